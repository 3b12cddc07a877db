"""One connection of the helper as lines: plain on a unix socket, sealed over TCP.

Every wait has an end: a peer that neither reads nor finishes its line is disconnected, and the
handshake of `protocol.sealed` has one deadline, however slowly its bytes come.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Protocol

from jupyter_gpushare.protocol import sealed
from jupyter_gpushare.protocol.helper import MAX_LINE_BYTES

# For the rest of a line once begun; for an answer to be read; for an idle peer.
LINE_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 3600.0


class Closed(Exception):
    """The peer closed the connection."""


class Lines(Protocol):
    """A connection that carries lines."""

    def read(self) -> bytes:
        """Return the next line without its end, or the first bytes of one that is too long.

        Raises:
            Closed: the peer closed the connection.
            OSError: it was too slow.
            SealError: the line is not what the peer sent.
        """

    def write(self, line: bytes) -> None:
        """Send a line, with its end.

        Raises:
            OSError: the peer does not read it, or is gone.
        """

    def is_open(self) -> bool:
        """Return whether a peer that has nothing more to say is still connected."""


class PlainLines:
    """Lines as they are."""

    def __init__(self, peer: socket.socket, idle_s: float | None = IDLE_TIMEOUT_S) -> None:
        """``idle_s``: how long the peer may be silent between lines; None: for ever."""
        self._peer = peer
        self._idle_s = idle_s
        self._rest = bytearray()

    def read(self) -> bytes:
        """Return the next line without its end, or the first bytes of one that is too long.

        Raises:
            Closed: the peer closed the connection.
            OSError: it was too slow.
        """
        rest = self._rest
        while (end := rest.find(b"\n")) < 0:
            if len(rest) > MAX_LINE_BYTES:
                return bytes(rest)
            self._peer.settimeout(LINE_TIMEOUT_S if rest else self._idle_s)
            more = self._peer.recv(65536)
            if not more:
                raise Closed
            rest += more
        line = bytes(rest[:end])
        del rest[: end + 1]
        return line

    def write(self, line: bytes) -> None:
        """Send a line as it is, within `SEND_TIMEOUT_S`."""
        self._peer.settimeout(SEND_TIMEOUT_S)
        self._peer.sendall(line)

    def is_open(self) -> bool:
        """Return whether the peer is connected; what it has sent stays to be read."""
        self._peer.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            return bool(self._peer.recv(1, socket.MSG_PEEK))
        return True


class SealedLines:
    """Lines of which each is one frame of `protocol.sealed`."""

    def __init__(
        self, peer: socket.socket, secret: bytes, name: str, hello_by: float, deadline: float
    ) -> None:
        """Shake hands as the server ``name``.

        The peer's hello arrives by ``hello_by``, its proof by ``deadline`` (both monotonic).

        Raises:
            SealError: the peer does not know the secret.
            Closed: it closed the connection.
            OSError: it was too slow.
        """
        self._peer = peer
        handshake = sealed.ServerHandshake(secret, name)
        challenge = handshake.challenge(_exactly(peer, sealed.HELLO_BYTES, hello_by))
        peer.settimeout(_left_s(deadline))
        peer.sendall(challenge)
        self._session = handshake.accept(_exactly(peer, sealed.PROOF_BYTES, deadline))

    def read(self) -> bytes:
        """Return the line of the next frame, without its end.

        Raises:
            Closed: the peer closed the connection.
            OSError: it was too slow.
            SealError: the frame is not what the peer sent next.
        """
        self._peer.settimeout(IDLE_TIMEOUT_S)
        first = self._peer.recv(1)
        if not first:
            raise Closed
        deadline = time.monotonic() + LINE_TIMEOUT_S
        header = first + _exactly(self._peer, sealed.HEADER_BYTES - 1, deadline)
        rest = _exactly(self._peer, self._session.rest_bytes(header), deadline)
        return self._session.open(header, rest).removesuffix(b"\n")

    def write(self, line: bytes) -> None:
        """Send a line as one frame, within `SEND_TIMEOUT_S`."""
        self._peer.settimeout(SEND_TIMEOUT_S)
        self._peer.sendall(self._session.seal(line))

    def is_open(self) -> bool:
        """Return whether the peer is connected and has sent nothing."""
        # A peer that says anything here breaks the protocol.  A TLS socket has no MSG_PEEK.
        self._peer.settimeout(0.0)
        try:
            self._peer.recv(1)
        except BlockingIOError:
            return True
        except OSError as error:
            # ssl.SSLWantReadError: nothing is there to read.
            return type(error).__name__ == "SSLWantReadError"
        return False


def _exactly(peer: socket.socket, count: int, deadline: float) -> bytes:
    """Return this many bytes, which have to be there by the deadline."""
    found = bytearray()
    while len(found) < count:
        peer.settimeout(_left_s(deadline))
        more = peer.recv(count - len(found))
        if not more:
            raise Closed
        found += more
    return bytes(found)


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the peer is too slow")
    return left_s
