"""Measurements and hints about a lease: not stored, and measured again after a restart."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles

from jupyter_gpushare.broker.state.low_use import LowUse
from jupyter_gpushare.core.idle import PauseHistory
from jupyter_gpushare.core.model import HOLDS_CAPACITY, LEAVING, State
from jupyter_gpushare.protocol.helper import LeaseSample
from jupyter_gpushare.protocol.wire import JobReport


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


class WakeRequest(enum.Enum):
    """What becomes of the owner's request to have a lease back, by its state."""

    IGNORED = enum.auto()  # the owner has the lease, or it is about to end
    FRESH = enum.auto()  # an earlier one ended with the state; a new one counts
    KEPT = enum.auto()  # an earlier one stays; a new one counts


WANTED: Mapping[State, WakeRequest] = {
    State.PENDING: WakeRequest.IGNORED,
    State.GRANTED: WakeRequest.IGNORED,
    State.RUNNING: WakeRequest.IGNORED,
    State.SUSPENDING: WakeRequest.FRESH,
    State.SUSPENDED: WakeRequest.KEPT,
    State.RESUMING: WakeRequest.KEPT,
    State.STOPPING: WakeRequest.IGNORED,
    State.RELEASED: WakeRequest.IGNORED,
    State.FAILED: WakeRequest.IGNORED,
}


# A cell that runs for less wakes its session by counted calls alone.
STALLED_BUSY_S = 5.0


@dataclass(slots=True)
class Observation:
    """Measurements and hints about one lease; not stored."""

    sample: LeaseSample | None = None  # None: not measured, or unknown to the helper
    measured_at: float = float("-inf")
    seen_alive: bool = False
    gone_since_at: float | None = None  # the first measurement in a row that missed its processes
    pauses: PauseTracker = field(default_factory=PauseTracker)
    active_at: float = 0.0  # last sign of work on the GPU
    low_use: LowUse = field(default_factory=LowUse)
    # Kernels that run a cell and how often each became busy, by their server's last report.
    busy: Mapping[str, int] = field(default_factory=dict)
    busy_since_at: float | None = None  # a kernel is busy since, a hint of its server; None: idle
    woken_by_stall: bool = False  # in the present cell
    end: JobReport | None = None  # of a job: its runner reported it; a full disk may have refused it
    end_announced: bool = False  # of its maximum run time
    kernel_active_at: float = 0.0
    kernels: dict[str, str] = field(default_factory=dict)  # kernel id -> name
    wanted_at: float | None = None  # its owner needs it since; `want`, `decline` and `enter` write it
    declined: bool = False  # its owner lets it sleep: the calls that wait do not wake it
    retry_at: float = 0.0  # nothing is planned for it before
    made_way_for: str = ""  # lease that its devices were freed for; "" once it has some again
    avoids: dict[str, float] = field(default_factory=dict)  # nodes without capacity for its server, until
    resumes_refused: int = 0  # in a row
    effect_retry_at: float = 0.0  # a failed effect is not tried again before
    not_suspendable: str = ""  # the driver refused, until retry_at
    progress_stored_at: float = float("-inf")

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
        return self.busy_since_at is not None

    def report_kernels(self, kernels: Mapping[str, int], now: float) -> bool:
        """Note which kernels are busy; return whether it changed that one is."""
        if kernels.items() - self.busy.items():
            self.declined = False  # a new cell may need its GPU
        self.busy, busy = kernels, bool(kernels)
        if busy is self.kernel_busy:
            return False
        self.busy_since_at, self.woken_by_stall = now if busy else None, False
        return True

    def wake_by_stall(self, now: float) -> bool:
        """Return whether a stalled process wakes the lease: its kernel is busy long enough, once per cell."""
        if self.busy_since_at is None or now - self.busy_since_at < STALLED_BUSY_S or self.woken_by_stall:
            return False
        self.woken_by_stall = True
        return True

    @property
    def wanted(self) -> bool:
        """Whether the owner needs the lease and does not have it."""
        return self.wanted_at is not None

    def want(self, state: State, now: float) -> bool:
        """Note that the owner needs a lease in ``state``; return whether that is new and counts there."""
        if WANTED[state] is WakeRequest.IGNORED or self.wanted:
            return False
        self.wanted_at, self.declined = now, False
        return True

    def decline(self) -> None:
        """Note that the owner lets it sleep, until the next cell begins or the owner asks for it."""
        self.wanted_at, self.declined = None, True

    def enter(self, state: State, for_lease: str = "") -> None:
        """Note that the lease enters ``state``: an earlier request stays only where `WANTED` keeps it.

        ``for_lease``: the lease that it gives its devices to.

        What was measured about an attempt ends with it.
        """
        if state is State.PENDING:
            self.seen_alive, self.gone_since_at, self.sample, self.end = False, None, None, None
            self.measured_at = float("-inf")
        self.low_use.reset()
        if for_lease or state in HOLDS_CAPACITY - LEAVING:
            self.made_way_for = for_lease
        if WANTED[state] is not WakeRequest.KEPT:
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
