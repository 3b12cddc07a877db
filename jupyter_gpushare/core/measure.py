"""Remaining work of a job, measured by the progress that it reports and checked against its service.

A job reports ``done`` of ``total`` in a unit of its own.  What is left of the total,
at the rate of the present attempt, is its remaining work in GPU-seconds.  It
counts once the attempt has been measured for `LEAST_S` and `LEAST_PART` of its
work; until then the estimate of the attempt before holds.

Reports come from the job itself, so the order trusts them no further than the
attained service bears them out (`on`):

* A job counts as measured until it has attained `TOLERANCE` times what it needs in all by
  its least estimate and what attempts say was lost.
* A job that is measured late counts with as much as if it had been measured from its
  start: its remaining work begins at all of its work, and ends at 0.

A total that begins again or changes counts from there if it was not measured yet,
in the first `LEAST_S` of the attempt.  Later it is an inner progress bar, and the attempt
is not measured.  So it is after a report that is withdrawn, whose total was not that of the job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from jupyter_gpushare.core.model import Lease

LEAST_S = 600.0
LEAST_PART = 0.05
# An honest job may take a little longer than it said, for example at its restarts.
TOLERANCE = 1.05
# An estimate that is less by a smaller part changes nothing: each change wakes the planner.
LEAST_CHANGE = 0.01
# Remaining work below this many GPU-seconds is all the same; above it, within a factor of 2.
LEAST_GPU_S = 60.0


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
    ends_gpu_s: float | None = None  # attained service at the end, by the least estimate
    late: float = 1.0  # all of the work by the first estimate, over what was left of it then

    def left_at(self, attained_gpu_s: float) -> float | None:
        """Remaining GPU-seconds of a job that has attained so many; None: not known, or it is overdue."""
        left = (self.left_gpu_s or 0.0) - (attained_gpu_s - self.at_gpu_s)
        return left if left > 0 else None


def after(before: Measure | None, report: Report) -> Measure | None:
    """Return what the reports of a job have shown, with one more."""
    if not 0 <= report.done <= report.total or not report.total:
        return before
    if before is None:
        before = _begun(report)
    elif report.attempt != before.attempt:
        before = _next_attempt(before, report)
    elif report.done < before.done or report.total != before.total:
        before = _restarted(before, report)
    if before.inner:
        return before
    return _estimated(replace(before, done=report.done, at_gpu_s=report.attained_gpu_s), report)


def withdrawn(before: Measure | None, *, attempt: int, attained_gpu_s: float, gpus: float) -> Measure | None:
    """Return what the reports of a job have shown, where those of this attempt were not of the whole job."""
    if before is None or before.attempt != attempt:
        return before
    if before.left_gpu_s is None and attained_gpu_s - before.began_gpu_s <= LEAST_S * gpus:
        return None
    return replace(before, inner=True, left_gpu_s=None)


def on(lease: Lease, measure: Measure | None) -> Lease:
    """Return a job's lease with the remaining work that the planner counts (`rounded`), and for how long."""
    left, until = None, 0.0
    if measure is not None and measure.left_gpu_s is not None:
        left, until = rounded(measure.left_gpu_s * measure.late), TOLERANCE * (measure.ends_gpu_s or 0.0)
    if (left, until) == (lease.left_gpu_s, lease.trusted_until_gpu_s):
        return lease
    return replace(lease, left_gpu_s=left, trusted_until_gpu_s=until)


def rounded(gpu_s: float) -> float:
    """``gpu_s`` rounded down to `LEAST_GPU_S` x 2^n; 0 below."""
    return LEAST_GPU_S * 2.0 ** int(log2(gpu_s / LEAST_GPU_S)) if gpu_s >= LEAST_GPU_S else 0.0


def _begun(report: Report) -> Measure:
    """Begin an attempt with its first report."""
    return Measure(
        attempt=report.attempt,
        total=report.total,
        began_gpu_s=report.attained_gpu_s,
        from_done=report.done,
        from_gpu_s=report.attained_gpu_s,
    )


def _next_attempt(before: Measure, report: Report) -> Measure:
    """Begin where the attempt says, with the rate of the one before until its own is measured.

    What it says was lost comes on top of the least estimate, which holds for all attempts.
    """
    todo = before.total - before.done
    if before.left_gpu_s is None or before.ends_gpu_s is None or report.total != before.total or todo <= 0:
        return _begun(report)  # and it is estimated anew
    again = before.left_gpu_s * (report.total - report.done) / todo
    lost = max(0.0, again - before.left_gpu_s)
    # Work that begins again counts as what it is, not as work that was measured late.
    late = max(1.0, before.late * before.left_gpu_s / again) if lost else before.late
    ends = before.ends_gpu_s + lost
    return replace(_begun(report), left_gpu_s=again, ends_gpu_s=ends, late=late)


def _restarted(before: Measure, report: Report) -> Measure:
    runs_long = report.attained_gpu_s - before.began_gpu_s > LEAST_S * report.gpus
    return replace(
        before,
        total=report.total,
        inner=runs_long or before.left_gpu_s is not None,
        left_gpu_s=None,
        from_done=report.done,
        from_gpu_s=report.attained_gpu_s,
    )


def _estimated(now: Measure, report: Report) -> Measure:
    service, done = report.attained_gpu_s - now.from_gpu_s, report.done - now.from_done
    if service < LEAST_S * report.gpus or done <= 0 or done < LEAST_PART * (report.total - now.from_done):
        return now
    left = service * (report.total - report.done) / done
    ends = report.attained_gpu_s + left
    if now.ends_gpu_s is None:
        return replace(now, left_gpu_s=left, ends_gpu_s=ends, late=ends / left if left else 1.0)
    is_less = ends < (1 - LEAST_CHANGE) * now.ends_gpu_s
    return replace(now, left_gpu_s=left, ends_gpu_s=ends if is_less else now.ends_gpu_s)
