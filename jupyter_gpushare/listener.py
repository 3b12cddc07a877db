"""HTTP server that keeps connections by the rules of `connections`.

The kernel proves connections of root and of this process's user (`peers`), such as the Hub and its proxy.
All other connections are unproven until a handler has verified a token and calls `Gate.prove`.

If the peer does not read an answer, the connection is closed after `UNREAD_S` without progress.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from collections.abc import Awaitable
from typing import Any

from tornado import httpserver, httputil, iostream, web

from jupyter_gpushare.connections import Connections
from jupyter_gpushare.peers import holder_of, our_users, source_of

log = logging.getLogger("gpushare.listener")

MAX_CONNECTIONS = 2_000
# File descriptors for everything else: database, helper, Hub, log.
_OTHER_FILES = 128
# One part of the connections is for unproven ones, and another part is the reserve of the Hub.
_PARTS = 4
# The holder of the connections of the Hub, its spawner and its proxy.
HUB = "the Hub"
# Deadlines for a proven connection between two requests, and for a body.
KEEP_S = 20.0
BODY_S = 15.0
# The maximum time between two pieces of an answer that the peer reads.
UNREAD_S = 15.0
_TICK_S = 0.25
_LOG_EVERY_S = 60.0


def connections_allowed(wanted: int = MAX_CONNECTIONS) -> int:
    """Raise the soft limit of open files for ``wanted`` connections; return the number that is possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(_PARTS, min(wanted, soft - _OTHER_FILES))


class Gate:
    """The connections of all HTTP listeners of this process, and the timer of their deadlines."""

    def __init__(self, maximum: int = MAX_CONNECTIONS) -> None:
        part = max(1, maximum // _PARTS)
        self.connections: Connections[iostream.IOStream] = Connections(
            unproven=part, proven=max(1, maximum - part), reserves={HUB: part}, cancels=True
        )
        # The clock of all deadlines: the seconds in which the event loop ran.  A late loop has read nothing.
        self._ran_s = 0.0
        self._was_late = False
        # Answers that are being sent: total bytes sent on the connection, and the time of the last change.
        self._unread: dict[iostream.IOStream, tuple[int, float]] = {}
        self._ticked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._logged_at = -math.inf

    def admit(self, stream: iostream.IOStream, holder: str, *, is_proven: bool) -> None:
        """Count a new connection; if there are too many, close one, which may be this one."""
        shakes_hands = isinstance(stream, iostream.SSLIOStream)
        self._close(
            self.connections.admit(
                stream, holder, self._now(), is_proven=is_proven, shakes_hands=shakes_hands
            )
        )
        if self._timer is None and self.connections.has_unproven:
            self._start()
        if shakes_hands and not stream.closed():
            stream.wait_for_handshake().add_done_callback(lambda _: self.idle(stream))  # type: ignore[attr-defined]

    def prove(self, stream: iostream.IOStream, holder: str) -> None:
        """Count an unproven connection for the user or service of a verified token.

        A connection with the Hub's token is the Hub's, even if it is already proven for another holder.
        """
        entry = self.connections.of(stream)
        if entry is not None and (holder == HUB or not entry.is_proven):
            self.count_for(stream, holder)

    def count_for(self, stream: iostream.IOStream, holder: str) -> None:
        """Count a connection as proven, for ``holder`` from now on."""
        self._close(self.connections.prove(stream, holder))

    def busy(self, stream: iostream.IOStream) -> bool:
        """Count a request as begun; return False if its connection is being closed."""
        if self._timer is None:
            self._start()
        return self.connections.busy(stream)

    def idle(self, stream: iostream.IOStream) -> None:
        """Count the request, or the handshake, of a connection as ended."""
        self.connections.idle(stream, self._now())

    def stop(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticked_at = loop.time()
        self._timer = loop.call_later(_TICK_S, self._tick)

    def _now(self) -> float:
        since_s = asyncio.get_running_loop().time() - self._ticked_at if self._timer is not None else 0.0
        return self._ran_s + min(since_s, _TICK_S)

    def _tick(self) -> None:
        since_s = asyncio.get_running_loop().time() - self._ticked_at
        self._ran_s += min(since_s, _TICK_S)
        # A late loop first reads what has arrived; if it is late again, it does not wait a second time.
        self._was_late = since_s >= 2 * _TICK_S and not self._was_late
        busy = self.connections.with_requests()
        if not self._was_late:
            for stream in [*self.connections.expired(self._ran_s), *self._stalled(busy)]:
                stream.close()
        self._timer = None
        if busy or self.connections.has_unproven:
            self._start()

    def _stalled(self, busy: list[iostream.IOStream]) -> list[iostream.IOStream]:
        """Return the connections whose peer has read nothing of an answer for `UNREAD_S`."""
        last, self._unread = self._unread, {}
        for stream in busy:
            if stream.writing():
                sent = stream._total_write_done_index  # Tornado has no public equivalent
                before = last.get(stream, (-1, 0.0))
                self._unread[stream] = before if before[0] == sent else (sent, self._ran_s)
        return [stream for stream, (_, since) in self._unread.items() if self._ran_s - since >= UNREAD_S]

    def _close(self, stream: iostream.IOStream | None) -> None:
        if stream is None:
            return
        stream.close()
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            log.warning(
                "%d connections are open: one of %s gives way to a new one",
                len(self.connections),
                self.connections.gave_way,
            )


class Listener(httpserver.HTTPServer):
    """An HTTP server with a `Gate` that counts its connections."""

    def initialize(self, application: web.Application, gate: Gate, **options: Any) -> None:  # type: ignore[override]
        super().initialize(application, idle_connection_timeout=KEEP_S, body_timeout=BODY_S, **options)
        self.gate = gate

    def proven_holder(self, source: str) -> str:
        """Return the holder that a source is proven to be before it sends anything; empty if none."""
        return HUB if holder_of(source) in our_users() else ""

    def handle_stream(self, stream: iostream.IOStream, address: Any) -> None:
        """Serve a new connection, if there is a slot for it."""
        try:
            source = source_of(stream.socket)
        except OSError:
            return stream.close()  # the peer has disconnected
        holder = self.proven_holder(source)
        self.gate.admit(stream, holder or holder_of(source), is_proven=bool(holder))
        if not stream.closed():
            super().handle_stream(stream, address)

    def start_request(
        self, server_conn: object, request_conn: httputil.HTTPConnection
    ) -> httputil.HTTPMessageDelegate:
        """Return the delegate for the next request of a connection; the last one has been answered."""
        stream: iostream.IOStream = request_conn.stream  # type: ignore[attr-defined]
        entry = self.gate.connections.of(stream)
        if entry is not None and entry.is_busy:
            self.gate.idle(stream)
        return _Request(self, request_conn, super().start_request(server_conn, request_conn))

    def begins(self, connection: Any, _headers: httputil.HTTPHeaders) -> bool:
        """Count a request as begun when its head is complete; return False if its connection is closed."""
        return self.gate.busy(connection.stream)

    async def end(self) -> None:
        """Stop listening, and close all connections, long polls included."""
        self.stop()
        self.gate.stop()
        await self.close_all_connections()

    def on_close(self, server_conn: Any) -> None:
        """Count a connection as closed."""
        self.gate.connections.close(server_conn.stream)
        super().on_close(server_conn)


class _Request(httputil.HTTPMessageDelegate):
    """A request that is passed to the application if `Listener.begins` returns True."""

    def __init__(
        self, listener: Listener, connection: object, application: httputil.HTTPMessageDelegate
    ) -> None:
        self._listener = listener
        self._connection = connection
        self._application: httputil.HTTPMessageDelegate | None = application

    def headers_received(
        self,
        start_line: httputil.RequestStartLine | httputil.ResponseStartLine,
        headers: httputil.HTTPHeaders,
    ) -> Awaitable[None] | None:
        """Pass the head on, unless the request does not begin."""
        if not self._listener.begins(self._connection, headers):
            self._application = None
        return self._application.headers_received(start_line, headers) if self._application else None

    def data_received(self, chunk: bytes) -> Awaitable[None] | None:
        return self._application.data_received(chunk) if self._application else None

    def finish(self) -> None:
        if self._application:
            self._application.finish()

    def on_connection_close(self) -> None:
        if self._application:
            self._application.on_connection_close()
