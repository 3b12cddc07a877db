"""Ports for servers that tests start.  Standard library only."""

from __future__ import annotations

import contextlib
import random
import socket

# Below Linux's range of outgoing connections (net.ipv4.ip_local_port_range, 32768 and up): a
# number out of that range may be somebody's connection by the time the server binds it.
_FIRST, _BEYOND = 15_000, 30_000


def free_ports(count: int = 1) -> int:
    """Return the first of ``count`` consecutive TCP ports of 127.0.0.1 on which nobody listens."""
    for _ in range(1_000):
        first = random.randrange(_FIRST, _BEYOND - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError(f"no {count} consecutive free ports from {_FIRST} to {_BEYOND}")
