"""Remaining work of a job, measured by its progress reports and checked against its attained service.

A job reports ``done`` of ``total`` in a unit of its own.  The rest of the total, at
the rate of the present attempt, is its remaining work in GPU-seconds.  It counts
once the attempt has run for `MIN_S` and has done `MIN_PART` of its work.  Until
then the estimate of the previous attempt holds.

Reports come from the job itself, so the order trusts them only as far as the
attained service confirms them (`on`):

* A job counts as measured until it has attained `TOLERANCE` times its total work: its
  smallest estimate plus the work that attempts report as lost.
* A job that is measured late counts as if it had been measured from its start: its
  remaining work begins at its total work and ends at 0.

A total may restart or change in the first `MIN_S` of an attempt that is not measured yet:
then it counts from there.  Later it is an inner progress bar, and the attempt is not
measured.  Nor is an attempt that withdraws a report because its total was not the job's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2

from jupyter_gpushare.core.model import Lease

MIN_S = 600.0
MIN_PART = 0.05
# An honest job may take a little longer than it reported, for example because of restarts.
TOLERANCE = 1.05
# An estimate that falls by a smaller part changes nothing, because each change wakes the planner.
MIN_CHANGE = 0.01
# The order does not distinguish remaining work below this, nor above it within a factor of 2.
MIN_GPU_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Progress of an attempt, and the service that the job had attained when it reported."""

    attempt: int
    done: float
    total: float
    attained_gpu_s: float
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Result of the reports of a job."""

    attempt: int
    total: float
    done: float = 0.0
    began_gpu_s: float = 0.0  # attained service at the first report of the attempt
    from_done: float = 0.0  # progress from which the rate counts
    from_gpu_s: float = 0.0  # attained service from which the rate counts
    inner: bool = False  # the progress bars of this attempt are not those of the job
    left_gpu_s: float | None = None  # remaining work; None: not measured
    at_gpu_s: float = 0.0  # attained service at the last report
    ends_gpu_s: float | None = None  # attained service at the end, by the smallest estimate
    late: float = 1.0  # total work by the first estimate, divided by the remaining work at that time

    def remaining_at(self, attained_gpu_s: float) -> float | None:
        """Return the remaining GPU-seconds at ``attained_gpu_s``; None: not known, or the job is overdue."""
        left = (self.left_gpu_s or 0.0) - (attained_gpu_s - self.at_gpu_s)
        return left if left > 0 else None


def after(before: Measure | None, report: Report) -> Measure | None:
    """Return the measure of a job after one more report."""
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
    """Return the measure of a job after it withdrew its reports, which were not of the whole job."""
    if before is None or before.attempt != attempt:
        return before
    if before.left_gpu_s is None and attained_gpu_s - before.began_gpu_s <= MIN_S * gpus:
        return None
    return replace(before, inner=True, left_gpu_s=None)


def on(lease: Lease, measure: Measure | None) -> Lease:
    """Return a job's lease with its remaining work (`rounded`) and the service until which it counts."""
    left, until = None, 0.0
    if measure is not None and measure.left_gpu_s is not None:
        left, until = rounded(measure.left_gpu_s * measure.late), TOLERANCE * (measure.ends_gpu_s or 0.0)
    if (left, until) == (lease.left_gpu_s, lease.trusted_until_gpu_s):
        return lease
    return replace(lease, left_gpu_s=left, trusted_until_gpu_s=until)


def rounded(gpu_s: float) -> float:
    """Return ``gpu_s`` rounded down to `MIN_GPU_S` x 2^n; 0 below `MIN_GPU_S`."""
    return MIN_GPU_S * 2.0 ** int(log2(gpu_s / MIN_GPU_S)) if gpu_s >= MIN_GPU_S else 0.0


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
    """Begin an attempt at its reported progress, with the previous rate until its own is measured.

    The work that it reports as lost is added to the smallest estimate, which holds for all attempts.
    """
    todo = before.total - before.done
    if before.left_gpu_s is None or before.ends_gpu_s is None or report.total != before.total or todo <= 0:
        return _begun(report)  # without an estimate
    again = before.left_gpu_s * (report.total - report.done) / todo
    lost = max(0.0, again - before.left_gpu_s)
    # Repeated work is not counted as work that was measured late.
    late = max(1.0, before.late * before.left_gpu_s / again) if lost else before.late
    ends = before.ends_gpu_s + lost
    return replace(_begun(report), left_gpu_s=again, ends_gpu_s=ends, late=late)


def _restarted(before: Measure, report: Report) -> Measure:
    runs_long = report.attained_gpu_s - before.began_gpu_s > MIN_S * report.gpus
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
    if service < MIN_S * report.gpus or done <= 0 or done < MIN_PART * (report.total - now.from_done):
        return now
    left = service * (report.total - report.done) / done
    ends = report.attained_gpu_s + left
    if now.ends_gpu_s is None:
        return replace(now, left_gpu_s=left, ends_gpu_s=ends, late=ends / left if left else 1.0)
    is_less = ends < (1 - MIN_CHANGE) * now.ends_gpu_s
    return replace(now, left_gpu_s=left, ends_gpu_s=ends if is_less else now.ends_gpu_s)
