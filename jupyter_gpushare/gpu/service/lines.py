"""Read and write lines on a connection of the helper.

Every wait has a time limit: a peer that does not read or does not finish its line is disconnected.
"""

from __future__ import annotations

import socket
import ssl

from jupyter_gpushare.protocol.helper import MAX_LINE_BYTES

# Maximum time for the rest of a line, for the peer to read an answer, and for an idle peer.
LINE_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 3600.0


class Closed(Exception):
    """The peer closed the connection."""


class Lines:
    """Lines of a unix socket, or of TLS."""

    def __init__(self, peer: socket.socket, idle_s: float | None = IDLE_TIMEOUT_S) -> None:
        """``idle_s`` is the maximum time between two lines of the peer; None means no limit."""
        self._peer = peer
        self._idle_s = idle_s
        self._rest = bytearray()

    def read(self) -> bytes:
        """Return the next line without its line break, or the first bytes of a line that is too long.

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
        """Send ``line``, which ends with a line break, within `SEND_TIMEOUT_S`.

        Raises:
            OSError: the peer does not read it, or is gone.
        """
        self._peer.settimeout(SEND_TIMEOUT_S)
        self._peer.sendall(line)

    def is_open(self) -> bool:
        """Return whether the peer is connected; `read` still returns what it has sent."""
        self._peer.setblocking(False)
        try:
            more = self._peer.recv(1)  # TLS has no MSG_PEEK
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        self._rest += more
        return bool(more)
