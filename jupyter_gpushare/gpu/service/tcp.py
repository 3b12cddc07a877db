"""The helper's TCP port for a broker on another machine: sealed by a shared secret, and by TLS where wanted.

A peer is served once it has shown that it knows the secret (`protocol.sealed`).  Until then it takes
none of the broker's `MAX_CONNECTIONS`, and has `HANDSHAKE_S` for TLS and challenge together.  At most
`MAX_HANDSHAKES` peers shake hands at once, at most `MAX_PER_ADDRESS` of them from one address: for one
more the oldest is disconnected, so that peers that send nothing keep no broker out.
A peer that vanished without a word is noticed by TCP keepalive.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.service.lines import Closed, Lines, SealedLines
from jupyter_gpushare.gpu.service.server import MAX_CONNECTIONS, Connections, start_thread
from jupyter_gpushare.protocol.sealed import SealError

log = logging.getLogger(__name__)

MAX_HANDSHAKES = 16
MAX_PER_ADDRESS = 4
HANDSHAKE_S = 5.0
# For the thread of a handshake that gave way to end.
_ENDS_S = 1.0
# Failed handshakes are logged this often at most.
LOG_EVERY_S = 60.0
KEEPALIVE = (  # a peer that is gone is noticed after half a minute
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a helper listens for a broker on another machine."""

    host: str
    port: int
    node: str  # the name that brokers ask for
    secret: bytes
    certificate: Path | None = None  # of TLS, with its key
    key: Path | None = None


@dataclass(eq=False, slots=True)
class _Handshake:
    """A peer that has not shown yet that it knows the secret."""

    peer: socket.socket
    host: str
    deadline: float = field(default_factory=lambda: time.monotonic() + HANDSHAKE_S)
    thread: threading.Thread | None = None


class _Handshakes:
    """Unfinished handshakes, the oldest first; only one thread calls `begin`."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._open: list[_Handshake] = []

    def begin(self, new: _Handshake) -> bool:
        """Take a handshake in, in place of the oldest where there are too many; False: that does not end."""
        with self._guard:
            same = [each for each in self._open if each.host == new.host]
            crowd = same if len(same) >= MAX_PER_ADDRESS else self._open
            is_full = crowd is same or len(self._open) >= MAX_HANDSHAKES
            oldest = crowd[0] if is_full else None
            if oldest is not None:
                _shut(oldest.peer)
        if oldest is not None and oldest.thread is not None:
            oldest.thread.join(_ENDS_S)
        with self._guard:
            if oldest in self._open:
                return False
            self._open.append(new)
            return True

    def end(self, handshake: _Handshake) -> None:
        """Forget a handshake, finished or not."""
        with self._guard:
            self._open.remove(handshake)

    def stop(self) -> None:
        """Disconnect every peer."""
        with self._guard:
            for each in self._open:
                _shut(each.peer)


def _shut(peer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(peer, socket.SHUT_RDWR)  # below TLS, which another thread may be in


class TcpServer:
    """Accepts connections on a TCP port; ``talk`` serves each that knows the secret."""

    def __init__(self, endpoint: Endpoint, talk: Callable[[Lines], None]) -> None:
        """Bind the port.

        Raises:
            HelperError: it cannot be bound, or the certificate cannot be used.
        """
        self._endpoint = endpoint
        self._talk = talk
        self._tls = _tls(endpoint)
        self._connections = Connections(MAX_CONNECTIONS)
        self._handshakes = _Handshakes()
        self._logged_at = float("-inf")
        self._stopped = False
        try:
            family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
            self._socket = socket.create_server((endpoint.host, endpoint.port), family=family, backlog=128)
        except OSError as error:
            raise HelperError(
                "socket", f"cannot listen on {endpoint.host} port {endpoint.port}: {error.strerror}"
            ) from None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._socket.getsockname()[1])

    def run(self) -> None:
        """Accept until stopped."""
        while not self._stopped:
            try:
                peer, address = self._socket.accept()
            except OSError:
                if self._stopped:
                    return
                time.sleep(0.1)  # out of descriptors: peers wait in the backlog
                continue
            self._meet(peer, str(address[0]))

    def stop(self) -> None:
        """Close the port and every connection."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._handshakes.stop()
        self._connections.stop()

    def _meet(self, accepted: socket.socket, host: str) -> None:
        """Begin the handshake of a peer in a thread of its own."""
        try:
            peer = self._prepared(accepted)
        except OSError:  # it is gone
            accepted.close()
            return
        handshake = _Handshake(peer, host)
        if not self._handshakes.begin(handshake):
            peer.close()
            return
        handshake.thread = start_thread("tcp", self._serve, handshake)
        if handshake.thread is None:
            self._handshakes.end(handshake)
            peer.close()

    def _serve(self, handshake: _Handshake) -> None:
        peer = handshake.peer
        try:
            try:
                lines = self._verified(handshake)
            finally:
                self._handshakes.end(handshake)
            if self._connections.enter(peer):
                try:
                    self._talk(lines)
                finally:
                    self._connections.leave(peer)
        except (SealError, ssl.SSLError) as error:
            self._log_failure(handshake.host, error)
        except (OSError, Closed):
            pass  # the peer is gone, or too slow
        finally:
            peer.close()

    def _verified(self, handshake: _Handshake) -> SealedLines:
        """Return the lines of a peer that knows the secret, by the deadline of its handshake.

        Raises:
            SealError: it does not know the secret.
            Closed: it closed the connection.
            OSError: it was too slow, or TLS failed.
        """
        peer = handshake.peer
        if isinstance(peer, ssl.SSLSocket):
            peer.settimeout(max(0.001, handshake.deadline - time.monotonic()))
            peer.do_handshake()  # its timeout is one for all of its messages
        return SealedLines(peer, self._endpoint.secret, self._endpoint.node, handshake.deadline)

    def _prepared(self, peer: socket.socket) -> socket.socket:
        """Return the socket of a peer, below TLS where wanted; nothing has been read yet."""
        for level, option, value in KEEPALIVE:
            peer.setsockopt(level, option, value)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return peer
        return self._tls.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)

    def _log_failure(self, host: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning("a connection from %s was refused: %s", host, error)


def _tls(endpoint: Endpoint) -> ssl.SSLContext | None:
    if endpoint.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(endpoint.certificate, endpoint.key)
    except (OSError, ssl.SSLError) as error:
        raise HelperError("tls", f"{endpoint.certificate} cannot be used: {error}") from None
    return context
