"""Lag of each project behind its fair share over time.

A share of 5 GPUs cannot be kept at every moment with jobs of 4, but it can be
kept over a day.  So the *lag* of a project is added up, as in fair queueing:
what its fair share came to minus what it had, in GPU-seconds.  Only use beyond
quota counts, out of what all projects together had beyond quota, and only while
a job waits that could run; so the lags add up to 0.

A waiting job could run if it borrows, does not back off and fits on the usable
devices; a suspended job if its devices are usable.

The share of a project in a round is its fair share of the moment plus what
brings its lag to 0 within `Settings.fairness_horizon_s`; it is below 0 for a
project far ahead.  Minimum run times and quotas bind as before.

Half of a lag is forgotten in `HALF_LIFE_S`, so that a project does not pay for
long for capacity that no other project could use.  (On jittered copies of
0e4a51 neither 6 hours nor no decay differ measurably: docs/benchmarks-archive.md.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.fragmentation import Workload
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Device, Kind, Lease, Project, State
from jupyter_gpushare.core.placement import Topology, empty_device, find
from jupyter_gpushare.core.quota import fair_shares, held_by, size_of

HALF_LIFE_S = 86_400.0


class Ledger:
    """Adds up the lags of projects that share ``devices``."""

    def __init__(
        self,
        projects: Iterable[Project],
        devices: Iterable[Device],
        lags_gpu_s: Mapping[str, float],
        *,
        now: float,
    ) -> None:
        self.projects = tuple(projects)
        self.devices = tuple(device for device in devices if device.usable)
        self.lags_gpu_s = {p.name: lags_gpu_s.get(p.name, 0.0) for p in self.projects}
        self._topology = Topology([DeviceCapacity(device) for device in self.devices])
        self._uuids = {device.uuid for device in self.devices}
        self._fitting: dict[object, bool] = {}
        self._now = now
        self._shared_for: dict[str, int] = {}  # demand that `_shares` are for
        self._shares = dict.fromkeys(self.lags_gpu_s, 0)
        self.recount(())

    def recount(self, leases: Iterable[Lease]) -> None:
        """Count exactly these leases from now on."""
        self._use = dict.fromkeys(self.lags_gpu_s, 0)
        self._waiting = dict.fromkeys(self.lags_gpu_s, 0)
        self._backing_off: dict[str, Lease] = {}
        for lease in leases:
            self.count(lease, 1)

    def count(self, lease: Lease, sign: int) -> None:
        """Add what a lease holds or waits for from now on (``sign`` 1), or subtract it (-1)."""
        if lease.project not in self.lags_gpu_s:
            return  # not configured any more
        if lease.state in HOLDS_CAPACITY:
            self._use[lease.project] += sign * size_of(lease)
        elif not self._could_run(lease):
            return
        elif sign > 0 and lease.retry_at > self._now:
            self._backing_off[lease.id] = lease
        elif sign > 0 or not self._backing_off.pop(lease.id, None):
            # A request for memory counts as one GPU: which part it is depends on the device.
            self._waiting[lease.project] += sign * (held_by(lease) or WHOLE_GPU) * lease.size.device_count

    def _could_run(self, lease: Lease) -> bool:
        """Whether a waiting job runs beyond quota where there is capacity, once it does not back off."""
        if lease.kind is not Kind.TRAIN or lease.cancelled or not lease.borrow:
            return False
        if lease.state is State.SUSPENDED:
            return self._uuids.issuperset(lease.devices)
        key = lease.size, lease.consolidate
        if key not in self._fitting:
            found = find(lease, self._topology, empty_device, Workload(()))
            self._fitting[key] = found is not None
        return lease.state is State.PENDING and self._fitting[key]

    def demand_milli(self) -> dict[str, int]:
        """Return what the leases of each project hold and wait for, by its name."""
        return {name: use + self._waiting[name] for name, use in self._use.items()}

    def shares_milli(self) -> dict[str, int]:
        """Return the fair share of each project for what is counted now, by its name."""
        demand = self.demand_milli()
        if demand != self._shared_for:
            self._shared_for = demand
            self._shares = fair_shares(self.projects, demand, WHOLE_GPU * len(self.devices))
        return self._shares

    def advance(self, now: float) -> None:
        """Add up the lags until ``now``; nothing counted changed since the last call."""
        due = sorted((x.retry_at, x.id) for x in self._backing_off.values() if x.retry_at <= now)
        for at, id in due:
            self._add_up(at)
            self.count(self._backing_off.pop(id), 1)
        self._add_up(now)

    def _add_up(self, now: float) -> None:
        passed_s = now - self._now
        if passed_s <= 0:
            return
        self._now = now
        keep, rates = 0.5 ** (passed_s / HALF_LIFE_S), self._rates()
        for name, lag in self.lags_gpu_s.items():
            self.lags_gpu_s[name] = lag * keep + rates.get(name, 0.0) * passed_s / WHOLE_GPU

    def _rates(self) -> dict[str, float]:
        """Thousandths of a GPU by which each project falls behind now."""
        if not any(self._waiting.values()):
            return {}
        shares = self.shares_milli()
        due = {p.name: max(0, shares[p.name] - p.quota_milli) for p in self.projects}
        had = {p.name: max(0, self._use[p.name] - p.quota_milli) for p in self.projects}
        if not any(due.values()):
            return {}  # all capacity is guaranteed
        part = sum(had.values()) / sum(due.values())
        return {name: due[name] * part - had[name] for name in due}
