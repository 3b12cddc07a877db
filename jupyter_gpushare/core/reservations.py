"""Capacity reserved for jobs that were bypassed for too long, and for jobs that are moved.

A job that does not fit is bypassed until it has waited for ``max_bypass_s`` under
`Order.BACKFILL`, or until it starves (`order`) under any order.  Then the devices that
lack the least capacity for it are reserved, so capacity released on them goes to no
later job.  Each project has at most one such job at a time.

If a job is moved for a gang (`reclaim.defragment`), the devices on which it will
continue are reserved.  Otherwise it would return to its old devices and be moved again:
26 % more preemptions on the first5000 trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from jupyter_gpushare.core import order
from jupyter_gpushare.core.capacity import CapacityView, DeviceCapacity
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import WHOLE_GPU, Kind, Lease, State, held_by
from jupyter_gpushare.core.placement import Placement, Topology


class Reservations:
    """Reserves capacity in a round: for one bypassed job per project, and for moved jobs."""

    def __init__(
        self,
        state: ClusterState,
        topology: Topology,
        find: Callable[[Lease, CapacityView], Placement | None],
        rank: Callable[[Lease, float], order.Rank],
    ) -> None:
        self._state = state
        self._rank = rank
        self._find = find
        self._topology = topology
        self._projects: set[str] = set()  # projects with a reservation

    def reserve_for(self, job: Lease) -> bool:
        """Reserve the devices that lack the least capacity for ``job``.

        Return False if its project has a reservation already, or if no devices can hold the job.
        """
        if job.project in self._projects:
            return False
        devices = self._to_resume_on(job) if job.devices else self._lacking_least(job)
        if devices is None:
            return False
        self._projects.add(job.project)
        need = held_by(job) if job.devices else devices[0].device.demand_milli(job.size)
        self._state.reserve(job, [c.device.uuid for c in devices], need)
        return True

    def reserve_targets(self, moved: Iterable[Lease]) -> None:
        """Reserve devices on which the jobs that are moved for a gang continue."""
        for job in moved:
            if target := self._find(job, DeviceCapacity.soon):
                self._state.reserve(job, target.devices, target.held_milli)

    def moving_for(self, gang: Lease, placement: Placement) -> list[Lease]:
        """Return the jobs, as they will queue, that are leaving ``placement`` and precede ``gang`` then."""
        now = self._state.moment
        stopping = (x for x in self._state.stopping.values() if x.kind is Kind.TRAIN and not x.cancelled)
        leaving = (x for x in stopping if x.project == gang.project)
        leaving = (x for x in leaving if not set(x.devices).isdisjoint(placement.devices))
        queued = (replace(x, state=State.PENDING, waits_since_at=now) for x in leaving)
        first = self._rank(gang, now)
        return [x for x in queued if self._rank(x, now) < first]

    def _to_resume_on(self, job: Lease) -> list[DeviceCapacity]:
        """Return the devices that a suspended job may resume on with the least capacity left to release."""
        devices = sorted(self._state.resume_devices(job), key=lambda c: (-c.soon(), c.device.uuid))
        return devices[: len(job.devices)]

    def _lacking_least(self, job: Lease) -> list[DeviceCapacity] | None:
        """Return devices that would fit ``job`` without other jobs, with the least capacity to release."""
        best: tuple[tuple[int, str], list[DeviceCapacity]] | None = None
        for tier in self._topology.tiers(job):
            for group in tier:
                able = [c for c in group if without_jobs(c) >= c.device.demand_milli(job.size)]
                able.sort(key=lambda c: (-c.soon(), c.device.uuid))
                if not self._topology.spans_nodes(job):
                    able = able[: job.size.device_count]
                devices = self._topology.choose(job, able, DeviceCapacity.soon)
                if devices is not None:
                    missing = sum(max(0, c.device.demand_milli(job.size) - c.soon()) for c in devices)
                    found = (missing, devices[0].device.uuid), devices
                    best = found if best is None else min(best, found, key=lambda x: x[0])
        return best and best[1]


def without_jobs(capacity: DeviceCapacity) -> int:
    """Return the thousandths of a device that would be free if every job left it."""
    sessions = sum(held_by(x) for x in capacity.holders.values() if x.kind is Kind.BUILD)
    return WHOLE_GPU - sessions - capacity.suspended_claims
