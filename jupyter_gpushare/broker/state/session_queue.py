"""Sessions that wait for their start: places in a queue, in memory.

* The spawn page keeps its place by repeating its request.  `ABANDONED_S` after the last request
  the place is given up, so a closed page keeps no place.
* A granted place is a reservation: the planner counts its capacity as held until the server
  starts, for at most `RESERVED_S`.  A server that does not use its reservation gets no place for
  `BARRED_S`, so that it cannot hold capacity again and again.
* Places are lost with the broker's process.  Pages repeat their requests to the next broker and
  get places in the order of these requests.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from math import ceil

from jupyter_gpushare.core.model import Grant, Lease, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import TooMany

# Reason for refusing a place: a retry soon is useless.
QUEUE_FULL = "queue_full"
# Browsers run the timers of a hidden page once a minute.
ABANDONED_S = 75.0
RESERVED_S = 90.0
BARRED_S = 300.0
MAX_PLACES = 1_000
MAX_PLACES_PER_USER = 4
_RETRY_S = 60.0

ServerName = tuple[str, str]  # user, name of the server


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """One session's place; the planner sees ``lease``."""

    lease: Lease
    renewed_at: float
    grant: Grant | None = None  # reserved since ``lease.granted_at``

    def ends_at(self) -> float:
        """Return the time at which the place is given up, unless it is renewed."""
        return self.renewed_at + ABANDONED_S if self.grant is None else self.lease.granted_at + RESERVED_S


class SessionQueue:
    """The places of all users, first come, first served."""

    def __init__(self) -> None:
        self._places: dict[ServerName, QueuePlace] = {}
        # Servers that did not use their reservation, and until when they get no place; oldest first.
        self._barred: dict[ServerName, float] = {}

    def leases(self, but: ServerName | None = None) -> tuple[Lease, ...]:
        """Return the leases of all places except ``but``: pending, or holding their reservation."""
        return tuple(place.lease for server, place in self._places.items() if server != but)

    def of(self, user: str, server: str) -> QueuePlace | None:
        """Return the place of a server."""
        return self._places.get((user, server))

    def waiting(self) -> list[QueuePlace]:
        """Return the places without a reservation, in the order of the queue."""
        waiting = (place for place in self._places.values() if place.grant is None)
        return sorted(waiting, key=lambda place: place.lease.queued_at)

    def join(self, lease: Lease, now: float) -> QueuePlace:
        """Return the place of ``lease``'s server, which keeps it while its request is the same.

        Raises:
            TooMany: the queue is full, the user has the maximum number of places, or this server
                recently did not use a reservation.
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
            place = self._places[key] = QueuePlace(lease=lease, renewed_at=now)
        return place

    def keep(self, user: str, server: str, size: Size, project: str, now: float) -> QueuePlace | None:
        """Renew and return the place that a server has for exactly this request, or None."""
        known = self._places.get((user, server))
        if known is None or not _matches(known.lease, size, project):
            return None
        self._places[user, server] = replace(known, renewed_at=now)
        return self._places[user, server]

    def leave(self, user: str, server: str, now: float) -> None:
        """Give up the place of a server, if it has one."""
        place = self._places.pop((user, server), None)
        if place is not None and place.grant is not None:
            self._barred[user, server] = now + BARRED_S
            if len(self._barred) > MAX_PLACES:
                del self._barred[next(iter(self._barred))]

    def forget(self, user: str) -> None:
        """Give up all places of a user, because another user may have the name now."""
        self._places = {key: place for key, place in self._places.items() if key[0] != user}
        self._barred = {key: until for key, until in self._barred.items() if key[0] != user}

    def reserve(self, grant: Grant, now: float) -> bool:
        """Reserve what a decision grants to a place; return False if no place has the granted lease."""
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
        """Give up the place of a server that starts; return what is reserved for exactly this start.

        ``usable`` has the devices that may be granted now; a reservation on other devices is void.
        """
        place = self._places.pop((lease.user, lease.server), None)
        if place is None or place.grant is None or not _matches(place.lease, lease.size, lease.project):
            return None
        return place.grant if all(uuid in usable for uuid in place.grant.devices) else None

    def expire(self, now: float) -> bool:
        """Give up the places that have ended (`QueuePlace.ends_at`); return whether there were any."""
        over = [key for key, place in self._places.items() if place.ends_at() <= now]
        for key in over:
            self.leave(*key, now)
        self._barred = {key: until for key, until in self._barred.items() if until > now}
        return bool(over)


def _matches(lease: Lease, size: Size, project: str) -> bool:
    return lease.size == size and lease.project == project
