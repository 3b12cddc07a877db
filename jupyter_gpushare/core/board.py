"""What is where: room per device, standing, host memory.

A `Board` follows the leases (`put`, `drop`).  In a round it is changed by the
decisions (`take`, `pledge`, `leave`, ...), so that each decision sees those
before it; `undo` takes them all back.  Per device (thousandths):

* ``free``     1000 - what is held, in any state of `HOLDS_ROOM`
* ``coming``   held, but on its way out
* ``pledged``  promised to leases that wait until it is free
* ``asleep``   claims of sleeping sessions that nobody wakes now
* ``awaited``  of sessions beyond quota that would wake if they could: before
  room is made for jobs that are owed nothing

What can be granted now is `Room.now`; what can be pledged is `Room.soon`; what
is nobody's claim is `Room.unclaimed`.  Room that is lent or held by a session
that cannot be suspended is ``firm``: it is not promised to anybody else.

Host memory: what is parked counts, what is being parked counts with a margin,
and so do the bytes of every suspendable job on lent room: waking the lender
takes room for the job's memory while the lender's copy is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

from jupyter_gpushare.core.model import (
    HOLDS_ROOM,
    LEAVING,
    WHOLE_GPU,
    Cluster,
    Device,
    Kind,
    Lease,
    Project,
    Settings,
    State,
    Survival,
)
from jupyter_gpushare.core.quota import Account, Standing, has_place, held_by, size_of
from jupyter_gpushare.core.room import Room

# A checkpoint takes a little more host memory than the device memory it parks.
PARK_PERCENT = 105


def parked_bytes(lease: Lease) -> int:
    """Host memory that suspending ``lease`` takes."""
    return ceil(lease.used_bytes * PARK_PERCENT / 100)


class Board:
    """All rooms, accounts and host memory."""

    def __init__(self, devices: Iterable[Device], projects: Iterable[Project], settings: Settings) -> None:
        self.settings = settings
        self.moment = 0.0
        self.rooms = {d.uuid: Room(d) for d in devices}
        self.usable = [r for r in self.rooms.values() if r.device.usable]
        self.leases: dict[str, Lease] = {}
        self.standing = Standing(projects)
        self.host_free = settings.host_budget_bytes
        self.reserved: dict[str, int] = {}  # host memory kept for jobs on lent room
        self.log: list[Room] = []  # in a round: every device whose room changed, in order
        self._arrived: dict[str, Lease] = {}  # are not counted yet
        self._watchers: list[set[Room]] = []
        self._on_lent: dict[Room, list[Lease]] = {}
        self._relent: set[Room] = set()  # who is on lent room there is not known any more
        self._undo: dict[object, Callable[[], None]] = {}  # by what changed
        self._host_free_before = self.host_free  # when decisions began

    @classmethod
    def of(cls, cluster: Cluster, now: float = 0.0) -> Board:
        """Return the board of a cluster."""
        board = cls(cluster.devices, cluster.projects, cluster.settings)
        for lease in cluster.leases:
            board.put(lease)
        board.settle(now)
        return board

    # -- what is

    def watch(self) -> set[Room]:
        """Return a set to which every device is added whose room changes."""
        watcher = set(self.rooms.values())
        self._watchers.append(watcher)
        return watcher

    def put(self, lease: Lease) -> None:
        """A lease is new, or has changed."""
        self.drop(lease.id)
        self.leases[lease.id] = lease
        if has_place(lease):
            self.standing.enter(lease)
            self._arrived[lease.id] = lease

    def drop(self, id: str) -> None:
        """A lease has ended (or never was)."""
        lease = self.leases.pop(id, None)
        if lease is not None and has_place(lease):
            self.standing.exit(lease)
            if self._arrived.pop(id, None) is None:
                self._count_in(lease, -1)

    def settle(self, now: float) -> None:
        """Bring claims, quotas and reserves up to date: call it before the round at ``now``."""
        self.moment = now
        self.log.clear()
        changed = self.standing.claims_to_change()
        for id in changed:
            lease = self.leases.get(id)
            if lease is not None and id not in self._arrived and has_place(lease):  # it has not ended
                self._count_in(lease, -1)
                self._arrived[id] = lease
        self.standing.claimants ^= changed
        for lease in self._arrived.values():
            self._count_in(lease, 1)
        self._arrived.clear()
        self.standing.settle()
        if self._relent:
            self._settle_reserves()

    def _settle_reserves(self) -> None:
        for room in self._relent:
            self._on_lent.pop(room, None)
            if on_lent := room.on_lent(self.standing.claimants):
                self._on_lent[room] = on_lent
        self._relent.clear()
        self.host_free += sum(self.reserved.values())
        self.reserved.clear()
        for on_lent in self._on_lent.values():
            for lease in on_lent:
                self.reserve(lease)

    def _count_in(self, lease: Lease, sign: int) -> None:
        self.standing.count(lease, sign)
        self._occupy(lease, sign)

    def _occupy(self, lease: Lease, sign: int) -> None:
        """Count a lease in the rooms of its devices and in host memory, or take it out again."""
        held, claimant = sign * held_by(lease), self.has_claim(lease)
        holds, leaving = lease.state in HOLDS_ROOM, lease.state in LEAVING
        stays = holds and not leaving
        firm = stays and lease.kind is Kind.BUILD and not claimant and not self.can_park(lease)
        for uuid in lease.devices:
            room = self.rooms.get(uuid)
            if room is None:
                continue
            self._touch(room)
            if claimant:
                room.claimed += held
                room.asleep += 0 if stays else held
            if holds:
                room.free -= held
                room.coming += held if leaving else 0
            if stays:
                if sign > 0:
                    room.holders[lease.id] = lease
                else:
                    del room.holders[lease.id]
            if firm:
                room.firm += held
            if room.claimed or room in self._on_lent:
                self._relent.add(room)
        if lease.state is State.SUSPENDING:
            self.host_free -= sign * parked_bytes(lease)
        elif lease.state in (State.SUSPENDED, State.RESUMING):
            self.host_free -= sign * lease.saved_bytes

    def _touch(self, room: Room) -> None:
        self.log.append(room)
        for watcher in self._watchers:
            watcher.add(room)

    # -- questions

    def account(self, lease: Lease) -> Account:
        return self.standing.account(lease.project)

    def has_claim(self, lease: Lease) -> bool:
        return lease.id in self.standing.claimants

    def rooms_of(self, lease: Lease) -> list[Room]:
        """The devices ``lease`` is bound to, as far as they are there."""
        rooms = self.rooms
        return [rooms[uuid] for uuid in lease.devices if uuid in rooms]

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

    def begin(self) -> None:
        """Decisions follow that `undo` takes back."""
        self._undo = {}
        self._host_free_before = self.host_free

    def undo(self) -> None:
        """Take back all decisions since `begin`."""
        self.host_free = self._host_free_before
        for key, undo in self._undo.items():
            undo()
            if isinstance(key, Room):
                self._touch(key)
        self._undo = {}

    def _will_change(self, room: Room) -> None:
        if room not in self._undo:
            self._undo[room] = room.undoing()
        self._touch(room)

    def _changing(self, lease: Lease) -> Account:
        """The account of a lease, whose numbers will change."""
        account = self.account(lease)
        if account.project not in self._undo:
            self._undo[account.project] = account.undoing()
        return account

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
            self._will_change(room)
            room.free -= held_milli
            if self.has_claim(lease):  # wakes up
                room.asleep -= held_milli
            elif claim:
                room.claimed += held_milli
        if claim:
            self._changing(lease).claimed += size
        self._count(lease, size, in_quota=claim)

    def take_asleep(self, lease: Lease, devices: tuple[str, ...], held_milli: int) -> None:
        """A build session gets its claim; the room itself is lent just now."""
        for uuid in devices:
            room = self.rooms[uuid]
            self._will_change(room)
            room.claimed += held_milli
            room.asleep += held_milli
        account = self._changing(lease)
        account.claimed += held_milli * len(devices)
        account.capped += held_milli * len(devices)

    def pledge(self, lease: Lease, devices: Iterable[str], held_milli: int) -> None:
        """Keep room that is free or on its way for ``lease``."""
        uuids = tuple(devices)
        for uuid in uuids:
            room = self.rooms[uuid]
            self._will_change(room)
            room.pledged += held_milli
            if self.has_claim(lease):
                room.asleep -= held_milli
        self._count(lease, held_milli * len(uuids))

    def await_room(self, lease: Lease) -> None:
        """``lease`` would wake if there was room."""
        for room in self.rooms_of(lease):
            self._will_change(room)
            room.awaited += held_by(lease)

    def _count(self, lease: Lease, size: int, *, in_quota: bool = False) -> None:
        account, claimant = self._changing(lease), self.has_claim(lease)
        if claimant or in_quota or (lease.kind is Kind.TRAIN and account.fits_quota(size)):
            account.in_quota_use += size
        if not claimant:
            account.capped += size
        account.use += size
        account.unborrowing += 0 if lease.borrow else size

    def leave(self, lease: Lease, *, parked: bool) -> None:
        """``lease`` was told to give its room away."""
        if Standing not in self._undo:
            self._undo[Standing] = self.standing.undoing()
        self._move(lease, 1)
        for room in self.rooms_of(lease):
            room.holders.pop(lease.id, None)
        self.host_free += self.reserved.get(lease.id, 0) - parked_bytes(lease) * parked
        self.standing.jobs.get(lease.project, {}).pop(lease.id, None)
        if lease.id in self.standing.in_quota:
            for promoted in self.standing.promote(self.account(lease)):
                for room in self.rooms_of(promoted):
                    self._will_change(room)

    def stay(self, lease: Lease, *, parked: bool) -> None:
        """``lease`` need not leave after all."""
        self._move(lease, -1)
        for room in self.rooms_of(lease):
            room.holders[lease.id] = lease
        if lease.kind is Kind.TRAIN:
            self.standing.jobs[lease.project][lease.id] = lease
        self.host_free -= self.reserved.get(lease.id, 0) - parked_bytes(lease) * parked

    def _move(self, lease: Lease, sign: int) -> None:
        held, size, account = sign * held_by(lease), sign * size_of(lease), self._changing(lease)
        for room in self.rooms_of(lease):
            self._will_change(room)
            room.coming += held
            if self.has_claim(lease):
                room.asleep += held
        account.use -= size
        account.unborrowing -= 0 if lease.borrow else size
        if not self.has_claim(lease):
            account.leaving += size
        if lease.id in self.standing.in_quota:
            account.in_quota_use -= size
