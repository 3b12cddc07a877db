"""The helper's TCP port for a broker on another machine: sealed by a shared secret, and by TLS where wanted.

A peer is served once it has shown that it knows the secret (`protocol.sealed`).  Until then it is an
unproven connection (`peers`) of its address, and takes no place of the broker's.
A peer that vanished without a word is noticed by TCP keepalive.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jupyter_gpushare.connections import BACKLOG
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.service.lines import Lines, SealedLines
from jupyter_gpushare.gpu.service.peers import Peers
from jupyter_gpushare.gpu.service.server import MAX_CONNECTIONS
from jupyter_gpushare.peers import holder_of
from jupyter_gpushare.protocol.sealed import SealError

log = logging.getLogger(__name__)

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
        self._peers = Peers(MAX_CONNECTIONS)
        self._logged_at = float("-inf")
        self._stopped = False
        try:
            family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
            self._socket = socket.create_server(
                (endpoint.host, endpoint.port), family=family, backlog=BACKLOG
            )
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
        self._peers.stop()

    def _meet(self, accepted: socket.socket, host: str) -> None:
        """Begin the handshake of a peer in a thread of its own."""
        try:
            peer = self._prepared(accepted)
        except OSError:  # it is gone
            accepted.close()
            return
        if not self._peers.serve(peer, holder_of(host), partial(self._serve, peer, host)):
            peer.close()

    def _serve(self, peer: socket.socket, host: str) -> None:
        try:
            lines = self._verified(peer)
            if self._peers.prove(peer, "broker"):
                self._talk(self._peers.counted(peer, lines))
        except (SealError, ssl.SSLError) as error:
            self._log_failure(host, error)

    def _verified(self, peer: socket.socket) -> SealedLines:
        """Return the lines of a peer that knows the secret.

        Raises:
            SealError: it does not know the secret.
            Closed: it closed the connection.
            OSError: it was too slow, or TLS failed.
        """
        deadline = self._peers.expires_at(peer)
        if isinstance(peer, ssl.SSLSocket):
            peer.settimeout(max(0.001, deadline - time.monotonic()))
            peer.do_handshake()  # its timeout is one for all of its messages
        self._peers.idle(peer)
        return SealedLines(
            peer, self._endpoint.secret, self._endpoint.node, self._peers.expires_at(peer), deadline
        )

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
