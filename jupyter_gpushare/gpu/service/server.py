"""The helper's unix sockets: access by uid, one line in, one line out, everything limited.

The kernel reports the uid of the peer (SO_PEERCRED).  Root, the helper's own user and the
users of ``--allow-uid`` have access, whatever the socket's mode.  If only one of them is not
root, the socket belongs to that user and no other user can connect.  Otherwise every user can
connect, and users without access are refused.  At most ``max_connections`` connections are
served at once (`Peers`), with lines of at most `protocol.helper.MAX_LINE_BYTES`.  A further
connection is refused as ``busy`` if all of them have a request in progress.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_gpushare.connections import BACKLOG, IDLE_S, Connections
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.service.exchange import error_answer
from jupyter_gpushare.gpu.service.lines import IDLE_TIMEOUT_S, Closed, Lines
from jupyter_gpushare.peers import socket_uid
from jupyter_gpushare.protocol.helper import ErrorKind, encode

log = logging.getLogger(__name__)


# ---- the helper's connections, each in its own thread, by the rules of `connections`
# A connection that gives way is shut down, and its thread gets `ENDS_S` to end before the next connection is
# accepted.  So there are hardly more threads than connections.  A request in progress cannot be cancelled,
# so its connection never gives way.

# Connections that have not proved yet that they have access, or that are being refused.
# A waiting thread costs about 0.02 MiB of memory.
MAX_UNPROVEN = 128
ENDS_S = 1.0


class Acceptor(abc.ABC):
    """A listening socket, and the connections that were accepted on it."""

    def __init__(self, listener: socket.socket, max_connections: int) -> None:
        self._socket = listener
        self._peers = Peers(max_connections)
        self._stopped = False

    def run(self) -> None:
        """Accept until stopped."""
        while not self._stopped:
            try:
                peer, address = self._socket.accept()
            except OSError:
                if self._stopped:
                    return
                time.sleep(0.1)  # no descriptor is free; peers wait in the backlog
                continue
            self.meet(peer, address)

    @abc.abstractmethod
    def meet(self, peer: socket.socket, address: Any) -> None:
        """Serve a connection in its own thread, or close it; never wait for its peer."""

    def stop(self) -> None:
        """Close the socket and every connection."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._peers.stop()


class Peers:
    """Connections of one listener and their threads; only one thread calls `serve`."""

    def __init__(self, max_connections: int) -> None:
        self._guard = threading.Lock()
        self._connections: Connections[socket.socket] = Connections(
            unproven=MAX_UNPROVEN, proven=max_connections, cancels=False
        )
        self._threads: dict[socket.socket, threading.Thread] = {}

    def serve(
        self, peer: socket.socket, holder: str, talk: Callable[[], None], *, is_proven: bool = False
    ) -> bool:
        """Run ``talk`` in a thread that finally closes ``peer``; return False if there is no place for it.

        In that case ``peer`` stays open.
        """
        with self._guard:
            given_way = self._connections.admit(
                peer, holder, time.monotonic(), is_proven=is_proven, shakes_hands=True
            )
            thread = self._shut(given_way) if given_way is not peer else None
        if given_way is peer:
            return False
        if thread is not None:
            thread.join(ENDS_S)
        started = threading.Thread(target=self._run, args=(peer, talk), name="peer", daemon=True)
        with self._guard:
            self._threads[peer] = started
        try:
            started.start()
        except RuntimeError as error:  # the system has no further thread
            log.error("a connection is refused: %s", error)
            self._leave(peer)
        return True

    def prove(self, peer: socket.socket, holder: str) -> bool:
        """Count a connection as proven; return False if there is no place for it."""
        with self._guard:
            given_way = self._connections.prove(peer, holder)
            if given_way is not None and given_way is not peer:
                self._shut(given_way)
        return given_way is not peer

    def expires_at(self, peer: socket.socket) -> float:
        """Return the monotonic time by which an unproven connection must continue; 0 if it has given way."""
        with self._guard:
            entry = self._connections.of(peer)
        return entry.expires_at if entry is not None else 0.0

    def lines(self, peer: socket.socket) -> Lines:
        """Return the lines of a connection, which counts as idle while it waits for the next line."""
        return _CountedLines(self, peer)

    def idle(self, peer: socket.socket) -> None:
        """Count the request of a connection as ended."""
        with self._guard:
            self._connections.idle(peer, time.monotonic())

    def busy(self, peer: socket.socket) -> None:
        """Count a request as begun.

        Raises:
            Closed: the connection has given way.
        """
        with self._guard:
            if not self._connections.busy(peer):
                raise Closed

    def stop(self) -> None:
        """Shut every connection down."""
        with self._guard:
            for peer in self._threads:
                self._shut(peer)

    def _run(self, peer: socket.socket, talk: Callable[[], None]) -> None:
        try:
            talk()
        except (OSError, Closed):
            pass  # the peer is gone, or too slow
        finally:
            self._leave(peer)

    def _leave(self, peer: socket.socket) -> None:
        with self._guard:
            self._connections.close(peer)
            self._threads.pop(peer, None)
        peer.close()

    def _shut(self, peer: socket.socket | None) -> threading.Thread | None:
        """Shut down a connection that gives way; return its thread."""
        if peer is None:
            return None
        with contextlib.suppress(OSError):
            socket.socket.shutdown(peer, socket.SHUT_RDWR)  # below TLS, which another thread may be using
        return self._threads.get(peer)


class _CountedLines(Lines):
    """Lines of a connection that counts as idle between an answer and the next request."""

    def __init__(self, peers: Peers, peer: socket.socket) -> None:
        super().__init__(peer)
        self._peers = peers

    def read(self) -> bytes:
        self._peers.idle(self._peer)
        line = super().read()
        self._peers.busy(self._peer)
        return line


# ---- unix sockets ------------------------------------------------------------

MAX_CONNECTIONS = 32


class Server(Acceptor):
    """Accepts connections on a unix socket; ``talk`` serves each."""

    def __init__(
        self,
        path: Path,
        allowed_uids: frozenset[int],
        talk: Callable[[Lines], None],
        max_connections: int = MAX_CONNECTIONS,
        idle_s: float | None = IDLE_TIMEOUT_S,
    ) -> None:
        """Bind the socket; a peer that is silent for ``idle_s`` is disconnected.

        Raises:
            HelperError: another helper answers on it, or it cannot be bound.
        """
        self._path = path
        self._allowed = allowed_uids | {0, os.geteuid()}
        self._talk = talk
        self._max_connections = max_connections
        self._idle_s = idle_s
        super().__init__(_bind(path, self._allowed), max_connections)

    def meet(self, peer: socket.socket, address: Any) -> None:
        """Serve a user that has access; refuse any other user."""
        uid = socket_uid(peer)
        if uid not in self._allowed:
            self._refuse(peer, uid, ErrorKind.NOT_ALLOWED, f"uid {uid} may not use this socket")
        elif not self._peers.serve(peer, f"uid {uid}", partial(self._serve, peer), is_proven=True):
            self._refuse(
                peer, uid, ErrorKind.BUSY, f"{self._max_connections} connections are open: try again"
            )

    def stop(self) -> None:
        """Close the socket and every connection, and remove the socket's file."""
        super().stop()
        self._path.unlink(missing_ok=True)

    def _refuse(self, peer: socket.socket, uid: int | None, kind: ErrorKind, message: str) -> None:
        if not self._peers.serve(peer, f"uid {uid}", partial(_answer_refusal, peer, kind, message)):
            peer.close()

    def _serve(self, peer: socket.socket) -> None:
        if self._idle_s is None:
            # A peer that may be silent for ever counts as busy, and so never gives way.
            self._peers.busy(peer)
            self._talk(Lines(peer, None))
        else:
            self._talk(self._peers.lines(peer))


def _bind(path: Path, allowed: frozenset[int]) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            listener.connect(str(path))
            raise HelperError("running", f"another device helper answers on {path}")
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        listener.bind(str(path))
        # Before this only root and the helper's user can connect.
        users = allowed - {0} or {0}
        if len(users) > 1:
            path.chmod(0o666)
        else:
            os.chown(path, min(users), -1)
            path.chmod(0o600)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise HelperError("socket", f"cannot listen on {path}: {error}") from None
    except HelperError:
        listener.close()
        raise
    return listener


def _answer_refusal(peer: socket.socket, kind: ErrorKind, message: str) -> None:
    """Answer the peer's first line with a refusal; the peer might not read an earlier answer."""
    peer.settimeout(IDLE_S)
    peer.recv(65536)
    peer.sendall(encode(error_answer(HelperError(kind, message))))
