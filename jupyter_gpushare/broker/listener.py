"""The HTTP server with bounds: so many connections, and none that only sits there.

There is a bound for all, and a smaller one for each user of this machine (`peers`)
and each other machine, so that one program cannot take every connection.  The
former leaves file descriptors to the database and the device helper, without
which nothing could be done for those who are connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from typing import Any

from tornado import httpserver, iostream, web

from jupyter_gpushare import wire
from jupyter_gpushare.broker.peers import source_of

log = logging.getLogger("gpushare.broker")

MAX_CONNECTIONS = 2_000
# What one user of this machine, or another machine (such as one with the Hub's proxy), may have of them.
SHARE = 4
# File descriptors for everything else: database, helper, Hub, log.
_OTHER_FILES = 128
# An idle connection is closed after this long, and a request that does not come to its end.
IDLE_S = 60.0
BODY_S = 30.0
# For the connections to close when the broker ends.
_END_S = 3.0


def connections_allowed() -> int:
    """Raise the soft limit of open files as far as it is needed; return for how many connections it does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MAX_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(1, min(MAX_CONNECTIONS, soft - _OTHER_FILES))
    )


class Listener(httpserver.HTTPServer):
    """Closes connections beyond ``max_connections``, or ``max_per_source``, as they come."""

    def initialize(  # type: ignore[override]
        self, application: web.Application, max_connections: int, max_per_source: int, **options: Any
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
        self._sources: dict[iostream.IOStream, str] = {}
        self._full = ""  # who has too many

    def handle_stream(self, stream: iostream.IOStream, address: Any) -> None:
        try:
            source = source_of(stream.socket)
        except OSError:
            return stream.close()  # gone already
        full = ""
        if len(self._sources) >= self._max_connections:
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

    async def end(self) -> None:
        """Listen no more, and close the connections of those who still wait for news."""
        self.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.close_all_connections()

    def on_close(self, server_conn: Any) -> None:
        self._sources.pop(server_conn.stream, None)
        super().on_close(server_conn)
