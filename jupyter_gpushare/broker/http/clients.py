"""Client behind a proxy, by the last entries of X-Forwarded-For.

A proxy appends the address of its own peer to the header, and passes on what the
client wrote before it (configurable-http-proxy, nginx with
``$proxy_add_x_forwarded_for``).  So the header is believed from a proxy only, and
read from its end: the first address that is no proxy's is the client's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from jupyter_gpushare.peers import Address, address_of, machine_of, our_users

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Proxies:
    """Peers with an X-Forwarded-For that is believed.

    ``sources`` are users of this machine as `peers.source_of` names them: by default root and
    the broker's user, over TCP.  ``networks`` are addresses of further proxies.
    """

    networks: tuple[_Network, ...] = ()
    sources: frozenset[str] = field(default_factory=our_users)

    @classmethod
    def at(cls, addresses: Iterable[str]) -> Proxies:
        """Return those with further proxies at ``addresses``.

        Raises:
            ValueError: one is neither an address nor a network.
        """
        return cls(tuple(ipaddress.ip_network(each, strict=False) for each in addresses))

    def trusts(self, source: str) -> bool:
        """Return whether ``source`` is a proxy."""
        return source in self.sources or self._has(address_of(source))

    def client(self, source: str, forwarded: str) -> str:
        """Return the client of a request from ``source``; empty: the source is the client.

        A machine counts as one, whichever of its loopback or IPv6 addresses it uses.
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
