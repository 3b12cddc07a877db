"""Search capacity for one job among running jobs of later levels in its project.

Leases that may be preempted anyway are cheaper and count as free.  Juniors, the jobs
of later levels, are added one by one in the order in which they are preempted, until
the job fits into a set of devices.  Then the victims that are not needed are dropped,
the most expensive first.  So the most expensive victim is as cheap as possible.

Only devices with juniors are searched: on the others the reclaim from other projects
has failed already.

`SingleDeviceSearch` serves jobs of one device or a part of it.  There are many, so it
goes through their juniors once for all jobs of a kind.  `MultiDeviceSearch` serves
any other job.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import Lease, held_by
from jupyter_gpushare.core.placement import Group, Topology, to_resume_on
from jupyter_gpushare.core.reclaim.options import ReclaimOptions
from jupyter_gpushare.core.reclaim.victims import Victim, prune, rank

Candidate = tuple[list[DeviceCapacity], tuple[Victim, ...]]


class MultiDeviceSearch:
    """Finds the devices that one job gets if some of its juniors are preempted."""

    def __init__(self, state: ClusterState, topology: Topology, job: Lease, options: ReclaimOptions) -> None:
        self._state = state
        self._topology = topology
        self._job = job
        self._options = options
        self._short: dict[DeviceCapacity, int] = {}  # thousandths of a device that the job still lacks
        self._able: dict[int, int] = {}  # by set: its number of devices with enough capacity

    def search(self, juniors: Iterable[Victim]) -> Candidate | None:
        """Return the devices to take and the leases to preempt; None: all juniors are not enough."""
        if self._job.devices:
            able = self._state.resume_devices(self._job)
            return self._search_in([able], dict.fromkeys(able, (0,)), juniors)
        return self._search_in(*self._topology.sets(self._job), juniors)

    def _lacks(self, capacity: DeviceCapacity) -> int:
        short = self._short.get(capacity)
        if short is None:
            short = self._short[capacity] = self._options.short(capacity)
        return short

    def _search_in(
        self, sets: list[Group], numbers: dict[DeviceCapacity, tuple[int, ...]], juniors: Iterable[Victim]
    ) -> Candidate | None:
        """Search in ``sets``; ``numbers`` has the set numbers of each device."""
        taken: list[Victim] = []
        for v in juniors:
            for capacity in self._state.capacities_of(v.lease):
                for number in numbers.get(capacity, ()):
                    if number not in self._able:
                        self._able[number] = sum([self._lacks(c) <= 0 for c in sets[number]])
            taken.append(v)
            enough = [n for n in self._add(v, 1, numbers) if self._is_enough(sets[n], n)]
            if enough:
                return self._needed_in(sets, min(enough), numbers, taken)
        return None

    def _needed_in(
        self,
        sets: list[Group],
        number: int,
        numbers: dict[DeviceCapacity, tuple[int, ...]],
        taken: list[Victim],
    ) -> Candidate:
        group = sets[number]
        inside = {capacity.device.uuid for capacity in group}
        others = {v.lease.id: v for capacity in group for v in self._options.victims_on(capacity)}
        victims = sorted(others.values(), key=rank)
        victims += [v for v in taken if not inside.isdisjoint(v.lease.devices)]

        def try_without(v: Victim) -> bool:
            self._add(v, -1, numbers)
            if self._is_enough(group, number):
                return True
            self._add(v, 1, numbers)
            return False

        kept = prune(reversed(victims), try_without)
        devices = self._chosen(group)
        assert devices is not None
        return devices, tuple(reversed(kept))

    def _add(self, victim: Victim, sign: int, numbers: dict[DeviceCapacity, tuple[int, ...]]) -> set[int]:
        """Add the capacity of a victim, or subtract it; return the sets whose able devices changed."""
        changed: set[int] = set()
        freed = sign * held_by(victim.lease)
        for capacity in self._state.capacities_of(victim.lease):
            if capacity in numbers:
                before = self._lacks(capacity)
                after = self._short[capacity] = before - freed
                if (after <= 0) != (before <= 0):
                    changed.update(numbers[capacity])
                    for number in numbers[capacity]:
                        if number in self._able:
                            self._able[number] += sign
        return changed

    def _is_enough(self, group: Group, number: int) -> bool:
        if self._able[number] < self._job.size.device_count:
            return False
        one_node = self._job.devices or not self._topology.spans_nodes(self._job)
        return bool(one_node) or self._chosen(group) is not None

    def _chosen(self, group: Group) -> list[DeviceCapacity] | None:
        short = self._short  # it has all devices of the set
        devices = [capacity for capacity in group if short[capacity] <= 0]
        if self._job.devices:
            uuids = to_resume_on(self._job, devices, lambda capacity: -self._short[capacity])
            return None if uuids is None else [self._state.capacities[uuid] for uuid in uuids]
        return self._topology.choose(self._job, devices, lambda capacity: -self._short[capacity])


class SingleDeviceSearch:
    """Finds the device that jobs of one kind and level get first if their juniors leave in order.

    It keeps its position for the next job of the kind, and counts again only devices that
    have changed since.
    """

    def __init__(
        self,
        state: ClusterState,
        options: ReclaimOptions,
        juniors: Sequence[Lease],
        as_victim: Callable[[Lease], Victim | None],
    ) -> None:
        """Prepare to search; ``as_victim`` returns None for a lease that can no longer be preempted.

        ``juniors`` are sorted, the first to be preempted first.
        """
        self._state = state
        self._options = options
        self._juniors = juniors
        self._as_victim = as_victim
        self._added = 0  # the number of juniors added
        # By device: its juniors, each with its number and the device's index among the junior's devices.
        self._on: dict[DeviceCapacity, list[tuple[int, int, Lease]]] = {}
        self._short: dict[DeviceCapacity, int] = {}  # thousandths that are missing if the added juniors leave
        # Heap with outdated entries: the number of the junior that makes a device large enough.
        self._enough: list[tuple[int, int, str, DeviceCapacity]] = []
        self._since: dict[DeviceCapacity, tuple[int, int] | None] = {}
        self._seen = len(state.log)

    def first(self) -> Candidate | None:
        """Return the device to take and the leases to preempt on it; None: all juniors are not enough."""
        for capacity in set(self._state.log[self._seen :]) & self._on.keys():
            self._recount(capacity)
        self._seen = len(self._state.log)
        while True:
            while self._enough and self._since[self._enough[0][3]] != self._enough[0][:2]:
                heapq.heappop(self._enough)
            if self._enough:
                number, _, _, capacity = self._enough[0]
                return [capacity], self._needed_on(capacity, number)
            if self._added == len(self._juniors):
                return None
            self._add(self._juniors[self._added])

    def _add(self, junior: Lease) -> None:
        for nth, capacity in enumerate(self._state.capacities_of(junior)):
            if capacity.device.usable:
                if capacity not in self._on:
                    self._on[capacity], self._since[capacity] = [], None
                    self._short[capacity] = self._options.option(capacity).short
                self._on[capacity].append((self._added, nth, junior))
                self._count(capacity, *self._on[capacity][-1])
        self._added += 1

    def _recount(self, capacity: DeviceCapacity) -> None:
        self._since[capacity] = None
        self._short[capacity] = self._options.option(capacity).short
        for number, nth, junior in self._on[capacity]:
            self._count(capacity, number, nth, junior)

    def _count(self, capacity: DeviceCapacity, number: int, nth: int, junior: Lease) -> None:
        if self._since[capacity] is None and self._as_victim(junior):
            self._short[capacity] -= held_by(junior)
            if self._short[capacity] <= 0:
                self._since[capacity] = number, nth
                heapq.heappush(self._enough, (number, nth, capacity.device.uuid, capacity))

    def _needed_on(self, capacity: DeviceCapacity, last: int) -> tuple[Victim, ...]:
        """Return the leases to preempt on a device, out of juniors up to ``last`` and all other victims."""
        victims = list(self._options.victims_on(capacity))
        victims += [v for number, _, x in self._on[capacity] if number <= last and (v := self._as_victim(x))]
        spare = -self._short[capacity]

        def try_without(v: Victim) -> bool:
            nonlocal spare
            if held_by(v.lease) > spare:
                return False
            spare -= held_by(v.lease)
            return True

        return tuple(reversed(prune(reversed(victims), try_without)))
