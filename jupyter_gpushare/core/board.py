"""The working copy of one round: room per device, standing, host memory.

A `Board` is made from a cluster and changed by the decisions of the round, so
that each decision sees those before it.  Per device (thousandths):

* ``free``     1000 - what is held, in any state of `HOLDS_ROOM`
* ``coming``   held, but on its way out
* ``pledged``  promised to leases that wait until it is free
* ``asleep``   claims of sleeping sessions that nobody wakes now

What can be granted now is `Room.now`; what can be pledged is `Room.soon`; what
is nobody's claim is `Room.unclaimed`.  Room that is lent or held by a session
that cannot be suspended is ``firm``: it is not promised to anybody else.

Host memory: what is parked counts, what is being parked counts with a margin,
and so do the bytes of every suspendable job on lent room: waking the lender
takes room for the job's memory while the lender's copy is still there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from math import ceil

from jupyter_gpushare.core.model import (
    HOLDS_ROOM,
    LEAVING,
    WHOLE_GPU,
    Cluster,
    Device,
    Kind,
    Lease,
    State,
    Survival,
)
from jupyter_gpushare.core.quota import Account, has_place, held_by, size_of, standing

# A checkpoint takes a little more host memory than the device memory it parks.
PARK_PERCENT = 105


def parked_bytes(lease: Lease) -> int:
    """Host memory that suspending ``lease`` takes."""
    return ceil(lease.used_bytes * PARK_PERCENT / 100)


class Room:
    """One device in one round."""

    __slots__ = ("asleep", "claimed", "coming", "device", "firm", "free", "holders", "pledged")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.free = WHOLE_GPU
        self.coming = 0
        self.pledged = 0
        self.claimed = 0
        self.asleep = 0
        self.firm = 0
        self.holders: list[Lease] = []  # hold room and are not on their way out

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
        for lease in sorted(self.holders, key=lambda x: (x.granted_at, x.id)):
            if lease.id not in claimants:
                unclaimed -= held_by(lease)
                if unclaimed < 0:
                    found.append(lease)
        return found


class Board:
    """All rooms, accounts and host memory, as the decisions so far leave them."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self.cluster = cluster
        self.settings = cluster.settings
        self.moment = now
        self.rooms = {d.uuid: Room(d) for d in cluster.devices}
        self.usable = [r for r in self.rooms.values() if r.device.usable]
        self.standing = standing(cluster.projects, cluster.leases)
        self.host_free = cluster.settings.host_budget_bytes
        self.reserved: dict[str, int] = {}  # host memory kept for jobs on lent room
        self.log: list[Room] = []  # every device whose room changed, in order
        self.jobs: dict[str, dict[str, Lease]] = {}  # by project and id: hold room, are not leaving
        for lease in cluster.leases:
            if has_place(lease):
                self._enter(lease)
        for room in self.rooms.values():
            for lease in room.on_lent(self.standing.claimants):
                self.reserve(lease)

    def _enter(self, lease: Lease) -> None:
        held, claimant = held_by(lease), self.has_claim(lease)
        for room in self.rooms_of(lease):
            if claimant:
                room.claimed += held
            if lease.state in HOLDS_ROOM:
                room.free -= held
                if lease.state in LEAVING:
                    room.coming += held
                    if claimant:
                        room.asleep += held
                else:
                    room.holders.append(lease)
                    if lease.kind is Kind.BUILD and not claimant and not self.can_park(lease):
                        room.firm += held
            elif claimant:
                room.asleep += held
        if lease.kind is Kind.TRAIN and lease.state in HOLDS_ROOM and lease.state not in LEAVING:
            self.jobs.setdefault(lease.project, {})[lease.id] = lease
        if lease.state is State.SUSPENDING:
            self.host_free -= parked_bytes(lease)
        elif lease.state in (State.SUSPENDED, State.RESUMING):
            self.host_free -= lease.saved_bytes

    # -- questions

    def account(self, lease: Lease) -> Account:
        return self.standing.account(lease.project)

    def has_claim(self, lease: Lease) -> bool:
        return lease.id in self.standing.claimants

    def rooms_of(self, lease: Lease) -> list[Room]:
        """The devices ``lease`` is bound to, as far as they are there."""
        return [self.rooms[uuid] for uuid in lease.devices if uuid in self.rooms]

    def is_whole(self, lease: Lease) -> bool:
        """Whether every device that ``lease`` is bound to is there."""
        return all(uuid in self.rooms for uuid in lease.devices)

    def can_park(self, lease: Lease) -> bool:
        """Whether ``lease`` can be suspended at all (host memory aside)."""
        return lease.suspendable and all(room.device.suspendable for room in self.rooms_of(lease))

    def granted_bytes(self, devices: Iterable[str], held_milli: int) -> int:
        return sum(self.rooms[u].device.grantable_bytes * held_milli // WHOLE_GPU for u in devices)

    def reserve_needed(self, lease: Lease, devices: Iterable[str], held_milli: int) -> int:
        """Host memory, beyond what it holds, to take the job off these devices again without harm."""
        rooms = [self.rooms[u] for u in devices]
        if lease.survival is not Survival.SUSPEND or not lease.suspendable:
            return 0
        if not all(room.device.suspendable for room in rooms):
            return 0
        there = lease.saved_bytes if lease.state in (State.SUSPENDED, State.RESUMING) else 0
        return max(0, self.granted_bytes(devices, held_milli) - there)

    # -- decisions

    def reserve(self, lease: Lease) -> None:
        """Keep host memory for a job that runs on lent room."""
        if lease.kind is Kind.TRAIN and lease.id not in self.reserved and self.is_whole(lease):
            needed = self.reserve_needed(lease, lease.devices, held_by(lease))
            self.reserved[lease.id] = needed
            self.host_free -= needed

    def take(self, lease: Lease, devices: tuple[str, ...], held_milli: int, *, claim: bool = False) -> None:
        """``lease`` gets room that is free now."""
        size = held_milli * len(devices)
        for uuid in devices:
            room = self.rooms[uuid]
            self.log.append(room)
            room.free -= held_milli
            if self.has_claim(lease):  # wakes up
                room.asleep -= held_milli
            elif claim:
                room.claimed += held_milli
        if claim:
            self.account(lease).claimed += size
        self._count(lease, size, in_quota=claim)

    def take_asleep(self, lease: Lease, devices: tuple[str, ...], held_milli: int) -> None:
        """A build session gets its claim; the room itself is lent just now."""
        for uuid in devices:
            room = self.rooms[uuid]
            self.log.append(room)
            room.claimed += held_milli
            room.asleep += held_milli
        account = self.account(lease)
        account.claimed += held_milli * len(devices)
        account.capped += held_milli * len(devices)

    def pledge(self, lease: Lease, devices: Iterable[str], held_milli: int) -> None:
        """Keep room that is free or on its way for ``lease``."""
        uuids = tuple(devices)
        for uuid in uuids:
            room = self.rooms[uuid]
            self.log.append(room)
            room.pledged += held_milli
            if self.has_claim(lease):
                room.asleep -= held_milli
        self._count(lease, held_milli * len(uuids))

    def _count(self, lease: Lease, size: int, *, in_quota: bool = False) -> None:
        account, claimant = self.account(lease), self.has_claim(lease)
        if claimant or in_quota or (lease.kind is Kind.TRAIN and account.fits_quota(size)):
            account.in_quota_use += size
        if not claimant:
            account.capped += size
        account.use += size

    def leave(self, lease: Lease, *, parked: bool) -> None:
        """``lease`` was told to give its room away."""
        self._move(lease, 1)
        for room in self.rooms_of(lease):
            room.holders = [x for x in room.holders if x.id != lease.id]
        self.host_free += self.reserved.get(lease.id, 0) - parked_bytes(lease) * parked
        jobs = self.jobs.get(lease.project, {})
        jobs.pop(lease.id, None)
        for promoted in self.standing.promote(self.account(lease), jobs.values()):
            self.log += self.rooms_of(promoted)

    def stay(self, lease: Lease, *, parked: bool) -> None:
        """``lease`` need not leave after all."""
        self._move(lease, -1)
        for room in self.rooms_of(lease):
            room.holders.append(lease)
        if lease.kind is Kind.TRAIN:
            self.jobs[lease.project][lease.id] = lease
        self.host_free -= self.reserved.get(lease.id, 0) - parked_bytes(lease) * parked

    def _move(self, lease: Lease, sign: int) -> None:
        held, size, account = sign * held_by(lease), sign * size_of(lease), self.account(lease)
        for room in self.rooms_of(lease):
            self.log.append(room)
            room.coming += held
            if self.has_claim(lease):
                room.asleep += held
        account.use -= size
        if not self.has_claim(lease):
            account.leaving += size
        if lease.id in self.standing.in_quota:
            account.in_quota_use -= size
