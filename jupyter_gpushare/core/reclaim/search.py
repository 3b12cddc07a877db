"""Search capacity for one job among running jobs of later levels in its project.

Leases that may be preempted anyway are cheaper and counted as free.  Juniors,
the jobs of later levels, are added one after the other, the first to be
preempted first, until the job fits into a set of devices; then the victims that
are not needed are dropped, the dearest first.  So the dearest victim is as
cheap as possible.

Only devices near a junior are looked at: without one, the reclaim from other
projects has failed there already.
"""

from __future__ import annotations

from collections.abc import Iterable

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.placement import Group, Topology
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.reclaim.options import ReclaimOptions
from jupyter_gpushare.core.reclaim.victims import Victim, prune, rank

Candidate = tuple[list[DeviceCapacity], tuple[Victim, ...]]


class JuniorSearch:
    """Finds the devices that one job gets if some of its juniors are preempted."""

    def __init__(self, state: ClusterState, topology: Topology, job: Lease, options: ReclaimOptions) -> None:
        self._state = state
        self._topology = topology
        self._job = job
        self._options = options
        # Sets of devices in which the job may lie, and by device the numbers of its sets.
        self._sets, self._of = topology.sets(job)
        if job.devices:
            own = state.capacities_of(job)
            self._sets, self._of = [own], dict.fromkeys(own, (0,))
        self._short: dict[DeviceCapacity, int] = {}  # thousandths that the job still lacks of a device
        self._able: dict[int, int] = {}  # by set of devices: the number of devices with enough

    def search(self, juniors: Iterable[Victim]) -> Candidate | None:
        """Devices to take and leases to preempt there; None: all juniors are not enough."""
        taken: list[Victim] = []
        for v in juniors:
            taken.append(v)
            if done := [number for number in self._add(v, 1) if self._is_enough(number)]:
                return self._needed_in(min(done), taken)
        return None

    def _lacks(self, capacity: DeviceCapacity) -> int:
        short = self._short.get(capacity)
        if short is None:
            short = self._short[capacity] = self._options.option(capacity).short
        return short

    def _needed_in(self, number: int, taken: list[Victim]) -> Candidate:
        group = self._sets[number]
        inside = {capacity.device.uuid for capacity in group}
        others = {v.lease.id: v for capacity in group for v in self._options.victims_on(capacity)}
        victims = sorted(others.values(), key=rank)
        victims += [v for v in taken if not inside.isdisjoint(v.lease.devices)]

        def try_without(v: Victim) -> bool:
            self._add(v, -1)
            if self._is_enough(number):
                return True
            self._add(v, 1)
            return False

        kept = prune(reversed(victims), try_without)
        devices = self._chosen(group)
        assert devices is not None
        return devices, tuple(reversed(kept))

    def _add(self, victim: Victim, sign: int) -> set[int]:
        """Add what a victim frees, or subtract it; returns the sets in which a device changed sides."""
        changed: set[int] = set()
        freed = sign * held_by(victim.lease)
        for capacity in self._state.capacities_of(victim.lease):
            if capacity in self._of:
                before = self._lacks(capacity)
                after = self._short[capacity] = before - freed
                if (after <= 0) != (before <= 0):
                    changed.update(self._of[capacity])
                    for number in self._of[capacity]:
                        if number in self._able:
                            self._able[number] += sign
                        else:
                            self._able[number] = sum([self._lacks(c) <= 0 for c in self._sets[number]])
        return changed

    def _is_enough(self, number: int) -> bool:
        if self._able[number] < self._job.size.device_count:
            return False
        return not self._topology.spans_nodes(self._job) or self._chosen(self._sets[number]) is not None

    def _chosen(self, group: Group) -> list[DeviceCapacity] | None:
        devices = [capacity for capacity in group if self._lacks(capacity) <= 0]
        if self._job.devices:
            return devices
        return self._topology.choose(self._job, devices, lambda capacity: -self._short[capacity])
