"""Lag of each project behind its fair share over time.

A share of 5 GPUs cannot be kept at every moment with jobs of 4, but it can be
kept over a day.  So the *lag* of a project is added up, as in fair queueing:
what its fair share came to minus what it had, in GPU-seconds.  Only use beyond
quota counts, out of what all projects together had beyond quota, and only while
a job waits; so the lags add up to 0.

The share of a project in a round is its fair share of the moment plus what
brings its lag to 0 within `Settings.fairness_horizon_s`; it is below 0 for a
project far ahead.  Minimum run times and quotas bind as before.

Half of a lag is forgotten in `HALF_LIFE_S`, so that a project does not pay for
long for capacity that no other project could use.  (On jittered copies of
0e4a51 neither 6 hours nor no decay differ measurably: docs/benchmarks.md.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Kind, Lease, Project, State
from jupyter_gpushare.core.quota import fair_shares, held_by, size_of

HALF_LIFE_S = 86_400.0


class Ledger:
    """Adds up the lags of projects that share ``capacity_milli``."""

    def __init__(
        self, projects: Iterable[Project], capacity_milli: int, lags_gpu_s: Mapping[str, float], *, now: float
    ) -> None:
        self.projects = tuple(projects)
        self.capacity_milli = capacity_milli
        self.lags_gpu_s = {p.name: lags_gpu_s.get(p.name, 0.0) for p in self.projects}
        self._now = now
        self._use = dict.fromkeys(self.lags_gpu_s, 0)
        self._waiting = dict.fromkeys(self.lags_gpu_s, 0)

    def count(self, lease: Lease, sign: int) -> None:
        """Add what a lease holds or waits for from now on (``sign`` 1), or subtract it (-1)."""
        if lease.project not in self.lags_gpu_s:
            return  # not configured any more
        if lease.state in HOLDS_CAPACITY:
            self._use[lease.project] += sign * size_of(lease)
        elif lease.kind is Kind.TRAIN and lease.state in (State.PENDING, State.SUSPENDED):
            # A request for memory counts as one GPU: which part it is depends on the device.
            self._waiting[lease.project] += sign * (held_by(lease) or WHOLE_GPU) * lease.size.device_count

    def recount(self, leases: Iterable[Lease]) -> None:
        """Count exactly these leases from now on."""
        self._use = dict.fromkeys(self.lags_gpu_s, 0)
        self._waiting = dict.fromkeys(self.lags_gpu_s, 0)
        for lease in leases:
            self.count(lease, 1)

    def advance(self, now: float) -> None:
        """Add up the lags until ``now``; nothing counted changed since the last call."""
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
        demand = {name: use + self._waiting[name] for name, use in self._use.items()}
        shares = fair_shares(self.projects, demand, self.capacity_milli)
        due = {p.name: max(0, shares[p.name] - p.quota_milli) for p in self.projects}
        had = {p.name: max(0, self._use[p.name] - p.quota_milli) for p in self.projects}
        if not any(due.values()):
            return {}  # all capacity is guaranteed
        part = sum(had.values()) / sum(due.values())
        return {name: due[name] * part - had[name] for name in due}
