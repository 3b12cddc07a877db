"""HTTP server of the broker: its connections, and the limits of each client and caller.

Connections follow the rules of `connections`.  A proxy at a configured address is a proven holder of its
own, so other processes at that address use nothing of the Hub's reserve.  A request through a proxy counts
for its client from its head to its answer, so a client's slow requests leave the proxy's share to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from tornado import httputil, iostream, web

from jupyter_gpushare.errors import TooMany
from jupyter_gpushare.listener import Gate, Listener
from jupyter_gpushare.peers import Address, address_of, holder_of, machine_of, our_users, source_of
from jupyter_gpushare.protocol import wire

# ---- client behind a proxy, by the last entries of X-Forwarded-For -----------
# A proxy appends the address of its peer to the header and keeps the entries that the
# client wrote (configurable-http-proxy, nginx with ``$proxy_add_x_forwarded_for``).  So
# the header is trusted only from a proxy, and read from its end: the first address that
# is not a proxy's is the client's.

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Proxies:
    """Peers whose X-Forwarded-For is trusted.

    ``sources`` are users of this machine as `peers.source_of` names them: by default root and
    the broker's user, over TCP.  ``networks`` are addresses of other proxies.
    """

    networks: tuple[_Network, ...] = ()
    sources: frozenset[str] = field(default_factory=our_users)

    @classmethod
    def at(cls, addresses: Iterable[str]) -> Proxies:
        """Return the default proxies and those at ``addresses``.

        Raises:
            ValueError: an entry is neither an address nor a network.
        """
        return cls(tuple(ipaddress.ip_network(each, strict=False) for each in addresses))

    def trusts(self, source: str) -> bool:
        """Return whether ``source`` is a proxy."""
        return source in self.sources or self._has(address_of(source))

    def client(self, source: str, forwarded: str) -> str:
        """Return the client of a request from ``source``; empty if the source itself is the client.

        All loopback or IPv6 addresses of a machine count as one client.
        """
        if not self.trusts(source):
            return ""
        client = ""
        for text in reversed(forwarded.split(",") if forwarded else ()):
            address = address_of(text.strip())
            client = machine_of(address)
            if not self._has(address):
                break
        return client

    def _has(self, address: Address) -> bool:
        return address is not None and any(address in each for each in self.networks)


# ---- limits per caller: a token bucket for the rate, and turns for costly requests

# Above this number of buckets, full ones are dropped, because they limit nothing.
_MAX_BUCKETS = 10_000


class Rate:
    """Rate limit per caller: ``per_s`` requests a second, after a burst of ``burst``."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._full_at: dict[str, float] = {}  # when a bucket will be full again

    def take(self, caller: str) -> None:
        """Count one request of ``caller``.

        Raises:
            TooMany: the bucket is empty; nothing is counted.
        """
        now = self._clock()
        full_at = max(now, self._full_at.get(caller, now)) + 1 / self._per_s
        wait_s = full_at - now - self._burst / self._per_s
        if wait_s > 1e-9:
            raise TooMany(
                "at most %1 of these a second: wait before the next one",
                f"{self._per_s:g}",
                retry_after_s=wait_s,
            )
        if len(self._full_at) >= _MAX_BUCKETS and caller not in self._full_at:
            self._full_at = {each: at for each, at in self._full_at.items() if at > now}
        self._full_at[caller] = full_at


class CallerQueues:
    """Runs costly steps of one caller one after the other, so that more connections get no larger share."""

    def __init__(self, at_once: int = 1, maximum: int = 128) -> None:
        """Run ``at_once`` steps of each caller; at most ``maximum`` steps run and wait."""
        self._at_once = at_once
        self._maximum = maximum
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._callers: Counter[str] = Counter()  # running and waiting steps

    @contextlib.asynccontextmanager
    async def of(self, caller: str) -> AsyncIterator[None]:
        """Wait until the caller's earlier steps have ended.

        Raises:
            TooMany: the maximum number of the caller's steps run and wait.
        """
        if self._callers[caller] >= self._maximum:
            raise TooMany("at most %1 of your requests wait at once", self._maximum, retry_after_s=1.0)
        self._callers[caller] += 1
        try:
            async with self._slots.setdefault(caller, asyncio.Semaphore(self._at_once)):
                yield
        finally:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller], self._slots[caller]


# ---- the server --------------------------------------------------------------

# Requests in progress of one client behind a proxy.
MAX_PER_CLIENT = 125
# Prefix of the holder of a proxy's connection while a client's request is in progress.
_CLIENT = "client "
# Set on every answer, including JSON and CSV.  Unless the Hub has subdomains, users' servers share the origin
# of this service, and a page can read and click a frame of its own origin.
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
        """Return the holder that the kernel or the configuration proves for a source; empty if none."""
        is_proxy = self._proxies.trusts(source)
        return super().proven_holder(source) or (f"proxy {holder_of(source)}" if is_proxy else "")

    def start_request(
        self, server_conn: object, request_conn: httputil.HTTPConnection
    ) -> httputil.HTTPMessageDelegate:
        """Return the delegate for the next request of a connection, whose last request is answered."""
        stream: iostream.IOStream = request_conn.stream  # type: ignore[attr-defined]
        entry = self.gate.connections.of(stream)
        if entry is not None and entry.holder.startswith(_CLIENT):
            self.gate.count_for(stream, entry.admitted_for)
        return super().start_request(server_conn, request_conn)

    def begins(self, connection: Any, headers: httputil.HTTPHeaders) -> bool:
        """Count the request for its client, or answer 429; then do as `Listener.begins`."""
        try:
            self.take(connection.stream, headers.get("X-Forwarded-For", ""))
        except TooMany as error:
            _refuse(connection, error)
            return False
        return super().begins(connection, headers)

    def take(self, stream: iostream.IOStream, forwarded: str) -> None:
        """Count the request on ``stream`` for its client.

        Raises:
            TooMany: that client has `MAX_PER_CLIENT` requests in progress; nothing is counted.
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


def _refuse(connection: httputil.HTTPConnection, error: TooMany) -> None:
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
    connection.write_headers(
        httputil.ResponseStartLine("HTTP/1.1", error.status, "Too Many Requests"), head, body
    )
    connection.finish()
