"""A lease in a replay, with its remaining work and the events that happen to it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jupyter_gpushare.core import measure
from jupyter_gpushare.core.idle import PauseHistory
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.order import attained_gpu_s, gpus

# A job reports no more often than this: a real one does every 2 s, which changes no decision.
REPORT_S = 60.0
# The part of its work that a job says is done, by the part that is.
Reports = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Cell:
    """One execution of a notebook cell on the GPU."""

    submit_at: float
    duration_s: float


class Happening(enum.IntEnum):
    """Kinds of events; at one moment those that free capacity come first."""

    MOVED = 0  # a transition is complete
    ENDED = 1  # a job, or the cell that a session runs, has done its work
    REPORTED = 2  # a job reports its progress
    CAME = 3
    CELL = 4  # a cell is submitted


class SimulatedLease:
    """A lease and its remaining work."""

    __slots__ = (
        "attempt",
        "busy",
        "busy_from_at",
        "cells",
        "crowded",
        "due",
        "due_at",
        "duration_s",
        "lease",
        "left_s",
        "lent",
        "measure",
        "next_cell",
        "past",
        "pause_s",
        "reports",
        "restarts",
        "runs_from_at",
        "stamp",
    )  # fmt: skip

    def __init__(
        self, lease: Lease, work_s: float, cells: Sequence[Cell] = (), reports: Reports | None = None
    ) -> None:
        self.lease = lease
        self.duration_s = work_s
        self.left_s = work_s  # of the job, or of the running cell
        self.runs_from_at: float | None = None  # None: no progress
        self.stamp = 0  # events scheduled under an older stamp are void
        self.restarts = False
        self.attempt = 1
        self.reports = reports
        self.measure: measure.Measure | None = None
        self.cells = cells
        self.next_cell = 0  # the next to be submitted
        self.due: deque[Cell] = deque()  # submitted, not begun
        self.due_at = 0.0  # since when the first of them waits only for the GPU
        self.busy = False  # a cell has begun
        self.lent = self.crowded = False  # state of the devices when the due cell came
        self.past = PauseHistory()
        self.pause_s = 0.0  # before the current or last work
        self.busy_from_at = 0.0

    def report(self, now: float) -> Lease:
        """Take a progress report of the running job; returns its lease with the measured remaining work."""
        if self.reports is None or self.runs_from_at is None:
            return self.lease
        left_s = self.left_s - (now - self.runs_from_at)
        self.measure = measure.after(
            self.measure,
            measure.Report(
                attempt=self.attempt,
                done=self.reports(1.0 - left_s / self.duration_s),
                total=1.0,
                attained_gpu_s=attained_gpu_s(self.lease, now),
                gpus=gpus(self.lease),
            ),
        )
        return measure.on(self.lease, self.measure)

    def reports_in_s(self, now: float) -> float:
        """Seconds until the next report that matters: an eighth of what it is about, at least `REPORT_S`."""
        left = self.measure.left_gpu_s if self.measure else None
        about = attained_gpu_s(self.lease, now) if left is None else left
        return max(REPORT_S, about / gpus(self.lease) / 8)
