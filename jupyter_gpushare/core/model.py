"""The nouns: devices, projects, leases, and the life of a lease.  Plain data.

Units are part of the names and never mixed:

* ``*_milli``: thousandths of one GPU, int.  `WHOLE_GPU` is 1000.
* ``*_bytes``: bytes, int.
* ``*_s``: a duration in seconds.  ``*_at``: a moment in seconds, on one
  monotonic clock (the machine's in the broker, virtual in the simulator).

Three things that are easy to confuse:

* a lease *holds room* on its devices in the states of `HOLDS_ROOM`: device
  memory is, or may still be, in use;
* a build session within its project's quota keeps its *claim* on its devices
  for as long as it lives, asleep or not: claims on one device never exceed
  the device, and whoever uses claimed room *borrows* it;
* a suspended lease holds host memory (`Lease.saved_bytes`), not room.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from types import MappingProxyType

from jupyter_gpushare.errors import Conflict, InvalidRequest

WHOLE_GPU = 1000


class Kind(enum.StrEnum):
    BUILD = "build"  # interactive: one Jupyter server
    TRAIN = "train"  # batch, preemptible


class Survival(enum.StrEnum):
    """How a training job outlives the loss of its room."""

    SUSPEND = "suspend"  # device memory parked, process lives; else as SIGTERM
    SIGTERM = "sigterm"  # stopped with grace, starts again from its own checkpoint
    NONE = "none"  # stopped with grace, starts again from the beginning


class Order(enum.StrEnum):
    """By what the jobs of a project are ordered; `order` says how."""

    LAS = "las"  # least attained service; preempts
    FIFO = "fifo"  # first come first served; who cannot start blocks those behind
    BACKFILL = "backfill"  # first come first served; who cannot start is skipped, for a while
    SRTF = "srtf"  # shortest remaining service; needs durations: simulation only; preempts


class State(enum.StrEnum):
    """Where a lease is in its life.  ``docs/lease.md`` draws the arrows."""

    PENDING = "pending"  # waits for room
    GRANTED = "granted"  # room is reserved, its processes are being started
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    STOPPING = "stopping"  # told to end; its room is on its way out
    RELEASED = "released"
    FAILED = "failed"  # could not be started, or its device state was lost


class Event(enum.StrEnum):
    GRANT = "grant"
    GRANT_ASLEEP = "grant_asleep"  # a build session whose claimed room is lent just now
    STARTED = "started"
    START_FAILED = "start_failed"
    SUSPEND = "suspend"
    SUSPEND_DONE = "suspend_done"
    SUSPEND_REFUSED = "suspend_refused"
    RESUME = "resume"
    RESUME_DONE = "resume_done"
    RESUME_REFUSED = "resume_refused"
    STATE_LOST = "state_lost"
    STOP = "stop"
    REQUEUED = "requeued"
    RELEASE = "release"
    FAIL = "fail"


_ENDED = frozenset({State.RELEASED, State.FAILED})

# The whole life of a lease.  Anything that is not in this table is a bug, and
# `advance` says so; no other module assigns `Lease.state`.
TRANSITIONS: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (State.PENDING, Event.GRANT): State.GRANTED,
        (State.PENDING, Event.GRANT_ASLEEP): State.SUSPENDED,
        (State.GRANTED, Event.STARTED): State.RUNNING,
        (State.GRANTED, Event.START_FAILED): State.PENDING,
        (State.RUNNING, Event.SUSPEND): State.SUSPENDING,
        (State.SUSPENDING, Event.SUSPEND_DONE): State.SUSPENDED,
        # A lease that the driver refuses to checkpoint keeps its GPU.
        (State.SUSPENDING, Event.SUSPEND_REFUSED): State.RUNNING,
        (State.SUSPENDED, Event.RESUME): State.RESUMING,
        (State.RESUMING, Event.RESUME_DONE): State.RUNNING,
        (State.RESUMING, Event.RESUME_REFUSED): State.SUSPENDED,
        # The kernel must be restarted; the session and its claim stay.
        (State.RESUMING, Event.STATE_LOST): State.RUNNING,
        **{
            (s, Event.STOP): State.STOPPING
            for s in State
            if s not in _ENDED | {State.PENDING, State.STOPPING}
        },
        (State.STOPPING, Event.REQUEUED): State.PENDING,
        **{(s, Event.RELEASE): State.RELEASED for s in State if s not in _ENDED},
        **{(s, Event.FAIL): State.FAILED for s in State if s not in _ENDED},
    }
)

# Device memory is, or may still be, in use.
HOLDS_ROOM = frozenset({State.GRANTED, State.RUNNING, State.SUSPENDING, State.RESUMING, State.STOPPING})
# ... and will be free soon without anybody else being asked.
LEAVING = frozenset({State.SUSPENDING, State.STOPPING})


def advance(state: State, event: Event) -> State:
    """Return the state that follows.

    Raises:
        Conflict: ``event`` cannot happen in ``state``.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise Conflict(f"a lease that is {state} cannot {event}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A physical GPU (or MIG instance), by UUID."""

    uuid: str
    memory_bytes: int
    reserve_bytes: int = 0
    node: str = ""
    island: str = ""  # same non-empty word on the same node: linked by NVLink
    name: str = ""
    profile: str = ""  # of a MIG instance, such as "1g.10gb"; "": a physical GPU
    usable: bool = True  # False: cordoned, broken or vanished; takes nothing new
    suspendable: bool = True  # the driver's checkpoint passed its test here

    @property
    def grantable_bytes(self) -> int:
        return self.memory_bytes - self.reserve_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    name: str
    quota_milli: int  # guaranteed
    weight: int = 1  # share of what is over
    limit_milli: int | None = None  # hard cap, None: no cap
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one workload to fractions of devices.

    What is asked for: ``device_count`` devices with ``fraction_milli`` of each
    (1000 for several), or ``memory_bytes`` of one device when that is not 0, or
    ``device_count`` MIG instances of one ``profile``.
    """

    id: str
    project: str
    kind: Kind
    fraction_milli: int = 0
    device_count: int = 1
    memory_bytes: int = 0
    profile: str = ""  # a whole MIG instance of this profile is asked for
    user: str = ""
    server: str = ""
    state: State = State.PENDING
    devices: tuple[str, ...] = ()  # UUIDs; kept while suspended (bound to return there)
    held_milli: int = 0  # per device, once placed (memory requests are converted then)
    priority: int = 0
    survival: Survival = Survival.SUSPEND
    consolidate: bool = True  # several GPUs: within one island or node
    borrow: bool = True  # False: a job that starts only on what its project is guaranteed
    submitted_at: float = 0.0  # first came
    queued_at: float = 0.0  # entered its present queue: came, or was demoted (`order.served`)
    waits_since_at: float = 0.0  # came, or last lost its room
    granted_at: float = 0.0  # last got room
    idle_since_at: float | None = None  # None: busy
    idle_timeout_s: float | None = None  # its own (`idle`); None: that of the settings
    keep_until_at: float = 0.0  # the owner asked not to be put to sleep before
    lend_now: bool = False  # the owner offers the room at once
    wanted: bool = False  # suspended, and its processes want the GPU
    suspendable: bool = True
    retry_at: float = 0.0  # a refused action is not tried again before
    used_bytes: int = 0  # device memory in use, all devices: what suspending it would park
    saved_bytes: int = 0  # host memory it holds while suspended, all devices
    attained_gpu_s: float = 0.0  # received up to ``attained_at``
    attained_at: float | None = None  # None: what a running job receives is not counted
    duration_s: float | None = None  # known in simulation only
    cancelled: bool = False  # its owner ended it
    borrowed: bool = False  # its last grant said so: claims of others come first


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The knobs of the policy."""

    idle_timeout_s: float = 900.0
    host_budget_bytes: int = 1 << 62  # for suspended state, all of it
    order: Order = Order.LAS
    las_thresholds_gpu_s: tuple[float, ...] = (3250.0, 7200.0)  # ascending; where queues 1, 2, ... begin
    # What the site's users ask for: (thousandths of each GPU, GPUs, how often); placement keeps room for it.
    workload: tuple[tuple[int, int, float], ...] = (
        (250, 1, 1.0),
        (500, 1, 1.0),
        (1000, 1, 1.0),
        (1000, 2, 1.0),
        (1000, 4, 1.0),
        (1000, 8, 1.0),
    )
    min_run_s: float = 0.0  # inside a project no job is preempted before
    preempt_cost_s: float = 0.0  # of each of its GPUs, what a preemption costs
    guard_s: float | None = None  # who waits for longer comes first; None: nobody does
    skip_wait_s: float | None = None  # who waits for longer is not overtaken any more; None: for ever
    catch_up_s: float | None = (
        None  # in which a lag behind the fair share is made good (`ledger`); None: never
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything `plan` may look at, at one moment."""

    devices: tuple[Device, ...]
    projects: tuple[Project, ...]
    leases: tuple[Lease, ...]
    settings: Settings = field(default_factory=Settings)
    lags_gpu_s: Mapping[str, float] = field(default_factory=dict)  # by project (`ledger`)


class Why(enum.StrEnum):
    """Machine-readable reasons, of decisions and of waiting."""

    FREE_ROOM = "free_room"
    CLAIM = "claim"  # guaranteed to its project
    IDLE = "idle"  # an idle session's room is lent
    LEND_NOW = "lend_now"  # its owner offered it
    OVER_QUOTA = "over_quota"  # taken back for a project below its quota
    LENDER_RETURNED = "lender_returned"  # taken back for the owner of the room
    PRIORITY = "priority"  # a lease of the same project has a higher priority
    ORDER = "order"  # a job of the same project comes first by the order of jobs
    MOVED = "moved"  # makes room for a larger job, and has room elsewhere
    ROOM_BACK = "room_back"  # there is room again
    WANTED = "wanted"  # its owner runs a GPU cell
    NOT_WAITING = "not_waiting"  # it has what it needs, or asks for nothing now
    NO_ROOM = "no_room"
    NOT_WORTH_IT = "not_worth_it"  # making room would cost more than it gains
    RESERVED = "reserved"  # it waited for long: nobody behind it gets the room that it needs
    IN_LINE = "in_line"  # a job before it has to start first
    WAITS_FOR_ROOM = "waits_for_room"  # room was asked for and is on its way
    PROJECT_LIMIT = "project_limit"
    QUOTA = "quota"  # it does not borrow, and what its project is guaranteed is taken
    TOO_LARGE = "too_large"  # can never run here
    HOST_MEMORY = "host_memory"
    BACKING_OFF = "backing_off"
    DEVICE_BROKEN = "device_broken"


@dataclass(frozen=True, slots=True)
class Grant:
    """Reserve ``held_milli`` of each of ``devices`` for a pending lease.

    ``asleep``: a build session whose claim fits but whose room is lent now.
    ``borrowed``: beyond quota or on claimed room; may be taken back.
    """

    lease: str
    devices: tuple[str, ...]
    held_milli: int
    why: Why
    borrowed: bool = False
    asleep: bool = False


@dataclass(frozen=True, slots=True)
class Suspend:
    """Park the device memory of ``lease`` in host memory, so that ``for_lease`` can run."""

    lease: str
    why: Why
    for_lease: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Bring a suspended lease back to its devices, whose room is free."""

    lease: str
    why: Why


@dataclass(frozen=True, slots=True)
class Requeue:
    """Stop a job with grace; it goes back to the queue."""

    lease: str
    why: Why
    for_lease: str


Action = Grant | Suspend | Resume | Requeue


@dataclass(frozen=True, slots=True)
class Plan:
    """``actions``, most important first; ``next_at``: when to ask again though nothing happens."""

    actions: tuple[Action, ...]
    next_at: float | None = None


def parse_fraction(text: str) -> int:
    """Return thousandths of one GPU for what a user typed: ``0.25``, ``1/4``, ``1``.

    Exact: ``1/3`` is 333 (the next thousandth below), ``0.33333`` is refused.

    Raises:
        InvalidRequest: not a number, not in (0, 1], or finer than 1/1000.
    """
    help_text = "a GPU fraction is a number like 0.5 or 1/2, from 0.001 to 1"
    try:
        # Bounded before parsing: 1e999999999 would take for ever.
        value = Fraction(text) if len(text) <= 16 and "e" not in text.lower() else None
    except (ValueError, ZeroDivisionError):
        value = None
    if value is None or not 0 < value <= 1:
        raise InvalidRequest(f"{text[:40]!r} is not a GPU fraction: {help_text}")
    milli = math.floor(value * WHOLE_GPU)
    if milli < 1 or ("/" not in text and value * WHOLE_GPU != milli):
        raise InvalidRequest(f"{text[:40]!r} is too fine: {help_text}, in steps of 0.001")
    return milli
