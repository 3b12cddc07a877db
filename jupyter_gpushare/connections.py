"""The rules by which all listeners keep or close connections.

| class    | which connections                             | how many        | until                        |
|----------|-----------------------------------------------|-----------------|------------------------------|
| unproven | no token, secret or uid has been verified yet | ``unproven``    | 2 s idle after the handshake,|
|          |                                               |                 | 10 s in all                  |
| proven   | all others                                    | ``proven``      | the server's own idle limit  |

Each connection is counted for a holder: the peer's uid or address while it is unproven, then the user or
service that it has proved.  The classes have separate slots.  In a full class the oldest idle connection of
the largest holder is closed for a new one.  A holder's reserve is subtracted in that comparison, so that
connections within it are closed last.

A small holder is protected too: a holder with n connections loses one only if no holder has more.  With
1,500 slots and a reserve of 500 for the Hub, each of 249 other holders keeps 4 connections, however many one
of them opens.

A connection is idle between two requests, and until the head of a request is complete.  One with a request
in progress is closed only if the largest holder has no idle connection, and only in a server that can cancel
requests.  If the largest holder is the new connection's own, and proven, the new connection is closed
instead.  An unproven holder can be an address of many users, so its oldest connection is closed.

This module has no I/O and no clock: times are seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

# Limits of an unproven connection: from its handshake to the head of a request, and in total.
IDLE_S = 2.0
PROOF_S = 10.0
# The length of the kernel's queue of unaccepted connections; net.core.somaxconn is its maximum.
BACKLOG = 4_096


@dataclass(slots=True)
class Entry:
    """One connection; only `Connections` changes it."""

    holder: str
    is_proven: bool
    opened_at: float
    expires_at: float  # unless it is proven by then
    admitted_for: str  # its first holder
    is_busy: bool = False
    user: str = ""  # whose request is in progress


class Connections(Generic[K]):
    """Open connections of one server, by class and holder."""

    def __init__(
        self, *, unproven: int, proven: int, reserves: Mapping[str, int] | None = None, cancels: bool
    ) -> None:
        """Set the maximum number of connections of each class, and the ``reserves`` by holder.

        ``cancels`` is whether a request in progress ends when its connection is closed.
        """
        self._maximum = {False: unproven, True: proven}
        self._reserves = reserves or {}
        self._cancels = cancels
        self._entries: dict[K, Entry] = {}
        # By class and holder; the least recently used connection of a holder comes first.
        self._held: dict[bool, dict[str, dict[K, Entry]]] = {False: {}, True: {}}
        self._counts = {False: 0, True: 0}
        self._requests: Counter[str] = Counter()  # in progress, by user
        # The holder of the connection that was closed last for a new one, or "".
        self.gave_way = ""

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, key: K) -> Entry | None:
        """Return the entry of a connection; None if it is not counted (any more)."""
        return self._entries.get(key)

    def count(self, holder: str, *, is_proven: bool) -> int:
        """Return the number of connections that ``holder`` has in a class."""
        return len(self._held[is_proven].get(holder, ()))

    def with_requests(self) -> list[K]:
        """Return the connections with a request in progress."""
        return [key for key, entry in self._entries.items() if entry.is_busy]

    def admit(
        self, key: K, holder: str, now: float, *, is_proven: bool = False, shakes_hands: bool = False
    ) -> K | None:
        """Count a new connection; return the one to close, which may be ``key``, or None.

        The returned connection is no longer counted.  One that ``shakes_hands`` expires after `PROOF_S`
        until `idle` is called for it; it counts as idle.
        """
        expires_at = math.inf if is_proven else now + (PROOF_S if shakes_hands else IDLE_S)
        self._add(key, Entry(holder, is_proven, now, expires_at, holder))
        return self._make_way(key)

    def prove(self, key: K, holder: str) -> K | None:
        """Count a connection as proven, for ``holder``; return the one to close, or None.

        A connection that is not counted (any more) must be closed itself.
        """
        entry = self._entries.get(key)
        if entry is None:
            return key
        if entry.is_proven and entry.holder == holder:
            return None
        self._remove(key)
        entry.holder, entry.is_proven, entry.expires_at = holder, True, math.inf
        self._add(key, entry)
        return self._make_way(key)

    def busy(self, key: K) -> bool:
        """Count a request as begun; return False if the connection is being closed and must not be read."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        entry.is_busy = True
        if not entry.is_proven:
            entry.expires_at = entry.opened_at + PROOF_S
        return True

    def begin(self, key: K, user: str, maximum: int) -> bool:
        """Count a request of ``user`` until it ends; return False if ``maximum`` of the user run already."""
        entry = self._entries.get(key)
        if entry is None or entry.user == user:
            return True
        if self._requests[user] >= maximum:
            return False
        self._end(entry)
        entry.user = user
        self._requests[user] += 1
        return True

    def idle(self, key: K, now: float) -> None:
        """Count the request, or the handshake, of a connection as ended."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.is_busy = False
        self._end(entry)
        if not entry.is_proven:
            entry.expires_at = min(entry.opened_at + PROOF_S, now + IDLE_S)
        owned = self._held[entry.is_proven][entry.holder]
        owned[key] = owned.pop(key)

    def expired(self, now: float) -> list[K]:
        """Return the connections that were not proven in time; they are no longer counted."""
        over = [
            key
            for owned in self._held[False].values()
            for key, entry in owned.items()
            if entry.expires_at <= now
        ]
        for key in over:
            self._remove(key)
        return over

    def close(self, key: K) -> None:
        """Count a connection as closed, if it is counted."""
        if key in self._entries:
            self._remove(key)

    @property
    def has_unproven(self) -> bool:
        """Return whether any connection can expire."""
        return self._counts[False] > 0

    def _add(self, key: K, entry: Entry) -> None:
        self._entries[key] = entry
        self._held[entry.is_proven].setdefault(entry.holder, {})[key] = entry
        self._counts[entry.is_proven] += 1

    def _end(self, entry: Entry) -> None:
        if entry.user:
            self._requests[entry.user] -= 1
            if not self._requests[entry.user]:
                del self._requests[entry.user]
            entry.user = ""

    def _remove(self, key: K) -> None:
        entry = self._entries.pop(key)
        self._end(entry)
        of_class = self._held[entry.is_proven]
        del of_class[entry.holder][key]
        if not of_class[entry.holder]:
            del of_class[entry.holder]
        self._counts[entry.is_proven] -= 1

    def _make_way(self, new: K) -> K | None:
        is_proven = self._entries[new].is_proven
        if self._counts[is_proven] <= self._maximum[is_proven]:
            return None
        found = self._to_close(new)
        self.gave_way = self._entries[found].holder
        self._remove(found)
        return found

    def _to_close(self, new: K) -> K:
        entry = self._entries[new]
        of_class = self._held[entry.is_proven]

        def size(holder: str) -> tuple[int, bool]:
            owned = of_class[holder]
            has_idle = any(not each.is_busy for key, each in owned.items() if key != new)
            return len(owned) - self._reserves.get(holder, 0), has_idle

        largest = max(of_class, key=size)
        others = {key: each for key, each in of_class[largest].items() if key != new}
        idle = next((key for key, each in others.items() if not each.is_busy), None)
        if idle is not None:
            return idle
        can_cut_off = self._cancels and (largest != entry.holder or not entry.is_proven)
        return next(iter(others)) if others and can_cut_off else new
