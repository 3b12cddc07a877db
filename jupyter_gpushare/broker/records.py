"""What the broker remembers: leases and jobs with all that `core` need not know.

Records are frozen; a change is a new record (`dataclasses.replace`), kept in
memory by `book.Book` and on disk by `store.Store`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from jupyter_gpushare.core.model import Kind, Lease, State

ENDED = frozenset({State.RELEASED, State.FAILED})
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"


def random_id() -> str:
    """Return 10 random letters and digits: ids are not to be guessed."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease, and how it is carried out on its machine."""

    lease: Lease
    uid: int = -1  # its processes run as
    attempt: int = 1
    since_at: str = ""  # wall clock (ISO 8601, UTC): when it entered its state
    entered_at: float = 0.0  # the same moment on the monotonic clock
    why: str = ""  # the reason of the last decision about it (core `Why`)
    requeue: bool = False  # stopping: it goes back to the queue afterwards
    note: str = ""  # why it is in this state, a sentence part for people
    suspend_reason: str = ""  # why it cannot be suspended
    limits: dict[str, int] = field(default_factory=dict)  # bytes per device UUID
    tries: int = 0  # failed starts of this attempt

    @property
    def id(self) -> str:
        return self.lease.id

    @property
    def state(self) -> State:
        return self.lease.state

    @property
    def is_job(self) -> bool:
        return self.lease.kind is Kind.TRAIN

    @property
    def handle(self) -> str:
        """The name of this very attempt: for the device helper, and for the Hub if it is a job.

        A late effect on an earlier attempt therefore meets nothing.
        """
        return f"{self.lease.id}-{self.attempt}"

    @property
    def server(self) -> str:
        return self.handle if self.is_job else self.lease.server


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A training job: what was asked for and what became of it."""

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
    result: str = ""  # "", "succeeded", "failed", "cancelled"
    exit_code: int | None = None  # of the current attempt, as its runner reported it
    stopped: bool = False  # ... after having been told to stop
    reason: str = ""
    attempts: int = 0  # how often it was started, once it has ended
    failures: int = 0  # failed attempts so far
    preemptions: int = 0  # times it was suspended or requeued
    ran_s: float = 0.0
    done: float | None = None
    total: float | None = None
    idempotency_key: str | None = None

    @property
    def lease_id(self) -> str:
        return f"j{self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    seq: int
    at: str
    lease: str
    user: str
    project: str
    action: str
    why: str
    for_lease: str | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """What a user took in a project on one day (UTC): GPU-seconds, GiB-seconds of host memory, seconds."""

    day: str
    user: str
    project: str
    used_gpu_s: float = 0.0
    lent_gpu_s: float = 0.0
    saved_gib_s: float = 0.0  # device memory that was parked in host memory
    kept_s: float = 0.0  # of the day's budget for "Keep it"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Means over the minutes before ``at`` (wall clock, UTC): numbers of GPUs."""

    at: str
    gpus: float  # all there are
    held: float  # by sessions and jobs
    busy: float  # measured utilization
    lent: float  # held in the room of sleeping sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Lags:
    """By how many GPU-seconds each project is behind its fair share (`core.ledger`)."""

    gpu_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectOverride:
    """A project's numbers as changed through the API; None: as configured."""

    name: str
    quota_milli: int | None = None
    weight: int | None = None
    limit_milli: int | None = None
