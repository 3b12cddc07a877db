"""Lags of projects and of users behind their fair shares over time.

Jobs of 4 GPUs cannot keep a share of 5 GPUs at every moment, but they can keep it
over a day.  So *lags* are added up, as in fair queueing: the fair share minus the
use, in GPU-seconds.  They change only while a waiting job could run; their sum is 0.

A waiting job could run if it borrows, does not back off and fits on the usable
devices.  A suspended job could run if its devices are usable.

Half of a lag is forgotten in `HALF_LIFE_S`, so nobody pays for long for capacity
that nobody else could use.  (On jittered copies of trace 0e4a51, a half-life of
6 hours and no decay make no measurable difference for projects:
docs/benchmarks-archive.md.)

*Projects* (`ProjectLedger`): only use beyond quota counts, as a part of the use of all
projects beyond quota.  The share of a project in a round is its present fair share plus
the amount that brings its lag to 0 within `Settings.fairness_horizon_s`.  The share is
negative for a project far ahead.  Minimum run times and quotas bind as before.

*Users* (`UserLedger`) have equal shares of the capacity that their project's jobs hold.
The order of jobs decides inside a project until a user is *behind* (`Behind`).  Then the
jobs of that user come first, as far as they fit the share.  Lags of users are made up for
in no other way, so jobs of other users are rarely stopped.
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
# A user is behind once the lag exceeds this many seconds of the user's share, until it falls to
# `_CAUGHT_UP` of that.
BEHIND_S = 4 * 3600.0
_CAUGHT_UP = 0.25
# The interval between reviews of shares while jobs wait.
REVIEW_S = 900.0
# Smaller lags are forgotten.
_NEGLIGIBLE_GPU_S = 1.0

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
        """Return the owner whose use or demand a lease counts as, or None."""

    @abstractmethod
    def _rates(self) -> Mapping[Owner, float]:
        """Return the rate at which each owner falls behind now, in thousandths of a GPU."""

    def recount(self, leases: Iterable[Lease], devices: Iterable[Device] | None = None) -> None:
        """Count exactly these leases from now on, and replace the devices by ``devices`` if given."""
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
        """Add the capacity that a lease holds or waits for (``sign`` 1), or subtract it (-1)."""
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
            # A request for memory counts as one GPU, because its fraction depends on the device.
            self._waiting[owner] += sign * (held_by(lease) or WHOLE_GPU) * lease.size.device_count
        self._forget_shares()

    @abstractmethod
    def _forget_shares(self) -> None:
        """Discard the shares; they are computed again on their next use."""

    def _could_run(self, lease: Lease) -> bool:
        """Return whether a waiting job could run beyond quota if capacity were free, back-off aside."""
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
        """Add up the lags until ``now``; the counted leases must not have changed since the last call."""
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
        return lease.project if lease.project in self.lags_gpu_s else None  # None: no longer configured

    def _forget_shares(self) -> None:
        self._shares: dict[str, int] | None = None

    def demand_milli(self) -> dict[str, int]:
        """Return the capacity that the leases of each project hold and wait for, by its name."""
        return {name: self._use[name] + self._waiting[name] for name in self.lags_gpu_s}

    def shares_milli(self) -> dict[str, int]:
        """Return the fair share of each project under the demand counted now, by its name."""
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
    """Adds up the lags of users behind equal shares of the capacity that their project's jobs hold."""

    def __init__(self, devices: Iterable[Device], lags_gpu_s: Mapping[User, float], *, now: float) -> None:
        super().__init__(devices, lags_gpu_s, now=now)
        self._behind: dict[User, int] = {}  # the last share of each user who is behind

    def _owner(self, lease: Lease) -> User | None:
        return (lease.project, lease.user) if lease.kind is Kind.TRAIN else None

    def _forget_shares(self) -> None:
        self._shares: dict[User, int] | None = None

    def _shares_milli(self) -> dict[User, int]:
        """Return the share of each user with jobs, in projects with a waiting job and several such users."""
        if self._shares is None:
            self._shares = {}
            demand: dict[str, dict[str, int]] = defaultdict(dict)
            for project, user in self._use.keys() | self._waiting.keys():
                owner = project, user
                if milli := self._use[owner] + self._waiting[owner]:
                    demand[project][user] = milli
            for project, by_user in demand.items():
                if len(by_user) > 1 and any(self._waiting[project, user] for user in by_user):
                    total = sum(self._use[project, user] for user in by_user)
                    users = [Project(name=user, quota_milli=0) for user in by_user]
                    for user, milli in fair_shares(users, by_user, total).items():
                        self._shares[project, user] = milli
        return self._shares

    def _rates(self) -> dict[User, float]:
        return {owner: share - self._use[owner] for owner, share in self._shares_milli().items()}

    def review(self) -> None:
        """Decide again who is behind, among users with a share and users who were behind."""
        shares = self._shares_milli()
        for owner in shares.keys() | self._behind.keys():
            was_behind = owner in self._behind
            share = shares.get(owner, self._behind.get(owner, 0))
            threshold = max(share, WHOLE_GPU) * (_CAUGHT_UP if was_behind else 1.0)
            if self._share_lagged(owner) > threshold:
                self._behind[owner] = share
            elif was_behind:
                del self._behind[owner]

    def behind(self) -> Mapping[User, Behind]:
        """Return the users who were behind at the last `review`, and the capacity that they get first."""
        found = {}
        for owner, share in self._behind.items():
            use = self._use[owner]
            found[owner] = Behind(share - use, 0 if use else int(self._share_lagged(owner)))
        return found

    def _share_lagged(self, owner: User) -> float:
        """Return the share, in thousandths of a GPU, that yields the user's lag in `BEHIND_S`."""
        return WHOLE_GPU * self.lags_gpu_s.get(owner, 0.0) / BEHIND_S

    @property
    def next_at(self) -> float:
        """The time of the next review; `inf` if no user has a share."""
        return self._now + REVIEW_S if self._shares_milli() else inf

    def forget_faded(self) -> Mapping[User, float]:
        """Forget the lags that have faded; return the others."""
        for owner, lag in tuple(self.lags_gpu_s.items()):
            if abs(lag) < _NEGLIGIBLE_GPU_S and not self._use[owner] and not self._waiting[owner]:
                del self.lags_gpu_s[owner]
        return self.lags_gpu_s
