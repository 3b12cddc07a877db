"""What is measured or hinted about a lease: not stored, and measured again after a restart."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median, quantiles

from jupyter_gpushare.core.idle import Past
from jupyter_gpushare.gpu.verbs import LeaseSample


@dataclass(slots=True)
class Habit:
    """What a session's pauses taught so far; forgotten by a restart of the broker."""

    past: Past = field(default_factory=Past)
    idle_from: float | None = None  # None: at work
    busy_from: float = 0.0
    pause_s: float = 0.0  # the last one

    def saw(self, idle_since: float | None, now: float) -> None:
        """Note whether the session is idle now, and since when."""
        if idle_since is None and self.idle_from is not None:
            self.pause_s, self.busy_from, self.idle_from = now - self.idle_from, now, None
        elif idle_since is not None and self.idle_from is None:
            self.past = self.past.after(self.pause_s, max(0.0, idle_since - self.busy_from))
            self.idle_from = idle_since


@dataclass(slots=True)
class Live:
    """What is measured or hinted about a lease; forgotten with the process."""

    sample: LeaseSample | None = None
    seen_alive: bool = False
    gone_since_at: float | None = None  # its processes are gone since
    habit: Habit = field(default_factory=Habit)
    active_at: float = 0.0  # last sign of work on the GPU
    kernel_busy: bool = False  # hint of its server
    kernel_active_at: float = 0.0
    kernels: dict[str, str] = field(default_factory=dict)  # kernel id -> name
    wanted_at: float | None = None  # it sleeps, and its owner needs it since
    retry_at: float = 0.0  # nothing is planned for it before
    resumes_refused: int = 0  # in a row
    effect_retry_at: float = 0.0  # a failed effect is not tried again before
    not_suspendable: str = ""  # the driver refused, until retry_at
    progress_stored_at: float = float("-inf")

    @property
    def wanted(self) -> bool:
        return self.wanted_at is not None

    @classmethod
    def since(cls, now: float) -> Live:
        """Return what is known of a lease that is first looked at now."""
        return cls(active_at=now, habit=Habit(busy_from=now))


# Fewer tell nothing.
_LEAST_WAKES = 10


@dataclass(slots=True)
class Wakes:
    """How long the last wake-ups took, in seconds from the first GPU call; forgotten with the process."""

    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=100))

    def usual(self) -> tuple[float, float, float] | None:
        """Return what one in ten took less than, half, and nine in ten; None: too few are known."""
        if len(self.took_s) < _LEAST_WAKES:
            return None
        tenths = quantiles(self.took_s, n=10, method="inclusive")
        return tenths[0], median(self.took_s), tenths[-1]
