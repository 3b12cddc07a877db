"""HTTP server of the broker: its connections, and the requests of each client behind a proxy.

Connections follow the rules of `connections`.  A proxy at a configured address is proven, as a holder of its
own: what else has such an address takes nothing of the Hub's reserve.  Requests that come through a proxy are
counted for their client (`clients`), from their head until they are answered: one client's slow requests
leave the proxy's share to others.
"""

from __future__ import annotations

from collections.abc import Awaitable
from math import ceil
from typing import Any

from tornado import httputil, iostream, web

from jupyter_gpushare.broker.http.clients import Proxies
from jupyter_gpushare.errors import TooMany
from jupyter_gpushare.listener import Gate, Listener, Passed
from jupyter_gpushare.peers import holder_of, source_of
from jupyter_gpushare.protocol import wire

# Requests in progress of one client behind a proxy.
MAX_PER_CLIENT = 125
# Holder of a proxy's connection while a request of this client is in progress.
_CLIENT = "client "
# On every answer, JSON and CSV too: all users' servers are one origin with this service, unless the Hub has
# subdomains, and a frame of the same origin can be read and clicked by the page around it.
GUARDS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class ApiListener(Listener):
    """HTTP server that answers 429 to requests of one client behind ``proxies`` beyond `MAX_PER_CLIENT`."""

    def initialize(  # type: ignore[override]
        self, application: web.Application, gate: Gate, proxies: Proxies | None = None, **options: Any
    ) -> None:
        super().initialize(
            application,
            gate,
            max_body_size=wire.MAX_BODY_BYTES,
            max_buffer_size=4 * wire.MAX_BODY_BYTES,
            **options,
        )
        self._proxies = proxies or Proxies()

    def proven_holder(self, source: str) -> str:
        """Return the holder that the kernel, or the configuration, proves for a source; empty: none."""
        is_proxy = self._proxies.trusts(source)
        return super().proven_holder(source) or (f"proxy {holder_of(source)}" if is_proxy else "")

    def start_request(
        self, server_conn: object, request_conn: httputil.HTTPConnection
    ) -> httputil.HTTPMessageDelegate:
        """Return what takes the next request of a connection; its last one has been answered."""
        stream: iostream.IOStream = request_conn.stream  # type: ignore[attr-defined]
        entry = self.gate.connections.of(stream)
        if entry is not None and entry.holder.startswith(_CLIENT):
            self.gate.count_for(stream, entry.admitted_for)
        return _Counted(self, stream, request_conn, super().start_request(server_conn, request_conn))

    def take(self, stream: iostream.IOStream, forwarded: str) -> None:
        """Count the request on ``stream`` for its client.

        Raises:
            TooMany: that client has as many requests as it may; nothing is counted.
        """
        if not forwarded or stream.closed():
            return
        try:
            client = self._proxies.client(source_of(stream.socket), forwarded)
        except OSError:
            return  # the peer has disconnected
        if not client:
            return
        if self.gate.connections.count(_CLIENT + client, is_proven=True) >= MAX_PER_CLIENT:
            raise TooMany(
                "at most %1 requests of one machine are answered at once: wait for one of them to end",
                MAX_PER_CLIENT,
                retry_after_s=1.0,
            )
        self.gate.count_for(stream, _CLIENT + client)


class _Counted(Passed):
    """Request that the application gets once it is counted for its client."""

    def __init__(
        self,
        listener: ApiListener,
        stream: iostream.IOStream,
        connection: httputil.HTTPConnection,
        application: httputil.HTTPMessageDelegate,
    ) -> None:
        super().__init__(application)
        self._listener = listener
        self._stream = stream
        self._connection = connection

    def headers_received(
        self,
        start_line: httputil.RequestStartLine | httputil.ResponseStartLine,
        headers: httputil.HTTPHeaders,
    ) -> Awaitable[None] | None:
        """Pass the head on, or answer 429."""
        try:
            self._listener.take(self._stream, headers.get("X-Forwarded-For", ""))
        except TooMany as error:
            self._application = None
            self._refuse(error)
            return None
        return super().headers_received(start_line, headers)

    def _refuse(self, error: TooMany) -> None:
        body = wire.encode(wire.ErrorAnswer.of(error, error.status, error.reason))
        head = httputil.HTTPHeaders(
            {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Retry-After": str(ceil(error.retry_after_s)),
                "Connection": "close",  # the body, if there is one, is not read
                **GUARDS,
            }
        )
        self._connection.write_headers(
            httputil.ResponseStartLine("HTTP/1.1", error.status, "Too Many Requests"), head, body
        )
        self._connection.finish()
