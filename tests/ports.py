"""Ports for servers that tests start.  Standard library only."""

from __future__ import annotations

import contextlib
import os
import random
import socket

# Below Linux's range of outgoing connections (net.ipv4.ip_local_port_range, 32768 and up): another
# program's connection may take a port of that range before the server binds it.
_FIRST, _BEYOND = 15_000, 30_000


def range_of_worker() -> tuple[int, int]:
    """Return the first port of this pytest worker, and the one after its last.

    Workers share no port: otherwise two could find the same port free before either binds it.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = (_BEYOND - _FIRST) // count
    return _FIRST + number * size, _FIRST + (number + 1) * size


def free_ports(count: int = 1) -> int:
    """Return the first of ``count`` consecutive free TCP ports of 127.0.0.1.

    Raises:
        RuntimeError: 1,000 tries found none.
    """
    begin, end = range_of_worker()
    for _ in range(1_000):
        first = random.randrange(begin, end - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError(f"no {count} consecutive free ports from {begin} to {end}")
