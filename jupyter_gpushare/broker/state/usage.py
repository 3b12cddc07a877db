"""Use of GPUs and parked host memory, added up by day, user, project and model of the GPU.

What a lease holds, lends and parks counts when its stretch in one state ends, and every few
minutes before (`Registry.store_sums`): `LeaseRecord.counted_at` says until when, so that a crash
counts nothing twice or not at all.  What computes and what is borrowed is sampled by
`control.metering`: a crash loses the minutes since the last commit.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from jupyter_gpushare.broker.state.lending import Lending, Lent
from jupyter_gpushare.broker.state.records import BusyStretch, LeaseRecord, UsageAddition, UsageRecord
from jupyter_gpushare.core.model import WHOLE_GPU, Lease, State
from jupyter_gpushare.gibibytes import GIB
from jupyter_gpushare.wall_clock import before, by_day

# Days of use that are shown to users, and kept in memory.
WEEK_DAYS = 7
# Its device memory lies in host memory, until a resumption is over.
_ASLEEP = (State.SUSPENDED, State.RESUMING)
_Key = tuple[str, str, str, str]
# Stretches of work between two commits; the oldest are dropped.
_MAX_STRETCHES = 5_000
# Shorter ones are no work, but what is left of the time of a sample.
_LEAST_STRETCH_S = 1.0
Counted = UsageRecord | UsageAddition


class Amounts(NamedTuple):
    """GPU-seconds of a sum of use."""

    used_gpu_s: float = 0.0
    computing_gpu_s: float = 0.0
    borrowed_gpu_s: float = 0.0
    lent_gpu_s: float = 0.0

    @classmethod
    def of(cls, use: UsageRecord) -> Amounts:
        """Return the GPU-seconds of a record."""
        return cls(*(getattr(use, name) for name in cls._fields))

    def plus(self, other: Amounts) -> Amounts:
        """Return the sum of both."""
        return Amounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Which use, and by what it is added up."""

    since: str  # a day, the first
    until: str  # a day, the last
    by: tuple[str, ...]  # of "user", "project", "gpu", and "day" or "month"
    user: str | None = None  # only of this one
    project: str | None = None

    def group(self, use: UsageRecord) -> tuple[str, ...] | None:
        """Return the group of a record, in the order of ``by``; None: it is not asked for."""
        if not self.since <= use.day <= self.until:
            return None
        if self.user not in (None, use.user) or self.project not in (None, use.project):
            return None
        values = {"month": use.day[:7], **{name: getattr(use, name) for name in ("day", *_OF_USE)}}
        return tuple(values[name] for name in self.by)


_OF_USE = ("user", "project", "gpu")
AMOUNTS = Amounts._fields
# A group, in the order of `UsageQuery.by`, and its sums.
UsageSum = tuple[tuple[str, ...], Amounts]


def held_gpus(lease: Lease) -> float:
    """Return the number of GPUs that a placed lease holds."""
    return lease.held_milli * len(lease.devices) / WHOLE_GPU


class Usage:
    """The sums of the last days; earlier ones are on disk only."""

    def __init__(self, model: Callable[[Collection[str]], str], began_at: float) -> None:
        self._model = model  # of the first of these devices (UUIDs); empty: not known
        self._lending = Lending(began_at=began_at)
        self.sums: dict[_Key, UsageRecord] = {}
        self._kept_s: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        self._unstored: set[_Key] = set()
        self._stretches: deque[BusyStretch] = deque(maxlen=_MAX_STRETCHES)  # not stored yet

    def load(self, stored: Iterable[UsageRecord]) -> None:
        """Replace all sums by those on disk."""
        self.sums = {_key(u): u for u in stored}
        self._unstored.clear()
        self._kept_s.clear()
        for use in self.sums.values():
            self._kept_s[use.day, use.user, use.project] += use.kept_s

    def move_owner(self, old: str, new: str) -> None:
        """Let the use of one owner be that of another; the database does the same (`OwnerMoved`)."""
        for key in [key for key in self.sums if key[1] == old]:
            use = replace(self.sums.pop(key), user=new)
            before = self.sums.get(_key(use))
            self.sums[_key(use)] = use if before is None else before.plus(use)
            if key in self._unstored:
                self._unstored.remove(key)
                self._unstored.add(_key(use))
        for day, user, project in [key for key in self._kept_s if key[1] == old]:
            self._kept_s[day, new, project] += self._kept_s.pop((day, user, project))
        self._stretches = deque(
            (replace(each, user=new) if each.user == old else each for each in self._stretches),
            maxlen=_MAX_STRETCHES,
        )

    def kept_s(self, day: str, user: str, project: str) -> float:
        """Return for how long a user kept idle sessions of a project, seconds of a day's budget."""
        return self._kept_s.get((day, user, project), 0.0)

    def kept_projects(self, day: str, user: str) -> list[str]:
        """Return the projects of which a user kept idle sessions on a day."""
        return [project for at, by, project in self._kept_s if (at, by) == (day, user)]

    def of(self, record: LeaseRecord, until: str, seconds: float) -> list[UsageRecord]:
        """Return what the ``seconds`` of a lease before ``until`` (ISO 8601) count for, by day."""
        lease, found = record.lease, []
        if lease.state is not State.RUNNING and lease.state not in _ASLEEP:
            return []
        for day, within in by_day(until, seconds):
            use = UsageRecord(day=day, user=lease.user, project=lease.project, gpu=self._model(lease.devices))
            if lease.state is State.RUNNING:
                found.append(replace(use, used_gpu_s=within * held_gpus(lease)))
            else:
                found.append(replace(use, saved_gib_s=within * lease.saved_bytes / GIB))
        return found

    def open(self, records: Collection[LeaseRecord], now: float, until: str) -> list[UsageRecord]:
        """Return what was held, parked and lent until ``now`` and is in no sum; ``until``: its wall clock."""
        held = [use for record in records for use in self.of(record, until, record.uncounted_s(now))]
        return held + self._lent_of(self._lending.open(records, now), until)

    def count_held(
        self, records: Iterable[LeaseRecord], now: float, until: str
    ) -> tuple[list[LeaseRecord], list[Counted]]:
        """Count what was held and parked until ``now``; returns the changed leases and sums."""
        counted: list[LeaseRecord] = []
        sums: list[Counted] = []
        for record in records:
            if uses := self.of(record, until, record.uncounted_s(now)):
                counted.append(replace(record, counted_at=now))
                sums += [self.count(use) for use in uses]
        return counted, sums

    def count_lent(
        self, records: Collection[LeaseRecord], now: float, until: str, devices: Collection[str] | None = None
    ) -> list[Counted]:
        """Count what was lent on ``devices`` (None: on all) until ``now``, before a change there."""
        lent = self._lending.count(records, now, devices)
        return [self.count(use) for use in self._lent_of(lent, until)]

    def _lent_of(self, lent: Iterable[Lent], until: str) -> list[UsageRecord]:
        return [
            UsageRecord(
                day=day,
                user=record.lease.user,
                project=record.lease.project,
                gpu=self._model((device,)),
                lent_gpu_s=within * gpus,
            )
            for record, device, gpus, seconds in lent
            for day, within in by_day(until, seconds)
        ]

    def count(self, stretch: UsageRecord) -> Counted:
        """Add a stretch of use to its day; returns what to store, the day's new sum if it is in memory."""
        key = _key(stretch)
        if stretch.kept_s:
            for yesterday in [key for key in self._kept_s if key[0] != stretch.day]:
                del self._kept_s[yesterday]
            self._kept_s[stretch.day, stretch.user, stretch.project] += stretch.kept_s
        before = self.sums.get(key)
        if before is not None:
            stretch = before.plus(stretch)
        else:
            newest = sorted({stretch.day, *(key[0] for key in self.sums)}, reverse=True)[:WEEK_DAYS]
            if stretch.day not in newest:
                return UsageAddition(stretch)
            self.sums = {k: u for k, u in self.sums.items() if k[0] in newest}
        self.sums[key] = stretch
        return stretch

    def sample(self, lease: Lease, until: str, seconds: float, computing: float, borrowed: float) -> None:
        """Add the last ``seconds`` of a lease that has so many GPUs computing and borrowed; stored later."""
        for day, within in by_day(until, seconds):
            use = UsageRecord(
                day=day,
                user=lease.user,
                project=lease.project,
                gpu=self._model(lease.devices),
                computing_gpu_s=within * computing,
                borrowed_gpu_s=within * borrowed,
            )
            self.count(use)
            self._unstored.add(_key(use))

    def worked(self, lease: Lease, ago_s: float, duration_s: float, wall: str) -> None:
        """Note that a session worked for ``duration_s``, from ``ago_s`` before ``wall`` on; stored later."""
        if duration_s >= _LEAST_STRETCH_S and lease.devices:
            stretch = BusyStretch(
                lease=lease.id,
                user=lease.user,
                project=lease.project,
                gpus=held_gpus(lease),
                began_at=before(wall, seconds=ago_s),
                duration_s=round(duration_s, 3),
            )
            self._stretches.append(stretch)

    def unstored(self) -> list[UsageRecord | BusyStretch]:
        """Return sums with samples, and stretches of work, that are not on disk; the caller stores them."""
        found: list[UsageRecord | BusyStretch] = [self.sums[k] for k in self._unstored if k in self.sums]
        found += self._stretches
        self._stretches.clear()
        self._unstored.clear()
        return found


def _key(use: UsageRecord) -> _Key:
    return use.day, use.user, use.project, use.gpu
