"""Lags of projects and of users behind their fair shares over time.

A share of 5 GPUs cannot be kept at every moment with jobs of 4, but it can be
kept over a day.  So *lags* are added up, as in fair queueing: what the fair share
came to minus what was had, in GPU-seconds, and only while a job waits that could
run; so the lags add up to 0.

A waiting job could run if it borrows, does not back off and fits on the usable
devices; a suspended job if its devices are usable.

Half of a lag is forgotten in `HALF_LIFE_S`, so that nobody pays for long for
capacity that no other could use.  (On jittered copies of 0e4a51 neither 6 hours
nor no decay differ measurably for projects: docs/benchmarks-archive.md.)

*Projects* (`ProjectLedger`): only use beyond quota counts, out of what all projects
together had beyond quota.  The share of a project in a round is its fair share of the
moment plus what brings its lag to 0 within `Settings.fairness_horizon_s`; it is below
0 for a project far ahead.  Minimum run times and quotas bind as before.

*Users* (`UserLedger`) have equal shares of what their project's jobs hold.  Inside a
project the order of jobs decides, until a user is *behind* (`Behind`): then the user's
jobs come first, as many as fit the share.  Nothing is made up for beyond that, so that
jobs of others stop seldom.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import inf
from typing import Generic, TypeVar

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    WHOLE_GPU,
    Behind,
    Device,
    Kind,
    Lease,
    Project,
    State,
    held_by,
    size_of,
)
from jupyter_gpushare.core.placement import Topology, empty_device, find
from jupyter_gpushare.core.quota import fair_shares

HALF_LIFE_S = 86_400.0
# Seconds of the own share by which a user lags who is behind, and until the lag is a quarter of that.
BEHIND_S = 4 * 3600.0
_CAUGHT_UP = 0.25
# Shares are reviewed this often while jobs wait.
REVIEW_S = 900.0
# Less than this is forgotten.
_LEAST_GPU_S = 1.0

User = tuple[str, str]  # project, user
Owner = TypeVar("Owner", str, User)


class Ledger(ABC, Generic[Owner]):
    """Adds up the lags of owners of leases that share ``devices``."""

    def __init__(self, devices: Iterable[Device], lags_gpu_s: Mapping[Owner, float], *, now: float) -> None:
        self.lags_gpu_s: dict[Owner, float] = dict(lags_gpu_s)
        self._now = now
        self.recount((), devices)

    @abstractmethod
    def _owner(self, lease: Lease) -> Owner | None:
        """Return whose use or demand a lease is; None: nobody's."""

    @abstractmethod
    def _rates(self) -> Mapping[Owner, float]:
        """Return the thousandths of a GPU by which each owner falls behind now."""

    def recount(self, leases: Iterable[Lease], devices: Iterable[Device] | None = None) -> None:
        """Count exactly these leases from now on, on other ``devices`` where these are given."""
        if devices is not None:
            self.devices = tuple(device for device in devices if device.usable)
            self._topology = Topology([DeviceCapacity(device) for device in self.devices])
            self._uuids = {device.uuid for device in self.devices}
            self._fitting: dict[object, bool] = {}
        self._use: Counter[Owner] = Counter()
        self._waiting: Counter[Owner] = Counter()
        self._backing_off: dict[str, Lease] = {}
        self._forget_shares()
        for lease in leases:
            self.count(lease, 1)

    def count(self, lease: Lease, sign: int) -> None:
        """Add what a lease holds or waits for from now on (``sign`` 1), or subtract it (-1)."""
        owner = self._owner(lease)
        if owner is None:
            return
        if lease.state in HOLDS_CAPACITY:
            self._use[owner] += sign * size_of(lease)
        elif not self._could_run(lease):
            return
        elif sign > 0 and lease.retry_at > self._now:
            self._backing_off[lease.id] = lease
        elif sign > 0 or not self._backing_off.pop(lease.id, None):
            # A request for memory counts as one GPU: which part it is depends on the device.
            self._waiting[owner] += sign * (held_by(lease) or WHOLE_GPU) * lease.size.device_count
        self._forget_shares()

    @abstractmethod
    def _forget_shares(self) -> None:
        """Work shares out again when they are needed next."""

    def _could_run(self, lease: Lease) -> bool:
        """Whether a waiting job runs beyond quota where there is capacity, once it does not back off."""
        if lease.kind is not Kind.TRAIN or lease.cancelled or not lease.borrow:
            return False
        if lease.state is State.SUSPENDED:
            return self._uuids.issuperset(lease.devices)
        key = lease.size, lease.consolidate
        if key not in self._fitting:
            found = find(lease, self._topology, empty_device)
            self._fitting[key] = found is not None
        return lease.state is State.PENDING and self._fitting[key]

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
        for owner in self.lags_gpu_s.keys() | rates.keys():
            lag = self.lags_gpu_s.get(owner, 0.0)
            self.lags_gpu_s[owner] = lag * keep + rates.get(owner, 0.0) * passed_s / WHOLE_GPU


class ProjectLedger(Ledger[str]):
    """Adds up the lags of projects."""

    def __init__(
        self,
        projects: Iterable[Project],
        devices: Iterable[Device],
        lags_gpu_s: Mapping[str, float],
        *,
        now: float,
    ) -> None:
        self.projects = tuple(projects)
        super().__init__(devices, {p.name: lags_gpu_s.get(p.name, 0.0) for p in self.projects}, now=now)

    def _owner(self, lease: Lease) -> str | None:
        return lease.project if lease.project in self.lags_gpu_s else None  # else it is configured no more

    def _forget_shares(self) -> None:
        self._shares: dict[str, int] | None = None

    def demand_milli(self) -> dict[str, int]:
        """Return what the leases of each project hold and wait for, by its name."""
        return {name: self._use[name] + self._waiting[name] for name in self.lags_gpu_s}

    def shares_milli(self) -> dict[str, int]:
        """Return the fair share of each project for what is counted now, by its name."""
        if self._shares is None:
            self._shares = fair_shares(self.projects, self.demand_milli(), WHOLE_GPU * len(self.devices))
        return self._shares

    def _rates(self) -> dict[str, float]:
        if not any(self._waiting.values()):
            return {}
        shares = self.shares_milli()
        due = {p.name: max(0, shares[p.name] - p.quota_milli) for p in self.projects}
        had = {p.name: max(0, self._use[p.name] - p.quota_milli) for p in self.projects}
        if not any(due.values()):
            return {}  # all capacity is guaranteed
        part = sum(had.values()) / sum(due.values())
        return {name: due[name] * part - had[name] for name in due}


class UserLedger(Ledger[User]):
    """Adds up the lags of users behind equal shares of what the jobs of their project hold."""

    def __init__(self, devices: Iterable[Device], lags_gpu_s: Mapping[User, float], *, now: float) -> None:
        super().__init__(devices, lags_gpu_s, now=now)
        self._behind: dict[User, int] = {}  # users who are behind, with the last share of each

    def _owner(self, lease: Lease) -> User | None:
        return (lease.project, lease.user) if lease.kind is Kind.TRAIN else None

    def _forget_shares(self) -> None:
        self._shares: dict[User, int] | None = None

    def _shares_milli(self) -> dict[User, int]:
        """Shares of users with jobs in projects with several of them, where a job waits."""
        if self._shares is None:
            self._shares = {}
            demand: dict[str, dict[str, int]] = defaultdict(dict)
            for project, user in self._use.keys() | self._waiting.keys():
                owner = project, user
                if milli := self._use[owner] + self._waiting[owner]:
                    demand[project][user] = milli
            for project, of in demand.items():
                if len(of) > 1 and any(self._waiting[project, user] for user in of):
                    total = sum(self._use[project, user] for user in of)
                    users = [Project(name=user, quota_milli=0) for user in of]
                    for user, milli in fair_shares(users, of, total).items():
                        self._shares[project, user] = milli
        return self._shares

    def _rates(self) -> dict[User, float]:
        return {owner: share - self._use[owner] for owner, share in self._shares_milli().items()}

    def review(self) -> None:
        """Work out again who is behind, of users with a share and of those who were."""
        shares = self._shares_milli()
        for owner in shares.keys() | self._behind.keys():
            was = owner in self._behind
            share = shares.get(owner, self._behind.get(owner, 0))
            least = max(share, WHOLE_GPU) * (_CAUGHT_UP if was else 1.0)
            if self._share_lagged(owner) > least:
                self._behind[owner] = share
            elif was:
                del self._behind[owner]

    def behind(self) -> Mapping[User, Behind]:
        """Return the users that were behind at the last `review`, and what their jobs get before others."""
        found = {}
        for owner, share in self._behind.items():
            use = self._use[owner]
            found[owner] = Behind(share - use, 0 if use else int(self._share_lagged(owner)))
        return found

    def _share_lagged(self, owner: User) -> float:
        """Thousandths of a GPU of which the lag is `BEHIND_S`."""
        return WHOLE_GPU * self.lags_gpu_s.get(owner, 0.0) / BEHIND_S

    @property
    def next_at(self) -> float:
        """When to look again whether a user is behind."""
        return self._now + REVIEW_S if self._shares_milli() else inf

    def forget_faded(self) -> Mapping[User, float]:
        """Return the lags up to now; those that have faded are forgotten."""
        for owner, lag in tuple(self.lags_gpu_s.items()):
            if abs(lag) < _LEAST_GPU_S and not self._use[owner] and not self._waiting[owner]:
                del self.lags_gpu_s[owner]
        return self.lags_gpu_s
