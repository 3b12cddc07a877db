"""Stored records: leases and jobs, with the fields that the scheduling core does not need.

Records are frozen.  A change makes a new record, which `registry.Registry` keeps in
memory and `store.Store` on disk.
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
    uid: int = -1  # the user that its processes run as
    attempt: int = 1
    since_at: str = ""  # wall clock (ISO 8601, UTC): when it entered its state
    entered_at: float = 0.0  # the same moment on the monotonic clock
    counted_at: float = 0.0  # monotonic: the sums include its use until then, if later than `entered_at`
    why: str = ""  # the reason of the last decision about it (core `Why`)
    requeue: bool = False  # stopping: it goes back to the queue afterwards
    note: str = ""  # why it is in this state, a part of an English sentence
    given_to: str = ""  # project of the lease that its GPU was taken for; empty: none, or unknown
    suspend_reason: str = ""  # why it cannot be suspended
    limits: dict[str, int] = field(default_factory=dict)  # bytes per device UUID
    tries: int = 0  # failed starts of this attempt
    settled: int = 0  # a job's newest attempt that was counted as ended or failed
    lost: bool = False  # its device memory was not restored, and processes that used it still run
    never_sleep: bool = False  # the owner marked this session as never to be suspended
    moves: bool = False  # its processes can use another device, and its owner lets it resume there
    slept_on: tuple[str, ...] = ()  # its devices when it was last suspended
    unprepared: bool = False  # the device helper may have other limits, so they must be set again
    guest_bytes: int = 0  # device memory that the host leaves to this guest

    @property
    def held(self) -> tuple[dict[str, int], int, bool, str]:
        """What the device helper stores of it: limits, part of each device, whether it borrows, its host."""
        return self.limits, self.lease.held_milli, self.lease.borrowed, self.lease.host

    @property
    def moved(self) -> bool:
        """Whether its devices differ from those of its last suspension."""
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
        """Return the seconds in its present state that no sum of use includes yet."""
        return max(0.0, now - max(self.entered_at, self.counted_at))

    @property
    def handle(self) -> str:
        """Name of this attempt at the device helper, and of a job's server at the Hub.

        Each attempt has its own, so a late effect on an earlier attempt has no target.
        """
        return f"{self.lease.id}-{self.attempt}"

    @property
    def server(self) -> str:
        """Name of the server at the Hub; each attempt of a job has its own."""
        return self.handle if self.is_job else self.lease.server


def with_current_boot(records: Sequence[LeaseRecord], now: float, wall: str) -> tuple[LeaseRecord, ...]:
    """Return records of another boot with monotonic times of this one; ``wall`` is the clock time of ``now``.

    The order of waiting and the differences between times stay.  The wall clock tells the age of the
    newest record; if the clock was set back, that age is 0.
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
    # Its processes ended with the other boot, so its state begins now.
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
    stopped: bool = False  # that attempt ended after a request to stop
    reason_texts: Texts = ()  # why it ended; before its end, what its runner reported of the attempt
    attempts: int = 0  # number of starts, set when it has ended
    failures: int = 0  # failed attempts so far
    preemptions: int = 0  # times it was suspended or requeued
    ran_s: float = 0.0
    done: float | None = None
    total: float | None = None
    measure: Measure | None = None  # of its remaining work
    idempotency_key: str | None = None
    request_digest: str = ""  # of the request with the key; "": no key, or stored by an earlier version

    @property
    def lease_id(self) -> str:
        """Id of the job's lease: ``j`` and the id of the job."""
        return f"j{self.id}"

    @property
    def reason(self) -> str:
        """The reason in English; empty while there is none."""
        return english(self.reason_texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A user of the Hub: a name, and the time at which the Hub created the user.

    ``user`` is the key of this owner's leases, jobs, use and decisions.  It is the name, or `former`
    for an earlier user of that name; `former` has a slash, which no name at the Hub has.
    """

    user: str
    name: str
    created: str = ""  # as the Hub reports it (`wall_clock.exact`); empty: unknown
    uid: int = -1  # of the system user of that name; -1: there is none, or it is unknown
    held: bool = False  # its waiting jobs stay until an administrator decides about them

    @property
    def is_former(self) -> bool:
        """Whether the name has another owner now, or none."""
        return self.user != self.name

    def with_known(self, created: str, uid: int = -1) -> Owner:
        """Return the owner with unknown values filled in and ``created`` as precise as the Hub stores it."""
        is_newer = not self.created or is_whole_second(created)
        return replace(
            self, created=created if is_newer else self.created, uid=uid if self.uid == -1 else self.uid
        )

    def is_other(self, created: str, uid: int = -1) -> bool:
        """Return whether a user of this name is another one; an unknown value equals every value."""
        is_uid_other = uid != self.uid and -1 not in (uid, self.uid)
        return is_uid_other or ("" not in (created, self.created) and not is_same(created, self.created))


def former(name: str, created: str, uid: int = -1) -> str:
    """Return the key of an owner whose name has another owner: ``ada/2026-11-22T03:05:09.123456Z``.

    ``uid`` tells two owners apart that were created at the same moment.
    """
    return f"{name[:200]}/{created or 'unknown'}" + ("" if uid == -1 else f"/{uid}")


@dataclass(frozen=True, slots=True)
class OwnerMoved:
    """All records of the owner ``old`` move to ``new``; the row of ``old`` is deleted."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class OwnerForgotten:
    """The row of an owner is deleted; the records of ``user`` stay."""

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
    gpu: str = ""  # model of the GPUs; empty: unknown
    used_gpu_s: float = 0.0  # held by running leases
    computing_gpu_s: float = 0.0  # the part of it that computed, while a broker measured
    borrowed_gpu_s: float = 0.0  # the part of it over the project's guarantee, while a broker measured
    lent_gpu_s: float = 0.0
    saved_gib_s: float = 0.0  # device memory that was saved in host memory
    kept_s: float = 0.0  # taken from the day's budget for "Keep it"

    def plus(self, other: UsageRecord) -> UsageRecord:
        """Return the sum of both, for the day, user, project and model of this one."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in USE_AMOUNTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyStretch:
    """One stretch of a session's work between two pauses, such as a cell; used for traces."""

    lease: str
    user: str
    project: str
    gpus: float
    began_at: str  # wall clock (ISO 8601, UTC)
    duration_s: float


@dataclass(frozen=True, slots=True)
class UsageAddition:
    """Use of a day whose sums are on disk only; the database adds it to them."""

    use: UsageRecord


USE_AMOUNTS = ("used_gpu_s", "computing_gpu_s", "borrowed_gpu_s", "lent_gpu_s", "saved_gib_s", "kept_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Means over the minutes before ``at`` (wall clock, UTC): numbers of GPUs."""

    at: str
    gpus: float  # all of the machine
    held: float  # by sessions and jobs
    busy: float  # measured utilization
    lent: float  # held in the capacity of suspended sessions


class MetaValue:
    """A single value of the database: one row of its table `meta`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lags(MetaValue):
    """GPU-seconds that each project is behind its fair share (`core.fairshare`)."""

    gpu_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLags(MetaValue):
    """GPU-seconds that each user is behind an equal share, by project and user (`core.fairshare`)."""

    gpu_s: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedPairs(MetaValue):
    """Pairs of jobs that were parted and do not share a GPU for a time: `core.pairs.Parted.rows`."""

    rows: list[tuple[str, str, float]] = field(default_factory=list)


class LendingMode(enum.StrEnum):
    """Whether GPUs of idle sessions are lent."""

    ON = "on"
    WATCH = "watch"  # decided and logged only: no session is suspended
    OFF = "off"  # no session is suspended, and suspended ones are resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class LendingOverride(MetaValue):
    """The lending mode as set by an administrator; ``mode`` None means as configured."""

    mode: LendingMode | None = None
    by: str = ""
    at: str = ""  # wall clock (ISO 8601, UTC)


# The key in `Drains` of all devices together, including those added later.
MACHINE = "machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """An administrator's order to drain a device, which then takes no new lease."""

    by: str
    at: str  # wall clock (ISO 8601, UTC), like the next
    until: str = ""  # owners of sessions are asked to finish by then; empty: no time was set


@dataclass(frozen=True, slots=True, kw_only=True)
class Drains(MetaValue):
    """Devices that are being drained, by UUID or `MACHINE`."""

    of: dict[str, Drain] = field(default_factory=dict)

    def on(self, uuid: str) -> Drain | None:
        """Return the drain of a device, or None if it is not being drained."""
        return self.of.get(uuid) or self.of.get(MACHINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspensionCounts(MetaValue):
    """Suspensions on this machine since the database was created."""

    tried: int = 0
    failed: int = 0  # the driver did not suspend; the processes kept running
    lost: int = 0  # device memory that could not be restored
    last_reason: str = ""  # of the last failure or loss
    last_at: str = ""  # when that was, wall clock (ISO 8601, UTC)

    def after_try(self, failure: str, at: str) -> SuspensionCounts:
        """Return the counts after one more try; ``failure`` is why it failed, empty if it succeeded."""
        tried = replace(self, tried=self.tried + 1)
        return replace(tried, failed=self.failed + 1, last_reason=failure, last_at=at) if failure else tried

    def after_loss(self, reason: str, at: str) -> SuspensionCounts:
        """Return the counts after one more loss."""
        return replace(self, lost=self.lost + 1, last_reason=reason, last_at=at)


class MetaValues(NamedTuple):
    """All values of `meta`."""

    lags: Lags
    lending: LendingOverride
    suspensions: SuspensionCounts
    drains: Drains
    users: UserLags
    parted: PartedPairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectOverride:
    """A project's numbers as changed through the API; None means as configured."""

    name: str
    quota_milli: int | None = None
    weight: int | None = None
    limit_milli: int | None = None
    priority_max: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether all numbers are as configured."""
        return self == ProjectOverride(name=self.name)
