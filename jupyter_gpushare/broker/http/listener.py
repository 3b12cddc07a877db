"""HTTP server with limits on connections: in total, per source, per client, and on idle ones.

A source is a user of this machine (`peers`) or another machine.  The total leaves
file descriptors for the database and the device helper.  Its last part is reserved
for root and the broker's user: the Hub and its proxy.  Requests that come through a
proxy are counted by their client as well (`clients`), from their head until they
are answered: one client's slow requests leave the proxy's share to others.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Awaitable
from math import ceil
from typing import Any

from tornado import httpserver, httputil, iostream, web

from jupyter_gpushare.broker.http.clients import Proxies
from jupyter_gpushare.broker.http.peers import source_of
from jupyter_gpushare.errors import TooMany
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")

MAX_CONNECTIONS = 2_000
# One source, such as a user or the machine of the Hub's proxy, has at most 1/SHARE of the connections,
# and one client behind a proxy at most 1/SHARE of that.
SHARE = 4
# File descriptors for everything else: database, helper, Hub, log.
_OTHER_FILES = 128
# Deadlines: for an idle connection or the head of a request, and for a body.
IDLE_S = 20.0
BODY_S = 15.0
# On every answer, JSON and CSV too: all users' servers are one origin with this service, unless the Hub has
# subdomains, and a frame of the same origin can be read and clicked by the page around it.
GUARDS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def connections_allowed(listeners: int = 1) -> int:
    """Raise the soft limit of open files to the need; return the connections that each listener may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS * listeners + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(1, min(MAX_CONNECTIONS, (soft - _OTHER_FILES) // listeners))
    )


class Listener(httpserver.HTTPServer):
    """HTTP server that closes new connections beyond ``max_connections`` or ``max_per_source``.

    Requests of one client behind ``proxies`` beyond its share are answered 429.
    """

    def initialize(  # type: ignore[override]
        self,
        application: web.Application,
        max_connections: int,
        max_per_source: int,
        proxies: Proxies | None = None,
        **options: Any,
    ) -> None:
        super().initialize(
            application,
            max_body_size=wire.MAX_BODY_BYTES,
            max_buffer_size=4 * wire.MAX_BODY_BYTES,
            idle_connection_timeout=IDLE_S,
            body_timeout=BODY_S,
            **options,
        )
        self._max_connections = max_connections
        self._max_per_source = max_per_source
        uids = {0, os.geteuid()}
        self._reserved_for = {f"uid {uid}{way}" for uid in uids for way in ("", " by socket")}
        self._max_per_client = max(1, max_per_source // SHARE)
        self._proxies = proxies or Proxies()
        self._sources: dict[iostream.IOStream, str] = {}
        self._clients: dict[iostream.IOStream, str] = {}  # of requests through a proxy, until answered
        self._full = ""  # the source that reached its limit last, for the log

    def handle_stream(self, stream: iostream.IOStream, address: Any) -> None:
        """Serve a connection, or close it where its source has as many as it may."""
        try:
            source = source_of(stream.socket)
        except OSError:
            return stream.close()  # the peer has disconnected
        full = ""
        is_ours = source in self._reserved_for
        # The last 1/SHARE is reserved for the Hub and its proxy.
        most = self._max_connections if is_ours else max(1, self._max_connections - self._max_per_source)
        if len(self._sources) >= most:
            full = "all"
        elif sum(each == source for each in self._sources.values()) >= self._max_per_source:
            full = source
        if full and full != self._full:
            log.warning("%d connections are open, by %s: more are refused", len(self._sources), full)
        self._full = full
        if full:
            return stream.close()
        self._sources[stream] = source
        super().handle_stream(stream, address)

    def start_request(
        self, server_conn: object, request_conn: httputil.HTTPConnection
    ) -> httputil.HTTPMessageDelegate:
        """Return what takes the next request of a connection; its last one has been answered."""
        stream: iostream.IOStream = request_conn.stream  # type: ignore[attr-defined]
        self._clients.pop(stream, None)
        return _Counted(self, stream, request_conn, super().start_request(server_conn, request_conn))

    def take(self, stream: iostream.IOStream, forwarded: str) -> None:
        """Count the request on ``stream`` for its client.

        Raises:
            TooMany: that client has as many requests as it may; nothing is counted.
        """
        client = self._proxies.client(self._sources.get(stream, ""), forwarded)
        if not client:
            return
        if sum(each == client for each in self._clients.values()) >= self._max_per_client:
            raise TooMany(
                "at most %1 requests of one machine are answered at once: wait for one of them to end",
                self._max_per_client,
                retry_after_s=1.0,
            )
        self._clients[stream] = client

    async def end(self) -> None:
        """Stop listening, and close all connections, long polls included."""
        self.stop()
        await self.close_all_connections()

    def on_close(self, server_conn: Any) -> None:
        """Count a connection as closed."""
        self._sources.pop(server_conn.stream, None)
        self._clients.pop(server_conn.stream, None)
        super().on_close(server_conn)


class _Counted(httputil.HTTPMessageDelegate):
    """Request that the application gets once it is counted for its client."""

    def __init__(
        self,
        listener: Listener,
        stream: iostream.IOStream,
        connection: httputil.HTTPConnection,
        application: httputil.HTTPMessageDelegate,
    ) -> None:
        self._listener = listener
        self._stream = stream
        self._connection = connection
        self._application: httputil.HTTPMessageDelegate | None = application

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
        return self._application.headers_received(start_line, headers) if self._application else None

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

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        return self._application.data_received(chunk) if self._application else None

    def finish(self) -> None:
        if self._application:
            self._application.finish()

    def on_connection_close(self) -> None:
        if self._application:
            self._application.on_connection_close()
