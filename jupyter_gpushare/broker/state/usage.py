"""Sums over leases and GPUs: lending, use, shares, and counts for metrics.

The use that a lease holds, lends or saves is counted when its stretch in one state ends, and
every few minutes before that (`Registry.store_sums`).  `LeaseRecord.counted_at` is the time of
the last count, so a crash neither loses use nor counts it twice.  `control.observer` samples
which GPUs compute and which are borrowed; a crash loses the samples since the last commit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple

from jupyter_gpushare.broker.state.observations import Observation
from jupyter_gpushare.broker.state.records import (
    BusyStretch,
    Lags,
    LeaseRecord,
    MachineUse,
    MetaValue,
    UsageAddition,
    UsageRecord,
    UserLags,
)
from jupyter_gpushare.core.fairshare import ProjectLedger, User, UserLedger
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Behind, Device, Kind, Lease, Project, State
from jupyter_gpushare.gibibytes import GIB
from jupyter_gpushare.protocol.helper import DeviceSample
from jupyter_gpushare.wall_clock import before, by_day

# ---- lending: the part of suspended sessions' capacity that other leases really use
# The capacity of all leases on one device, including suspended sessions, exceeds the
# device only while sessions are suspended.  The excess is lent, and each suspended
# session lends its part of it.  A suspended session lends nothing while no other lease
# uses its capacity.  A stretch is counted before each change on its device, so what is
# lent is constant within a stretch.

# A lender, the device's UUID, the number of GPUs that it lends there, and the duration in seconds.
Lent = tuple[LeaseRecord, str, float, float]


def sleeps(lease: Lease) -> bool:
    """Return whether a lease is a suspended session."""
    return lease.state is State.SUSPENDED and lease.kind is Kind.BUILD


def lent_milli(leases: Collection[Lease]) -> Mapping[str, float]:
    """Return, by lease, the thousandths of one device that each suspended session lends.

    ``leases`` are all leases bound to the device.
    """
    asleep = {lease.id: lease.held_milli for lease in leases if sleeps(lease)}
    held = sum(own_milli(lease) for lease in leases if lease.state in HOLDS_CAPACITY)
    over = held + sum(asleep.values()) - WHOLE_GPU
    if over <= 0 or not asleep:
        return {}
    return {lease: over * milli / sum(asleep.values()) for lease, milli in asleep.items()}


def own_milli(lease: Lease) -> int:
    """Return the thousandths of each of its devices that a lease holds; 0 for a guest."""
    return 0 if lease.host else lease.held_milli


@dataclass(slots=True)
class LendingMeter:
    """Measures lending; what was lent while no broker ran, or between its last count and its end, is lost."""

    began_at: float  # monotonic, like the next field
    counted_at: dict[str, float] = field(default_factory=dict)  # by device

    def open(
        self, records: Iterable[LeaseRecord], now: float, devices: Collection[str] | None = None
    ) -> list[Lent]:
        """Return what was lent on ``devices`` (None: all) since the last count of each."""
        on_device: dict[str, dict[str, LeaseRecord]] = {}
        for record in records:
            for device in record.lease.devices:
                if devices is None or device in devices:
                    on_device.setdefault(device, {})[record.id] = record
        return [
            (
                bound[lender],
                device,
                milli / WHOLE_GPU,
                max(0.0, now - self.counted_at.get(device, self.began_at)),
            )
            for device, bound in on_device.items()
            for lender, milli in lent_milli([record.lease for record in bound.values()]).items()
        ]

    def count(
        self, records: Collection[LeaseRecord], now: float, devices: Collection[str] | None = None
    ) -> list[Lent]:
        """Return what `open` does, and start the next count now."""
        found = self.open(records, now, devices)
        if devices is None:
            self.began_at = now
            self.counted_at.clear()
        else:
            self.counted_at.update(dict.fromkeys(devices, now))
        return found


# ---- use of the machine's GPUs: now, and as means over the last months
# Four parts add up to all usable GPUs: running sessions and jobs hold *computing* and
# *idle*, borrowers hold *lent* in the capacity of suspended sessions, *free* is the
# rest.  A lease computes if its use of the GPU was measured; holding a GPU or having a
# busy kernel is not enough.  Utilization is measured; allocation is what leases hold.

# Period that one stored row covers.
ROW_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBreakdown:
    """Numbers of GPUs; all fields but ``broken`` add up to the usable GPUs."""

    computing: float = 0.0
    idle: float = 0.0
    lent: float = 0.0
    free: float = 0.0
    broken: float = 0.0

    @property
    def usable(self) -> float:
        """GPUs that are not broken, fractions included."""
        return self.computing + self.idle + self.lent + self.free


def gpu_breakdown(
    leases: Iterable[Lease], usable: Iterable[str], broken: int, at_work: Container[str]
) -> GpuBreakdown:
    """Return the use of the usable devices (UUIDs) by ``leases``; ``at_work`` has the ids that compute."""
    bound: dict[str, list[Lease]] = {uuid: [] for uuid in usable}
    for lease in leases:
        for device in lease.devices:
            if device in bound:
                bound[device].append(lease)
    lent = held = idle = 0.0
    for on_device in bound.values():
        holders = [lease for lease in on_device if lease.state in HOLDS_CAPACITY]
        # A guest computes in the part that its host holds.
        busy = {lease.host or lease.id for lease in holders if lease.id in at_work}
        lent += sum(lent_milli(on_device).values()) / WHOLE_GPU
        held += sum(map(own_milli, holders)) / WHOLE_GPU
        idle += sum(own_milli(lease) for lease in holders if lease.id not in busy) / WHOLE_GPU
    # An idle borrower counts as lent, not as idle.
    idle = min(idle, held - lent)
    return GpuBreakdown(
        computing=held - lent - idle,
        idle=idle,
        lent=lent,
        free=max(0.0, len(bound) - held),
        broken=broken,
    )


class Meter:
    """Averages the use of the GPUs over `ROW_S`."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._samples: deque[MachineUse] = deque(maxlen=10_000)  # about one a second

    def note(self, share: GpuBreakdown, devices: Iterable[DeviceSample]) -> None:
        """Add one sample."""
        self._samples.append(
            MachineUse(
                at="",
                gpus=share.usable + share.broken,
                held=share.computing + share.idle + share.lent,
                busy=sum(device.utilization_percent for device in devices) / 100,
                lent=share.lent,
            )
        )

    def row(self, now: float, wall: str) -> MachineUse | None:
        """Return the means since the last row and start the next, or None before `ROW_S` has passed."""
        if now - self._began_at < ROW_S or not self._samples:
            return None
        row = replace(_mean(self._samples), at=wall)
        self._began_at = now
        self._samples.clear()
        return row


def downsample(rows: Sequence[MachineUse], until: str, hours: float, count: int) -> list[MachineUse | None]:
    """Return the means of ``count`` equal parts of the last ``hours``, oldest first; None if no rows."""
    end = datetime.fromisoformat(until)
    part = timedelta(hours=hours) / count
    parts: list[list[MachineUse]] = [[] for _ in range(count)]
    for row in rows:
        number = count - 1 - int((end - datetime.fromisoformat(row.at)) / part)
        if 0 <= number < count:
            parts[number].append(row)
    return [_mean(found) if found else None for found in parts]


def _mean(rows: Collection[MachineUse]) -> MachineUse:
    n = len(rows)
    return MachineUse(
        at="",
        gpus=sum(r.gpus for r in rows) / n,
        held=sum(r.held for r in rows) / n,
        busy=sum(r.busy for r in rows) / n,
        lent=sum(r.lent for r in rows) / n,
    )


# ---- use by day, user, project and model -------------------------------------

# Days of use that are shown to users, and kept in memory.
WEEK_DAYS = 7
# States in which the device memory of a lease is in host memory.
_ASLEEP = (State.SUSPENDED, State.RESUMING)
_Key = tuple[str, str, str, str]
# Maximum number of stretches between two commits; older ones are dropped.
_MAX_STRETCHES = 5_000
# A shorter stretch is an artifact of the sampling interval.
_MIN_STRETCH_S = 1.0
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
    """A selection of use, and the fields that group its sums."""

    since: str  # the first day
    until: str  # the last day
    by: tuple[str, ...]  # of "user", "project", "gpu", and "day" or "month"
    user: str | None = None  # None: all
    project: str | None = None

    def group(self, use: UsageRecord) -> tuple[str, ...] | None:
        """Return the group of a record, in the order of ``by``, or None if it is not selected."""
        if not self.since <= use.day <= self.until:
            return None
        if self.user not in (None, use.user) or self.project not in (None, use.project):
            return None
        values = {"month": use.day[:7], **{name: getattr(use, name) for name in ("day", *_GROUP_FIELDS)}}
        return tuple(values[name] for name in self.by)


_GROUP_FIELDS = ("user", "project", "gpu")
AMOUNTS = Amounts._fields
# A group, in the order of `UsageQuery.by`, and its sums.
UsageSum = tuple[tuple[str, ...], Amounts]


def held_gpus(lease: Lease) -> float:
    """Return the number of GPUs that a placed lease holds; 0 for a guest."""
    return own_milli(lease) * len(lease.devices) / WHOLE_GPU


class UsageSums:
    """The sums of the last `WEEK_DAYS`; earlier sums are on disk only."""

    def __init__(self, model: Callable[[Collection[str]], str], began_at: float) -> None:
        self._model = model  # returns the models of devices (UUIDs); empty if unknown
        self._lending = LendingMeter(began_at=began_at)
        self.sums: dict[_Key, UsageRecord] = {}
        self._kept_s: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        self._unstored: set[_Key] = set()
        self._stretches: deque[BusyStretch] = deque(maxlen=_MAX_STRETCHES)  # not stored yet

    def load(self, stored: Iterable[UsageRecord]) -> None:
        """Replace all sums with those on disk."""
        self.sums = {_key(u): u for u in stored}
        self._unstored.clear()
        self._kept_s.clear()
        for use in self.sums.values():
            self._kept_s[use.day, use.user, use.project] += use.kept_s

    def move_owner(self, old: str, new: str) -> None:
        """Move the use of the owner ``old`` to ``new``; the database does the same (`OwnerMoved`)."""
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
        """Return the seconds of a day's budget that a user spent to keep idle sessions of a project."""
        return self._kept_s.get((day, user, project), 0.0)

    def kept_projects(self, day: str, user: str) -> list[str]:
        """Return the projects whose idle sessions a user kept on a day."""
        return [project for at, by, project in self._kept_s if (at, by) == (day, user)]

    def of(self, record: LeaseRecord, until: str, seconds: float) -> list[UsageRecord]:
        """Return the use of a lease in the ``seconds`` before ``until`` (ISO 8601), one record per day."""
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
        """Return the use until ``now`` that is in no sum; ``until`` is the wall-clock time of ``now``."""
        held = [use for record in records for use in self.of(record, until, record.uncounted_s(now))]
        return held + self._lent_of(self._lending.open(records, now), until)

    def count_held(
        self, records: Iterable[LeaseRecord], now: float, until: str
    ) -> tuple[list[LeaseRecord], list[Counted]]:
        """Count what was held and saved until ``now``; return the changed leases and sums."""
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
        """Count what was lent on ``devices`` (None: all) until ``now``; called before a change on them."""
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
        """Add a stretch of use to its day; return what to store: the day's new sum, or the addition to it."""
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
        """Add the last ``seconds`` of a lease with its computing and borrowed GPUs; stored later."""
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

    def move_to_guest(
        self, guest: Lease, host: Lease, until: str, seconds: float, gpus: float, borrowed: float
    ) -> None:
        """Move ``gpus`` of a host's use in the last ``seconds`` to its guest; stored later.

        The sum of both stays what the host held.  ``borrowed`` is the part of the host's GPUs that is
        over its project's guarantee.
        """
        for day, within in by_day(until, seconds):
            for lease, gpu_s in ((guest, within * gpus), (host, -within * gpus)):
                use = UsageRecord(
                    day=day,
                    user=lease.user,
                    project=lease.project,
                    gpu=self._model(lease.devices),
                    used_gpu_s=gpu_s,
                    borrowed_gpu_s=gpu_s * borrowed,
                )
                self.count(use)
                self._unstored.add(_key(use))

    def worked(self, lease: Lease, ago_s: float, duration_s: float, wall: str) -> None:
        """Note that a session worked for ``duration_s``, starting ``ago_s`` before ``wall``; stored later."""
        if duration_s >= _MIN_STRETCH_S and lease.devices:
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
        """Return the sums and stretches of work that are not on disk yet; the caller stores them."""
        found: list[UsageRecord | BusyStretch] = [self.sums[k] for k in self._unstored if k in self.sums]
        found += self._stretches
        self._stretches.clear()
        self._unstored.clear()
        return found


def _key(use: UsageRecord) -> _Key:
    return use.day, use.user, use.project, use.gpu


# ---- lags of projects and of users: updated every round, stored every few minutes
# A crash loses a few minutes of a horizon of hours.


class FairnessTracker:
    """Lags of projects and of users (`core.fairshare`)."""

    def __init__(self, stored: Lags, stored_users: UserLags) -> None:
        self.stored = stored
        self.stored_users = stored_users
        self._ledger: ProjectLedger | None = None
        self._built_from: tuple[object, ...] = ()
        self._counted: object = None
        self._users: UserLedger | None = None
        self._users_counted: object = None

    @property
    def lags_gpu_s(self) -> Mapping[str, float]:
        """GPU-seconds that each project is behind its fair share; empty before the first update."""
        return self._ledger.lags_gpu_s if self._ledger else {}

    @property
    def behind(self) -> Mapping[User, Behind]:
        """The users that are behind an equal share; empty before the first update."""
        return self._users.behind() if self._users else {}

    def update_users(
        self,
        devices: tuple[Device, ...],
        version: object,
        leases: Callable[[], Iterable[Lease]],
        now: float,
    ) -> None:
        """Bring the lags of users up to ``now``; from then on these devices and leases count.

        ``leases`` is called only if ``version`` has changed since the last call.
        """
        if self._users is None:
            stored = self.stored_users.gpu_s.items()
            lags = {(project, user): lag for project, of in stored for user, lag in of.items()}
            self._users = UserLedger(devices, lags, now=now)
        self._users.advance(now)
        if self._users_counted != (devices, version):
            self._users.recount(leases(), devices)
            self._users_counted = devices, version
        self._users.review()

    def move_owner(self, old: str, new: str) -> UserLags:
        """Move the lags of the owner ``old`` to ``new``; return what to store."""
        if self._users is not None:
            self.stored_users = _by_project(self._users.forget_faded())
        moved: dict[User, float] = {}
        for project, users in self.stored_users.gpu_s.items():
            for user, lag in users.items():
                key = project, new if user == old else user
                moved[key] = moved.get(key, 0.0) + lag
        self.drop_users()
        self.stored_users = _by_project(moved)
        return self.stored_users

    def drop_users(self) -> None:
        """Forget who is behind, because the present order does not use it; the stored lags remain."""
        self._users = self._users_counted = None

    def update(
        self,
        projects: tuple[Project, ...],
        devices: tuple[Device, ...],
        version: object,
        leases: Callable[[], Iterable[Lease]],
        now: float,
    ) -> None:
        """Bring the lags up to ``now``; from then on these projects, devices and leases count.

        ``leases`` is called only if ``version`` has changed since the last call.
        """
        ledger, built_from = self._ledger, (projects, devices)
        if ledger is not None:
            ledger.advance(now)
        if ledger is None or built_from != self._built_from:
            lags = ledger.lags_gpu_s if ledger else self.stored.gpu_s
            ledger = self._ledger = ProjectLedger(projects, devices, lags, now=now)
            self._built_from, self._counted = built_from, None
        if self._counted != version:
            ledger.recount(leases())
            self._counted = version

    def to_store(self) -> list[MetaValue]:
        """Return the lags of projects and of users, each only if changed."""
        found: list[MetaValue] = []
        if self._ledger is not None:
            lags = Lags(gpu_s={name: round(lag, 1) for name, lag in self._ledger.lags_gpu_s.items()})
            if lags != self.stored:
                self.stored = lags
                found.append(lags)
        if self._users is not None:
            users = _by_project(self._users.forget_faded())
            if users != self.stored_users:
                self.stored_users = users
                found.append(users)
        return found


def _by_project(lags: Mapping[User, float]) -> UserLags:
    found: dict[str, dict[str, float]] = {}
    for (project, user), lag in lags.items():
        found.setdefault(project, {})[user] = round(lag, 1)
    return UserLags(gpu_s=found)


# ---- counts and durations since the broker started, for metrics; not stored --
# Labels are bounded: the program's states, kinds, reasons and phases, and configured
# projects; never users or leases.

# Upper bounds of the buckets, in seconds: of moves, and of waits in the queue.
MOVE_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
WAIT_BOUNDS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0, 72 * 3600.0)
# A longer gap between two measurements counts as this.
_MAX_GAP_S = 60.0


@dataclass(slots=True)
class Durations:
    """A histogram of durations: the number within each bound, and the sum in seconds."""

    bounds_s: tuple[float, ...]
    counts: Counter[int] = field(default_factory=Counter)  # by index of the first bound >= the duration
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += max(0.0, seconds)

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Yield each bound and the number of durations within it, as Prometheus does; the last is +Inf."""
        within = 0
        for index, bound in enumerate((*map(str, self.bounds_s), "+Inf")):
            within += self.counts[index]
            yield bound, within


def _moves() -> Durations:
    return Durations(MOVE_BOUNDS_S)


@dataclass(slots=True)
class Tally:
    """Counts and durations of events since the broker started."""

    moves: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by kind, old and new state
    spawns: Counter[str] = field(default_factory=Counter)  # "granted", "asleep", or why one was refused
    gpu_s: Counter[str] = field(default_factory=Counter)  # GPU-seconds by part of `GpuBreakdown`
    guest_gpu_s: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # what guests got, by their project
    guests_left: Counter[str] = field(default_factory=Counter)  # by reason
    suspend: Durations = field(default_factory=_moves)
    wake: dict[str, Durations] = field(default_factory=lambda: defaultdict(_moves))  # by phase
    start: dict[str, Durations] = field(default_factory=lambda: defaultdict(_moves))  # by kind
    queue: dict[str, Durations] = field(
        default_factory=lambda: defaultdict(lambda: Durations(WAIT_BOUNDS_S))
    )  # of jobs, by project
    _noted_at: float | None = None

    def moved(self, before: LeaseRecord, state: State, now: float, observed: Observation | None) -> None:
        """Count that a lease enters ``state``."""
        lease = before.lease
        self.moves[lease.kind, before.state, state] += 1
        since_s = now - before.entered_at
        match before.state, state:
            case State.SUSPENDING, State.SUSPENDED:
                self.suspend.add(since_s)
            case State.SUSPENDED, State.RESUMING if observed is not None and observed.wanted_at is not None:
                self.wake["waiting"].add(now - observed.wanted_at)
            case State.RESUMING, State.RUNNING:
                self.wake["copying"].add(since_s)
            case State.PENDING, State.GRANTED if lease.kind is Kind.TRAIN:
                self.queue[lease.project].add(now - lease.waits_since_at)
            case State.GRANTED, State.RUNNING:
                self.start[lease.kind].add(since_s)

    def used(self, share: GpuBreakdown, now: float) -> None:
        """Add the time since the last measurement to the GPU-seconds of each use."""
        passed_s = 0.0 if self._noted_at is None else min(_MAX_GAP_S, now - self._noted_at)
        self._noted_at = now
        for name in ("computing", "idle", "lent", "free", "broken"):
            self.gpu_s[name] += passed_s * getattr(share, name)
