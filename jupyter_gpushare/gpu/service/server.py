"""The helper's unix socket: access by uid, one line in, one line out, everything bounded.

The kernel reports the uid of the peer (SO_PEERCRED): root, the helper's own user and
those named with ``--allow-uid`` have access, whatever the socket's mode.  Where that
is one user beside root, the socket belongs to that user and no other can connect;
where there are more, every user can connect and the others are refused.  At most
`MAX_CONNECTIONS` are served at once, each in its own thread, with lines of at most
`protocol.helper.MAX_LINE_BYTES`; one more is refused as ``busy``.  A peer that neither
reads nor finishes its line is disconnected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import struct
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jupyter_gpushare.errors import DeviceError, HelperError, InvalidRequest
from jupyter_gpushare.gpu.events import Events, Watcher
from jupyter_gpushare.gpu.service.requests import Requests
from jupyter_gpushare.protocol.helper import MAX_LINE_BYTES, ErrorKind, decode, encode

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
# Threads that answer refused connections; beyond them a connection is closed without an answer.
MAX_REFUSALS = 8
REFUSAL_TIMEOUT_S = 1.0
# For the rest of a line once begun; for an answer to be read; for an idle peer.
LINE_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 3600.0
WATCH_CHECK_S = 5.0

_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Server:
    """Accepts connections and answers each request through `Requests`."""

    def __init__(
        self,
        path: Path,
        allowed_uids: frozenset[int],
        requests: Requests,
        events: Events,
    ) -> None:
        """Bind the socket.

        Raises:
            HelperError: another helper answers on it, or it cannot be bound.
        """
        self._path = path
        self._allowed = allowed_uids | {0, os.geteuid()}
        self._requests = requests
        self._events = events
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._refusals = threading.BoundedSemaphore(MAX_REFUSALS)
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
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
            elif self._slots.acquire(blocking=False):
                with self._guard:
                    self._open.add(peer)
                threading.Thread(target=self._serve, args=(peer,), name="peer", daemon=True).start()
            else:
                self._refuse(peer, ErrorKind.BUSY, f"{MAX_CONNECTIONS} connections are open: try again")

    def stop(self) -> None:
        """Close the socket and every connection."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._path.unlink(missing_ok=True)
        with self._guard:
            for peer in self._open:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

    def _refuse(self, peer: socket.socket, kind: ErrorKind, message: str) -> None:
        if not self._refusals.acquire(blocking=False):
            peer.close()
            return

        def refuse() -> None:
            try:
                _answer_refusal(peer, kind, message)
            finally:
                self._refusals.release()

        threading.Thread(target=refuse, name="refusal", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            self._talk(peer)
        except (OSError, _Closed):
            pass  # the peer is gone, or too slow
        finally:
            with self._guard:
                self._open.discard(peer)
            peer.close()
            self._slots.release()

    def _talk(self, peer: socket.socket) -> None:
        rest = bytearray()
        while True:
            line = _line(peer, rest)
            watcher: Watcher | None = None
            try:
                verb, fields = _request(line)
                if verb == "watch":
                    # The sample is taken after this, so no event is missed.
                    watcher = self._events.watch()
                answer: dict[str, Any] = {"ok": True, "result": asdict(self._requests.answer(verb, fields))}
            except Exception as error:  # the outermost loop of this thread
                answer = _error(error)
            try:
                _send(peer, encode(answer))
                if watcher is not None and answer["ok"]:
                    self._stream(peer, watcher)
                    return
            finally:
                if watcher is not None:
                    self._events.leave(watcher)
            if len(line) > MAX_LINE_BYTES:
                return

    def _stream(self, peer: socket.socket, watcher: Watcher) -> None:
        while True:
            try:
                event = watcher.events.get(timeout=WATCH_CHECK_S)
            except queue.Empty:
                peer.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if not peer.recv(1, socket.MSG_PEEK):
                        return
                continue
            if event is None or watcher.cut:
                return
            _send(peer, encode(event))


class _Closed(Exception):
    """The peer closed the connection."""


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


def _line(peer: socket.socket, rest: bytearray) -> bytes:
    """The next line, or the first bytes of one that is too long.

    Raises:
        _Closed: the peer closed the connection.
        OSError: it was too slow.
    """
    while (end := rest.find(b"\n")) < 0:
        if len(rest) > MAX_LINE_BYTES:
            return bytes(rest)
        peer.settimeout(LINE_TIMEOUT_S if rest else IDLE_TIMEOUT_S)
        more = peer.recv(65536)
        if not more:
            raise _Closed
        rest += more
    line = bytes(rest[:end])
    del rest[: end + 1]
    return line


def _request(line: bytes) -> tuple[str, dict[str, Any]]:
    fields = decode(line)
    verb = fields.pop("verb", None)
    if not isinstance(verb, str):
        raise InvalidRequest("a request needs a verb")
    return verb, fields


def _send(peer: socket.socket, line: bytes) -> None:
    peer.settimeout(SEND_TIMEOUT_S)
    peer.sendall(line)


def _error(error: Exception) -> dict[str, Any]:
    call, code, message = "", 0, str(error)
    if isinstance(error, InvalidRequest):
        kind: str = ErrorKind.BAD_REQUEST
    elif isinstance(error, HelperError):
        kind = error.kind
    elif isinstance(error, DeviceError):
        kind, call, code, message = ErrorKind.DEVICE, error.call, error.code, error.name
    else:
        log.error("a request failed", exc_info=error)
        kind, message = ErrorKind.INTERNAL, f"{type(error).__name__}: {error}"
    return {"ok": False, "error": {"kind": str(kind), "message": message, "call": call, "code": code}}


def _answer_refusal(peer: socket.socket, kind: ErrorKind, message: str) -> None:
    """Answer the peer's first line with a refusal and close (an earlier answer might not be read)."""
    answer = {"ok": False, "error": {"kind": str(kind), "message": message, "call": "", "code": 0}}
    with contextlib.suppress(OSError):
        peer.settimeout(REFUSAL_TIMEOUT_S)
        peer.recv(65536)
        peer.sendall(encode(answer))
    peer.close()
