"""Data types: devices, projects, leases, actions, and the life of a lease.

Units are part of the names and never mixed:

* ``*_milli``: thousandths of one GPU, int.  `WHOLE_GPU` is 1000.
* ``*_bytes``: bytes, int.
* ``*_s``: a duration in seconds.  ``*_at``: a moment in seconds, on one
  monotonic clock (the machine's in the broker, virtual in the simulator).

Three terms that are easy to confuse:

* a lease *holds capacity* of its devices in the states of `HOLDS_CAPACITY`:
  device memory is, or may still be, in use;
* a build session within its project's quota keeps a *claim* on its devices for
  as long as it lives, running or suspended: claims on one device never exceed
  the device, and any other lease on claimed capacity *borrows* it;
* a suspended lease holds host memory (`Lease.saved_bytes`), not capacity.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from jupyter_gpushare.core.size import WHOLE_GPU as WHOLE_GPU
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import Conflict


class Kind(enum.StrEnum):
    """Kind of a lease."""

    BUILD = "build"  # interactive: one Jupyter server
    TRAIN = "train"  # batch, preemptible


class CheckpointMode(enum.StrEnum):
    """How a training job survives a preemption."""

    SUSPEND = "suspend"  # device memory suspended, process lives; where that is impossible as NONE
    SUSPEND_SIGTERM = "suspend,sigterm"  # the same; where that is impossible, or harms it, as SIGTERM
    SIGTERM = "sigterm"  # stopped with grace, starts again from its own checkpoint
    NONE = "none"  # stopped with grace, starts again from the beginning

    def __init__(self, value: str) -> None:
        self.suspends = "suspend" in value  # where the driver can
        self.has_checkpoint = "sigterm" in value  # of its own, from which a job that is stopped continues


class Order(enum.StrEnum):
    """Order of the jobs of a project (`order.ORDERS`)."""

    PROGRESS = "progress"  # least remaining work where it is measured, else as `LAS`; preempts
    LAS = "las"  # least attained service; preempts
    FIFO = "fifo"  # first come first served; a job that cannot start blocks the jobs behind it
    BACKFILL = "backfill"  # first come first served; a job that cannot start is bypassed, for a while


class State(enum.StrEnum):
    """State of a lease; ``docs/lease.md`` draws the transitions."""

    PENDING = "pending"  # waits for capacity
    GRANTED = "granted"  # holds capacity, its processes are being started
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    STOPPING = "stopping"  # asked to end; its capacity is being released
    RELEASED = "released"
    FAILED = "failed"  # could not be started, or its device state was lost


class LeaseEvent(enum.StrEnum):
    """What moves a lease from one `State` to another."""

    GRANT = "grant"
    GRANT_ASLEEP = "grant_asleep"  # to a build session on lent devices
    STARTED = "started"
    START_FAILED = "start_failed"
    SUSPEND = "suspend"
    SUSPEND_DONE = "suspend_done"
    SUSPEND_REFUSED = "suspend_refused"
    RESUME = "resume"
    RESUME_DONE = "resume_done"
    RESUME_REFUSED = "resume_refused"
    STATE_LOST = "state_lost"
    RESIZE = "resize"  # a session becomes larger or smaller on its device
    KEEP = "keep"  # a guest has the device that its host has left
    STOP = "stop"
    REQUEUED = "requeued"
    RELEASE = "release"
    FAIL = "fail"


_ENDED = frozenset({State.RELEASED, State.FAILED})

# Every transition of a lease.  `advance` refuses any other; no other module assigns `Lease.state`.
TRANSITIONS: Mapping[tuple[State, LeaseEvent], State] = MappingProxyType(
    {
        (State.PENDING, LeaseEvent.GRANT): State.GRANTED,
        (State.PENDING, LeaseEvent.GRANT_ASLEEP): State.SUSPENDED,
        (State.GRANTED, LeaseEvent.STARTED): State.RUNNING,
        (State.GRANTED, LeaseEvent.START_FAILED): State.PENDING,
        (State.RUNNING, LeaseEvent.RESIZE): State.RUNNING,
        (State.RUNNING, LeaseEvent.KEEP): State.RUNNING,
        (State.RUNNING, LeaseEvent.SUSPEND): State.SUSPENDING,
        (State.SUSPENDING, LeaseEvent.SUSPEND_DONE): State.SUSPENDED,
        # A lease that the driver refuses to checkpoint keeps its GPU.
        (State.SUSPENDING, LeaseEvent.SUSPEND_REFUSED): State.RUNNING,
        (State.SUSPENDED, LeaseEvent.RESUME): State.RESUMING,
        (State.RESUMING, LeaseEvent.RESUME_DONE): State.RUNNING,
        (State.RESUMING, LeaseEvent.RESUME_REFUSED): State.SUSPENDED,
        # The kernel must be restarted; the session and its claim stay.
        (State.RESUMING, LeaseEvent.STATE_LOST): State.RUNNING,
        **{
            (s, LeaseEvent.STOP): State.STOPPING
            for s in State
            if s not in _ENDED | {State.PENDING, State.STOPPING}
        },
        (State.STOPPING, LeaseEvent.REQUEUED): State.PENDING,
        **{(s, LeaseEvent.RELEASE): State.RELEASED for s in State if s not in _ENDED},
        **{(s, LeaseEvent.FAIL): State.FAILED for s in State if s not in _ENDED},
    }
)

# Device memory is, or may still be, in use.
HOLDS_CAPACITY = frozenset({State.GRANTED, State.RUNNING, State.SUSPENDING, State.RESUMING, State.STOPPING})
# Leases that release their capacity without a further decision.
LEAVING = frozenset({State.SUSPENDING, State.STOPPING})


def advance(state: State, event: LeaseEvent) -> State:
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
    usable: bool = True  # False: draining, broken or vanished; takes nothing new
    # It works, and is not usable only because an administrator empties it, or because its memory is used
    # beyond what was granted.
    draining: bool = False
    suspendable: bool = True  # the driver's checkpoint passed its test here
    movable: bool = False  # what is suspended here can be restored on another device of its node and model
    units: int = 0  # on a node of a unit pool (`core.units`): so many equal parts; 0: on another node
    pool_obstacle: str = ""  # why the unit pool of its node grants and lends nothing

    @property
    def grantable_bytes(self) -> int:
        """Device memory that leases may get: all but the reserve."""
        return self.memory_bytes - self.reserve_bytes

    def demand_milli(self, size: Size) -> int:
        """Thousandths of this device that ``size`` needs here; more than 1000 if it does not fit.

        Bytes are rounded up to the next thousandth.  In a unit pool only whole units fit.
        """
        if self.units and not _is_whole_units(size, self.units):
            return WHOLE_GPU + 1
        if size.memory_bytes:
            most = self.grantable_bytes
            return -(-size.memory_bytes * WHOLE_GPU // most) if most > 0 else WHOLE_GPU + 1
        return size.fraction_milli if size.profile == self.profile else WHOLE_GPU + 1


def _is_whole_units(size: Size, units: int) -> bool:
    """Return whether a size is one of so many units of a GPU, or whole GPUs where a GPU is one unit."""
    is_part = size.device_count == 1 or units == 1
    return not size.memory_bytes and is_part and size.fraction_milli * units == WHOLE_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project with its part of the cluster, in thousandths of a GPU."""

    name: str
    quota_milli: int  # guaranteed
    weight: int = 1  # share of what is over
    limit_milli: int | None = None  # hard cap, None: no cap
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of one workload to fractions of devices.

    It requests ``size``, and gets ``held_milli`` of each of ``devices``.
    """

    id: str
    project: str
    kind: Kind
    size: Size
    user: str = ""
    server: str = ""
    state: State = State.PENDING
    devices: tuple[str, ...] = ()  # UUIDs; kept while suspended (bound to return there)
    held_milli: int = 0  # per device, once placed (memory requests are converted then)
    priority: int = 0
    survival: CheckpointMode = CheckpointMode.SUSPEND
    consolidate: bool = True  # several GPUs: within one island or node
    borrow: bool = True  # False: a job that starts only within its project's quota
    waits: bool = False  # a session that waits for its start, behind jobs that the quotas owe
    submitted_at: float = 0.0  # created
    queued_at: float = 0.0  # entered its present queue: submitted, or demoted (`order.served`)
    waits_since_at: float = 0.0  # submitted, or last lost its capacity
    granted_at: float = 0.0  # last got capacity
    idle_since_at: float | None = None  # None: busy
    idle_timeout_s: float | None = None  # its own (`idle`); None: that of the settings
    notice_s: float | None = None  # its own (`idle`); None: that of the settings
    keep_until_at: float = 0.0  # not suspended for being idle before
    lend_now: bool = False  # the owner offers the devices at once
    wanted: bool = False  # suspended, and its processes want the GPU
    suspendable: bool = True
    movable: bool = False  # its processes can use another device of its node and model
    retry_at: float = 0.0  # a refused action is not retried before
    # Nodes that had no capacity for its server, devices that it could not move to, and until when.
    avoids: tuple[tuple[str, float], ...] = ()
    used_bytes: int = 0  # device memory in use, all devices: what a suspension copies
    saved_bytes: int = 0  # host memory it holds while suspended, all devices
    attained_gpu_s: float = 0.0  # received up to ``attained_at``
    attained_at: float | None = None  # None: what a running job receives is not counted
    left_gpu_s: float | None = None  # remaining work by its progress (`measure.rounded`); None: not measured
    trusted_until_gpu_s: float = 0.0  # attained service from which ``left_gpu_s`` no longer counts
    cancelled: bool = False  # ended by its owner
    borrowed: bool = False  # as its last grant said: claims of other leases come first
    made_way_for: str = ""  # lease for which it last gave its devices up; "" once it has some again
    share: bool = False  # owner and site let it run on one GPU with another job, as host or as guest
    host: str = ""  # lease on whose capacity it is a guest; "": it has its own
    spare_bytes: int = 0  # of a running job: what a guest may use on each of its devices; 0: nothing
    needs_bytes: int = 0  # device memory without which it is no guest; 0: not known
    pair_key: str = ""  # owner and command: what `Cluster.parted` names it by
    turns: int = 0  # times it got capacity after `Settings.starvation_guard_s` of waiting

    @property
    def can_be_guest(self) -> bool:
        """Whether it can run on what another job holds, and give that back at any moment."""
        return self.size.device_count == 1 and self.survival.suspends and self.borrow


def held_by(lease: Lease) -> int:
    """Thousandths of each of its devices that ``lease`` holds, or will hold when it resumes."""
    return lease.held_milli or lease.size.fraction_milli


def size_of(lease: Lease) -> int:
    """Thousandths of a GPU over all its devices; 0 of a guest, which has none of its own."""
    return 0 if lease.host else held_by(lease) * len(lease.devices)


@dataclass(frozen=True, slots=True)
class JobOrder:
    """Rules of an order of jobs: first come first served; `order` has those of the others."""

    strict: bool = False  # a job that cannot start blocks the jobs behind it
    preempts: bool = False  # a waiting job may preempt running jobs of a later level
    bounds_bypass: bool = False  # `Settings.max_bypass_s` applies
    drifts: bool = False  # the group of a running job changes continuously

    def group(self, lease: Lease, now: float, settings: Settings) -> float:
        """Group of a job; a smaller group comes first."""
        return 0.0

    def place(self, lease: Lease, settings: Settings) -> tuple[float, bool, float]:
        """Group of a waiting job, whether it comes after jobs that ran in it, and its sort time."""
        return 0.0, False, lease.queued_at

    def entered_at(self, lease: Lease, now: float, settings: Settings) -> float:
        """Time at which a job entered its present group."""
        return lease.queued_at

    def leaves_at(self, lease: Lease, now: float, settings: Settings) -> float | None:
        """Time at which a running job enters a later group; None: it stays."""
        return None

    def gain_gpu_s(self, lease: Lease, now: float, settings: Settings) -> float:
        """GPU-seconds that a waiting job may run before it ends or enters a later group."""
        return inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Parameters of the policy; by default nothing that costs or bounds anything is on.

    `DEFAULT_POLICY` is what a site gets.
    """

    idle_timeout_s: float = 900.0
    notice_s: float = 0.0  # an owner is told so long before an idle session is suspended (`notice`)
    host_budget_bytes: int = 1 << 62  # host memory for all suspended state
    order: Order | JobOrder = Order.LAS
    las_thresholds_gpu_s: tuple[float, ...] = (3250.0, 7200.0)  # ascending; where queues 1, 2, ... begin
    min_run_s: float = 0.0  # no job is preempted inside its project before
    preempt_cost_s: float = 0.0  # of each GPU that changes hands, what a preemption costs
    grace_s: float = 0.0  # from SIGTERM until the capacity of a job that is stopped is free
    starvation_guard_s: float | None = None  # a job that waits for so long starves (`order`); None: none does
    max_bypass_s: float | None = None  # with backfill: bypassed for at most this long; None: no bound
    fairness_horizon_s: float | None = None  # lags behind the fair share are made up within; None: never
    share_between_projects: bool = False  # a guest may be on the GPU of another project's job


# The one source of a site's defaults: traits, broker and simulator read them here.
DEFAULT_ORDER = Order.PROGRESS
DEFAULT_POLICY = Settings(
    order=DEFAULT_ORDER,
    notice_s=30.0,
    min_run_s=600.0,
    preempt_cost_s=30.0,
    grace_s=30.0,
    starvation_guard_s=14 * 86_400.0,
    max_bypass_s=86_400.0,
    fairness_horizon_s=1_800.0,
)


@dataclass(frozen=True, slots=True)
class Behind:
    """What a user who is behind gets before others of the project (`fairshare`), in thousandths of a GPU."""

    left_milli: int  # of the share; below 0: more than that is held
    first_milli: int = 0  # the largest first job of a user who holds nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything that `plan` depends on, at one moment."""

    devices: tuple[Device, ...]
    projects: tuple[Project, ...]
    leases: tuple[Lease, ...]
    settings: Settings = field(default_factory=Settings)
    lags_gpu_s: Mapping[str, float] = field(default_factory=dict)  # by project (`fairshare`)
    behind: Mapping[tuple[str, str], Behind] = field(default_factory=dict)  # by project and user, likewise
    parted: frozenset[tuple[str, str]] = frozenset()  # `Lease.pair_key` of host and guest: not to be tried


class Why(enum.StrEnum):
    """Machine-readable reasons of decisions and of waiting."""

    FREE_CAPACITY = "free_capacity"
    CLAIM = "claim"  # guaranteed to its project
    IDLE = "idle"  # devices of an idle session are lent
    LEND_NOW = "lend_now"  # offered by its owner
    OVER_QUOTA = "over_quota"  # reclaimed for another project
    LENDER_RETURNED = "lender_returned"  # reclaimed for the session with the claim
    PRIORITY = "priority"  # for a lease of the same project with higher priority
    ORDER = "order"  # for a job of the same project that comes first in the order of jobs
    MOVED = "moved"  # for a larger job; it continues elsewhere
    CAPACITY_BACK = "capacity_back"  # capacity is free again
    GUEST = "guest"  # on what a running job leaves of its GPU
    HOST_LEFT = "host_left"  # the job that it is a guest of gives its GPU up
    HOST_MEMORY_WANTED = "host_memory_wanted"  # the job that it is a guest of needs the memory
    OWN_MEMORY_WANTED = "own_memory_wanted"  # it needs more memory than its host leaves
    PAIR_PARTED = "pair_parted"  # the job that it is a guest of became too slow, or neither gained
    CANNOT_YIELD = "cannot_yield"  # a guest that can no longer be suspended
    WANTED = "wanted"  # its owner runs a GPU cell
    NOT_WAITING = "not_waiting"  # it has what it needs, or requests nothing now
    NO_CAPACITY = "no_capacity"
    OWN_DEVICES = "own_devices"  # its own devices are in use, and it cannot move
    NOT_WORTH_IT = "not_worth_it"  # a preemption would cost more than it gains
    RESERVED = "reserved"  # it starves: the capacity that it needs is reserved before all other jobs
    NOT_BYPASSED = "not_bypassed"  # it was bypassed for long: no later job of its project precedes it
    IN_LINE = "in_line"  # a job before it has to start first
    AWAITING_RELEASE = "awaiting_release"  # the capacity is being released
    PROJECT_LIMIT = "project_limit"
    QUOTA = "quota"  # it does not borrow, and its project's quota is in use
    TOO_LARGE = "too_large"  # can never run here
    HOST_MEMORY = "host_memory"  # of the sessions that would have to sleep
    JOB_HOST_MEMORY = "job_host_memory"  # of the job itself; a job with its own checkpoint would start
    BACKING_OFF = "backing_off"
    DEVICE_BROKEN = "device_broken"
    DRAINING = "draining"  # it would fit on devices that take nothing new for now


@dataclass(frozen=True, slots=True)
class Grant:
    """Give ``held_milli`` of each of ``devices`` to a pending lease.

    ``asleep``: a build session gets its claim on devices that are lent now, and
    starts suspended.  ``borrowed``: over quota or on claimed capacity; it may be
    reclaimed.  ``host``: the lease on whose capacity a job becomes a guest.  A guest
    that is granted what it stands on, without ``host``, has it for its own.
    """

    lease: str
    devices: tuple[str, ...]
    held_milli: int
    why: Why
    borrowed: bool = False
    asleep: bool = False
    host: str = ""
    guest_bytes: int = 0  # of the device memory that ``host`` holds


@dataclass(frozen=True, slots=True)
class Suspend:
    """Park the device memory of ``lease`` in host memory, so that ``for_lease`` can run."""

    lease: str
    why: Why
    for_lease: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume a suspended lease on its devices, which are free, or on others that it moves to.

    The n-th of ``devices`` takes what was on the n-th of its own; empty: it stays.
    """

    lease: str
    why: Why
    devices: tuple[str, ...] = ()
    host: str = ""  # as in `Grant`
    guest_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Requeue:
    """Stop a job with grace and queue it again."""

    lease: str
    why: Why
    for_lease: str


Action = Grant | Suspend | Resume | Requeue


@dataclass(frozen=True, slots=True)
class Notice:
    """The owner of ``lease`` is told that it is suspended for ``for_lease``, not before ``until_at``."""

    lease: str
    for_lease: str
    until_at: float


@dataclass(frozen=True, slots=True)
class Plan:
    """``actions``, most important first; ``next_at``: when to plan again if nothing changes until then."""

    actions: tuple[Action, ...]
    next_at: float | None = None
    notices: tuple[Notice, ...] = ()
