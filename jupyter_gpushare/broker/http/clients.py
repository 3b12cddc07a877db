"""Client behind a proxy, by the last entries of X-Forwarded-For.

A proxy appends the address of its own peer to the header, and passes on what the
client wrote before it (configurable-http-proxy, nginx with
``$proxy_add_x_forwarded_for``).  So the header is believed from a proxy only, and
read from its end: the first address that is no proxy's is the client's.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address | None

_LOOPBACK = "127.0.0.0/8"
# The part of an IPv6 address that a site gives to one machine, which chooses the rest (RFC 6177).
_IPV6_BITS = 64


def _our_processes() -> frozenset[str]:
    return frozenset(f"uid {uid}" for uid in (0, os.geteuid()))


@dataclass(frozen=True, slots=True)
class Proxies:
    """Peers whose X-Forwarded-For is believed.

    ``sources`` are users of this machine as `peers.source_of` names them: by default root and
    the broker's user, over TCP.  ``networks`` are addresses of further proxies.
    """

    networks: tuple[_Network, ...] = ()
    sources: frozenset[str] = field(default_factory=_our_processes)

    @classmethod
    def at(cls, addresses: Iterable[str]) -> Proxies:
        """Return those with further proxies at ``addresses``.

        Raises:
            ValueError: one is neither an address nor a network.
        """
        return cls(tuple(ipaddress.ip_network(each, strict=False) for each in addresses))

    def client(self, source: str, forwarded: str) -> str:
        """Return the client of a request from ``source``; empty: the source is the client.

        A machine counts as one, whichever of its loopback or IPv6 addresses it uses.
        """
        address = _address(source)
        if source not in self.sources and not self._has(address):
            return ""
        client = ""
        for text in reversed(forwarded.split(",") if forwarded else ()):
            address = _address(text.strip())
            client = _machine(address)
            if not self._has(address):
                break
        return client

    def _has(self, address: _Address) -> bool:
        return address is not None and any(address in each for each in self.networks)


def _address(text: str) -> _Address:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    # Node writes IPv4 clients of a socket for both families as ::ffff:203.0.113.7.
    return getattr(address, "ipv4_mapped", None) or address


def _machine(address: _Address) -> str:
    if address is None:
        return "unknown"
    if address.is_loopback:
        return _LOOPBACK
    if address.version == 6:
        return str(ipaddress.ip_network((address, _IPV6_BITS), strict=False))
    return str(address)
