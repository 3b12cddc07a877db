"""One device: what of it is free, promised, claimed.

What the numbers mean is in `board`.  How much of a device somebody may have is
asked for by functions of a room (`free_now`, `claimable`, ...): placement
looks by any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from jupyter_gpushare.core.model import WHOLE_GPU, Device, Lease
from jupyter_gpushare.core.quota import held_by


class Room:
    """One device."""

    __slots__ = ("asleep", "awaited", "claimed", "coming", "device", "firm", "free", "holders", "pledged")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.free = WHOLE_GPU
        self.coming = 0
        self.pledged = 0
        self.claimed = 0
        self.asleep = 0
        self.firm = 0
        self.awaited = 0
        self.holders: dict[str, Lease] = {}  # by id: hold room and are not on their way out

    def undoing(self) -> Callable[[], None]:
        """Return what brings the room back to how it is now, after decisions."""
        before = self.free, self.coming, self.pledged, self.claimed, self.asleep, self.awaited
        holders = self.holders.copy()

        def undo() -> None:
            self.free, self.coming, self.pledged, self.claimed, self.asleep, self.awaited = before
            self.holders = holders

        return undo

    @property
    def now(self) -> int:
        """What can be granted at once."""
        return min(self.free, self.soon)

    @property
    def soon(self) -> int:
        """What can be granted once everything on its way out has left."""
        return self.free + self.coming - self.pledged

    @property
    def unclaimed(self) -> int:
        """What can be granted at once and is no sleeping session's."""
        return min(self.free, self.soon - self.asleep)

    @property
    def claimable(self) -> int:
        """What a build session can still be guaranteed."""
        return WHOLE_GPU - self.claimed - self.firm

    def on_lent(self, claimants: Container[str]) -> list[Lease]:
        """Who holds room that others claim: those without a claim that came last."""
        found: list[Lease] = []
        if not self.claimed:
            return found
        unclaimed = WHOLE_GPU - self.claimed
        for lease in sorted(self.holders.values(), key=lambda x: (x.granted_at, x.id)):
            if lease.id not in claimants:
                unclaimed -= held_by(lease)
                if unclaimed < 0:
                    found.append(lease)
        return found


RoomOf = Callable[[Room], int]


def free_now(room: Room) -> int:
    return room.now


def free_soon(room: Room) -> int:
    return room.soon


def unclaimed_now(room: Room) -> int:
    return room.unclaimed


def unclaimed_soon(room: Room) -> int:
    return room.soon - room.asleep


def claimable(room: Room) -> int:
    return room.claimable


def claimable_now(room: Room) -> int:
    return min(room.claimable, room.now)


def returnable(room: Room) -> int:
    return room.unclaimed if room.device.suspendable else 0


# Where a job that does not borrow looks for room.
UNLENT: dict[RoomOf, RoomOf] = {free_now: unclaimed_now, free_soon: unclaimed_soon}
