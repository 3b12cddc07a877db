"""What is observed and not stored: leases, devices, and what an administrator has to mend."""

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

# Utilization from which a GPU computes, in percent.
COMPUTES_PERCENT = 2
# A session without a call of the driver for so long does not keep its GPU busy.
STILL_S = 600.0
# A longer time without a measurement counts for nothing.
GAP_S = 60.0


@dataclass(slots=True)
class LowUse:
    """Since when a session's processes enter the driver while its GPUs stay below `COMPUTES_PERCENT`.

    The driver does not split utilization between processes, so a fraction counts only while its
    neighbours do not compute either.  Not stored: it begins anew with the broker.
    """

    since_at: float | None = None
    entered_at: float = 0.0  # the last call of the driver
    seen_at: float = 0.0  # the last measurement
    is_told: bool = False  # once for each such time

    def saw(self, entered_at: float, utilization_percent: int | None, now: float) -> None:
        """Add a measurement: the last call of the driver, and the highest utilization of its GPUs."""
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
        """Forget what was seen: the session computes, is idle, or has no GPU."""
        self.since_at, self.is_told = None, False

    @property
    def lasted_s(self) -> float:
        """For how long it has lasted, up to the last call of the driver, in seconds; 0: it does not."""
        return 0.0 if self.since_at is None else max(0.0, self.entered_at - self.since_at)


# ---- leases ------------------------------------------------------------------


@dataclass(slots=True)
class PauseTracker:
    """The history of a session's pauses, for its adaptive idle timeout; not stored."""

    past: PauseHistory = field(default_factory=PauseHistory)
    idle_from: float | None = None  # None: at work
    busy_from: float = 0.0
    pause_s: float = 0.0  # the last one

    def saw(self, idle_since: float | None, now: float) -> float | None:
        """Add an observation: idle since ``idle_since``, or busy (None).

        Returns the seconds of the work that it ends, from `busy_from` on; None: it ends none.
        """
        if idle_since is None and self.idle_from is not None:
            self.pause_s, self.busy_from, self.idle_from = now - self.idle_from, now, None
        elif idle_since is not None and self.idle_from is None:
            worked_s = max(0.0, idle_since - self.busy_from)
            self.past = self.past.after(self.pause_s, worked_s)
            self.idle_from = idle_since
            return worked_s
        return None


# States of a lease in which its owner's request to have it back counts.
_AWAY = frozenset({State.SUSPENDING, State.SUSPENDED, State.RESUMING})
# States into which an earlier request is carried; every other state begins without one.
_KEEPS_REQUEST = _AWAY - {State.SUSPENDING}


# A cell or another request that takes less wakes its session by counted calls alone.
STALLED_BUSY_S = 5.0


@dataclass(frozen=True, slots=True)
class KernelEnded:
    """How the process of a kernel ended, as its server reported it: a hint."""

    name: str
    how: str
    code: int | None
    at: float  # on the broker's clock


# Ends of kernels that are remembered of one server.
_MOST_ENDS = 64


@dataclass(slots=True)
class Loss:
    """Saved GPU memory that is gone, of which it may still be reported what ended its processes."""

    since: float
    at: str  # the same moment, ISO 8601
    lost_bytes: int
    gone: tuple[ProcessSample, ...] = ()


@dataclass(slots=True)
class PeakMemory:
    """The most memory that a lease used on one of its devices in its last `WATCHED_S`; not stored."""

    since_at: float | None = None
    seen_at: float = 0.0
    _minutes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=int(WATCHED_S / 60) + 1))

    def saw(self, used_bytes: int, now: float) -> None:
        """Add a measurement; after a gap it begins anew."""
        if self.since_at is None or now - self.seen_at > GAP_S:
            self.reset()
            self.since_at = now
        self.seen_at = now
        minute = int(now // 60)
        before = self._minutes.pop()[1] if self._minutes and self._minutes[-1][0] == minute else 0
        self._minutes.append((minute, max(before, used_bytes)))

    def reset(self) -> None:
        """Watch anew."""
        self.since_at = None
        self._minutes.clear()

    def peak(self, now: float) -> int | None:
        """Return it in bytes; None: it was not watched for so long."""
        if self.since_at is None or now - self.since_at < WATCHED_S:
            return None
        return max(used for _, used in self._minutes)


@dataclass(frozen=True, slots=True)
class Companion:
    """The other job on the GPU of a host or of a guest, and the parts of their speeds that both keep.

    A host has one guest, however many devices it holds.
    """

    role: Literal["host", "guest"]  # of the lease that this is an observation of
    other: str  # id of the other lease
    # Of a host's rate alone, by the last judgement; of a guest's own rate alone.  None: not known.
    kept: float | None = None
    # Part of its device's time that the guest gets, from 0 to 1.
    guest_gets: float = 0.0
    began_at: float = 0.0  # on the broker's clock

    @property
    def granted(self) -> float:
        """The part of the device's time that this lease is granted in turns."""
        return GUEST_SHARE if self.role == "guest" else 1 - GUEST_SHARE


@dataclass(slots=True)
class Observation:
    """Measurements and hints about one lease; not stored."""

    sample: LeaseSample | None = None  # None: not measured, or unknown to the helper
    measured_at: float = float("-inf")
    seen_alive: bool = False
    share_asked: ComputeShare | None = None  # of the helper, last; None: not by this broker
    companion: Companion | None = None  # None: it shares its devices with no other job
    rates: Rates = field(default_factory=Rates)  # of a job whose owner lets it share its GPU
    peak: PeakMemory = field(default_factory=PeakMemory)  # likewise
    # The most that it used on a device since the broker's start, or had as a guest when it needed more.
    most_bytes: int = 0
    guest_gpu_s: float = 0.0  # that it got in its present time as a guest
    left_host: tuple[str, float] | None = None  # why the helper suspended it, and the seconds that took
    gone_since_at: float | None = None  # the first measurement in a row that missed its processes
    pauses: PauseTracker = field(default_factory=PauseTracker)
    active_at: float = 0.0  # last sign of work on the GPU
    low_use: LowUse = field(default_factory=LowUse)
    # Kernels that run a cell and how many each has begun, by their server's last report: hints.
    busy: Mapping[str, int] = field(default_factory=dict)
    requested_at: float | None = None  # a kernel has handled requests since, cells or others; None: none does
    woken_by_stall: bool = False  # in the present requests
    end: JobReport | None = None  # of a job: its runner reported it; a full disk may have refused it
    end_announced: bool = False  # of its maximum run time
    kernel_active_at: float = 0.0
    kernels: dict[str, str] = field(default_factory=dict)  # kernel id -> name
    wanted_at: float | None = None  # its owner needs it since; `want`, `decline` and `enter` write it
    declined: bool = False  # its owner lets it sleep: the calls that wait do not wake it
    retry_at: float = 0.0  # nothing is planned for it before
    made_way_for: str = ""  # lease that its devices were freed for; "" once it has some again
    # Nodes without capacity for its server, and devices that it was refused to move to, until
    avoids: dict[str, float] = field(default_factory=dict)
    resumes_refused: int = 0  # in a row
    effect_retry_at: float = 0.0  # a failed effect is not tried again before
    not_suspendable: str = ""  # the driver refused, until retry_at
    progress_stored_at: float = float("-inf")
    # Of its kernels, by their server's reports: when a setting may end each, and how those ended that did.
    kernel_ends_at: Mapping[str, float] = field(default_factory=dict)
    kernels_ended: dict[str, KernelEnded] = field(default_factory=dict)
    # Its processes in the last sample before a loss, and when that was; None: there is none.
    sleepers: tuple[ProcessSample, ...] = ()
    sleepers_at: float | None = None
    loss: Loss | None = None  # not told yet
    has_lost: bool = False  # since it fell asleep last

    @property
    def gpu_active_at(self) -> float:
        """Last sign of work on the GPU, as the helper knows it, also from before the broker's start."""
        return self.active_at if self.sample is None else self.sample.active_at

    @property
    def is_gone(self) -> bool:
        """Whether the last measurement shows no process of the lease, none that may be, and no memory."""
        return self.sample is None or self.sample.is_gone

    @property
    def vanished_s(self) -> float:
        """For how long measurements have missed its processes, in seconds; the newest one counts."""
        return 0.0 if self.gone_since_at is None else self.measured_at - self.gone_since_at

    @property
    def kernel_busy(self) -> bool:
        """Whether a kernel runs a cell."""
        return bool(self.busy)

    def report_kernels(self, cells: Mapping[str, int], *, requests: bool, now: float) -> bool:
        """Note which kernels run which cell, and whether any handles a request.

        Returns whether it changed that a cell runs.
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
        while len(self.kernels_ended) > _MOST_ENDS:
            del self.kernels_ended[next(iter(self.kernels_ended))]

    def wake_by_stall(self, now: float) -> bool:
        """Return whether a stalled process wakes the lease: once in requests that last `STALLED_BUSY_S`."""
        if self.requested_at is None or now - self.requested_at < STALLED_BUSY_S or self.woken_by_stall:
            return False
        self.woken_by_stall = True
        return True

    @property
    def wanted(self) -> bool:
        """Whether the owner needs the lease and does not have it."""
        return self.wanted_at is not None

    def want(self, state: State, now: float) -> bool:
        """Note that the owner needs a lease in ``state``; return whether that is new and counts there."""
        if state not in _AWAY or self.wanted:
            return False
        self.wanted_at, self.declined = now, False
        return True

    def decline(self) -> None:
        """Note that the owner lets it sleep, until the next cell begins or the owner asks for it."""
        self.wanted_at, self.declined = None, True

    def enter(self, state: State, for_lease: str = "") -> None:
        """Note that the lease enters ``state``: an earlier request stays where `_KEEPS_REQUEST` has it.

        ``for_lease``: the lease that it gives its devices to.

        What was measured about an attempt ends with it.
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


# No usual wake time from fewer wake-ups.
_LEAST_WAKES = 10


@dataclass(slots=True)
class WakeTimes:
    """Durations of the last wake-ups, in seconds from the first GPU call; not stored."""

    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=100))

    def usual(self) -> tuple[float, float, float] | None:
        """Return the 10th, 50th and 90th percentile in seconds; None: too few wake-ups."""
        if len(self.took_s) < _LEAST_WAKES:
            return None
        tenths = quantiles(self.took_s, n=10, method="inclusive")
        return tenths[0], median(self.took_s), tenths[-1]


# ---- what the device helper said last: the one place that reads its inventory and samples

# After this many seconds without a sample the devices are unknown and nothing is decided.
STALE_S = 5.0


@dataclass(slots=True)
class DeviceObservations:
    """Inventory and last sample; not stored, measured again after a restart."""

    inventory: Inventory | None = None
    sample: Sample | None = None
    sampled_at: float = float("-inf")  # when the devices were measured, on the clock of this machine
    orphaned: dict[str, str] = field(default_factory=dict)  # device UUID -> lease missing in the database
    drains: Drains = field(default_factory=Drains)  # stored, other than all above

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
        """Host memory that suspended leases may take."""
        return self.inventory.host_budget_bytes if self.inventory else 0

    @property
    def host_saved_bytes(self) -> int:
        """Host memory that suspended leases take."""
        return self.sample.host_saved_bytes if self.sample else 0

    def for_planner(self) -> Iterator[PlannerDevice]:
        """Yield all devices as the planner sees them.

        A device that the last sample does not show, that holds an orphaned lease, that is being emptied, or
        with memory in use that was not granted is not usable.
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
                # Processes on a cluster, and those of a MIG instance, can open nothing else.
                movable=device.movable and bool(self.inventory.host) and not device.profile,
            )

    def limits(self, size: Size, uuids: Iterable[str], held_milli: int) -> dict[str, int]:
        """Return the memory limits of a lease that holds ``held_milli`` of each device, bytes per UUID."""
        grantable = {device.uuid: device.grantable_bytes for device in self.for_planner()}
        return {uuid: size.memory_bytes or grantable[uuid] * held_milli // WHOLE_GPU for uuid in uuids}

    def model_name(self, uuids: Collection[str]) -> str:
        """Return the models of these devices, for people; empty when none is known."""
        return " and ".join(dict.fromkeys(d.name for d in self.listed if d.uuid in uuids))

    def nodes_of(self, uuids: Collection[str]) -> frozenset[str]:
        """Return the nodes of these devices."""
        return frozenset(d.node for d in self.for_planner() if d.uuid in uuids)

    def have_left(self, uuids: Collection[str]) -> bool:
        """Return whether a cluster measures none of these devices any more: their node has left it."""
        measured = {device.uuid for device in self.measured}
        is_cluster = self.inventory is not None and not self.inventory.host
        return is_cluster and bool(uuids) and measured.isdisjoint(uuids)

    def level(self, uuid: str) -> str:
        """Return how the memory limit is enforced on a device; empty for an unknown one."""
        return next((str(d.level) for d in self.listed if d.uuid == uuid), "")

    def suspend_obstacle(self, uuids: Collection[str]) -> str:
        """Return why nothing can be suspended on one of these devices; empty when it can."""
        return next((d.suspend_reason for d in self.listed if not d.suspendable and d.uuid in uuids), "")

    def move_obstacle(self, uuids: Collection[str]) -> str:
        """Return why nothing suspended on one of these devices can move; empty: it can."""
        found = (d for d in self.for_planner() if d.uuid in uuids and not d.movable)
        reasons = {d.uuid: d.move_reason for d in self.listed}
        return next((reasons[d.uuid] or "it cannot move from this GPU" for d in found), "")

    def copy_rates(self, uuids: Collection[str]) -> tuple[float, float]:
        """Return bytes per second of a suspension and of a resume; 0: unknown.

        Of the slowest of these devices, as the self-test measured them.
        """
        found = [d for d in self.listed if d.uuid in uuids]
        suspend = min((d.suspend_bytes_per_s for d in found), default=0.0)
        return suspend, min((d.resume_bytes_per_s for d in found), default=0.0)

    def most_utilization_percent(self, uuids: Collection[str]) -> int | None:
        """Return the highest utilization of these devices; None: not measured, as of MIG instances."""
        if any(device.profile for device in self.listed if device.uuid in uuids):
            return None
        return max((d.utilization_percent for d in self.measured if d.uuid in uuids), default=None)

    def utilization_percent(self, uuids: Collection[str]) -> int | None:
        """Return the mean utilization of these devices; None: not measured."""
        percents = [d.utilization_percent for d in self.measured if d.uuid in uuids]
        return sum(percents) // len(percents) if percents else None


# ---- faults outside the broker -----------------------------------------------
# What an administrator has to mend outside the broker: one sentence per source, for health and the page.

# Sentences kept; a source is a part of the site, of which there are few.
_MOST = 20
# Between two lines in the log about one source: a sentence may name the server that could not start.
_LOG_S = 60.0


class Faults:
    """Faults that were reported and not yet seen to be mended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[str, tuple[str, float]] = {}
        self._logged: dict[str, tuple[str, float]] = {}  # the last sentence in the log; empty: it is over
        self._checks: list[Callable[[], str]] = []

    def check(self, look: Callable[[], str]) -> None:
        """Ask ``look`` at each `sentences`; it returns the fault, or an empty text."""
        self._checks.append(look)

    def found(self, source: str, sentence: str, *, forget_s: float = math.inf) -> None:
        """Note the fault of a source in place of an earlier one; it counts until mended, or ``forget_s``.

        The log has each new sentence, of one source at most one in `_LOG_S`.
        """
        if source not in self._found and len(self._found) >= _MOST:
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
        checked = [said for look in self._checks if (said := look())]
        return [*checked, *(sentence for sentence, _ in self._found.values())]

    def _end_forgotten(self) -> None:
        now = self._clock()
        self.mended(*[source for source, (_, until) in self._found.items() if now >= until])
