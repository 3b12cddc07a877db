"""HTTP server with limits on connections: in total, per source, and on idle ones.

A source is a user of this machine (`peers`) or another machine.  The total leaves
file descriptors for the database and the device helper.  Its last part is reserved
for root and the broker's user: the Hub and its proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from typing import Any

from tornado import httpserver, iostream, web

from jupyter_gpushare.broker.http.peers import source_of
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")

MAX_CONNECTIONS = 2_000
# One source, such as a user or the machine of the Hub's proxy, has at most 1/SHARE of the connections.
SHARE = 4
# File descriptors for everything else: database, helper, Hub, log.
_OTHER_FILES = 128
# Deadlines: for an idle connection or the head of a request, and for a body.
IDLE_S = 20.0
BODY_S = 15.0
# Deadline for open connections when the broker ends.
_END_S = 3.0


def connections_allowed() -> int:
    """Raise the soft limit of open files up to the need; return the number of connections that it allows."""
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
    """HTTP server that closes new connections beyond ``max_connections`` or ``max_per_source``."""

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
        uids = {0, os.geteuid()}
        self._reserved_for = {f"uid {uid}{way}" for uid in uids for way in ("", " by socket")}
        self._sources: dict[iostream.IOStream, str] = {}
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

    async def end(self) -> None:
        """Stop listening, and close all connections, long polls included."""
        self.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.close_all_connections()

    def on_close(self, server_conn: Any) -> None:
        """Count a connection as closed."""
        self._sources.pop(server_conn.stream, None)
        super().on_close(server_conn)
