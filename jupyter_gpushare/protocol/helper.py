"""Requests to the device helper and its answers, as plain values.

A request and its answer are one line of JSON each (`encode`, `decode`), over a unix
socket.  A request is ``{"verb": ..., "epoch": ..., **fields}``.  An answer is
``{"ok": true, "result": {...}}`` or ``{"ok": false, "error": {"kind", "message",
"call", "code"}}``; for an error of the driver, ``message`` is the name of its code.

* Verbs that change something carry the broker's epoch; the helper refuses an epoch
  below the highest that it has seen (``stale_epoch``).
* Requests name leases, and the helper finds their processes.  Only ``end_process`` names
  a process, one without a lease.
* ``hello`` is answered with `Hello`; a given epoch fences every lower one at once.
* ``inventory`` is answered with `Inventory`, after a bounded wait for the self-tests at
  start; ``sample`` with the last `Sample`, from memory, without the driver.
* ``set_limit`` and ``reserve`` are answered with `LeaseFiles`, ``suspend`` and ``resume``
  with `MoveResult`, ``signal`` with `Signalled`, ``drop`` with `Dropped`.
* ``watch`` is answered with a `Sample`, and turns the connection into a stream of
  `Event` lines.  A reader that falls behind is disconnected; it watches again and
  continues from the sample in that answer.

Times are seconds of ``time.monotonic()`` (one clock for all processes of a boot), memory
is in bytes, and devices are UUID strings as NVML prints them.
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

# ---- the verb ``reserve``: leases that servers without a GPU may get while they run


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Reserve the name of a lease that a server without a GPU may get while it runs.

    This creates nothing.  The processes of the server carry the name from their start, and are denied
    every allocation until `SetLimit` creates the lease.
    """

    lease: str


# ---- processes without a lease: their use of devices, and the request to end one
# A request names a process by the pid and start time in the sample.  The helper ends it only if it still
# has no lease.


@dataclass(frozen=True, slots=True, kw_only=True)
class UnleasedProcess:
    """A process without a lease that uses a device."""

    process: str  # its id in `EndProcess`
    pid: int
    uid: int
    name: str  # chosen by the process
    used_bytes: int  # on this device; 0 if the driver does not show it
    kept: str  # why it is not ended on request; empty if it may be
    ending: bool = False  # it was requested to end
    contained: bool = False  # it is in a container, where several users may have its uid


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProcess:
    """End a process without a lease: SIGTERM, and SIGKILL after 5 s if it still runs without one."""

    device: str  # UUID
    process: str


# ---- requests and answers ----------------------------------------------------

# The maximum length of a line.  A sample with the maximum number of leases and processes is shorter.
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


# A guest gets this part of its device's time in turns; its host gets the rest.
GUEST_SHARE = 0.1


class ComputeShare(enum.StrEnum):
    """How leases on one device share its time (docs/concepts.md)."""

    OFF = "off"  # the driver divides it equally between processes
    FAIR = "fair"  # in turns, by weight; unused time goes to the others
    STRICT = "strict"  # in turns; a share is also the maximum


class Level(enum.StrEnum):
    """The means that enforces a memory limit, strongest first (docs/isolation.md)."""

    WHOLE_GPU = "whole_gpu"
    MIG = "mig"
    CGROUP = "cgroup"
    PRELOAD = "preload"
    HINTS = "hints"


class EventKind(enum.StrEnum):
    """The kind of an `Event`."""

    WANTED = "wanted"  # a process of a suspended lease entered a CUDA call
    ENDED = "ended"  # the last process of a lease has ended
    OVER_LIMIT = "over_limit"  # the watchdog saw more memory than granted
    UNLEASED_PROCESS = "unleased_process"  # a process without a lease uses a managed device
    DEVICE = "device"  # a device became unhealthy or healthy again
    PHASE = "phase"  # a lease changed its phase
    DRIVER_KILLED = "driver_killed"  # a process ended within a driver call of a suspension or resume
    SEAT = "seat"  # a seat of this node changed its state: see the sample
    EVICTED = "evicted"  # processes of a lease without a seat were ended, because it cannot be suspended
    GUEST = "guest"  # a guest left the device of its host by a decision of the helper


class Refusal(enum.StrEnum):
    """Why `Suspend` or `Resume` moved nothing (`MoveResult.refused`)."""

    NONE = ""
    WANTED = "wanted"  # a process has entered a CUDA call since the decision
    BUSY = "busy"  # the lock timed out, or the lease is being moved
    NO_MEMORY = "no_memory"  # the driver does not show enough free device memory
    HOST_MEMORY = "host_memory"  # not enough host memory for the copy
    NOT_SUSPENDABLE = "not_suspendable"
    LOST = "lost"
    NO_LEASE = "no_lease"


class ErrorKind(enum.StrEnum):
    """The value of ``error.kind`` in an answer that is not ``ok``."""

    BAD_REQUEST = "bad_request"
    UNKNOWN_VERB = "unknown_verb"
    STALE_EPOCH = "stale_epoch"
    NOT_ALLOWED = "not_allowed"
    UNKNOWN_LEASE = "unknown_lease"
    UNKNOWN_PROCESS = "unknown_process"
    CONFLICT = "conflict"
    BUSY = "busy"  # too many connections: try again
    DEVICE = "device"  # the driver refused; see ``call`` and ``code``
    STATE = "state"  # the state directory cannot be written
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The helper that answers, with the highest epoch that it has seen."""

    version: str
    pid: int
    boot_id: str
    epoch: int
    simulated: bool
    now: float = 0.0  # the time of this answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One level of one device: offered if its self-test passed, else ``reason`` says why not."""

    level: Level
    offered: bool
    reason: str = ""
    by: str = ""  # for a whole GPU: the means that keeps other users from opening it


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU or MIG instance that the helper leases, with the results of its self-test."""

    uuid: str
    index: int
    name: str
    memory_bytes: int
    reserve_bytes: int  # never granted: a restore margin of max(3 %, 512 MiB), and the bytes used when empty
    healthy: bool = True
    reason: str = ""  # why it is not healthy
    level: Level = Level.PRELOAD  # strongest level that passed its self-test
    suspendable: bool = False  # the child of the self-test survived a full cycle on it
    suspend_reason: str = ""  # why not
    movable: bool = False  # that child was then restored on another device of the same model
    move_reason: str = ""  # why not
    suspend_bytes_per_s: int = 0  # measured by the self-test, device to host
    resume_bytes_per_s: int = 0  # measured by the self-test, host to device
    ladder: tuple[Rung, ...] = ()  # all levels, strongest first
    profile: str = ""  # of a MIG instance, such as 1g.10gb
    island: str = ""  # devices with the same non-empty value share an NVLink island
    node: str = ""  # on a cluster; the broker fills it in


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The devices of this machine, and the host memory for suspended state."""

    host: str  # empty for several nodes
    driver: str
    simulated: bool
    devices: tuple[Device, ...]
    host_total_bytes: int
    host_budget_bytes: int  # the maximum of suspended state in this machine's RAM
    at: float
    watchdog: WatchdogAction = WatchdogAction.WARN
    left_out: tuple[str, ...] = ()  # a sentence for each device that cannot be leased


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """GPU use of one process."""

    pid: int
    started_at: float
    name: str
    used_bytes: int  # on all devices together, by NVML, else by the library (0 while suspended)
    calls: int  # CUDA calls entered, counted by the preload library; -1 if it is not loaded
    kernel: str = ""  # Jupyter kernel id, if the command line has it
    # It keeps the memory of a dead process that forked it; the first such process is shown with all bytes.
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Overuse:
    """Memory of a lease beyond its limit on one device, in two consecutive samples."""

    device: str
    used_bytes: int
    limit_bytes: int  # 0: the device is not its own, or is lent while it is suspended
    # The process with the most uncounted bytes; 0: contexts or ended processes have them.
    pid: int = 0
    name: str = ""
    process_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSample:
    """Use, phase and processes of one lease."""

    lease: str
    phase: Phase
    measured_at: float  # of the lease and all its devices; earlier than the sample if a device is late
    # Per device UUID, contexts included, by NVML, or by the library if NVML does not show it.
    used_bytes: dict[str, int]
    saved_bytes: dict[str, int]  # per device UUID, in host memory
    calls: str  # opaque: the counters of all processes, to be returned in `Suspend`
    active_at: float  # the last time at which a process entered a CUDA call or had a kernel running
    suspendable: bool
    suspend_reason: str  # taints, no preload library, ...
    alive: bool  # at least one process carries this lease
    processes: tuple[ProcessSample, ...] = ()  # those that use the GPU, at most 64
    wanted: bool = False  # suspended, and a process has entered a CUDA call since
    queries_only: bool = False  # wanted, but only by stream and event queries
    stalled: bool = False  # suspended, and a process seems to wait in a call that is not counted
    level: Level = Level.HINTS  # enforces its limit now; the weakest of its devices
    devices: tuple[str, ...] = ()  # UUIDs of the devices that it may use
    runner_ended: bool = False  # a job's runner, which ends its processes and reports its result, is gone
    damaged: bool = False  # a failed checkpoint may have damaged a living process
    over: tuple[Overuse, ...] = ()  # by device
    # The time since which processes on its devices that may belong to it are unread; 0: all are read.
    unread_since: float = 0.0
    # It was resumed while no broker could record that; the next recorded `Resume` confirms it.
    unconfirmed: bool = False
    compute_share: ComputeShare = ComputeShare.OFF  # in force now
    share_reason: str = ""  # why the share of `SetLimit` is not in force
    # Its part of its devices' time in the last minute, counted only while another lease computed beside it
    # (strict: while it computed); -1: there was no such time.
    measured_share: float = -1.0
    work: int = -1  # completed driver calls that give work to a device; -1: unknown
    guest_of: str = ""  # the lease on whose device it is a guest now
    # It was a guest that could not be suspended, so its processes were ended; this is not its own failure.
    ended_as_guest: bool = False

    @property
    def is_gone(self) -> bool:
        """Return whether it has no process, no unread process that may belong to it, and no device memory."""
        return not (self.alive or self.unread_since or any(self.used_bytes.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """Use and health of one device."""

    uuid: str
    used_bytes: int
    utilization_percent: int
    healthy: bool
    reason: str = ""
    # The driver does not show the bytes of a process, so the watchdog cannot check limits.
    blind: bool = False
    unleased: tuple[UnleasedProcess, ...] = ()  # processes without a lease, at most 16
    # Why a working device takes nothing new: somebody uses memory there that was not granted.
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
    seats_by_number: bool = False  # by the last `CountSeats`
    gpu_pods: tuple[GpuPod, ...] = ()  # pods to which the node's kubelet gave GPUs
    knows_gpu_pods: bool = False  # the kubelet reports them


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimit:
    """Create or change a lease: its directory, limit page and account.

    Repeating a request changes nothing.  The devices of a lease change only while no process carries it, or
    by `Resume`; their limits change at any time.
    """

    lease: str
    uid: int  # owner of the account file; the helper checks that this is allowed
    limits: dict[str, int]  # bytes per device UUID, in the order in which CUDA lists the devices
    # Start asleep: processes wait in the library until `Resume`.  Takes effect while no process carries the
    # lease.
    suspended: bool = False
    # Bytes per device UUID that the driver keeps for the lease under pressure; the default is its limit.
    guaranteed: dict[str, int] = field(default_factory=dict)
    unattended: bool = False  # the helper may resume it when it is wanted and no broker answers
    stops: bool = False  # a job that is stopped and restarted, not suspended, when its seat leaves
    compute_share: ComputeShare = ComputeShare.OFF
    share: float = 1.0  # of the time of each device: above 0, at most 1
    # A guest uses the single device of the lease `guest_of`, its host.  The guest gets `guest_bytes` of its
    # limit there, and the host has that much less until the guest has left.  When either wants the rest of
    # its limit, the guest leaves: it is suspended, and `guest_of` counts again when it resumes.  A
    # suspended lease becomes a guest by `SetLimit` with `guest_of`, then `Resume`; with an empty `guest_of`
    # it resumes on its own capacity.  A running guest gets its whole limit when its host has left.
    guest_of: str = ""
    guest_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFiles:
    """Answer to `SetLimit` and `Reserve`."""

    directory: str  # the value of GPUSHARE_LEASE_DIR
    library: str = ""  # on a node of a cluster: its preload library


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Move the device memory of a lease to host memory.

    ``calls`` comes from the sample on which the decision is based.  If the counters have changed since, the
    lease is wanted and keeps running.  An empty ``calls`` forces the move.
    """

    lease: str
    calls: str = ""
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Copy the device memory of a lease back, when the driver shows enough free memory.

    ``unrecorded`` means that the broker cannot store this request.  Then the lease is resumed only if no
    other living lease has its part of the devices, and it counts as ``unconfirmed``.
    """

    lease: str
    timeout_s: float = 60.0
    unrecorded: bool = False
    # UUIDs to resume on, in the order of the lease's devices; empty: its own devices.  Other devices must
    # have the same model and memory, and replace its own in its limits.  If the move is refused or fails,
    # the lease stays suspended on its own devices (`gpu.moves.places`).
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveResult:
    """Answer to `Suspend` and `Resume`."""

    done: bool
    refused: Refusal = Refusal.NONE  # if not done; the lease is where it was, except with LOST
    reason: str = ""  # a sentence
    bytes: int = 0
    took_s: float = 0.0
    devices: tuple[str, ...] = ()  # UUIDs of the lease now, if it moves to other devices or may have moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Send a signal to the processes of a lease (through pidfd)."""

    lease: str
    number: int
    # leader: the oldest process that carries the lease and whose parent does not.  others: all except the
    # runner of a job.  keepers: those that keep the memory of dead processes.
    to: str = "leader"  # or "all", "others" or "keepers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """The number of processes that got the signal; 0 if all have ended."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Forget a lease: revoke its page and remove its files.  An unknown lease is not an error.

    With ``end_processes``, then kill the processes that name it, such as a job's runner that has just
    started.
    """

    lease: str
    end_processes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Whether the helper knew the lease."""

    known: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One entry of the helper's event stream, numbered from 1."""

    seq: int
    at: float
    kind: EventKind
    lease: str = ""
    device: str = ""
    reason: str = ""
    # WANTED: queries_only ("true" or "false").  OVER_LIMIT, UNLEASED_PROCESS: used_bytes, action, pid, name;
    # UNLEASED_PROCESS also uid and contained ("true" or "false").  PHASE: from, to, bytes.  DEVICE: the
    # fields that changed (healthy, or suspendable and level, or reserve_bytes), after which the inventory
    # must be requested again; published once for the device, and, if its health changed, once for each
    # lease on it.  SEAT: seat, state.  GUEST: host, bytes (of the guest), took_s (until the host had its
    # memory), ended ("true" or "false"); the reason is host_memory or own_memory, by who wanted the memory.
    fields: dict[str, str] = field(default_factory=dict)


def encode(value: Any) -> bytes:
    """Return a dataclass or a plain dict as one line of JSON, newline included."""
    plain = value if isinstance(value, dict) else asdict(value)
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode() + b"\n"


_Value = TypeVar("_Value")


def decode(line: bytes) -> dict[str, Any]:
    """Return the object in one line of JSON.

    Raises:
        InvalidRequest: the line is too long or not a JSON object, or has a key twice, NaN or Infinity.
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
    """Return a verb's dataclass with the fields that `decode` returned.

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
    # `isinstance` would accept a bool as an int.
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
