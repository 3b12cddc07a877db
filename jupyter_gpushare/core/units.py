"""Unit pools: which GPUs of a node its leases get when a scheduler only counts units.

Every GPU of a pool consists of the same number of equal units.  A lease takes one unit of each of
its GPUs: whole GPUs if a GPU is one unit, else a part of one GPU.  The scheduler grants numbers of
units; this module decides which GPUs.  Units of one GPU are equal, so an assignment names only GPUs.

=====  ===================================================================================
U1     a unit has at most one awake lease
U2     a unit has at most one claim, and a lease with a claim is only on the units it claims
U3     so the claims in a pool never exceed its units
U4     awake units never exceed the units that the scheduler has granted in the pool
=====  ===================================================================================

A lease without a claim is a *guest*; on units that another lease claims it *borrows*.  A guest
that can be neither parked nor restarted (`Exit.NONE`) counts as a claim: it never borrows.

These rules guarantee that every grant can be placed:

* A returning lease: by U2, every awake lease beyond the claims of a GPU is a guest, so displacing
  at most one guest for each of its units frees them (`Pool.bring_back`).
* A displaced guest that restarts: by U4, as many units as it had are free elsewhere.
* A new lease with a claim: by U3, enough units have no claim; guests on them are displaced too.
* A new guest: by U4, enough units are free, and unclaimed units are taken first (`Pool.place`).
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace


class Exit(enum.StrEnum):
    """Reaction of a guest when it is displaced."""

    RESTART = "restart"  # it stops and starts again on other units of the pool; it keeps its grant
    PARK = "park"  # it gives its grant up; its memory returns to the same GPUs later
    NONE = "none"  # it can do neither


class Presence(enum.StrEnum):
    """State of a lease on the units that it is assigned to."""

    ASLEEP = "asleep"  # its memory will return to the units
    ARRIVING = "arriving"  # granted; it waits until its units are free
    AWAKE = "awake"  # it has device memory, or may have
    LEAVING = "leaving"  # it has device memory and releases it without a further decision


_IN_USE = (Presence.AWAKE, Presence.LEAVING)
_STAYS = (Presence.AWAKE, Presence.ARRIVING)
EVERY_EXIT = frozenset(Exit)
# The order in which guests of one GPU are displaced.
_EXIT_ORDER = (Exit.RESTART, Exit.PARK, Exit.NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupant:
    """A lease that is assigned to one unit of each of ``gpus``."""

    lease: str
    gpus: tuple[str, ...]
    presence: Presence
    claims: bool = False
    exit: Exit = Exit.RESTART  # of a guest

    @property
    def keeps(self) -> bool:
        """Whether no other lease may claim its units."""
        return self.claims or self.exit is Exit.NONE


@dataclass(frozen=True, slots=True)
class UnitPlacement:
    """GPUs of a lease, and the guests that must leave before it can use them."""

    gpus: tuple[str, ...]
    displaced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """The units of one node and the leases assigned to them."""

    gpus: tuple[str, ...]
    per_gpu: int  # units
    occupants: tuple[Occupant, ...] = ()

    def on(self, gpu: str) -> Iterator[Occupant]:
        """Yield the leases that are assigned to a unit of a GPU."""
        return (each for each in self.occupants if gpu in each.gpus)

    def of(self, lease: str) -> Occupant | None:
        """Return the lease of this id; None: it is not assigned."""
        return next((each for each in self.occupants if each.lease == lease), None)

    def claimed(self, gpu: str) -> int:
        """Return the number of units of a GPU that no further lease may claim."""
        return sum(each.keeps for each in self.on(gpu))

    def is_free(self, lease: str) -> bool:
        """Return whether an assigned lease can use its units now, because no other lease has memory there."""
        mine = self.of(lease)
        return mine is not None and all(
            sum(each.presence in _IN_USE for each in self.on(gpu) if each is not mine) < self.per_gpu
            for gpu in mine.gpus
        )

    def place(self, units: int, *, keeps: bool) -> UnitPlacement | None:
        """Return GPUs for a new lease of ``units`` units; None: too few are available now.

        ``keeps``: the lease claims its units or cannot leave them.  It gets unclaimed units, and guests on
        them are displaced.  Any other lease gets units that are free now, unclaimed ones first.
        """
        if keeps:
            fitting = [gpu for gpu in self.gpus if self.claimed(gpu) < self.per_gpu]
            fitting.sort(key=lambda gpu: (self._staying(gpu) >= self.per_gpu, self._taken(gpu)))
            gpus = tuple(sorted(fitting[:units], key=self.gpus.index))
            return UnitPlacement(gpus, self._displaced(gpus, "", EVERY_EXIT)) if len(gpus) == units else None
        free = [gpu for gpu in self.gpus if self._taken(gpu) < self.per_gpu]
        free.sort(key=self._is_borrowed)
        return UnitPlacement(tuple(sorted(free[:units], key=self.gpus.index))) if len(free) >= units else None

    def bring_back(self, lease: str, exits: Container[Exit] = EVERY_EXIT) -> UnitPlacement | None:
        """Return the guests that an assigned lease displaces from its own GPUs when it gets them back.

        None: it cannot displace the lease on one of its units, which has a claim or an exit that is not in
        ``exits``.  With all exits this never happens to a lease with a claim.
        """
        mine = self.of(lease)
        if mine is None:
            return None
        displaced = self._displaced(mine.gpus, lease, exits)
        rest = self.without(displaced)
        if any(rest._staying(gpu, lease) >= self.per_gpu for gpu in mine.gpus):
            return None
        return UnitPlacement(mine.gpus, displaced)

    def put(self, occupant: Occupant) -> Pool:
        """Return the pool with this assignment of a lease, in place of its previous one."""
        return replace(self, occupants=(*self.without((occupant.lease,)).occupants, occupant))

    def with_presence(self, lease: str, presence: Presence) -> Pool:
        """Return the pool with another presence of an assigned lease."""
        return replace(
            self,
            occupants=tuple(
                replace(each, presence=presence) if each.lease == lease else each for each in self.occupants
            ),
        )

    def without(self, leases: Container[str]) -> Pool:
        """Return the pool without these leases."""
        return replace(self, occupants=tuple(each for each in self.occupants if each.lease not in leases))

    def _staying(self, gpu: str, except_for: str = "") -> int:
        return sum(each.presence in _STAYS for each in self.on(gpu) if each.lease != except_for)

    def _taken(self, gpu: str) -> int:
        return sum(each.presence is not Presence.ASLEEP for each in self.on(gpu))

    def _is_borrowed(self, gpu: str) -> bool:
        """Return whether one more guest of a GPU would be on a claimed unit."""
        guests = sum(not each.keeps and each.presence is not Presence.ASLEEP for each in self.on(gpu))
        return guests >= self.per_gpu - self.claimed(gpu)

    def _displaced(self, gpus: tuple[str, ...], lease: str, exits: Container[Exit]) -> tuple[str, ...]:
        """Return the guests to displace so that each of these GPUs has a unit for one more lease."""
        rest, found = self, list[str]()
        for gpu in gpus:
            if rest._staying(gpu, lease) < self.per_gpu:
                continue
            guests = [
                each
                for each in rest.on(gpu)
                if each.presence in _STAYS and not each.claims and each.exit in exits and each.lease != lease
            ]
            if guests:
                chosen = min(guests, key=lambda each: (_EXIT_ORDER.index(each.exit), each.lease))
                found.append(chosen.lease)
                rest = rest.without((chosen.lease,))
        return tuple(found)
