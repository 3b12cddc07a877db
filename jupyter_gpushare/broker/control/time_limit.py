"""The maximum run time of jobs.

It counts while a job runs, in all of its attempts together; pauses do not count.  The owner
reads when it ends, and once more in the log of decisions `ANNOUNCED_S` before.  At its end
the job is stopped as by its owner, with its grace, and has then timed out.
"""

from __future__ import annotations

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control.announcer import Announcer
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import Stopping
from jupyter_gpushare.core.model import State
from jupyter_gpushare.protocol import wire

# Before the end; of a shorter run, at half of it.
ANNOUNCED_S = 300.0


def limit_s(job: JobRecord) -> float | None:
    """Return the maximum run time of a job in seconds; None: it has none."""
    return wire.decode_stored(job.request, wire.JobTerms).max_run_s


def left_s(job: JobRecord, record: LeaseRecord, now: float) -> float | None:
    """Return for how many seconds a job may still run; None: it has no maximum, or does not run."""
    limit = limit_s(job)
    if limit is None or record.state is not State.RUNNING:
        return None
    return limit - job.ran_s - max(0.0, now - record.entered_at)


def why_over(job: JobRecord) -> wire.Text | None:
    """Return the reason of a job that has run for its maximum; None: it has not."""
    limit = limit_s(job)
    if limit is None or job.ran_s < limit:
        return None
    return messages.text("job.timed_out", messages.duration_text(limit))


class TimeLimits:
    """Announces and enforces maximum run times, in every round of the loop."""

    def __init__(self, registry: Registry, announcer: Announcer) -> None:
        self._registry = registry
        self._announcer = announcer

    async def apply(self, now: float) -> None:
        """Stop jobs that have run for their maximum, and announce that of others.

        Raises:
            DiskFull: nothing is changed.
            StoreError: the database failed; the broker ends.
        """
        registry = self._registry
        for record in list(registry.index.placed.values()):
            job = registry.job_of(record) if record.is_job else None
            if job is None or job.exit_code is not None or (left := left_s(job, record, now)) is None:
                continue
            observation = registry.observations[record.id]
            if left <= 0:
                await registry.advance(record, Stopping(reason="its maximum run time is over"))
            elif not observation.end_announced and left <= min(ANNOUNCED_S, (limit_s(job) or 0.0) / 2):
                observation.end_announced = True
                told = messages.duration_text(left)
                await registry.record_notice(record, "time_limit", "notice.time_limit", told)
                notice = messages.text("job.stopped_in", told)
                self._announcer.job("attention", job, "running", messages.english(notice))
