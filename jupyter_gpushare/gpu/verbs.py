"""What may be asked of the device helper, and what it answers: plain values.

One request and one answer are one line of JSON each (`encode`, `decode`), over
a unix socket.  A request is ``{"verb": ..., "epoch": ..., **fields}``, an answer
``{"ok": true, "result": {...}}`` or ``{"ok": false, "error": {"kind", "message",
"call", "code"}}``.

* Verbs that change something carry the broker's epoch; an epoch below the
  highest that the helper ever saw is refused (``stale_epoch``).
* No request names a process: the helper finds the processes of a lease itself.
* ``watch`` turns the connection into a stream of `Event` lines.

Moments are seconds of ``time.monotonic()`` (one clock for all processes of a
boot), memory is bytes, devices are UUID strings as NVML prints them.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field
from typing import Any

# A line may not be longer; 64 leases with 64 processes each stay far below it.
MAX_LINE_BYTES = 1 << 20


class Phase(enum.StrEnum):
    """Where the processes of a lease are, as the driver and the limit page say."""

    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    # A restore went wrong: the driver will refuse every further call of the process.
    LOST = "lost"


class Level(enum.StrEnum):
    """What enforces a memory limit, strongest first (design: isolation ladder)."""

    WHOLE_GPU = "whole_gpu"
    MIG = "mig"
    CGROUP = "cgroup"
    PRELOAD = "preload"
    HINTS = "hints"


class EventKind(enum.StrEnum):
    WANTED = "wanted"  # a process of a suspended lease entered a CUDA call
    ENDED = "ended"  # the last process of a lease that had some is gone
    OVER_LIMIT = "over_limit"  # the watchdog saw more memory than granted
    STRANGER = "stranger"  # a process without a lease uses a managed device
    DEVICE = "device"  # a device became unhealthy or healthy again
    PHASE = "phase"  # a lease changed its phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    uuid: str
    index: int
    name: str
    memory_bytes: int
    reserve_bytes: int  # never granted: max(3 %, 256 MiB)
    healthy: bool = True
    reason: str = ""  # why it is not healthy
    level: Level = Level.PRELOAD  # strongest level that passed its self-test
    suspendable: bool = False  # the canary survived a full cycle here
    suspend_reason: str = ""  # why not
    island: str = ""  # devices with the same non-empty word share an NVLink island


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    host: str
    driver: str
    simulated: bool
    devices: tuple[Device, ...]
    host_total_bytes: int
    host_budget_bytes: int  # how much suspended state this machine may hold in RAM
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    pid: int
    started_at: float
    name: str
    used_bytes: int  # all devices together, as NVML shows it (0 while suspended)
    calls: int  # CUDA calls entered, as the preload library counts them; -1 if it is not loaded
    kernel: str = ""  # Jupyter kernel id, where the command line tells it


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSample:
    lease: str
    phase: Phase
    used_bytes: dict[str, int]  # per device UUID, contexts included, as NVML shows it
    saved_bytes: dict[str, int]  # per device UUID, parked in host memory
    calls: str  # opaque: the counters of all processes; hand it back to `suspend`
    active_at: float  # last moment a process entered a CUDA call or had a kernel running
    suspendable: bool
    suspend_reason: str  # taints, "preload library not loaded", ...
    alive: bool  # at least one process carries this lease
    processes: tuple[ProcessSample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    uuid: str
    used_bytes: int
    utilization_percent: int
    healthy: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at: float
    devices: tuple[DeviceSample, ...]
    leases: tuple[LeaseSample, ...]
    host_available_bytes: int
    host_saved_bytes: int  # suspended state of all leases together


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLimit:
    """Create or change a lease: its directory, limit page and account."""

    lease: str
    uid: int  # owner of the account file; the helper checks that it may
    limits: dict[str, int]  # bytes per device UUID, in the order CUDA shall see them
    suspended: bool = False  # start asleep: processes wait in the library until `resume`


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFiles:
    directory: str  # goes into GPUSHARE_LEASE_DIR


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend:
    """Park the device memory of a lease in host memory.

    ``calls`` is what the sample said that the decision was made on: when the
    counters have moved since, the lease is wanted and stays.  Empty: forced.
    """

    lease: str
    calls: str = ""
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Copy the device memory of a lease back; only into room the driver shows free."""

    lease: str
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Answer to `Suspend` and `Resume`."""

    done: bool
    # When not done: "wanted", "busy" (lock timed out), "no_room", "host_memory",
    # "not_suspendable", "lost", "no_lease"; the lease is then where it was (but "lost").
    refused: str = ""
    reason: str = ""  # a sentence
    bytes: int = 0
    took_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """Send a signal to the processes of a lease (through pidfd)."""

    lease: str
    number: int
    # leader: the oldest process that carries the lease and whose parent does not.
    to: str = "leader"  # or "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Forget a lease: revoke its page, remove its files.  Unknown leases are fine."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    seq: int
    at: float
    kind: EventKind
    lease: str = ""
    device: str = ""
    reason: str = ""
    fields: dict[str, str] = field(default_factory=dict)


def encode(value: Any) -> bytes:
    """One line of JSON for a dataclass or a plain dict, newline included."""
    plain = value if isinstance(value, dict) else asdict(value)
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode() + b"\n"
