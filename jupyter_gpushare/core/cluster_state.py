"""Capacity of every device, quota use of every project, and free host memory.

A `ClusterState` follows the leases (`put`, `drop`).  During a round, decisions
change it (`allocate`, `reserve`, `evict`, ...), so each decision sees the
earlier ones; `undo` reverts them all.  Per device, in thousandths:

* ``free``: 1000 minus the capacity held in any state of `HOLDS_CAPACITY`
* ``releasing``: held by leases that are leaving
* ``reserved``: kept for waiting leases until it is free
* ``claimed``: guaranteed to build sessions, suspended or not
* ``suspended_claims``: claims of suspended sessions that are not waking
* ``guest_demand``: requested by suspended sessions beyond quota; it precedes
  reclaims for jobs that no quota owes anything
* ``awaited``: suspended leases without a claim wait for it; other leases avoid it if they can
* ``guest``: a lease that runs on capacity held by another lease; all rules treat it as a suspended
  job that waits for capacity of its own, with host memory already reserved for its state
* ``unreclaimable``: held without a claim by a session that cannot be suspended;
  guaranteed to no other session

Three things take host memory: suspended state; state that is being copied, with a
margin; and the bytes of every suspendable job on lent capacity.  When the lender
wakes, the job's memory is copied out before the lender's copy is released.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import ceil

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    Cluster,
    Device,
    Kind,
    Lease,
    Project,
    Settings,
    State,
    held_by,
    size_of,
)
from jupyter_gpushare.core.quota import Account, QuotaState, has_place

# A checkpoint takes a little more host memory than the device memory that it saves.
CHECKPOINT_PERCENT = 105


def suspended_bytes(lease: Lease) -> int:
    """Return the host memory that suspending ``lease`` takes, in bytes."""
    return ceil(lease.used_bytes * CHECKPOINT_PERCENT / 100)


class ClusterState:
    """Capacity of all devices, accounts of all projects, and host memory."""

    def __init__(self, devices: Iterable[Device], projects: Iterable[Project], settings: Settings) -> None:
        self.settings = settings
        self.moment = 0.0  # the time of the round
        self.capacities = {d.uuid: DeviceCapacity(d) for d in devices}
        self.usable = [c for c in self.capacities.values() if c.device.usable]
        # Usable devices by kind; a suspended lease may move between devices of one kind.
        self._alike: dict[tuple[object, ...], list[DeviceCapacity]] = defaultdict(list)
        for capacity in self.usable:
            if capacity.device.movable:
                self._alike[_kind_of(capacity.device)].append(capacity)
        self.leases: dict[str, Lease] = {}
        self.stopping: dict[str, Lease] = {}  # leases that are being stopped
        self.guests: dict[str, Lease] = {}  # guests in their real state; `leases` shows them suspended
        self.hosts: dict[str, Lease] = {}  # running jobs that have memory to spare for a guest
        self.quotas = QuotaState(projects, WHOLE_GPU * len(self.capacities))
        self.host_free = settings.host_budget_bytes
        self.reserved_bytes: dict[str, int] = {}  # host memory reserved for jobs on lent capacity
        self.log: list[DeviceCapacity] = []  # devices that changed in this round, in order
        self._arrived: dict[str, Lease] = {}  # not counted yet
        self._watchers: list[set[DeviceCapacity]] = []
        self._on_lent: dict[DeviceCapacity, list[Lease]] = {}
        self._lent_devices: Counter[str] = Counter()  # by lease: the number of its devices in `_on_lent`
        self._relent: set[DeviceCapacity] = set()  # devices with an outdated entry in `_on_lent`
        self._undo: dict[object, Callable[[], object]] = {}  # by the object that changed
        self._host_free_before = self.host_free  # when the round began

    @classmethod
    def of(cls, cluster: Cluster, now: float = 0.0) -> ClusterState:
        """Return the state of a cluster."""
        state = cls(cluster.devices, cluster.projects, cluster.settings)
        for lease in cluster.leases:
            state.put(lease)
        state.settle(now)
        return state

    # -- leases

    def watch(self) -> set[DeviceCapacity]:
        """Return a set that starts with all devices and then receives every device that changes."""
        watcher = set(self.capacities.values())
        self._watchers.append(watcher)
        return watcher

    def put(self, lease: Lease) -> None:
        """Add a lease, or replace it after a change."""
        self.drop(lease.id)
        if lease.host and lease.state in HOLDS_CAPACITY:
            self.guests[lease.id] = lease
            self._note_guest(lease, lease.id)
            lease = replace(lease, state=State.SUSPENDED, host="")
        self.leases[lease.id] = lease
        if lease.state is State.STOPPING:
            self.stopping[lease.id] = lease
        if lease.share and lease.spare_bytes and lease.kind is Kind.TRAIN and lease.state is State.RUNNING:
            self.hosts[lease.id] = lease
        if has_place(lease):
            self.quotas.enter(lease)
            self._arrived[lease.id] = lease

    def drop(self, id: str) -> None:
        """Remove a lease if it is known."""
        lease = self.leases.pop(id, None)
        self.stopping.pop(id, None)
        self.hosts.pop(id, None)
        if (guest := self.guests.pop(id, None)) is not None:
            self._note_guest(guest, "")
        if lease is not None and has_place(lease):
            self.quotas.exit(lease)
            if self._arrived.pop(id, None) is None:
                self._count_in(lease, -1)

    def settle(self, now: float) -> None:
        """Bring claims, quotas and host memory up to date; call it before the round at ``now``."""
        self.moment = now
        self.log.clear()
        changed = self.quotas.claims_to_change()
        for id in changed:
            lease = self.leases.get(id)
            if lease is not None and id not in self._arrived and has_place(lease):
                self._count_in(lease, -1)
                self._arrived[id] = lease
        self.quotas.claimants ^= changed
        for lease in self._arrived.values():
            self._count_in(lease, 1)
        self._arrived.clear()
        self.quotas.settle()
        if self._relent:
            self._settle_host_memory()

    def _settle_host_memory(self) -> None:
        for capacity in self._relent:
            for lease in self._on_lent.pop(capacity, ()):
                self._lent_devices[lease.id] -= 1
                if not self._lent_devices[lease.id]:
                    del self._lent_devices[lease.id]
                    self.host_free += self.reserved_bytes.pop(lease.id, 0)
        for capacity in self._relent:
            if on_lent := capacity.on_lent(self.quotas.claimants):
                self._on_lent[capacity] = on_lent
            for lease in on_lent:
                self._lent_devices[lease.id] += 1
                self.reserve_host_memory(lease)
        self._relent.clear()

    def _count_in(self, lease: Lease, sign: int) -> None:
        self.quotas.count(lease, sign)
        self._occupy(lease, sign)

    def _occupy(self, lease: Lease, sign: int) -> None:
        """Add a lease to its devices and to host memory (``sign`` 1), or remove it (-1)."""
        held, claimant = sign * held_by(lease), self.has_claim(lease)
        holds, leaving = lease.state in HOLDS_CAPACITY, lease.state in LEAVING
        stays = holds and not leaving
        unreclaimable = stays and lease.kind is Kind.BUILD and not claimant and not self.can_suspend(lease)
        for uuid in lease.devices:
            capacity = self.capacities.get(uuid)
            if capacity is None:
                continue
            self._touch(capacity)
            if claimant:
                capacity.claimed += held
                capacity.suspended_claims += 0 if stays else held
            if holds:
                capacity.free -= held
                capacity.releasing += held if leaving else 0
            if stays:
                if sign > 0:
                    capacity.holders[lease.id] = lease
                else:
                    del capacity.holders[lease.id]
            if unreclaimable:
                capacity.unreclaimable += held
            if lease.state is State.SUSPENDED and not claimant:
                capacity.awaited += held
            if capacity.claimed or capacity in self._on_lent:
                self._relent.add(capacity)
        if lease.state is State.SUSPENDING:
            self.host_free -= sign * suspended_bytes(lease)
        elif lease.state in (State.SUSPENDED, State.RESUMING):
            self.host_free -= sign * lease.saved_bytes

    def _note_guest(self, guest: Lease, id: str) -> None:
        for capacity in self.capacities_of(guest):
            capacity.guest = id
            self._touch(capacity)

    def _touch(self, capacity: DeviceCapacity) -> None:
        capacity.version += 1
        self.log.append(capacity)
        for watcher in self._watchers:
            watcher.add(capacity)

    # -- questions

    def version(self) -> int:
        """Return a number that changes with every decision of a round."""
        return len(self.log)

    def account(self, lease: Lease) -> Account:
        """Return the account of the lease's project."""
        return self.quotas.account(lease.project)

    def has_claim(self, lease: Lease) -> bool:
        """Return whether ``lease`` is a session with a claim on its devices."""
        return lease.id in self.quotas.claimants

    def capacities_of(self, lease: Lease) -> list[DeviceCapacity]:
        """Return the existing devices that ``lease`` is bound to."""
        capacities = self.capacities
        return [capacities[uuid] for uuid in lease.devices if uuid in capacities]

    def resume_devices(self, lease: Lease) -> list[DeviceCapacity]:
        """Return the devices that a suspended lease may resume on: its own, and similar ones if it can move.

        A similar device has the same model, is on the same node (a process does not leave its machine) and
        has at least as much memory to grant.
        """
        own = self.capacities_of(lease)
        kinds = {_kind_of(c.device) for c in own if c.device.movable}
        if not lease.movable or len(kinds) != 1 or not all(c.device.movable for c in own):
            return own
        excluded = {*lease.devices, *(name for name, until_at in lease.avoids if until_at > self.moment)}
        needs = max(c.device.grantable_bytes for c in own)
        others = (c for c in self._alike[kinds.pop()] if c.device.uuid not in excluded)
        return [*own, *(c for c in others if c.device.grantable_bytes >= needs)]

    def least_size(self, job: Lease) -> int:
        """Return the least capacity that ``job`` takes on any device, in thousandths of a GPU."""
        if job.devices:
            return held_by(job) * len(job.devices)
        if not job.size.memory_bytes:
            return job.size.fraction_milli * job.size.device_count
        return min([c.device.demand_milli(job.size) for c in self.usable], default=WHOLE_GPU)

    def has_all_devices(self, lease: Lease) -> bool:
        """Return whether every device that ``lease`` is bound to exists."""
        return all(uuid in self.capacities for uuid in lease.devices)

    def can_suspend(self, lease: Lease) -> bool:
        """Return whether ``lease`` can be suspended, regardless of host memory."""
        return lease.suspendable and all(c.device.suspendable for c in self.capacities_of(lease))

    def granted_bytes(self, devices: Iterable[str], held_milli: int) -> int:
        """Return the device memory of ``held_milli`` of each of ``devices``, in bytes."""
        return sum(self.capacities[u].device.grantable_bytes * held_milli // WHOLE_GPU for u in devices)

    def host_memory_needed(self, lease: Lease, devices: Iterable[str], held_milli: int) -> int:
        """Return the additional host memory, in bytes, that suspending a job from these devices may take."""
        capacities = [self.capacities[u] for u in devices]
        if not lease.survival.suspends or not lease.suspendable:
            return 0
        if not all(c.device.suspendable for c in capacities):
            return 0
        saved = lease.saved_bytes if lease.state in (State.SUSPENDED, State.RESUMING) else 0
        return max(0, self.granted_bytes(devices, held_milli) - saved)

    # -- decisions

    def begin(self) -> None:
        """Start a round; `undo` returns to this point."""
        self._undo = {}
        self._host_free_before = self.host_free

    def undo(self) -> None:
        """Revert all decisions since `begin`."""
        self.host_free = self._host_free_before
        for key, undo in self._undo.items():
            undo()
            if isinstance(key, DeviceCapacity):
                self._touch(key)
        self._undo = {}

    def _will_change(self, capacity: DeviceCapacity) -> None:
        if capacity not in self._undo:
            self._undo[capacity] = capacity.rollback_point()
        self._touch(capacity)

    def _changing(self, lease: Lease) -> Account:
        account = self.account(lease)
        if account.project not in self._undo:
            self._undo[account.project] = account.rollback_point()
        return account

    def reserve_host_memory(self, lease: Lease) -> None:
        """Reserve host memory for a job that runs on lent capacity."""
        if lease.kind is Kind.TRAIN and lease.id not in self.reserved_bytes and self.has_all_devices(lease):
            needed = self.host_memory_needed(lease, lease.devices, held_by(lease))
            self.reserved_bytes[lease.id] = needed
            self.host_free -= needed

    def allocate(
        self, lease: Lease, devices: tuple[str, ...], held_milli: int, *, claim: bool = False
    ) -> None:
        """Give ``lease`` free capacity; with ``claim``, guarantee it that capacity from now on."""
        size = held_milli * len(devices)
        for uuid in devices:
            capacity = self.capacities[uuid]
            self._will_change(capacity)
            capacity.free -= held_milli
            if self.has_claim(lease):  # wakes up
                capacity.suspended_claims -= held_milli
            elif claim:
                self._claim(capacity, held_milli)
        if claim:
            self._changing(lease).claimed += size
        self._count(lease, size, in_quota=claim)

    def allocate_suspended(self, lease: Lease, devices: tuple[str, ...], held_milli: int) -> None:
        """Give a new session a claim on capacity that is lent."""
        for uuid in devices:
            capacity = self.capacities[uuid]
            self._will_change(capacity)
            self._claim(capacity, held_milli)
            capacity.suspended_claims += held_milli
        account = self._changing(lease)
        account.claimed += held_milli * len(devices)
        account.capped += held_milli * len(devices)

    def _claim(self, capacity: DeviceCapacity, held_milli: int) -> None:
        """Count a new claim; jobs on the claimed capacity need host memory from now on."""
        capacity.claimed += held_milli
        for lease in capacity.on_lent(self.quotas.claimants):
            if lease.id not in self.reserved_bytes:
                self._undo[lease.id] = partial(self.reserved_bytes.pop, lease.id, None)
                self.reserve_host_memory(lease)

    def reserve(self, lease: Lease, devices: Iterable[str], held_milli: int) -> None:
        """Reserve capacity that is free or being released for ``lease``."""
        uuids = tuple(devices)
        for uuid in uuids:
            capacity = self.capacities[uuid]
            self._will_change(capacity)
            capacity.reserved += held_milli
            capacity.unlent |= not lease.borrow
            if self.has_claim(lease):
                capacity.suspended_claims -= held_milli
        self._count(lease, held_milli * len(uuids))

    def add_guest_demand(self, lease: Lease) -> None:
        """Note that a suspended session beyond quota would wake on its devices."""
        for capacity in self.capacities_of(lease):
            self._will_change(capacity)
            capacity.guest_demand += held_by(lease)

    def _count(self, lease: Lease, size: int, *, in_quota: bool = False) -> None:
        account, claimant = self._changing(lease), self.has_claim(lease)
        if claimant or in_quota or (lease.kind is Kind.TRAIN and account.fits_quota(size)):
            account.in_quota_use += size
        # The capacity of a session with a claim already counted while it was asleep.
        account.capped += 0 if claimant else size
        account.use += size
        account.unborrowing += 0 if lease.borrow else size

    def evict(self, lease: Lease, *, suspended: bool) -> None:
        """Count ``lease`` as leaving; with ``suspended``, its state goes to host memory."""
        if QuotaState not in self._undo:
            self._undo[QuotaState] = self.quotas.rollback_point()
        self._count_leaving(lease, 1)
        for capacity in self.capacities_of(lease):
            capacity.holders.pop(lease.id, None)
        self.host_free += self.reserved_bytes.get(lease.id, 0) - suspended_bytes(lease) * suspended
        self.quotas.jobs.get(lease.project, {}).pop(lease.id, None)
        if lease.id in self.quotas.in_quota:
            for promoted in self.quotas.promote(self.account(lease)):
                for capacity in self.capacities_of(promoted):
                    self._will_change(capacity)

    def reinstate(self, lease: Lease, *, suspended: bool) -> None:
        """Revert `evict`."""
        self._count_leaving(lease, -1)
        for capacity in self.capacities_of(lease):
            capacity.holders[lease.id] = lease
        if lease.kind is Kind.TRAIN:
            self.quotas.jobs[lease.project][lease.id] = lease
        self.host_free -= self.reserved_bytes.get(lease.id, 0) - suspended_bytes(lease) * suspended

    def _count_leaving(self, lease: Lease, sign: int) -> None:
        held, size, account = sign * held_by(lease), sign * size_of(lease), self._changing(lease)
        for capacity in self.capacities_of(lease):
            self._will_change(capacity)
            capacity.releasing += held
            if self.has_claim(lease):
                capacity.suspended_claims += held
        account.use -= size
        account.unborrowing -= 0 if lease.borrow else size
        account.leaving += sign * self.quotas.capped_until_left(lease)
        if lease.id in self.quotas.in_quota:
            account.in_quota_use -= size


def _kind_of(device: Device) -> tuple[str, str, str, int]:
    """Return a key that is equal for two devices if a suspended process may move between them."""
    return device.node, device.name, device.profile, device.memory_bytes
