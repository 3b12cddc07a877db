"""The helper's unix sockets: access by uid, one line in, one line out, everything bounded.

The kernel reports the uid of the peer (SO_PEERCRED): root, the helper's own user and
those named with ``--allow-uid`` have access, whatever the socket's mode.  Where that
is one user beside root, the socket belongs to that user and no other can connect;
where there are more, every user can connect and the others are refused.  At most
``most`` connections are served at once (`peers`), with lines of at most
`protocol.helper.MAX_LINE_BYTES`; one more is refused as ``busy`` where all have a request in progress.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_gpushare.connections import BACKLOG, IDLE_S
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.service.exchange import error_answer
from jupyter_gpushare.gpu.service.lines import IDLE_TIMEOUT_S, Lines
from jupyter_gpushare.gpu.service.peers import Acceptor
from jupyter_gpushare.peers import socket_uid
from jupyter_gpushare.protocol.helper import ErrorKind, encode

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32


class Server(Acceptor):
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
        super().__init__(_bind(path, self._allowed), most)

    def meet(self, peer: socket.socket, address: Any) -> None:
        """Serve a user that has access, and tell any other that it has none."""
        uid = socket_uid(peer)
        if uid not in self._allowed:
            self._refuse(peer, uid, ErrorKind.NOT_ALLOWED, f"uid {uid} may not use this socket")
        elif not self._peers.serve(peer, f"uid {uid}", partial(self._serve, peer), is_proven=True):
            self._refuse(peer, uid, ErrorKind.BUSY, f"{self._most} connections are open: try again")

    def stop(self) -> None:
        """Close the socket and every connection, and remove the socket's file."""
        super().stop()
        self._path.unlink(missing_ok=True)

    def _refuse(self, peer: socket.socket, uid: int | None, kind: ErrorKind, message: str) -> None:
        if not self._peers.serve(peer, f"uid {uid}", partial(_answer_refusal, peer, kind, message)):
            peer.close()

    def _serve(self, peer: socket.socket) -> None:
        if self._idle_s is None:
            # A peer that may be silent for ever never gives way: its connection itself is its request.
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
        # Until here only root and the helper's user can connect.
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
    """Answer the peer's first line with a refusal (an earlier answer might not be read)."""
    peer.settimeout(IDLE_S)
    peer.recv(65536)
    peer.sendall(encode(error_answer(HelperError(kind, message))))
