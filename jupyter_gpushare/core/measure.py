"""Remaining work of a job, measured by the progress that it reports and checked against its service.

A job reports ``done`` of ``total`` in a unit of its own.  What is left of the total,
at the rate of the present attempt, is its remaining work in GPU-seconds.  It
counts once the attempt has been measured for `LEAST_S` and `LEAST_PART` of its
work; until then the estimate of the attempt before holds.

Reports come from the job itself, so the attained service checks them.  A job is
doubted for good where (`Doubt`):

* its first report comes after `LEAST_S` with more than `LATEST_PART` done, and with more
  than the first unit, or a total that was measured begins again or changes;
* its work differs by more than `TOLERANCE` from the first estimate, beside what
  attempts say was lost;
* the job attains `TOLERANCE` times the service at which it was to end.

A total that begins again before it was measured counts from there in the first
`LEAST_S` of the attempt.  Later it is an inner progress bar, and the attempt is
not measured.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from math import log2

from jupyter_gpushare.core.model import Lease

LEAST_S = 600.0
LEAST_PART = 0.05
LATEST_PART = 0.1
TOLERANCE = 2.0
# Remaining work below this many GPU-seconds is all the same; above it, within a factor of 2.
LEAST_GPU_S = 60.0


class Doubt(enum.StrEnum):
    """Why the progress of a job is not believed."""

    LATE = "late"  # it began to report late
    RESTARTED = "restarted"  # its total began again or changed
    CHANGED = "changed"  # its remaining work grew or fell at once
    OVERDUE = "overdue"  # it runs for much longer than estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Progress of an attempt, and the service that the job has attained at that moment."""

    attempt: int
    done: float
    total: float
    attained_gpu_s: float
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What the reports of a job have shown."""

    attempt: int
    total: float
    done: float = 0.0
    began_gpu_s: float = 0.0  # attained service at the first report of the attempt
    from_done: float = 0.0  # the rate counts from here ...
    from_gpu_s: float = 0.0  # ... and this attained service
    inner: bool = False  # the bars of this attempt are not those of the job
    left_gpu_s: float | None = None  # remaining work; None: not measured
    at_gpu_s: float = 0.0  # attained service at the last report
    ends_gpu_s: float | None = None  # attained service at the end, by the first estimate
    doubt: Doubt | None = None

    @property
    def trusted_until_gpu_s(self) -> float:
        """Attained service from which the estimate no longer counts."""
        return TOLERANCE * (self.ends_gpu_s or 0.0)

    def left_at(self, attained_gpu_s: float) -> float | None:
        """Remaining GPU-seconds of a job that has attained so many; None: not known."""
        if self.left_gpu_s is None or attained_gpu_s >= self.trusted_until_gpu_s:
            return None
        return max(0.0, self.left_gpu_s - (attained_gpu_s - self.at_gpu_s))

    def doubt_at(self, attained_gpu_s: float) -> Doubt | None:
        """Why the progress of a job does not count that has attained so many GPU-seconds."""
        overdue = self.left_gpu_s is not None and attained_gpu_s >= self.trusted_until_gpu_s
        return Doubt.OVERDUE if overdue else self.doubt


def after(before: Measure | None, report: Report) -> Measure | None:
    """Return what the reports of a job have shown, with one more."""
    if not 0 <= report.done <= report.total or not report.total:
        return before
    if before is None:
        before = _first(report)
    if before.doubt:
        return before
    if report.attempt != before.attempt:
        before = _next_attempt(before, report)
    elif report.done < before.done or report.total != before.total:
        before = _restarted(before, report)
    if before.doubt or before.inner:
        return before
    return _estimated(replace(before, done=report.done, at_gpu_s=report.attained_gpu_s), report)


def on(lease: Lease, measure: Measure | None) -> Lease:
    """Return a job's lease with the remaining work that the planner counts (`rounded`)."""
    left, until = None, 0.0
    if measure is not None and measure.doubt is not None:
        left = 0.0  # trusted no longer
    elif measure is not None and measure.left_gpu_s is not None:
        left, until = rounded(measure.left_gpu_s), measure.trusted_until_gpu_s
    if (left, until) == (lease.left_gpu_s, lease.trusted_until_gpu_s):
        return lease
    return replace(lease, left_gpu_s=left, trusted_until_gpu_s=until)


def rounded(gpu_s: float) -> float:
    """``gpu_s`` rounded down to `LEAST_GPU_S` x 2^n; 0 below."""
    return LEAST_GPU_S * 2.0 ** int(log2(gpu_s / LEAST_GPU_S)) if gpu_s >= LEAST_GPU_S else 0.0


def _first(report: Report) -> Measure:
    """Begin with the first report of a job, which is late where it could have come before."""
    is_first_unit = report.done == 1 < report.total
    has_run = report.attained_gpu_s > LEAST_S * report.gpus
    is_late = has_run and not is_first_unit and report.done > LATEST_PART * report.total
    return Measure(
        attempt=report.attempt,
        total=report.total,
        began_gpu_s=report.attained_gpu_s,
        from_done=report.done,
        from_gpu_s=report.attained_gpu_s,
        doubt=Doubt.LATE if is_late else None,
    )


def _next_attempt(before: Measure, report: Report) -> Measure:
    """Begin where the attempt says, with the rate of the one before until its own is measured.

    What it says was lost comes on top of the first estimate, which holds for all attempts.
    """
    left, ends = before.left_gpu_s, before.ends_gpu_s
    if left is not None and ends is not None:
        todo = before.total - before.done
        if report.total == before.total and todo > 0:
            again = left * (report.total - report.done) / todo
            left, ends = again, ends + max(0.0, again - left)
        else:
            left = None
    return Measure(
        attempt=report.attempt,
        total=report.total,
        began_gpu_s=report.attained_gpu_s,
        from_done=report.done,
        from_gpu_s=report.attained_gpu_s,
        left_gpu_s=left,
        ends_gpu_s=ends,
    )


def _restarted(before: Measure, report: Report) -> Measure:
    if before.left_gpu_s is not None:
        return replace(before, left_gpu_s=None, doubt=Doubt.RESTARTED)
    inner = report.attained_gpu_s - before.began_gpu_s > LEAST_S * report.gpus
    return replace(
        before,
        total=report.total,
        inner=inner,
        from_done=report.done,
        from_gpu_s=report.attained_gpu_s,
    )


def _estimated(now: Measure, report: Report) -> Measure:
    attained = report.attained_gpu_s
    if now.ends_gpu_s is not None and attained >= now.trusted_until_gpu_s:
        return replace(now, left_gpu_s=None, doubt=Doubt.OVERDUE)
    service, done = attained - now.from_gpu_s, report.done - now.from_done
    if service < LEAST_S * report.gpus or done <= 0 or done < LEAST_PART * (report.total - now.from_done):
        return now
    left = service * (report.total - report.done) / done
    ends = now.ends_gpu_s or attained + left
    if not ends / TOLERANCE <= attained + left <= ends * TOLERANCE:
        return replace(now, left_gpu_s=None, doubt=Doubt.CHANGED)
    return replace(now, left_gpu_s=left, ends_gpu_s=ends)
