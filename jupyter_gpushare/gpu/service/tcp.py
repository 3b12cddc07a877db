"""The helper's TCP port for a broker on another machine, with certificates on both sides.

A peer is served once it has shown a certificate of the broker (`protocol.helper_tls`).  Until then it
counts as an unproven connection of its address (`server`), and takes no place of the broker's.
TCP keepalive finds peers that vanished without closing the connection.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jupyter_gpushare.connections import BACKLOG
from jupyter_gpushare.errors import GpuShareError, HelperError
from jupyter_gpushare.gpu.service.exchange import error_answer
from jupyter_gpushare.gpu.service.lines import Lines
from jupyter_gpushare.gpu.service.server import MAX_CONNECTIONS, Acceptor
from jupyter_gpushare.peers import holder_of
from jupyter_gpushare.protocol.helper import ErrorKind, encode
from jupyter_gpushare.protocol.helper_tls import BROKER, TlsFiles, keep_alive, names, reason

log = logging.getLogger(__name__)

# Failed handshakes are logged at most this often.
LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The TCP address of a helper for a broker on another machine, with its certificate files."""

    host: str
    port: int
    node: str  # the name of its node that the helper sends to the broker
    tls: TlsFiles


class TcpServer(Acceptor):
    """Accepts connections on a TCP port; ``talk`` serves each connection of the broker."""

    def __init__(self, endpoint: Endpoint, talk: Callable[[Lines], None]) -> None:
        """Bind the port.

        Raises:
            HelperError: it cannot be bound.
            GpuShareError: the certificate, its key or its authority is unusable.
        """
        self._endpoint = endpoint
        self._talk = talk
        endpoint.tls.context(ssl.Purpose.CLIENT_AUTH)
        self._logged_at = float("-inf")
        try:
            family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
            listener = socket.create_server((endpoint.host, endpoint.port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise HelperError(
                "socket", f"cannot listen on {endpoint.host} port {endpoint.port}: {error.strerror}"
            ) from None
        super().__init__(listener, MAX_CONNECTIONS)

    @property
    def port(self) -> int:
        """The port of the listening socket."""
        return int(self._socket.getsockname()[1])

    def meet(self, peer: socket.socket, address: Any) -> None:
        """Begin the handshake of a peer in its own thread."""
        host = str(address[0])
        try:
            prepared = self._prepared(peer)
        except (OSError, GpuShareError) as error:
            if isinstance(error, GpuShareError):  # otherwise the peer is gone
                self._log_failure(host, str(error))
            peer.close()
            return
        if not self._peers.serve(prepared, holder_of(host), partial(self._serve, prepared, host)):
            prepared.close()

    def _serve(self, peer: ssl.SSLSocket, host: str) -> None:
        try:
            peer.settimeout(max(0.001, self._peers.expires_at(peer) - time.monotonic()))
            peer.do_handshake()  # the timeout covers all of its messages together
            lines = self._peers.lines(peer)
            if BROKER not in names(peer.getpeercert()):
                refused = HelperError(ErrorKind.NOT_ALLOWED, f"the broker's certificate has to name {BROKER}")
                self._log_failure(host, str(refused))
            elif self._peers.prove(peer, "broker"):
                lines.write(encode({"ok": True, "result": {"node": self._endpoint.node}}))
                self._talk(lines)
                return
            else:
                refused = HelperError(ErrorKind.BUSY, f"{MAX_CONNECTIONS} connections are open: try again")
            lines.write(encode(error_answer(refused)))
        except ssl.SSLError as error:
            self._log_failure(host, reason(error))

    def _prepared(self, peer: socket.socket) -> ssl.SSLSocket:
        """Return the TLS socket of a peer, before its handshake.

        Raises:
            OSError: the peer is gone.
            GpuShareError: the certificate is unusable.
        """
        keep_alive(peer)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = self._endpoint.tls.context(ssl.Purpose.CLIENT_AUTH)
        return context.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)

    def _log_failure(self, host: str, why: str) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning("a connection from %s was refused: %s", host, why)
