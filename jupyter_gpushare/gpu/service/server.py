"""The helper's unix sockets: access by uid, one line in, one line out, everything bounded.

The kernel reports the uid of the peer (SO_PEERCRED): root, the helper's own user and
those named with ``--allow-uid`` have access, whatever the socket's mode.  Where that
is one user beside root, the socket belongs to that user and no other can connect;
where there are more, every user can connect and the others are refused.  At most
`Server.most` connections are served at once, each in its own thread, with lines of at most
`protocol.helper.MAX_LINE_BYTES`; one more is refused as ``busy``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.service.lines import IDLE_TIMEOUT_S, Closed, Lines, PlainLines
from jupyter_gpushare.protocol.helper import ErrorKind, encode

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
# Threads that answer refused connections; beyond them a connection is closed without an answer.
MAX_REFUSALS = 8
REFUSAL_TIMEOUT_S = 1.0

_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def start_thread(name: str, target: Callable[..., None], *args: object) -> threading.Thread | None:
    """Start a thread; None: the system has no more."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.error("a connection is refused: %s", error)
        return None
    return thread


class Connections:
    """Open connections of one listener, which a stop ends; `most` at once."""

    def __init__(self, most: int) -> None:
        self._slots = threading.BoundedSemaphore(most)
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()

    def enter(self, peer: socket.socket) -> bool:
        """Take a slot for a connection; False: all are taken."""
        if not self._slots.acquire(blocking=False):
            return False
        with self._guard:
            self._open.add(peer)
        return True

    def leave(self, peer: socket.socket) -> None:
        """Give the slot of a connection back."""
        with self._guard:
            self._open.discard(peer)
        self._slots.release()

    def stop(self) -> None:
        """Shut every connection down."""
        with self._guard:
            for peer in self._open:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)


class Server:
    """Accepts connections on a unix socket; ``talk`` serves each."""

    def __init__(
        self,
        path: Path,
        allowed_uids: frozenset[int],
        talk: Callable[[Lines], None],
        most: int = MAX_CONNECTIONS,
        idle_s: float | None = IDLE_TIMEOUT_S,
    ) -> None:
        """Bind the socket; a peer that is silent for ``idle_s`` is disconnected.

        Raises:
            HelperError: another helper answers on it, or it cannot be bound.
        """
        self._path = path
        self._allowed = allowed_uids | {0, os.geteuid()}
        self._talk = talk
        self._most = most
        self._idle_s = idle_s
        self._connections = Connections(most)
        self._refusals = threading.BoundedSemaphore(MAX_REFUSALS)
        self._stopped = False
        self._socket = _bind(path, self._allowed)

    def run(self) -> None:
        """Accept until stopped."""
        while not self._stopped:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                if self._stopped:
                    return
                time.sleep(0.1)  # out of descriptors: peers wait in the backlog
                continue
            # A peer without access takes no slot of the others.
            if (uid := _uid_of(peer)) not in self._allowed:
                self._refuse(peer, ErrorKind.NOT_ALLOWED, f"uid {uid} may not use this socket")
            elif self._connections.enter(peer):
                if start_thread("peer", self._serve, peer) is None:
                    self._connections.leave(peer)
                    peer.close()
            else:
                self._refuse(peer, ErrorKind.BUSY, f"{self._most} connections are open: try again")

    def stop(self) -> None:
        """Close the socket and every connection."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)
        self._connections.stop()

    def _refuse(self, peer: socket.socket, kind: ErrorKind, message: str) -> None:
        if not self._refusals.acquire(blocking=False):
            peer.close()
            return

        def refuse() -> None:
            try:
                _answer_refusal(peer, kind, message)
            finally:
                self._refusals.release()

        if start_thread("refusal", refuse) is None:
            self._refusals.release()
            peer.close()

    def _serve(self, peer: socket.socket) -> None:
        try:
            self._talk(PlainLines(peer, self._idle_s))
        except (OSError, Closed):
            pass  # the peer is gone, or too slow
        finally:
            self._connections.leave(peer)
            peer.close()


def _bind(path: Path, allowed: frozenset[int]) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            listener.connect(str(path))
            raise HelperError("running", f"another device helper answers on {path}")
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        listener.bind(str(path))
        # Until here only root and the helper's user can connect.
        users = allowed - {0} or {0}
        if len(users) > 1:
            path.chmod(0o666)
        else:
            os.chown(path, min(users), -1)
            path.chmod(0o600)
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise HelperError("socket", f"cannot listen on {path}: {error}") from None
    except HelperError:
        listener.close()
        raise
    return listener


def _uid_of(peer: socket.socket) -> int:
    """The uid of the peer, from the kernel."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    uid: int = _PEER.unpack(credentials)[1]
    return uid


def _answer_refusal(peer: socket.socket, kind: ErrorKind, message: str) -> None:
    """Answer the peer's first line with a refusal and close (an earlier answer might not be read)."""
    answer = {"ok": False, "error": {"kind": str(kind), "message": message, "call": "", "code": 0}}
    with contextlib.suppress(OSError):
        peer.settimeout(REFUSAL_TIMEOUT_S)
        peer.recv(65536)
        peer.sendall(encode(answer))
    peer.close()
