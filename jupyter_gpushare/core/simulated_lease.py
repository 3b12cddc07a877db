"""A lease in a replay, with its remaining work and the events that happen to it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from jupyter_gpushare.core import measure
from jupyter_gpushare.core.idle import PauseHistory
from jupyter_gpushare.core.measure import Measure
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.order import attained_gpu_s, gpus

# The minimum interval between reports of a job.  A real job reports every 2 s; no decision differs.
REPORT_S = 60.0
# Maps the part of its work that a job has done to the part that it reports as done.
Reports = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Cell:
    """One execution of a notebook cell on the GPU."""

    submit_at: float
    duration_s: float


class ReplayEvent(enum.IntEnum):
    """Kinds of events; of events at one moment, those that free capacity come first."""

    MOVED = 0  # a transition is complete
    ENDED = 1  # a job, or the running cell of a session, has done its work
    REPORTED = 2  # a job reports its progress
    JUDGED = 3  # the trial of a guest is over
    WATCHED = 4  # a job ran alone for long enough to be a host
    ARRIVED = 5
    CELL = 6  # a cell is submitted


@dataclass(slots=True, eq=False)
class SimulatedLease:
    """A lease and its remaining work."""

    lease: Lease
    duration_s: float  # total work of a job
    cells: Sequence[Cell] = ()
    reports: Reports | None = None
    left_s: float = 0.0  # remaining work of the job or of the running cell
    runs_from_at: float | None = None  # None: it makes no progress
    speed: float = 1.0  # work done per second
    guest: str = ""  # the lease that is its guest
    alone_s: float = 0.0  # time that it ran on a GPU of its own
    stamp: int = 0  # events scheduled under an older stamp are void
    restarts: bool = False
    attempt: int = 1
    measure: Measure | None = None
    next_cell: int = 0  # number of the next cell to be submitted
    due: deque[Cell] = field(default_factory=deque)  # cells that are submitted and not begun
    due_at: float = 0.0  # time since which the first due cell waits only for the GPU
    busy: bool = False  # a cell has begun
    lent: bool = False  # `CellRun.lent` of the due cell
    crowded: bool = False  # `CellRun.crowded` of the due cell
    past: PauseHistory = field(default_factory=PauseHistory)
    pause_s: float = 0.0  # pause before the current or last work
    busy_from_at: float = 0.0

    def __post_init__(self) -> None:
        self.left_s = self.duration_s

    @property
    def is_alone(self) -> bool:
        """Whether it is neither host nor guest."""
        return not self.guest and not self.lease.host

    def settle(self, now: float) -> float:
        """Count the work done since ``runs_from_at``; return the seconds since then."""
        assert self.runs_from_at is not None
        attained = self.attained_gpu_s(now)
        seconds, self.runs_from_at = now - self.runs_from_at, None
        self.left_s -= seconds * self.speed
        if self.is_alone:
            self.alone_s += seconds
        if self.lease.host:
            self.lease = replace(self.lease, attained_gpu_s=attained)
        return seconds

    def attained_gpu_s(self, now: float) -> float:
        """Return the GPU-seconds that a job has received until ``now``, for a guest at its own speed."""
        if not self.lease.host or self.runs_from_at is None:
            return attained_gpu_s(self.lease, now)
        return self.lease.attained_gpu_s + (now - self.runs_from_at) * self.speed * gpus(self.lease)

    def report(self, now: float) -> Lease:
        """Take a progress report of the running job; return its lease with the measured remaining work."""
        if self.reports is None or self.runs_from_at is None:
            return self.lease
        left_s = self.left_s - (now - self.runs_from_at) * self.speed
        self.measure = measure.after(
            self.measure,
            measure.Report(
                attempt=self.attempt,
                done=self.reports(1.0 - left_s / self.duration_s),
                total=1.0,
                attained_gpu_s=self.attained_gpu_s(now),
                gpus=gpus(self.lease),
            ),
        )
        return measure.on(self.lease, self.measure)

    def reports_in_s(self, now: float) -> float:
        """Return the seconds until the next report that matters, at least `REPORT_S`.

        It is an eighth of the remaining work, or of the attained service if that is not measured.
        """
        left = self.measure.left_gpu_s if self.measure else None
        gpu_s = self.attained_gpu_s(now) if left is None else left
        return max(REPORT_S, gpu_s / gpus(self.lease) / 8)
