"""Requests to the device helper and its answers, as plain values.

One request and one answer are one line of JSON each (`encode`, `decode`), over
a unix socket.  A request is ``{"verb": ..., "epoch": ..., **fields}``, an answer
``{"ok": true, "result": {...}}`` or ``{"ok": false, "error": {"kind", "message",
"call", "code"}}``; of an error of the driver, ``message`` is the name of its code.

* Verbs that change something carry the broker's epoch; an epoch below the
  highest that the helper ever saw is refused (``stale_epoch``).
* No request names a process: the helper finds the processes of a lease itself.
* ``hello`` answers `Hello`; given an epoch, it fences every lower one at once.
* ``inventory`` answers `Inventory` (it waits, bounded, for the self-tests that
  run at start), ``sample`` the last `Sample`, from memory, without the driver.
* ``set_limit`` and ``reserve`` answer `LeaseFiles`, ``suspend`` and ``resume`` `MoveResult`,
  ``signal`` `Signalled`, ``drop`` `Dropped`.
* ``watch`` answers with a `Sample` and then turns the connection into a stream
  of `Event` lines.  A reader that falls behind is disconnected; it watches again
  and goes on from the sample of that answer.

Moments are seconds of ``time.monotonic()`` (one clock for all processes of a
boot), memory is bytes, devices are UUID strings as NVML prints them.
"""

from __future__ import annotations

import enum
import functools
import json
import types
import typing
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, NoReturn, TypeVar

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol.seats import GpuPod, SeatSample

# ---- the helper's verb ``reserve``: names of leases that servers without a GPU may get while they run


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Name a lease that a server without a GPU may get while it runs.

    Nothing is created: its processes carry the name from their start, and are denied every
    allocation until `SetLimit` creates the lease.
    """

    lease: str


# ---- processes without a lease: what the device helper shows of them, and the request to end one
# A request names a process as the sample did, by pid and start time.  The helper compares that with
# what it finds itself: it ends only a process that has no lease then.


@dataclass(frozen=True, slots=True, kw_only=True)
class UnleasedProcess:
    """A process without a lease that uses a device."""

    process: str  # names it in `EndProcess`
    pid: int
    uid: int
    name: str  # as the process chose it
    used_bytes: int  # on this device; 0 where the driver does not say
    kept: str  # why it is not ended on request; empty: it may be
    ending: bool = False  # it was told to end
    contained: bool = False  # it is in a container, where several users may have its uid


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProcess:
    """End a process without a lease: SIGTERM, and SIGKILL after 5 s if it is still there without one."""

    device: str  # UUID
    process: str


# ---- requests and answers ----------------------------------------------------

# A line may not be longer; a sample of as many leases and processes as are shown stays below it.
MAX_LINE_BYTES = 1 << 20


class Phase(enum.StrEnum):
    """The state of a lease's processes, from the driver and the limit page."""

    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    # A restore failed for good: the driver refuses every further call of the process.
    LOST = "lost"


class WatchdogAction(enum.StrEnum):
    """The watchdog's action on memory beyond a limit and on processes without a lease."""

    WARN = "warn"
    STOP = "stop"
    OFF = "off"


# The part of its device's time that a guest is granted in turns; its host has the rest.
GUEST_SHARE = 0.1


class ComputeShare(enum.StrEnum):
    """How leases on one device share its time (docs/concepts.md)."""

    OFF = "off"  # as the driver divides it: equally between processes
    FAIR = "fair"  # by turns, by weight; what one leaves the others get
    STRICT = "strict"  # by turns, and a share is a cap


class Level(enum.StrEnum):
    """What enforces a memory limit, strongest first (docs/isolation.md)."""

    WHOLE_GPU = "whole_gpu"
    MIG = "mig"
    CGROUP = "cgroup"
    PRELOAD = "preload"
    HINTS = "hints"


class EventKind(enum.StrEnum):
    """What an `Event` reports."""

    WANTED = "wanted"  # a process of a suspended lease entered a CUDA call
    ENDED = "ended"  # the last process of a lease that had some is gone
    OVER_LIMIT = "over_limit"  # the watchdog saw more memory than granted
    UNLEASED_PROCESS = "unleased_process"  # a process without a lease uses a managed device
    DEVICE = "device"  # a device became unhealthy or healthy again
    PHASE = "phase"  # a lease changed its phase
    DRIVER_KILLED = "driver_killed"  # a process ended within a driver call of a suspension or resume
    SEAT = "seat"  # a seat of this node changed its state: see the sample
    EVICTED = "evicted"  # processes of a lease were ended: it has no seat and cannot be suspended
    GUEST = "guest"  # a guest left the device of its host, which the helper decided by itself


class Refusal(enum.StrEnum):
    """Why `Suspend` or `Resume` moved nothing (`MoveResult.refused`)."""

    NONE = ""
    WANTED = "wanted"  # a process entered a CUDA call since the decision
    BUSY = "busy"  # the lock timed out, or the lease is moving already
    NO_MEMORY = "no_memory"  # the driver does not show enough free device memory
    HOST_MEMORY = "host_memory"  # not enough host memory for the copy
    NOT_SUSPENDABLE = "not_suspendable"
    LOST = "lost"
    NO_LEASE = "no_lease"


class ErrorKind(enum.StrEnum):
    """The word in ``error.kind`` of an answer that is not ``ok``."""

    BAD_REQUEST = "bad_request"
    UNKNOWN_VERB = "unknown_verb"
    STALE_EPOCH = "stale_epoch"
    NOT_ALLOWED = "not_allowed"
    UNKNOWN_LEASE = "unknown_lease"
    UNKNOWN_PROCESS = "unknown_process"
    CONFLICT = "conflict"
    BUSY = "busy"  # too many connections: try again
    DEVICE = "device"  # the driver said no; ``call`` and ``code`` say what
    STATE = "state"  # the state directory cannot be written
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The helper that answers, and the highest epoch that it has seen."""

    version: str
    pid: int
    boot_id: str
    epoch: int
    simulated: bool
    now: float = 0.0  # the moment of this answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One level of one device: offered where its self-test passed, else ``reason`` says why not."""

    level: Level
    offered: bool
    reason: str = ""
    by: str = ""  # of a whole GPU: what keeps other users from opening it


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or MIG instance that the helper leases, with what its self-test found."""

    uuid: str
    index: int
    name: str
    memory_bytes: int
    reserve_bytes: int  # never granted: a restore margin of max(3 %, 512 MiB), and what is used when empty
    healthy: bool = True
    reason: str = ""  # why it is not healthy
    level: Level = Level.PRELOAD  # strongest level that passed its self-test
    suspendable: bool = False  # the child of the self-test survived a full cycle here
    suspend_reason: str = ""  # why not
    movable: bool = False  # that child was then restored on another device of the same model
    move_reason: str = ""  # why not
    suspend_bytes_per_s: int = 0  # measured by the self-test, device to host
    resume_bytes_per_s: int = 0  # same, host to device
    ladder: tuple[Rung, ...] = ()  # all levels, strongest first
    profile: str = ""  # of a MIG instance, such as 1g.10gb
    island: str = ""  # devices with the same non-empty word share an NVLink island
    node: str = ""  # of a cluster: filled in by the broker


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The devices of this machine, and the host memory for suspended state."""

    host: str  # empty: of several nodes
    driver: str
    simulated: bool
    devices: tuple[Device, ...]
    host_total_bytes: int
    host_budget_bytes: int  # how much suspended state this machine may hold in RAM
    at: float
    watchdog: WatchdogAction = WatchdogAction.WARN
    left_out: tuple[str, ...] = ()  # a sentence for each device that cannot be leased


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """Use of the GPU by one process."""

    pid: int
    started_at: float
    name: str
    used_bytes: int  # all devices together, as NVML shows it, else as counted (0 while suspended)
    calls: int  # CUDA calls entered, as the preload library counts them; -1 if it is not loaded
    kernel: str = ""  # Jupyter kernel id, where the command line has it
    # It keeps the memory of a dead process that forked it; the first of such has all of the bytes.
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overuse:
    """Memory of a lease on one device beyond what it may hold there, in two samples in a row."""

    device: str
    used_bytes: int
    limit_bytes: int  # 0: the device is not its own, or is lent while it sleeps
    # The process that holds the most which the library did not count; 0: contexts or ended processes hold it.
    pid: int = 0
    name: str = ""
    process_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSample:
    """Use, phase and processes of one lease."""

    lease: str
    phase: Phase
    measured_at: float  # it and all of its devices; before that of the sample where a device is late
    # Per device UUID, contexts included, as NVML shows it; where it does not, as the library counts it.
    used_bytes: dict[str, int]
    saved_bytes: dict[str, int]  # per device UUID, parked in host memory
    calls: str  # opaque: the counters of all processes; hand it back to `suspend`
    active_at: float  # last moment a process entered a CUDA call or had a kernel running
    suspendable: bool
    suspend_reason: str  # taints, no preload library, ...
    alive: bool  # at least one process carries this lease
    processes: tuple[ProcessSample, ...] = ()  # those that use the GPU, 64 at most
    wanted: bool = False  # suspended, and a process entered a CUDA call since
    queries_only: bool = False  # wanted, but by stream and event queries alone
    stalled: bool = False  # suspended, and a process seems to wait in a call that is not counted
    level: Level = Level.HINTS  # what enforces its limit now; of several devices the weakest
    devices: tuple[str, ...] = ()  # UUIDs of those it may use
    runner_ended: bool = False  # of a job: what ends its processes and reports its result is gone
    damaged: bool = False  # a failed checkpoint may have damaged a process that lives
    over: tuple[Overuse, ...] = ()  # by device
    # Since when processes on its devices that may be its own do not answer; 0: all answer.
    unread_since: float = 0.0
    # It was resumed while no broker could record that; the next `resume` that is recorded confirms it.
    unconfirmed: bool = False
    compute_share: ComputeShare = ComputeShare.OFF  # in force now
    share_reason: str = ""  # why what `SetLimit` asks for is not in force
    # The part of its devices' time that it got, of the last minute's time in which another lease computed
    # beside it (strict: in which it computed); -1: there was none.
    measured_share: float = -1.0
    work: int = -1  # driver calls that give work to a device, completed since it began; -1: not known
    guest_of: str = ""  # lease on whose device it is a guest now
    # It was a guest that could not be suspended: its processes were ended, which is no failure of its own.
    ended_as_guest: bool = False

    @property
    def is_gone(self) -> bool:
        """Whether it has no process, none that may be its own, and no device memory."""
        return not (self.alive or self.unread_since or any(self.used_bytes.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """Use and health of one device."""

    uuid: str
    used_bytes: int
    utilization_percent: int
    healthy: bool
    reason: str = ""
    # The driver does not say how many bytes a process holds: the watchdog cannot compare.
    blind: bool = False
    unleased: tuple[UnleasedProcess, ...] = ()  # processes without a lease, 16 at most
    # Why it takes nothing new although it works: somebody has memory there that was not granted.
    closed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of all devices and leases."""

    at: float
    devices: tuple[DeviceSample, ...]
    leases: tuple[LeaseSample, ...]
    host_available_bytes: int
    host_saved_bytes: int  # suspended state of all leases together
    seats: tuple[SeatSample, ...] = ()  # on a node of a cluster
    seats_by_number: bool = False  # as `CountSeats` said last
    gpu_pods: tuple[GpuPod, ...] = ()  # to which the node's kubelet gave GPUs,
    knows_gpu_pods: bool = False  # where it says so


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimit:
    """Create or change a lease: its directory, limit page and account.

    Setting what is set already changes nothing.  The devices of a lease change
    only while no process carries it, or by `Resume`; their limits at any time.
    """

    lease: str
    uid: int  # owner of the account file; the helper checks that it may
    limits: dict[str, int]  # bytes per device UUID, in the order CUDA shall see them
    # Start asleep: processes wait in the library until `resume`.  Takes effect while
    # no process carries the lease.
    suspended: bool = False
    # Bytes per device UUID that the driver keeps for the lease under pressure; a missing one is its limit.
    guaranteed: dict[str, int] = field(default_factory=dict)
    unattended: bool = False  # the helper may resume it when it is wanted and no broker answers
    stops: bool = False  # a job that is stopped and starts again: it is not suspended when its seat leaves
    compute_share: ComputeShare = ComputeShare.OFF
    share: float = 1.0  # of the time of each device: above 0, at most 1
    # The lease on whose device it is a guest, which has one device, and bytes there: the guest has
    # so many of its limit, and the host so many less of its own until the guest has left.  A guest leaves
    # when either wants the rest of its limit: it is suspended, and its `guest_of` counts again when it
    # resumes.  One that is suspended becomes a guest by this and then `Resume`, on capacity of its
    # own with this empty, and then `Resume`.  One that runs gets its whole limit once its host has left.
    guest_of: str = ""
    guest_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFiles:
    """Answer to `SetLimit`, and to `helper.Reserve`."""

    directory: str  # goes into GPUSHARE_LEASE_DIR
    library: str = ""  # on a node of a cluster: the preload library there


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Move the device memory of a lease to host memory.

    ``calls`` comes from the sample that the decision was made on: when the counters
    have changed since, the lease is wanted and keeps running.  Empty: forced.
    """

    lease: str
    calls: str = ""
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Copy the device memory of a lease back, once the driver shows enough free.

    ``unrecorded``: the broker cannot store that it asks.  Then the lease is resumed only into a part of
    its devices that no other lease has, of those that live, and counts as ``unconfirmed``.
    """

    lease: str
    timeout_s: float = 60.0
    unrecorded: bool = False
    # UUIDs to resume on, in the order of the lease's devices; empty: on its own.  Others than its own must
    # have the same model and memory, and take the place of its own in its limits.  Refused or failed, it
    # stays suspended on its own (`gpu.moves.places`).
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveResult:
    """Answer to `Suspend` and `Resume`."""

    done: bool
    refused: Refusal = Refusal.NONE  # when not done; the lease is where it was (but LOST)
    reason: str = ""  # a sentence
    bytes: int = 0
    took_s: float = 0.0
    devices: tuple[str, ...] = ()  # UUIDs that the lease has now, of one that moves or may have moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Send a signal to the processes of a lease (through pidfd)."""

    lease: str
    number: int
    # leader: the oldest process that carries the lease, with a parent that does not.
    # others: all but the runner of a job.  keepers: those that keep the memory of dead processes.
    to: str = "leader"  # or "all", "others" or "keepers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """How many processes the signal was sent to; 0: there was none any more."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Forget a lease: revoke its page, remove its files.  An unknown lease is no error.

    ``end_processes``: then kill the processes that name it, such as a job's runner that
    started a moment before.
    """

    lease: str
    end_processes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Whether the helper knew the lease."""

    known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One entry of the helper's event stream, numbered upwards from 1."""

    seq: int
    at: float
    kind: EventKind
    lease: str = ""
    device: str = ""
    reason: str = ""
    # WANTED: queries_only ("true" or "false").  OVER_LIMIT, UNLEASED_PROCESS: used_bytes, action, pid, name;
    # UNLEASED_PROCESS also uid and contained ("true" or "false").  PHASE: from, to, bytes.  DEVICE: healthy,
    # or suspendable and level, or reserve_bytes (what changed): request the inventory again.  It is published
    # once for the device, and where its health changed once for each lease on it.  SEAT: seat, state.
    # GUEST: host, bytes (of the guest), took_s (until the host had its memory), ended ("true" or "false");
    # its reason is host_memory or own_memory: who wanted it.
    fields: dict[str, str] = field(default_factory=dict)


def encode(value: Any) -> bytes:
    """One line of JSON for a dataclass or a plain dict, newline included."""
    plain = value if isinstance(value, dict) else asdict(value)
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode() + b"\n"


_Value = TypeVar("_Value")


def decode(line: bytes) -> dict[str, Any]:
    """The object in one line of JSON.

    Raises:
        InvalidRequest: no JSON object, a key twice, NaN, Infinity, or too long.
    """
    if len(line) > MAX_LINE_BYTES:
        raise InvalidRequest(f"a line has at most {MAX_LINE_BYTES} bytes")
    try:
        value = json.loads(line, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"not a line of JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("a request is a JSON object")
    return value


def build(cls: type[_Value], plain: dict[str, Any]) -> _Value:
    """A verb's dataclass from what `decode` returned.

    Raises:
        InvalidRequest: a field is unknown, missing, or not of its declared type.
    """
    hints = _hints(cls)  # type: ignore[arg-type]  # every class is hashable
    for name in plain:
        if name not in hints:
            raise InvalidRequest(f"{cls.__name__} has no field {name[:40]!r}")
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        if item.name in plain:
            values[item.name] = _convert(hints[item.name], plain[item.name], f"{cls.__name__}.{item.name}")
        elif item.default is MISSING and item.default_factory is MISSING:
            raise InvalidRequest(f"{cls.__name__} needs the field {item.name!r}")
    return cls(**values)


@functools.cache
def _hints(cls: Any) -> types.MappingProxyType[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(cls))


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin is dict and isinstance(value, dict):
        inner = typing.get_args(kind)[1]
        return {key: _convert(inner, item, f"{where}[{key[:40]!r}]") for key, item in value.items()}
    if origin is tuple and isinstance(value, list | tuple):
        inner = typing.get_args(kind)[0]
        return tuple(_convert(inner, item, f"{where}[{at}]") for at, item in enumerate(value))
    if isinstance(kind, type) and issubclass(kind, enum.StrEnum) and isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise InvalidRequest(f"{where}: {value[:40]!r} is not one of {', '.join(kind)}") from None
    if is_dataclass(kind) and isinstance(value, dict):
        return build(typing.cast("type[Any]", kind), value)
    if kind is float and type(value) in (int, float):
        return float(value)
    # bool is an int in Python, not here.
    if kind in (int, str, bool) and type(value) is kind:
        return value
    raise InvalidRequest(f"{where}: expected {getattr(kind, '__name__', kind)}, not {type(value).__name__}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise ValueError("a key appears twice")
    return plain


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number here")
