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

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, log, log1p, log2

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Device, Kind, Lease, Project, State
from jupyter_gpushare.core.placement import Topology, Workload, empty_device, find
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


# ---- attained service of users, which decides between the users of a project -
# The *service* of a user in a project is the sum of the GPU-seconds that the user's
# jobs held there; half of it is forgotten in a day, as of lags (`fairshare`).  So
# cutting a job into pieces, submitting it again or submitting many gains nothing.
#
# Services are compared by *levels*, which are a factor of `STEP` apart: a user rises
# when the service reaches the next level, and sinks only `SINK` levels below the own
# one.  Else users would preempt each other's jobs whenever their services cross; with
# half a level they did so twice as often (docs/benchmarks-archive.md).
# The only user of a project has level 0.

User = tuple[str, str]  # project, user

# Factor between levels; below `BASE_GPU_S` they are about as far apart as the second LAS threshold.
STEP = 1.1
BASE_GPU_S = 72_000.0
# Levels that a service falls below the own one before its user sinks, or half of the own one.
SINK = 1.5
# Part of a level that counts for nothing: times are floats.
_MARGIN = 1e-6
# Less than this is forgotten.
_LEAST_GPU_S = 1.0


@dataclass(slots=True)
class _Service:
    at: float
    service_gpu_s: float = 0.0
    held_milli: int = 0
    jobs: int = 0
    level: int = 0
    crosses_at: float = inf

    def advance(self, now: float) -> None:
        """Bring the service up to ``now``, and the level after it."""
        limit = self.held_milli / WHOLE_GPU * HALF_LIFE_S / log(2)
        self.service_gpu_s = limit + (self.service_gpu_s - limit) * 0.5 ** ((now - self.at) / HALF_LIFE_S)
        self.at = now
        reached = _reached(self.service_gpu_s)
        self.level = max(int(reached), self.level)
        while reached < _sinks_at(self.level):
            self.level -= 1
        bound = _starts_at(self.level + 1 if limit > self.service_gpu_s else _sinks_at(self.level) - _MARGIN)
        part = (bound - limit) / (self.service_gpu_s - limit) if self.service_gpu_s != limit else 1.0
        self.crosses_at = now - HALF_LIFE_S * log2(part) if 0 < part < 1 else inf


def _reached(service_gpu_s: float) -> float:
    """Levels that a service reaches."""
    return log1p(service_gpu_s / BASE_GPU_S) / log(STEP) + _MARGIN / 2


def _sinks_at(level: int) -> float:
    """Levels below which the service of a user of ``level`` falls before the user sinks."""
    return level - min(SINK, level / 2)


def _starts_at(level: float) -> float:
    return BASE_GPU_S * (float(STEP**level) - 1)


class UserLedger:
    """Adds up the services of users, and says their levels."""

    def __init__(self, service_gpu_s: Mapping[User, float], *, now: float) -> None:
        self._now = now
        self._users: dict[User, _Service] = {}
        self._competing: Counter[str] = Counter()  # users with jobs, by project
        for key, service in service_gpu_s.items():
            user = self._users[key] = _Service(now, service)
            user.advance(now)

    def recount(self, leases: Iterable[Lease]) -> None:
        """Count exactly these leases from now on."""
        for user in self._users.values():
            user.advance(self._now)
            user.held_milli = user.jobs = 0
        self._competing.clear()
        for lease in leases:
            self.count(lease, 1)
        for user in self._users.values():
            user.advance(self._now)

    def count(self, lease: Lease, sign: int) -> None:
        """Add a job from now on (``sign`` 1), or take it out (-1)."""
        if lease.kind is not Kind.TRAIN or lease.state in (State.RELEASED, State.FAILED):
            return
        key = lease.project, lease.user
        user = self._users.get(key)
        if user is None:
            user = self._users[key] = _Service(self._now)
        had = bool(user.jobs)
        user.jobs += sign
        self._competing[lease.project] += bool(user.jobs) - had
        if lease.state in HOLDS_CAPACITY:
            user.advance(self._now)
            user.held_milli += sign * size_of(lease)
            user.advance(self._now)

    def advance(self, now: float) -> None:
        """Bring services and levels up to ``now``; nothing counted changed since the last call."""
        self._now = now
        for user in self._users.values():
            if user.crosses_at <= now:
                user.advance(now)

    @property
    def next_at(self) -> float:
        """When the next user of a project with several reaches another level."""
        competing = (x for key, x in self._users.items() if self._competing[key[0]] > 1)
        return min((x.crosses_at for x in competing), default=inf)

    def levels(self) -> dict[User, int]:
        """Return the levels above 0 of users with jobs in projects with several of them."""
        return {
            key: user.level
            for key, user in self._users.items()
            if user.jobs and user.level and self._competing[key[0]] > 1
        }

    def service_gpu_s(self) -> dict[User, float]:
        """Return the services up to now; those that have faded are forgotten."""
        for key, user in tuple(self._users.items()):
            user.advance(self._now)
            if not user.jobs and user.service_gpu_s < _LEAST_GPU_S:
                del self._users[key]
        return {key: user.service_gpu_s for key, user in self._users.items()}
