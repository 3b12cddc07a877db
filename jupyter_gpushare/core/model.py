"""Data types: devices, projects, leases, actions, and the life of a lease.

Units are part of the names and never mixed:

* ``*_milli``: thousandths of one GPU, int.  `WHOLE_GPU` is 1000.
* ``*_bytes``: bytes, int.
* ``*_s``: a duration in seconds.  ``*_at``: a moment in seconds, on one
  monotonic clock (the machine's in the broker, virtual in the simulator).

Three terms that are easy to confuse:

* A lease *holds capacity* of its devices in the states of `HOLDS_CAPACITY`:
  it uses device memory, or may still use it.
* A build session within its project's quota keeps a *claim* on its devices for
  its whole life, running or suspended.  Claims on one device never exceed the
  device.  Any other lease on claimed capacity *borrows* it.
* A suspended lease holds host memory (`Lease.saved_bytes`), not capacity.
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

    SUSPEND = "suspend"  # device memory is suspended, the process lives; NONE where that is impossible
    SUSPEND_SIGTERM = "suspend,sigterm"  # as SUSPEND; SIGTERM where that is impossible or harms the job
    SIGTERM = "sigterm"  # stopped with grace, starts again from its own checkpoint
    NONE = "none"  # stopped with grace, starts again from the beginning

    def __init__(self, value: str) -> None:
        self.suspends = "suspend" in value  # if the driver can suspend it
        self.has_checkpoint = "sigterm" in value  # its own checkpoint, from which it continues after a stop


class Order(enum.StrEnum):
    """Order of the jobs of a project (`order.ORDERS`)."""

    PROGRESS = "progress"  # least remaining work if it is measured, else as `LAS`; preempts
    LAS = "las"  # least attained service; preempts
    FIFO = "fifo"  # first come first served; a job that cannot start blocks the jobs behind it
    BACKFILL = "backfill"  # first come first served; a job that cannot start is bypassed, for a while


class State(enum.StrEnum):
    """State of a lease; ``docs/lease.md`` draws the transitions."""

    PENDING = "pending"  # waits for capacity
    GRANTED = "granted"  # holds capacity; its processes are being started
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    STOPPING = "stopping"  # asked to end; its capacity is being released
    RELEASED = "released"
    FAILED = "failed"  # could not be started, or its device state was lost


class LeaseEvent(enum.StrEnum):
    """Event that moves a lease from one `State` to another."""

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
    KEEP = "keep"  # a guest keeps the device that its host has left
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

# States in which a lease uses device memory, or may still use it.
HOLDS_CAPACITY = frozenset({State.GRANTED, State.RUNNING, State.SUSPENDING, State.RESUMING, State.STOPPING})
# States in which a lease releases its capacity without a further decision.
LEAVING = frozenset({State.SUSPENDING, State.STOPPING})


def advance(state: State, event: LeaseEvent) -> State:
    """Return the state that follows ``event`` in ``state``.

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
    island: str = ""  # devices of a node with the same non-empty word are linked by NVLink
    name: str = ""
    profile: str = ""  # of a MIG instance, such as "1g.10gb"; "": a physical GPU
    usable: bool = True  # False: draining, broken or vanished; takes nothing new
    # It works; it is unusable only because an administrator drains it, or because its memory is used beyond
    # the grants.
    draining: bool = False
    suspendable: bool = True  # the driver's checkpoint passed its test on this device
    movable: bool = False  # leases suspended on it can be restored on another device of its node and model
    units: int = 0  # the number of equal parts on a node of a unit pool (`core.units`); 0 on another node
    pool_obstacle: str = ""  # why the unit pool of its node grants and lends nothing

    @property
    def grantable_bytes(self) -> int:
        """Device memory that leases may get: all but the reserve."""
        return self.memory_bytes - self.reserve_bytes

    def demand_milli(self, size: Size) -> int:
        """Return the thousandths of this device that ``size`` needs; more than 1000 if it does not fit.

        Bytes are rounded up to the next thousandth.  In a unit pool only whole units fit.
        """
        if self.units and not _is_whole_units(size, self.units):
            return WHOLE_GPU + 1
        if size.memory_bytes:
            grantable = self.grantable_bytes
            return -(-size.memory_bytes * WHOLE_GPU // grantable) if grantable > 0 else WHOLE_GPU + 1
        return size.fraction_milli if size.profile == self.profile else WHOLE_GPU + 1


def _is_whole_units(size: Size, units: int) -> bool:
    """Return whether a size is one of ``units`` parts of a GPU, or whole GPUs if a GPU is one unit."""
    is_part = size.device_count == 1 or units == 1
    return not size.memory_bytes and is_part and size.fraction_milli * units == WHOLE_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project and its part of the cluster, in thousandths of a GPU."""

    name: str
    quota_milli: int  # guaranteed
    weight: int = 1  # its share of the capacity that no quota guarantees
    limit_milli: int | None = None  # hard cap; None: no cap
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
    devices: tuple[str, ...] = ()  # UUIDs; kept while it is suspended and bound to them
    held_milli: int = 0  # per device, once it is placed and a request for memory is converted
    priority: int = 0
    survival: CheckpointMode = CheckpointMode.SUSPEND
    consolidate: bool = True  # several GPUs are in one island or node, unless no node has as many
    borrow: bool = True  # False: a job that starts only within its project's quota
    waits: bool = False  # a session that waits for its start, behind jobs that a quota owes capacity
    submitted_at: float = 0.0  # created
    queued_at: float = 0.0  # entered its present queue: submitted, or demoted (`order.served`)
    waits_since_at: float = 0.0  # submitted, or last lost its capacity
    granted_at: float = 0.0  # last got capacity
    idle_since_at: float | None = None  # None: busy
    idle_timeout_s: float | None = None  # its own (`idle`); None: as in the settings
    notice_s: float | None = None  # its own (`idle`); None: as in the settings
    keep_until_at: float = 0.0  # before this time it is not suspended for being idle
    lend_now: bool = False  # the owner offers the devices at once
    wanted: bool = False  # suspended, and its processes want the GPU
    suspendable: bool = True
    movable: bool = False  # its processes can use another device of its node and model
    retry_at: float = 0.0  # before this time a refused action is not retried
    # Nodes that could not place its server and devices that it could not move to, each until a time.
    avoids: tuple[tuple[str, float], ...] = ()
    used_bytes: int = 0  # device memory in use on all devices, which a suspension copies
    saved_bytes: int = 0  # host memory that it holds while suspended, for all devices
    attained_gpu_s: float = 0.0  # GPU-seconds received up to ``attained_at``
    attained_at: float | None = None  # None: the GPU-seconds of the running job are not counted
    left_gpu_s: float | None = None  # remaining work by its progress (`measure.rounded`); None: not measured
    trusted_until_gpu_s: float = 0.0  # attained service from which ``left_gpu_s`` no longer counts
    cancelled: bool = False  # ended by its owner
    borrowed: bool = False  # its last grant was borrowed: claims of other leases come first
    made_way_for: str = ""  # lease for which it last gave its devices up; "" once it has devices again
    share: bool = False  # owner and site let it run on one GPU with another job, as host or as guest
    host: str = ""  # lease on whose capacity it is a guest; "": it has its own
    spare_bytes: int = 0  # memory that a guest may use on each device of a running job; 0: none
    needs_bytes: int = 0  # minimum device memory that it needs as a guest; 0: not known
    pair_key: str = ""  # owner and command, by which `Cluster.parted` names it
    turns: int = 0  # number of times it got capacity after `Settings.starvation_guard_s` of waiting

    @property
    def can_be_guest(self) -> bool:
        """Whether it can run on capacity held by another job and give that back at any moment."""
        return self.size.device_count == 1 and self.survival.suspends and self.borrow


def held_by(lease: Lease) -> int:
    """Return the thousandths of each of its devices that ``lease`` holds, or will hold when it resumes."""
    return lease.held_milli or lease.size.fraction_milli


def size_of(lease: Lease) -> int:
    """Return the thousandths of a GPU over all its devices; 0 for a guest, which holds none of its own."""
    return 0 if lease.host else held_by(lease) * len(lease.devices)


@dataclass(frozen=True, slots=True)
class JobOrder:
    """Rules of an order of jobs, by default first come first served; `order` defines other orders."""

    strict: bool = False  # a job that cannot start blocks the jobs behind it
    preempts: bool = False  # a waiting job may preempt running jobs of a later level
    bounds_bypass: bool = False  # `Settings.max_bypass_s` applies
    drifts: bool = False  # the group of a running job changes continuously

    def group(self, lease: Lease, now: float, settings: Settings) -> float:
        """Return the group of a job; a smaller group comes first."""
        return 0.0

    def place(self, lease: Lease, settings: Settings) -> tuple[float, bool, float]:
        """Return the group of a waiting job, whether it follows jobs that ran in it, and its sort time."""
        return 0.0, False, lease.queued_at

    def entered_at(self, lease: Lease, now: float, settings: Settings) -> float:
        """Return the time at which a job entered its present group."""
        return lease.queued_at

    def leaves_at(self, lease: Lease, now: float, settings: Settings) -> float | None:
        """Return the time at which a running job enters a later group; None: it stays."""
        return None

    def gain_gpu_s(self, lease: Lease, now: float, settings: Settings) -> float:
        """Return the GPU-seconds that a waiting job may run before it ends or enters a later group."""
        return inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Parameters of the policy; the defaults switch all costs and bounds off.

    A site gets `DEFAULT_POLICY`.
    """

    idle_timeout_s: float = 900.0
    notice_s: float = 0.0  # time from the notice to the suspension of an idle session (`notice`)
    host_budget_bytes: int = 1 << 62  # host memory for all suspended state
    order: Order | JobOrder = Order.LAS
    las_thresholds_gpu_s: tuple[float, ...] = (3250.0, 7200.0)  # where queues 1, 2, ... begin; ascending
    min_run_s: float = 0.0  # minimum run time before a job is preempted inside its project
    preempt_cost_s: float = 0.0  # cost of a preemption for each GPU that changes hands
    grace_s: float = 0.0  # from SIGTERM until the capacity of a stopped job is free
    starvation_guard_s: float | None = None  # wait after which a job starves (`order`); None: never
    max_bypass_s: float | None = None  # maximum time that backfill bypasses a job; None: no bound
    fairness_horizon_s: float | None = None  # time in which lags are made up (`fairshare`); None: never
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
    """Capacity that a user who is behind gets before others of the project (`fairshare`).

    In thousandths of a GPU.
    """

    left_milli: int  # the share minus the use; negative if the user holds more than the share
    first_milli: int = 0  # the largest first job of a user who holds nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Everything that a plan depends on, at one moment."""

    devices: tuple[Device, ...]
    projects: tuple[Project, ...]
    leases: tuple[Lease, ...]
    settings: Settings = field(default_factory=Settings)
    lags_gpu_s: Mapping[str, float] = field(default_factory=dict)  # by project (`fairshare`)
    behind: Mapping[tuple[str, str], Behind] = field(default_factory=dict)  # by project and user
    parted: frozenset[tuple[str, str]] = frozenset()  # pairs not to try: `Lease.pair_key` of host and guest


class Why(enum.StrEnum):
    """Machine-readable reasons of decisions and of waiting."""

    FREE_CAPACITY = "free_capacity"
    CLAIM = "claim"  # guaranteed to its project
    IDLE = "idle"  # an idle session lends its devices
    LEND_NOW = "lend_now"  # offered by its owner
    OVER_QUOTA = "over_quota"  # reclaimed for another project
    LENDER_RETURNED = "lender_returned"  # reclaimed for the session with the claim
    PRIORITY = "priority"  # for a lease of the same project with higher priority
    ORDER = "order"  # for a job of the same project that comes first in the order of jobs
    MOVED = "moved"  # for a larger job; it continues elsewhere
    CAPACITY_BACK = "capacity_back"  # capacity is free again
    GUEST = "guest"  # on the unused part of a running job's GPU
    HOST_LEFT = "host_left"  # its host gives the GPU up
    HOST_MEMORY_WANTED = "host_memory_wanted"  # its host needs the memory
    OWN_MEMORY_WANTED = "own_memory_wanted"  # it needs more memory than its host leaves
    PAIR_PARTED = "pair_parted"  # its host became too slow, or neither gained
    CANNOT_YIELD = "cannot_yield"  # a guest that can no longer be suspended
    WANTED = "wanted"  # its owner runs a GPU cell
    NOT_WAITING = "not_waiting"  # it has the capacity that it needs, or requests none now
    NO_CAPACITY = "no_capacity"
    OWN_DEVICES = "own_devices"  # its own devices are in use, and it cannot move
    NOT_WORTH_IT = "not_worth_it"  # a preemption would cost more than it gains
    RESERVED = "reserved"  # it starves: its capacity is reserved before all other jobs
    NOT_BYPASSED = "not_bypassed"  # it was bypassed for too long: no later job of its project precedes it
    IN_LINE = "in_line"  # a job before it must start first
    AWAITING_RELEASE = "awaiting_release"  # the capacity is being released
    PROJECT_LIMIT = "project_limit"
    QUOTA = "quota"  # it does not borrow, and its project's quota is in use
    TOO_LARGE = "too_large"  # it can never run on this cluster
    HOST_MEMORY = "host_memory"  # too little for the sessions that would have to sleep
    JOB_HOST_MEMORY = "job_host_memory"  # too little for the job; with its own checkpoint it would start
    BACKING_OFF = "backing_off"
    DEVICE_BROKEN = "device_broken"
    DRAINING = "draining"  # it would fit on devices that are draining


@dataclass(frozen=True, slots=True)
class Grant:
    """Give ``held_milli`` of each of ``devices`` to a pending lease.

    ``asleep``: a build session gets its claim on devices that are lent now, and
    starts suspended.  ``borrowed``: over quota or on claimed capacity; it may be
    reclaimed.  ``host``: the lease on whose capacity a job becomes a guest.  A grant
    of its own device, without ``host``, gives a guest that device for itself.
    """

    lease: str
    devices: tuple[str, ...]
    held_milli: int
    why: Why
    borrowed: bool = False
    asleep: bool = False
    host: str = ""
    guest_bytes: int = 0  # the guest's part of the device memory that ``host`` holds


@dataclass(frozen=True, slots=True)
class Suspend:
    """Park the device memory of ``lease`` in host memory, so that ``for_lease`` can run."""

    lease: str
    why: Why
    for_lease: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Resume a suspended lease on its devices, which are free, or on others that it moves to.

    The n-th of ``devices`` takes the memory of its own n-th device; empty: it stays.
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
    """Notify the owner of ``lease`` that it is suspended for ``for_lease``, not before ``until_at``."""

    lease: str
    for_lease: str
    until_at: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of a round.

    ``actions`` are sorted, the most important first.  ``next_at``: when to plan again if nothing changes.
    """

    actions: tuple[Action, ...]
    next_at: float | None = None
    notices: tuple[Notice, ...] = ()
