"""Stored records: leases and jobs with all that the scheduling core does not need.

Records are frozen; a change is a new record, kept in memory by `registry.Registry`
and on disk by `store.Store`.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jupyter_gpushare.core.measure import Measure
from jupyter_gpushare.core.model import Kind, Lease, State
from jupyter_gpushare.messages import Texts, english
from jupyter_gpushare.wall_clock import is_same, is_whole_second, seconds_between

ENDED = frozenset({State.RELEASED, State.FAILED})
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


def random_id() -> str:
    """Return 10 random letters and digits (52 bits), which cannot be guessed."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease, and its execution on the machine."""

    lease: Lease
    uid: int = -1  # its processes run as
    attempt: int = 1
    since_at: str = ""  # wall clock (ISO 8601, UTC): when it entered its state
    entered_at: float = 0.0  # the same moment on the monotonic clock
    counted_at: float = 0.0  # monotonic: its use until then is in the sums, if that is later
    why: str = ""  # the reason of the last decision about it (core `Why`)
    requeue: bool = False  # stopping: it goes back to the queue afterwards
    note: str = ""  # why it is in this state, a part of an English sentence
    given_to: str = ""  # project of the lease that its GPU was taken for; empty: none, or not known
    suspend_reason: str = ""  # why it cannot be suspended
    limits: dict[str, int] = field(default_factory=dict)  # bytes per device UUID
    tries: int = 0  # failed starts of this attempt
    settled: int = 0  # of a job: the newest attempt that ended or failed, and counted as such
    lost: bool = False  # its device memory could not be restored; until the processes that used it have ended
    never_sleep: bool = False  # a session that its owner marked: it is not suspended
    moves: bool = False  # its processes can use another device, and its owner lets it resume there
    slept_on: tuple[str, ...] = ()  # devices that it had when it was last suspended
    unprepared: bool = False  # the device helper may have other limits: they are set again
    guest_bytes: int = 0  # of a guest: the device memory that its host leaves it

    @property
    def held(self) -> tuple[dict[str, int], int, bool, str]:
        """What the device helper keeps for it: limits, part of each device, whether it borrows, its host."""
        return self.limits, self.lease.held_milli, self.lease.borrowed, self.lease.host

    @property
    def moved(self) -> bool:
        """Whether it has other devices than when it was last suspended."""
        return self.slept_on not in ((), self.lease.devices)

    @property
    def id(self) -> str:
        """Id of the lease, the same in every attempt."""
        return self.lease.id

    @property
    def state(self) -> State:
        """State of the lease, as the planner sees it."""
        return self.lease.state

    @property
    def is_job(self) -> bool:
        """Whether the lease belongs to a training job and not to a session."""
        return self.lease.kind is Kind.TRAIN

    def uncounted_s(self, now: float) -> float:
        """Return the seconds in its present state that are in no sum of use yet."""
        return max(0.0, now - max(self.entered_at, self.counted_at))

    @property
    def handle(self) -> str:
        """The name of this attempt at the device helper, and of a job's server at the Hub.

        A late effect on an earlier attempt therefore has no target.
        """
        return f"{self.lease.id}-{self.attempt}"

    @property
    def server(self) -> str:
        """Name of the server at the Hub; of a job, that of this attempt."""
        return self.handle if self.is_job else self.lease.server


def with_current_boot(records: Sequence[LeaseRecord], now: float, wall: str) -> tuple[LeaseRecord, ...]:
    """Return records of another boot with monotonic times of this one; ``wall`` is the clock time of ``now``.

    The order of waiting and the differences stay.  How long the newest of them is ago, the machine's
    clock says; a clock that was set back says nothing, and then it is now.
    """
    if not records:
        return ()
    newest = max(records, key=lambda record: record.entered_at)
    ago_s = seconds_between(newest.since_at, wall) if newest.since_at else 0.0
    shift_s = now - ago_s - newest.entered_at
    return tuple(_in_boot(record, shift_s, now, wall) for record in records)


def _in_boot(record: LeaseRecord, shift_s: float, now: float, wall: str) -> LeaseRecord:
    old = record.lease
    lease = replace(
        old,
        submitted_at=min(now, old.submitted_at + shift_s),
        queued_at=min(now, old.queued_at + shift_s),
        waits_since_at=min(now, old.waits_since_at + shift_s),
        granted_at=now,
        keep_until_at=0.0,
        attained_at=None if old.attained_at is None else now,
    )
    if record.state is State.PENDING:
        return replace(record, lease=lease, entered_at=record.entered_at + shift_s, counted_at=now)
    # Its processes went with the other boot: it counts as seen from now on.
    return replace(record, lease=lease, entered_at=now, since_at=wall, counted_at=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A training job: its request and its result."""

    id: str  # 10 random letters and digits; its lease is "j" + id
    user: str
    project: str
    name: str
    command: tuple[str, ...]
    cwd: str | None
    env: dict[str, str]
    retries: int
    grace_s: float
    request: str  # the JSON of the request, to submit it again
    submitted_at: str  # wall clock, like the next two
    started_at: str | None = None
    ended_at: str | None = None
    result: str = ""  # "", "succeeded", "failed", "cancelled", "timed_out"
    exit_code: int | None = None  # of the current attempt, as its runner reported it
    stopped: bool = False  # ... after a request to stop
    reason_texts: Texts = ()  # why it ended; before that, what its runner said of the attempt
    attempts: int = 0  # how often it was started, once it has ended
    failures: int = 0  # failed attempts so far
    preemptions: int = 0  # times it was suspended or requeued
    ran_s: float = 0.0
    done: float | None = None
    total: float | None = None
    measure: Measure | None = None  # of its remaining work
    idempotency_key: str | None = None
    request_digest: str = ""  # of the request that came with the key; "": none, or of an earlier version

    @property
    def lease_id(self) -> str:
        """Id of the job's lease: ``j`` and the id of the job."""
        return f"j{self.id}"

    @property
    def reason(self) -> str:
        """Its reason in English; empty: none yet."""
        return english(self.reason_texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A user of the Hub: a name, and the moment at which the Hub made the user.

    ``user`` is what leases, jobs, use and decisions of this owner are kept under: the name, or
    for an earlier user of that name `former`, which no name at the Hub can be (it has a slash).
    """

    user: str
    name: str
    created: str = ""  # as the Hub says it (`wall_clock.exact`); empty: not known
    uid: int = -1  # of the system user of that name; -1: there is none, or it is not known
    held: bool = False  # an administrator says what becomes of its waiting jobs

    @property
    def is_former(self) -> bool:
        """Whether the name has another owner now, or none."""
        return self.user != self.name

    def with_known(self, created: str, uid: int = -1) -> Owner:
        """Return the owner with what was not known before, and the moment as the Hub's database keeps it."""
        is_newer = not self.created or is_whole_second(created)
        return replace(
            self, created=created if is_newer else self.created, uid=uid if self.uid == -1 else self.uid
        )

    def is_other(self, created: str, uid: int = -1) -> bool:
        """Return whether a user of this name is another one; what is not known differs from nothing."""
        is_uid_other = uid != self.uid and -1 not in (uid, self.uid)
        return is_uid_other or ("" not in (created, self.created) and not is_same(created, self.created))


def former(name: str, created: str, uid: int = -1) -> str:
    """Return what is kept under when the name has another owner: ``ada/2026-11-22T03:05:09.123456Z``.

    ``uid`` where the other owner was made at the same moment.
    """
    return f"{name[:200]}/{created or 'unknown'}" + ("" if uid == -1 else f"/{uid}")


@dataclass(frozen=True, slots=True)
class OwnerMoved:
    """What was kept under ``old`` is kept under ``new`` from now on; the row of the owner ``old`` goes."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class OwnerForgotten:
    """The row of an owner goes; what is kept under ``user`` stays."""

    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """An entry of the decision log."""

    seq: int
    at: str
    lease: str
    user: str
    project: str
    action: str
    why: str
    for_lease: str | None
    texts: Texts

    @property
    def sentence(self) -> str:
        """The entry in English."""
        return english(self.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """Use by one user in one project on one day (UTC): GPU-seconds, GiB-seconds of host memory, seconds."""

    day: str
    user: str
    project: str
    gpu: str = ""  # model of the GPUs; empty: not known
    used_gpu_s: float = 0.0  # held by what runs
    computing_gpu_s: float = 0.0  # of it seen to use the GPU, while a broker measured
    borrowed_gpu_s: float = 0.0  # of it over the guarantee of the project, while a broker measured
    lent_gpu_s: float = 0.0
    saved_gib_s: float = 0.0  # device memory that was parked in host memory
    kept_s: float = 0.0  # of the day's budget for "Keep it"

    def plus(self, other: UsageRecord) -> UsageRecord:
        """Return the sum of both, for the day, user, project and model of this one."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in USE_AMOUNTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyStretch:
    """One stretch of work of a session between two pauses, such as a cell; for traces."""

    lease: str
    user: str
    project: str
    gpus: float
    began_at: str  # wall clock (ISO 8601, UTC)
    duration_s: float


@dataclass(frozen=True, slots=True)
class UsageAddition:
    """Use of a day with sums that are on disk only: it is added to them there."""

    use: UsageRecord


USE_AMOUNTS = ("used_gpu_s", "computing_gpu_s", "borrowed_gpu_s", "lent_gpu_s", "saved_gib_s", "kept_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Means over the minutes before ``at`` (wall clock, UTC): numbers of GPUs."""

    at: str
    gpus: float  # all there are
    held: float  # by sessions and jobs
    busy: float  # measured utilization
    lent: float  # held in the capacity of suspended sessions


class MetaValue:
    """A value of which the database has one: a row of its table `meta`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lags(MetaValue):
    """By how many GPU-seconds each project is behind its fair share (`core.fairshare`)."""

    gpu_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLags(MetaValue):
    """By how many GPU-seconds each user is behind an equal share, by project and user (`core.fairshare`)."""

    gpu_s: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedPairs(MetaValue):
    """Pairs of jobs that are not tried on one GPU again: `core.pairs.Parted.rows`."""

    rows: list[tuple[str, str, float]] = field(default_factory=list)


class LendingMode(enum.StrEnum):
    """Whether GPUs of idle sessions are lent."""

    ON = "on"
    WATCH = "watch"  # decided and logged only: no session is suspended
    OFF = "off"  # no session is suspended, and suspended ones are resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingOverride(MetaValue):
    """The lending mode as set by an administrator; ``mode`` None: as configured."""

    mode: LendingMode | None = None
    by: str = ""
    at: str = ""  # wall clock (ISO 8601, UTC)


# The key in `Drains` of all devices together, those that come later included.
MACHINE = "machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """That an administrator empties a device: it takes nothing new."""

    by: str
    at: str  # wall clock (ISO 8601, UTC), like the next
    until: str = ""  # owners of sessions are asked to finish by then; empty: no time is named


@dataclass(frozen=True, slots=True, kw_only=True)
class Drains(MetaValue):
    """Devices that are being emptied, by UUID or `MACHINE`."""

    of: dict[str, Drain] = field(default_factory=dict)

    def on(self, uuid: str) -> Drain | None:
        """Return why a device takes nothing new; None: it is not being emptied."""
        return self.of.get(uuid) or self.of.get(MACHINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspensionCounts(MetaValue):
    """Suspensions on this machine since the database was created."""

    tried: int = 0
    failed: int = 0  # the driver did not suspend; the processes went on
    lost: int = 0  # device memory that could not be restored
    last_reason: str = ""  # of the last failure or loss
    last_at: str = ""  # its wall clock (ISO 8601, UTC)

    def after_try(self, failure: str, at: str) -> SuspensionCounts:
        """Return the counts after one more try; ``failure``: why it failed, empty: it did not."""
        tried = replace(self, tried=self.tried + 1)
        return replace(tried, failed=self.failed + 1, last_reason=failure, last_at=at) if failure else tried

    def after_loss(self, reason: str, at: str) -> SuspensionCounts:
        """Return the counts after one more loss."""
        return replace(self, lost=self.lost + 1, last_reason=reason, last_at=at)


class MetaValues(NamedTuple):
    """All of them."""

    lags: Lags
    lending: LendingOverride
    suspensions: SuspensionCounts
    drains: Drains
    users: UserLags
    parted: PartedPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectOverride:
    """A project's numbers as changed through the API; None: as configured."""

    name: str
    quota_milli: int | None = None
    weight: int | None = None
    limit_milli: int | None = None
    priority_max: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether all numbers are as configured."""
        return self == ProjectOverride(name=self.name)
