"""One connection of the helper as lines.

Every wait has an end: a peer that neither reads nor finishes its line is disconnected.
"""

from __future__ import annotations

import socket
import ssl

from jupyter_gpushare.protocol.helper import MAX_LINE_BYTES

# For the rest of a line once begun; for an answer to be read; for an idle peer.
LINE_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 3600.0


class Closed(Exception):
    """The peer closed the connection."""


class Lines:
    """Lines of a unix socket, or of TLS."""

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
        """Send a line, with its end, within `SEND_TIMEOUT_S`.

        Raises:
            OSError: the peer does not read it, or is gone.
        """
        self._peer.settimeout(SEND_TIMEOUT_S)
        self._peer.sendall(line)

    def is_open(self) -> bool:
        """Return whether the peer is connected; what it has sent stays to be read."""
        self._peer.setblocking(False)
        try:
            more = self._peer.recv(1)  # TLS has no MSG_PEEK
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        self._rest += more
        return bool(more)
