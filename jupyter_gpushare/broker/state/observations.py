"""Observations that are not stored: of leases, of devices, and of faults outside the broker."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Literal

from jupyter_gpushare.broker.state.records import Drains
from jupyter_gpushare.core.idle import PauseHistory
from jupyter_gpushare.core.model import HOLDS_CAPACITY, LEAVING, WHOLE_GPU, State
from jupyter_gpushare.core.model import Device as PlannerDevice
from jupyter_gpushare.core.pairs import Rates
from jupyter_gpushare.core.planning.sharing import WATCHED_S
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.protocol.helper import (
    GUEST_SHARE,
    ComputeShare,
    Device,
    DeviceSample,
    Inventory,
    LeaseSample,
    ProcessSample,
    Sample,
)
from jupyter_gpushare.protocol.wire import JobReport, KernelEnd

log = logging.getLogger("gpushare.broker")


# ---- sessions that keep a GPU busy without computing: a program that only polls the driver is never idle

# Minimum utilization of a GPU that computes, in percent.
COMPUTES_PERCENT = 2
# After this time without a driver call a session no longer keeps its GPU busy.
STILL_S = 600.0
# A longer gap between two measurements ends a period.
GAP_S = 60.0


@dataclass(slots=True)
class LowUse:
    """The period in which a session's processes call the driver but its GPUs stay below `COMPUTES_PERCENT`.

    The driver does not split utilization between processes, so a fraction counts only while its
    neighbours do not compute either.  The period is not stored and restarts with the broker.
    """

    since_at: float | None = None
    entered_at: float = 0.0  # the last driver call
    seen_at: float = 0.0  # the last measurement
    is_notified: bool = False  # its notice was sent, once per period

    def saw(self, entered_at: float, utilization_percent: int | None, now: float) -> None:
        """Add a measurement: the last driver call, and the highest utilization of the session's GPUs."""
        computes = utilization_percent is None or utilization_percent >= COMPUTES_PERCENT
        if now - self.seen_at > GAP_S:
            self.reset()
        self.seen_at = now
        if computes or now - entered_at > STILL_S:
            self.reset()
        else:
            self.since_at = now if self.since_at is None else self.since_at
            self.entered_at = entered_at

    def reset(self) -> None:
        """End the period: the session computes, is idle, or has no GPU."""
        self.since_at, self.is_notified = None, False

    @property
    def lasted_s(self) -> float:
        """Seconds from the start of the period to the last driver call; 0 outside a period."""
        return 0.0 if self.since_at is None else max(0.0, self.entered_at - self.since_at)


# ---- leases ------------------------------------------------------------------


@dataclass(slots=True)
class PauseTracker:
    """The history of a session's pauses, for its adaptive idle timeout; not stored."""

    past: PauseHistory = field(default_factory=PauseHistory)
    idle_from: float | None = None  # None: at work
    busy_from: float = 0.0
    pause_s: float = 0.0  # duration of the last pause

    def saw(self, idle_since: float | None, now: float) -> float | None:
        """Add an observation: idle since ``idle_since``, or busy (None).

        Return the seconds of work since `busy_from` that this observation ends, or None if it ends none.
        """
        if idle_since is None and self.idle_from is not None:
            self.pause_s, self.busy_from, self.idle_from = now - self.idle_from, now, None
        elif idle_since is not None and self.idle_from is None:
            worked_s = max(0.0, idle_since - self.busy_from)
            self.past = self.past.after(self.pause_s, worked_s)
            self.idle_from = idle_since
            return worked_s
        return None


# States of a lease in which its owner can ask for it back.
_AWAY = frozenset({State.SUSPENDING, State.SUSPENDED, State.RESUMING})
# States that keep an earlier request; every other state begins without one.
_KEEPS_REQUEST = _AWAY - {State.SUSPENDING}


# A shorter request, such as a cell, wakes its session only by counted calls, not by a stall.
STALLED_BUSY_S = 5.0


@dataclass(frozen=True, slots=True)
class KernelEnded:
    """How a kernel's process ended, as its server reported it; a hint only."""

    name: str
    how: str
    code: int | None
    at: float  # on the broker's clock


# Ends of kernels kept per server.
_MAX_ENDS = 64


@dataclass(slots=True)
class Loss:
    """A loss of saved GPU memory; a report of what ended the processes may still arrive."""

    since: float
    at: str  # the same moment, ISO 8601
    lost_bytes: int
    gone: tuple[ProcessSample, ...] = ()


@dataclass(slots=True)
class PeakMemory:
    """The peak memory of a lease on any of its devices in the last `WATCHED_S` seconds; not stored."""

    since_at: float | None = None
    seen_at: float = 0.0
    _minutes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=int(WATCHED_S / 60) + 1))

    def saw(self, used_bytes: int, now: float) -> None:
        """Add a measurement; start again after a gap of `GAP_S`."""
        if self.since_at is None or now - self.seen_at > GAP_S:
            self.reset()
            self.since_at = now
        self.seen_at = now
        minute = int(now // 60)
        before = self._minutes.pop()[1] if self._minutes and self._minutes[-1][0] == minute else 0
        self._minutes.append((minute, max(before, used_bytes)))

    def reset(self) -> None:
        """Forget all measurements."""
        self.since_at = None
        self._minutes.clear()

    def peak(self, now: float) -> int | None:
        """Return the peak in bytes, or None if the lease was watched for less than `WATCHED_S`."""
        if self.since_at is None or now - self.since_at < WATCHED_S:
            return None
        return max(used for _, used in self._minutes)


@dataclass(frozen=True, slots=True)
class Companion:
    """The other job on the GPU of a host or guest, and the part of its own speed that each keeps.

    A host has one guest, no matter how many devices it holds.
    """

    role: Literal["host", "guest"]  # of the observed lease
    other: str  # id of the other lease
    # Part that a host keeps of its rate alone, by the last judgement, or a guest of its own; None: unknown.
    kept: float | None = None
    # Part of the device's time that the guest gets, from 0 to 1.
    guest_part: float = 0.0
    began_at: float = 0.0  # on the broker's clock

    @property
    def granted(self) -> float:
        """Part of the device's time that this lease is granted in turns."""
        return GUEST_SHARE if self.role == "guest" else 1 - GUEST_SHARE


@dataclass(slots=True)
class Observation:
    """Measurements and hints about one lease; not stored."""

    sample: LeaseSample | None = None  # None: not measured, or unknown to the helper
    measured_at: float = float("-inf")
    seen_alive: bool = False
    requested_share: ComputeShare | None = None  # last request to the helper; None: none by this broker
    companion: Companion | None = None  # None: it shares its devices with no other job
    rates: Rates = field(default_factory=Rates)  # of a job whose owner lets it share its GPU
    peak: PeakMemory = field(default_factory=PeakMemory)  # likewise
    # Maximum that it used on a device since the broker's start, or had as a guest that needed more.
    max_bytes: int = 0
    guest_gpu_s: float = 0.0  # what it got in its present stay as a guest
    left_host: tuple[str, float] | None = None  # why the helper suspended it, and the seconds that took
    gone_since_at: float | None = None  # the first of the latest measurements that all missed its processes
    pauses: PauseTracker = field(default_factory=PauseTracker)
    active_at: float = 0.0  # last sign of work on the GPU
    low_use: LowUse = field(default_factory=LowUse)
    # Cells begun by each kernel that runs one, from its server's last report; hints only.
    busy: Mapping[str, int] = field(default_factory=dict)
    requested_at: float | None = None  # since then a kernel handles requests, such as cells; None: none does
    woken_by_stall: bool = False  # during the present requests
    end: JobReport | None = None  # a job's end as its runner reported it; a full disk may have refused it
    end_announced: bool = False  # the end of its maximum run time was announced
    kernel_active_at: float = 0.0
    kernels: dict[str, str] = field(default_factory=dict)  # kernel id -> name
    wanted_at: float | None = None  # since when its owner needs it; `want`, `decline` and `enter` write it
    declined: bool = False  # its owner lets it sleep, so waiting calls do not wake it
    retry_at: float = 0.0  # nothing is planned for it before this time
    made_way_for: str = ""  # lease that its devices were freed for; "" once it has devices again
    # Until when it avoids nodes without capacity for its server, and devices that refused its move.
    avoids: dict[str, float] = field(default_factory=dict)
    resumes_refused: int = 0  # in a row
    effect_retry_at: float = 0.0  # a failed effect is not tried again before this time
    not_suspendable: str = ""  # why the driver refused; holds until `retry_at`
    progress_stored_at: float = float("-inf")
    # By the reports of its server: when a setting may end each kernel, and how kernels ended.
    kernel_ends_at: Mapping[str, float] = field(default_factory=dict)
    kernels_ended: dict[str, KernelEnded] = field(default_factory=dict)
    # Its processes in the last sample before a loss, and the time of that sample; None: there is none.
    sleepers: tuple[ProcessSample, ...] = ()
    sleepers_at: float | None = None
    loss: Loss | None = None  # its owner has not been notified yet
    has_lost: bool = False  # it lost memory since it was last suspended

    @property
    def gpu_active_at(self) -> float:
        """Last sign of work on the GPU that the helper saw, even before the broker's start."""
        return self.active_at if self.sample is None else self.sample.active_at

    @property
    def is_gone(self) -> bool:
        """Whether the last measurement shows no memory and no process that is or may be of the lease."""
        return self.sample is None or self.sample.is_gone

    @property
    def vanished_s(self) -> float:
        """Seconds for which its processes have been missing, up to the newest measurement."""
        return 0.0 if self.gone_since_at is None else self.measured_at - self.gone_since_at

    @property
    def kernel_busy(self) -> bool:
        """Whether a kernel runs a cell."""
        return bool(self.busy)

    def report_kernels(self, cells: Mapping[str, int], *, requests: bool, now: float) -> bool:
        """Note the cells that kernels run, and whether any kernel handles a request.

        Return whether cells began or stopped running.
        """
        if cells.items() - self.busy.items():
            self.declined = False  # a new cell may need its GPU
        changed = bool(cells) is not self.kernel_busy
        self.busy = cells
        if requests is not (self.requested_at is not None):
            self.requested_at, self.woken_by_stall = now if requests else None, False
        return changed

    def report_ends(self, reports: Iterable[KernelEnd], now: float) -> None:
        """Note how kernels ended."""
        for each in reports:
            self.kernels_ended.pop(each.id[:64], None)
            self.kernels_ended[each.id[:64]] = KernelEnded(
                each.name[:255], each.how, each.code, now - each.ago_s
            )
        while len(self.kernels_ended) > _MAX_ENDS:
            del self.kernels_ended[next(iter(self.kernels_ended))]

    def wake_by_stall(self, now: float) -> bool:
        """Return whether a stalled process wakes the lease: once, after requests of `STALLED_BUSY_S`."""
        if self.requested_at is None or now - self.requested_at < STALLED_BUSY_S or self.woken_by_stall:
            return False
        self.woken_by_stall = True
        return True

    @property
    def wanted(self) -> bool:
        """Whether the owner needs the lease and does not have it."""
        return self.wanted_at is not None

    def want(self, state: State, now: float) -> bool:
        """Note that the owner needs a lease in ``state``; return whether that is new and of effect."""
        if state not in _AWAY or self.wanted:
            return False
        self.wanted_at, self.declined = now, False
        return True

    def decline(self) -> None:
        """Note that the owner lets it sleep until the next cell begins or the owner asks for it."""
        self.wanted_at, self.declined = None, True

    def enter(self, state: State, for_lease: str = "") -> None:
        """Note that the lease enters ``state``, which keeps an earlier request only if in `_KEEPS_REQUEST`.

        ``for_lease`` is the lease that gets its devices.  A new attempt begins without the measurements
        of the last one.
        """
        if state is State.PENDING:
            self.seen_alive, self.gone_since_at, self.sample, self.end = False, None, None, None
            self.measured_at = float("-inf")
        self.low_use.reset()
        self.rates.interrupt()
        self.peak.reset()
        if state is State.SUSPENDING:
            self.has_lost = False
        if for_lease or state in HOLDS_CAPACITY - LEAVING:
            self.made_way_for = for_lease
        if state not in _KEEPS_REQUEST:
            self.wanted_at, self.declined = None, False

    @classmethod
    def since(cls, now: float) -> Observation:
        """Return the observation of a lease that is first seen at ``now``."""
        return cls(active_at=now, pauses=PauseTracker(busy_from=now))


# Minimum number of wake-ups that make a usual wake time.
_MIN_WAKES = 10


@dataclass(slots=True)
class WakeTimes:
    """Durations of the last wake-ups, in seconds from the first GPU call; not stored."""

    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=100))

    def usual(self) -> tuple[float, float, float] | None:
        """Return the 10th, 50th and 90th percentile in seconds, or None after too few wake-ups."""
        if len(self.took_s) < _MIN_WAKES:
            return None
        tenths = quantiles(self.took_s, n=10, method="inclusive")
        return tenths[0], median(self.took_s), tenths[-1]


# ---- the last reports of the device helper: only this section reads its inventory and samples

# Without a sample for this time the devices are unknown and nothing is decided.
STALE_S = 5.0


@dataclass(slots=True)
class DeviceObservations:
    """Inventory and last sample; not stored but measured again after a restart."""

    inventory: Inventory | None = None
    sample: Sample | None = None
    sampled_at: float = float("-inf")  # when the devices were measured, on the clock of this machine
    orphaned: dict[str, str] = field(default_factory=dict)  # device UUID -> lease missing in the database
    drains: Drains = field(default_factory=Drains)  # stored, unlike the fields above

    def are_known(self, now: float) -> bool:
        """Return whether there is an inventory and a sample that is at most `STALE_S` old."""
        return self.inventory is not None and now - self.sampled_at <= STALE_S

    @property
    def listed(self) -> tuple[Device, ...]:
        """All devices of the inventory; empty before the first."""
        return self.inventory.devices if self.inventory else ()

    @property
    def measured(self) -> tuple[DeviceSample, ...]:
        """All devices of the last sample; empty before the first."""
        return self.sample.devices if self.sample else ()

    @property
    def total_milli(self) -> int:
        """Capacity of all devices, in thousandths of a GPU."""
        return WHOLE_GPU * len(self.listed)

    @property
    def left_out(self) -> tuple[str, ...]:
        """A sentence for each device that cannot be leased."""
        return self.inventory.left_out if self.inventory else ()

    @property
    def host_budget_bytes(self) -> int:
        """Maximum of host memory for suspended leases."""
        return self.inventory.host_budget_bytes if self.inventory else 0

    @property
    def host_saved_bytes(self) -> int:
        """Host memory that suspended leases use."""
        return self.sample.host_saved_bytes if self.sample else 0

    def for_planner(self) -> Iterator[PlannerDevice]:
        """Yield all devices as the planner sees them.

        A device is not usable if the last sample does not show it, if it holds an orphaned lease or memory
        that was not granted, or while it is being drained.
        """
        if self.inventory is None:
            return
        healthy = {d.uuid: d.healthy for d in self.sample.devices} if self.sample else None
        closed = {d.uuid for d in self.sample.devices if d.closed} if self.sample else set()
        for device in self.inventory.devices:
            works = device.healthy if healthy is None else healthy.get(device.uuid, False)
            works = works and device.uuid not in self.orphaned
            draining = self.drains.on(device.uuid) is not None or device.uuid in closed
            yield PlannerDevice(
                uuid=device.uuid,
                memory_bytes=device.memory_bytes,
                reserve_bytes=device.reserve_bytes,
                node=device.node or self.inventory.host,
                island=device.island,
                name=device.name,
                profile=device.profile,
                usable=works and not draining,
                draining=works and draining,
                suspendable=device.suspendable,
                # Processes on a cluster or in a MIG instance can open no other device.
                movable=device.movable and bool(self.inventory.host) and not device.profile,
            )

    def limits(self, size: Size, uuids: Iterable[str], held_milli: int) -> dict[str, int]:
        """Return the memory limits, in bytes by UUID, of a lease that holds ``held_milli`` of each device."""
        grantable = {device.uuid: device.grantable_bytes for device in self.for_planner()}
        return {uuid: size.memory_bytes or grantable[uuid] * held_milli // WHOLE_GPU for uuid in uuids}

    def model_name(self, uuids: Collection[str]) -> str:
        """Return the models of these devices as text for people; empty if unknown."""
        return " and ".join(dict.fromkeys(d.name for d in self.listed if d.uuid in uuids))

    def nodes_of(self, uuids: Collection[str]) -> frozenset[str]:
        """Return the nodes of these devices."""
        return frozenset(d.node for d in self.for_planner() if d.uuid in uuids)

    def have_left(self, uuids: Collection[str]) -> bool:
        """Return whether the node of these devices has left the cluster, which no longer measures them."""
        measured = {device.uuid for device in self.measured}
        is_cluster = self.inventory is not None and not self.inventory.host
        return is_cluster and bool(uuids) and measured.isdisjoint(uuids)

    def level(self, uuid: str) -> str:
        """Return how the memory limit is enforced on a device; empty for an unknown one."""
        return next((str(d.level) for d in self.listed if d.uuid == uuid), "")

    def suspend_obstacle(self, uuids: Collection[str]) -> str:
        """Return why nothing can be suspended on one of these devices; empty if it can."""
        return next((d.suspend_reason for d in self.listed if not d.suspendable and d.uuid in uuids), "")

    def move_obstacle(self, uuids: Collection[str]) -> str:
        """Return why a lease suspended on these devices cannot move; empty if it can."""
        found = (d for d in self.for_planner() if d.uuid in uuids and not d.movable)
        reasons = {d.uuid: d.move_reason for d in self.listed}
        return next((reasons[d.uuid] or "it cannot move from this GPU" for d in found), "")

    def copy_rates(self, uuids: Collection[str]) -> tuple[float, float]:
        """Return the bytes per second of a suspension and of a resume; 0 if unknown.

        The self-test measured them; the slowest of these devices counts.
        """
        found = [d for d in self.listed if d.uuid in uuids]
        suspend = min((d.suspend_bytes_per_s for d in found), default=0.0)
        return suspend, min((d.resume_bytes_per_s for d in found), default=0.0)

    def max_utilization_percent(self, uuids: Collection[str]) -> int | None:
        """Return the highest utilization of these devices; None if not measured, as of MIG instances."""
        if any(device.profile for device in self.listed if device.uuid in uuids):
            return None
        return max((d.utilization_percent for d in self.measured if d.uuid in uuids), default=None)

    def utilization_percent(self, uuids: Collection[str]) -> int | None:
        """Return the mean utilization of these devices, or None if not measured."""
        percents = [d.utilization_percent for d in self.measured if d.uuid in uuids]
        return sum(percents) // len(percents) if percents else None


# ---- faults outside the broker -----------------------------------------------
# An administrator must fix these.  Each source has one sentence, for the health check and the page.

# Maximum number of sources with a fault.  A source is a part of the site, so there are few.
_MAX_FAULTS = 20
# Minimum interval of log lines about one source: sentences may differ in the server that failed to start.
_LOG_S = 60.0


class Faults:
    """Faults that were reported and are not known to be fixed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[str, tuple[str, float]] = {}
        self._logged: dict[str, tuple[str, float]] = {}  # the last sentence in the log; empty: fault is over
        self._checks: list[Callable[[], str]] = []

    def check(self, check: Callable[[], str]) -> None:
        """Add a check that each call of `sentences` runs; it returns a fault, or an empty text."""
        self._checks.append(check)

    def found(self, source: str, sentence: str, *, forget_s: float = math.inf) -> None:
        """Replace the fault of a source; it counts until `mended` or for ``forget_s`` seconds.

        Each new sentence is logged, but at most one per source in `_LOG_S`.
        """
        if source not in self._found and len(self._found) >= _MAX_FAULTS:
            return
        self._end_forgotten()
        now, (logged, at) = self._clock(), self._logged.get(source, ("", -math.inf))
        if sentence != logged and now - at >= _LOG_S:
            log.error("%s", sentence)
            self._logged[source] = (sentence, now)
        self._found[source] = (sentence, now + forget_s)

    def mended(self, *sources: str) -> None:
        """Forget the faults of these sources."""
        for source in sources:
            self._found.pop(source, None)
            logged, at = self._logged.get(source, ("", 0.0))
            if logged:
                log.info("%s: works again", source)
                self._logged[source] = ("", at)

    def sentences(self) -> list[str]:
        """Return the faults that are known now."""
        self._end_forgotten()
        checked = [fault for check in self._checks if (fault := check())]
        return [*checked, *(sentence for sentence, _ in self._found.values())]

    def _end_forgotten(self) -> None:
        now = self._clock()
        self.mended(*[source for source, (_, until) in self._found.items() if now >= until])
