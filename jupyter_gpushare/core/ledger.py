"""What each project had beyond its quota over time, against its fair share of it.

A share of 5 GPUs cannot be kept at every moment with jobs of 4, but it can be
kept over a day.  So what a project lacks, or has too much, is added up: its
*lag*, as fair queueing calls it, is what its fair share came to minus what it
had, in GPU-seconds.  Only what is beyond quota counts, of what all projects
together had of it, and only while somebody waits; so the lags add up to 0.

A project's share in a round is its fair share of the moment and what brings its
lag to 0 within `Settings.catch_up_s`; below 0 where it is far ahead.  All else
stays: who may take whose room below that share, after which minimum run time,
and that nothing is taken within quota.

Half of a lag is forgotten in `HALF_LIFE_S`, so that nobody pays for long for
what nobody could use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jupyter_gpushare.core.model import HOLDS_ROOM, WHOLE_GPU, Kind, Lease, Project, State
from jupyter_gpushare.core.quota import fair_shares, held_by, size_of

HALF_LIFE_S = 86_400.0


class Ledger:
    """Adds up the lags of projects that share so many thousandths of a GPU."""

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
        """Count what a lease holds or waits for from now on, or take it out again."""
        if lease.project not in self.lags_gpu_s:
            return  # not configured any more: nothing is shared with it
        if lease.state in HOLDS_ROOM:
            self._use[lease.project] += sign * size_of(lease)
        elif lease.kind is Kind.TRAIN and lease.state in (State.PENDING, State.SUSPENDED):
            # Memory is part of a GPU, nobody knows yet of which: taken for a whole one.
            self._waiting[lease.project] += sign * (held_by(lease) or WHOLE_GPU) * lease.device_count

    def recount(self, leases: Iterable[Lease]) -> None:
        """Count these leases, and no others, from now on."""
        self._use = dict.fromkeys(self.lags_gpu_s, 0)
        self._waiting = dict.fromkeys(self.lags_gpu_s, 0)
        for lease in leases:
            self.count(lease, 1)

    def advance(self, now: float) -> None:
        """Nothing that counts changed until ``now``."""
        passed_s = now - self._now
        if passed_s <= 0:
            return
        self._now = now
        keep, rates = 0.5 ** (passed_s / HALF_LIFE_S), self._rates()
        for name, lag in self.lags_gpu_s.items():
            self.lags_gpu_s[name] = lag * keep + rates.get(name, 0.0) * passed_s / WHOLE_GPU

    def _rates(self) -> dict[str, float]:
        """By how many thousandths of a GPU each project falls behind now."""
        if not any(self._waiting.values()):
            return {}
        demand = {name: use + self._waiting[name] for name, use in self._use.items()}
        shares = fair_shares(self.projects, demand, self.capacity_milli)
        due = {p.name: max(0, shares[p.name] - p.quota_milli) for p in self.projects}
        had = {p.name: max(0, self._use[p.name] - p.quota_milli) for p in self.projects}
        if not any(due.values()):
            return {}  # all there is is guaranteed
        part = sum(had.values()) / sum(due.values())
        return {name: due[name] * part - had[name] for name in due}
