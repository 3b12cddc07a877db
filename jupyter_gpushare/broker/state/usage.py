"""What leases and GPUs did, added up: lending, use, shares, and counts for metrics.

What a lease holds, lends and parks counts when its stretch in one state ends, and every few
minutes before (`Registry.store_sums`): `LeaseRecord.counted_at` says until when, so that a crash
counts nothing twice or not at all.  What computes and what is borrowed is sampled by
`control.observer`: a crash loses the minutes since the last commit.
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
# On one device the capacity of all leases, suspended sessions included, exceeds
# the device only while sessions are suspended.  The excess is lent, and every
# suspended session there lends its part of it.  A session that is suspended
# while no other lease uses its capacity lends nothing.  A stretch is counted before every
# change on its device: between two changes nothing changes.

# A lender with the device (UUID), the GPUs that it lends there, and for how many seconds.
Lent = tuple[LeaseRecord, str, float, float]


def sleeps(lease: Lease) -> bool:
    """Return whether it is a session that is asleep."""
    return lease.state is State.SUSPENDED and lease.kind is Kind.BUILD


def lent_milli(leases: Collection[Lease]) -> Mapping[str, float]:
    """Return what each session sleeping on one device lends, in thousandths of it, by lease.

    ``leases`` are all that are bound to the device.
    """
    asleep = {lease.id: lease.held_milli for lease in leases if sleeps(lease)}
    held = sum(own_milli(lease) for lease in leases if lease.state in HOLDS_CAPACITY)
    over = held + sum(asleep.values()) - WHOLE_GPU
    if over <= 0 or not asleep:
        return {}
    return {lease: over * milli / sum(asleep.values()) for lease, milli in asleep.items()}


def own_milli(lease: Lease) -> int:
    """Return the thousandths of each of its devices that a lease holds: none as a guest."""
    return 0 if lease.host else lease.held_milli


@dataclass(slots=True)
class LendingMeter:
    """Counts it; what was lent while no broker ran, or since the last count before, is not known."""

    began_at: float  # monotonic, like the next one
    counted_at: dict[str, float] = field(default_factory=dict)  # by device

    def open(
        self, records: Iterable[LeaseRecord], now: float, devices: Collection[str] | None = None
    ) -> list[Lent]:
        """Return what was lent on ``devices`` (None: on all) since each was last counted."""
        there: dict[str, dict[str, LeaseRecord]] = {}
        for record in records:
            for device in record.lease.devices:
                if devices is None or device in devices:
                    there.setdefault(device, {})[record.id] = record
        return [
            (
                bound[lender],
                device,
                milli / WHOLE_GPU,
                max(0.0, now - self.counted_at.get(device, self.began_at)),
            )
            for device, bound in there.items()
            for lender, milli in lent_milli([record.lease for record in bound.values()]).items()
        ]

    def count(
        self, records: Collection[LeaseRecord], now: float, devices: Collection[str] | None = None
    ) -> list[Lent]:
        """Return the same, and begin anew."""
        found = self.open(records, now, devices)
        if devices is None:
            self.began_at = now
            self.counted_at.clear()
        else:
            self.counted_at.update(dict.fromkeys(devices, now))
        return found


# ---- use of the machine's GPUs: at this moment, and as means over the last months
# Four parts add up to all usable GPUs: *computing* and *idle* are held by running
# sessions and jobs, *lent* is held in the capacity of suspended sessions, *free*
# is the rest.  What computes was seen to use the GPU: neither holding one nor a busy
# kernel is enough.  Utilization is measured; allocation is what leases hold.

# Time that one stored row covers.
ROW_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBreakdown:
    """Numbers of GPUs; all but ``broken`` add up to the usable ones."""

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
    """Return the use of the usable devices (UUIDs) by ``leases``; ``at_work``: ids of those that compute."""
    bound: dict[str, list[Lease]] = {uuid: [] for uuid in usable}
    for lease in leases:
        for device in lease.devices:
            if device in bound:
                bound[device].append(lease)
    lent = held = idle = 0.0
    for there in bound.values():
        holders = [lease for lease in there if lease.state in HOLDS_CAPACITY]
        # What a guest computes, it computes in the part of its host.
        busy = {lease.host or lease.id for lease in holders if lease.id in at_work}
        lent += sum(lent_milli(there).values()) / WHOLE_GPU
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
        self._noted: deque[MachineUse] = deque(maxlen=10_000)  # about one a second

    def note(self, share: GpuBreakdown, devices: Iterable[DeviceSample]) -> None:
        """Add one sample."""
        self._noted.append(
            MachineUse(
                at="",
                gpus=share.usable + share.broken,
                held=share.computing + share.idle + share.lent,
                busy=sum(device.utilization_percent for device in devices) / 100,
                lent=share.lent,
            )
        )

    def row(self, now: float, wall: str) -> MachineUse | None:
        """Return the means since the last row and start the next; None: `ROW_S` has not passed."""
        if now - self._began_at < ROW_S or not self._noted:
            return None
        row = replace(_mean(self._noted), at=wall)
        self._began_at = now
        self._noted.clear()
        return row


def downsample(rows: Sequence[MachineUse], until: str, hours: float, most: int) -> list[MachineUse | None]:
    """Return the means of ``most`` equal parts of the last ``hours``, oldest first; None: no rows."""
    end = datetime.fromisoformat(until)
    part = timedelta(hours=hours) / most
    parts: list[list[MachineUse]] = [[] for _ in range(most)]
    for row in rows:
        number = most - 1 - int((end - datetime.fromisoformat(row.at)) / part)
        if 0 <= number < most:
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
    """Return the number of GPUs that a placed lease holds: none as a guest."""
    return own_milli(lease) * len(lease.devices) / WHOLE_GPU


class UsageSums:
    """The sums of the last days; earlier ones are on disk only."""

    def __init__(self, model: Callable[[Collection[str]], str], began_at: float) -> None:
        self._model = model  # of the first of these devices (UUIDs); empty: not known
        self._lending = LendingMeter(began_at=began_at)
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

    def visited(
        self, guest: Lease, host: Lease, until: str, seconds: float, gpus: float, borrowed: float
    ) -> None:
        """Count that a guest got ``gpus`` of what its host held in the last ``seconds``; stored later.

        It is the guest's, and not the host's any more, so that the sum of both is what the host held;
        ``borrowed``: which share of the host is over its project's guarantee.
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


# ---- lags of projects and of users: updated every round, stored every few minutes
# A crash loses minutes of a horizon of hours.


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
        """The users that are behind; empty before the first update."""
        return self._users.behind() if self._users else {}

    def update_users(
        self,
        devices: tuple[Device, ...],
        version: object,
        leases: Callable[[], Iterable[Lease]],
        now: float,
    ) -> None:
        """Bring the lags of users up to ``now``; from there on these devices and leases count.

        ``leases`` are asked for when ``version`` is another than at the last call.
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
        """Let the lags of one owner be those of another; returns what to store."""
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
        """Forget who is behind: the order in force does not ask.  What is stored counts from there on."""
        self._users = self._users_counted = None

    def update(
        self,
        projects: tuple[Project, ...],
        devices: tuple[Device, ...],
        version: object,
        leases: Callable[[], Iterable[Lease]],
        now: float,
    ) -> None:
        """Bring the lags up to ``now``; from there on these projects, devices and leases count.

        ``leases`` are asked for when ``version`` is another than at the last call.
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
        """Return the lags of projects and users, as far as they are new."""
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
# Labels are bounded: states, kinds, reasons and phases of the program, and projects as
# configured; never users or leases.

# Upper bounds in seconds: of moves, and of waiting in the queue.
MOVE_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
WAIT_BOUNDS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0, 72 * 3600.0)
# A longer silence between two measurements counts as this.
_LONGEST_S = 60.0


@dataclass(slots=True)
class Durations:
    """How many durations were within each bound, and their sum in seconds."""

    bounds_s: tuple[float, ...]
    counts: Counter[int] = field(default_factory=Counter)  # by index of the first bound that is not less
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += max(0.0, seconds)

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Yield each bound and how many were within it, as Prometheus has them; the last is +Inf."""
        within = 0
        for index, bound in enumerate((*map(str, self.bounds_s), "+Inf")):
            within += self.counts[index]
            yield bound, within


def _moves() -> Durations:
    return Durations(MOVE_BOUNDS_S)


@dataclass(slots=True)
class Tally:
    """What happened since the broker started."""

    moves: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by kind, old and new state
    spawns: Counter[str] = field(default_factory=Counter)  # "granted", "asleep", or why one was refused
    gpu_s: Counter[str] = field(default_factory=Counter)  # GPU-seconds by use of the machine
    guest_gpu_s: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # that guests got, by their project
    guests_left: Counter[str] = field(default_factory=Counter)  # by reason
    suspend: Durations = field(default_factory=_moves)
    wake: dict[str, Durations] = field(default_factory=lambda: defaultdict(_moves))  # by phase
    start: dict[str, Durations] = field(default_factory=lambda: defaultdict(_moves))  # by kind
    queue: dict[str, Durations] = field(
        default_factory=lambda: defaultdict(lambda: Durations(WAIT_BOUNDS_S))
    )  # of jobs, by project
    _noted_at: float | None = None

    def moved(self, before: LeaseRecord, state: State, now: float, observed: Observation | None) -> None:
        """Count that a lease goes to ``state``."""
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
        passed_s = 0.0 if self._noted_at is None else min(_LONGEST_S, now - self._noted_at)
        self._noted_at = now
        for name in ("computing", "idle", "lent", "free", "broken"):
            self.gpu_s[name] += passed_s * getattr(share, name)
