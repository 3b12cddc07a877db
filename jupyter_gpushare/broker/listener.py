"""The HTTP server with bounds: so many connections, and none that only sits there.

Everybody comes through the Hub's proxy, or from this machine: an address tells
nobody from anybody, so there is one bound for all.  It leaves file descriptors
to the database and the device helper, without which nothing could be done for
those who are connected.
"""

from __future__ import annotations

import logging
import resource
from typing import Any

from tornado import httpserver, iostream, web

from jupyter_gpushare import wire

log = logging.getLogger("gpushare.broker")

MAX_CONNECTIONS = 2_000
# File descriptors for everything else: database, helper, Hub, log.
_OTHER_FILES = 128
# An idle connection is closed after this long, and a request that does not come to its end.
IDLE_S = 60.0
BODY_S = 30.0


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
    """Closes connections beyond ``max_connections`` as they come."""

    def initialize(  # type: ignore[override]
        self, application: web.Application, max_connections: int, **options: Any
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
        self._full = False

    def handle_stream(self, stream: iostream.IOStream, address: Any) -> None:
        full = len(self._connections) >= self._max_connections
        if full and not self._full:
            log.warning("%d connections are open: more are refused", self._max_connections)
        self._full = full
        if full:
            stream.close()
        else:
            super().handle_stream(stream, address)
