"""Sessions that wait for their start: places in a queue, in memory.

* The spawn page holds a place by asking for it again; `LEFT_S` after its last request the place
  is free for others, so that a closed page waits for nothing.
* A granted place is a reservation: the planner counts its capacity as held until the server
  starts, at most for `RESERVED_S`.  A server that did not start on its reservation has no place
  for `BARRED_S`: no capacity is held for it again and again.
* A place is lost with the broker's process.  Pages ask on, and get places in the order in which
  they ask the next broker.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from math import ceil

from jupyter_gpushare.core.model import Grant, Lease, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import TooMany

# Reason of the refusal of a place: asking again soon is useless.
QUEUE_FULL = "queue_full"
# Browsers run a timer of a hidden page once a minute.
LEFT_S = 75.0
RESERVED_S = 90.0
BARRED_S = 300.0
MAX_PLACES = 1_000
MAX_PLACES_PER_USER = 4
_RETRY_S = 60.0

ServerName = tuple[str, str]  # user, name of the server


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """One session's place; ``lease`` as the planner sees it."""

    lease: Lease
    asked_at: float
    grant: Grant | None = None  # it is reserved since ``lease.granted_at``

    def ends_at(self) -> float:
        """Time at which the place is given up, if it is not asked for again."""
        return self.asked_at + LEFT_S if self.grant is None else self.lease.granted_at + RESERVED_S


class SessionQueue:
    """The places of all users, first come first served."""

    def __init__(self) -> None:
        self._places: dict[ServerName, QueuePlace] = {}
        # Servers that did not use their reservation, and until when they have no place; oldest first.
        self._barred: dict[ServerName, float] = {}

    def leases(self, but: ServerName | None = None) -> tuple[Lease, ...]:
        """Return the leases of all places but one: pending, or holding what is reserved."""
        return tuple(place.lease for server, place in self._places.items() if server != but)

    def of(self, user: str, server: str) -> QueuePlace | None:
        """Return the place of a server."""
        return self._places.get((user, server))

    def waiting(self) -> list[QueuePlace]:
        """Return the places without a reservation, the first to start first."""
        waiting = (place for place in self._places.values() if place.grant is None)
        return sorted(waiting, key=lambda place: place.lease.queued_at)

    def join(self, lease: Lease, now: float) -> QueuePlace:
        """Return the place of ``lease``'s server, which keeps it while it asks for the same.

        Raises:
            TooMany: the queue is full, the user has as many places as allowed, or did not use a
                reservation of this server a moment ago.
        """
        key = lease.user, lease.server
        place = self.keep(lease.user, lease.server, lease.size, lease.project, now)
        if place is None:
            self.leave(*key, now)
            if (left_s := self._barred.get(key, now) - now) > 0:
                raise TooMany(
                    "A GPU was reserved for this server and not used: it can wait again in %1 min",
                    ceil(left_s / 60),
                    retry_after_s=left_s,
                    reason=QUEUE_FULL,
                )
            others = [user for user, server in self._places if (user, server) != key]
            if others.count(lease.user) >= MAX_PLACES_PER_USER:
                raise TooMany(
                    "%1 of your servers wait for a GPU: cancel one of them first",
                    MAX_PLACES_PER_USER,
                    retry_after_s=_RETRY_S,
                    reason=QUEUE_FULL,
                )
            if len(others) >= MAX_PLACES:
                raise TooMany(
                    "%1 sessions wait for a GPU: try again later",
                    MAX_PLACES,
                    retry_after_s=_RETRY_S,
                    reason=QUEUE_FULL,
                )
            place = self._places[key] = QueuePlace(lease=lease, asked_at=now)
        return place

    def keep(self, user: str, server: str, size: Size, project: str, now: float) -> QueuePlace | None:
        """Return the place that a server has for just this request, asked for at ``now``; None: none."""
        known = self._places.get((user, server))
        if known is None or not _asks_for(known.lease, size, project):
            return None
        self._places[user, server] = replace(known, asked_at=now)
        return self._places[user, server]

    def leave(self, user: str, server: str, now: float) -> None:
        """Give up the place of a server, if it has one."""
        place = self._places.pop((user, server), None)
        if place is not None and place.grant is not None:
            self._barred[user, server] = now + BARRED_S
            if len(self._barred) > MAX_PLACES:
                del self._barred[next(iter(self._barred))]

    def forget(self, user: str) -> None:
        """Give up all places of a user; another one may have the name now."""
        self._places = {key: place for key, place in self._places.items() if key[0] != user}
        self._barred = {key: until for key, until in self._barred.items() if key[0] != user}

    def reserve(self, grant: Grant, now: float) -> bool:
        """Reserve what a decision grants to a place; False: it is of no place."""
        key = next((key for key, place in self._places.items() if place.lease.id == grant.lease), None)
        if key is None:
            return False
        place = self._places[key]
        lease = replace(
            place.lease,
            state=State.SUSPENDED if grant.asleep else State.GRANTED,
            devices=grant.devices,
            held_milli=grant.held_milli,
            borrowed=grant.borrowed,
            granted_at=now,
        )
        self._places[key] = replace(place, lease=lease, grant=grant)
        return True

    def take(self, lease: Lease, usable: Container[str]) -> Grant | None:
        """Give up the place of a server that starts; returns what is reserved for just this start.

        ``usable``: devices that may be granted now; a reservation on others is worth nothing.
        """
        place = self._places.pop((lease.user, lease.server), None)
        if place is None or place.grant is None or not _asks_for(place.lease, lease.size, lease.project):
            return None
        return place.grant if all(uuid in usable for uuid in place.grant.devices) else None

    def expire(self, now: float) -> bool:
        """Give up the places that have ended (`QueuePlace.ends_at`); returns whether there were any."""
        over = [key for key, place in self._places.items() if place.ends_at() <= now]
        for key in over:
            self.leave(*key, now)
        self._barred = {key: until for key, until in self._barred.items() if until > now}
        return bool(over)


def _asks_for(lease: Lease, size: Size, project: str) -> bool:
    return lease.size == size and lease.project == project
