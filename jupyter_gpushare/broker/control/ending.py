"""How attempts end: by the maximum run time, by the end of the processes, and what becomes of the job.

A job's runner kills its command at the end of the grace period, writes the result and reports
it; only then it may be killed.  So a job whose runner is late loses its processes on time,
and its result `RECORD_S` later at the earliest.  Whether a lease is gone is said by measurements
that began after it entered its state.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, replace
from typing import cast

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import DeviceBackend
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.announcer import Announcer
from jupyter_gpushare.broker.control.observer import Observer
from jupyter_gpushare.broker.state.observations import STALE_S
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import Stopping
from jupyter_gpushare.core.model import State, Why
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")


# ---- the maximum run time of jobs --------------------------------------------
# It counts while a job runs, in all of its attempts together; pauses do not count.  The owner
# reads when it ends, and once more in the log of decisions `ANNOUNCED_S` before.  At its end
# the job is stopped as by its owner, with its grace, and has then timed out.

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


async def apply_time_limits(registry: Registry, announcer: Announcer, now: float) -> None:
    """Stop jobs that have run for their maximum, and announce that of others.

    Raises:
        DiskFull: nothing is changed.
        StoreError: the database failed; the broker ends.
    """
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
            announcer.job("attention", job, "running", messages.english(notice))


# ---- what becomes of a job after an attempt: cancelled, finished, preempted, lost or failed

# Of what a runner says about an end: a sentence, and the last lines that its command printed.
_REASON_LINES = 6
_REASON_CHARS = 300  # of each line


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """A job after an attempt: with a ``result`` it has ended, without it waits for the next attempt."""

    result: str
    reason: wire.Text
    job: JobRecord  # with this attempt counted


def bounded(report: wire.JobReport) -> wire.JobReport:
    """Return a report with no more of its reason than is stored."""
    return wire.replace(report, reason=_plain(report.reason))


def with_end(job: JobRecord, report: wire.JobReport, at: str) -> JobRecord:
    """Return a job with a `bounded` report of its end; ``at`` is the time (ISO 8601) of the report."""
    return replace(
        job,
        exit_code=1 if report.exit_code is None else report.exit_code,
        stopped=report.stopped,
        reason_texts=messages.reason_texts(report.reason),
        done=job.done if report.done is None else report.done,
        total=job.total if report.total is None else report.total,
        started_at=job.started_at or at,
    )


def _plain(reason: str) -> str:
    """Return what a runner said, bounded; only its line breaks stay of what is not printable."""
    lines = reason.splitlines()[:_REASON_LINES]
    return "\n".join(messages.printable(line[:_REASON_CHARS]) for line in lines)


def outcome_of(record: LeaseRecord, job: JobRecord) -> AttemptEnd:
    """Return what an attempt that has ended, or is about to stop, makes of its job."""
    # Neither is a failure of its own: its memory was lost, or it was ended for its host.
    lost = (record.lost or record.why == Why.CANNOT_YIELD) and job.exit_code != 0
    if record.lease.cancelled:
        return AttemptEnd("cancelled", messages.text("job.cancelled"), job)
    if job.exit_code is not None and not job.stopped and not lost:
        if job.exit_code == 0:
            # A reason says what its log lacks.
            done = job.reason_texts[0] if job.reason_texts else messages.text("job.done")
            return AttemptEnd("succeeded", done, job)
        code = messages.text("job.ended_with", job.exit_code)
        return _after_failure(job, job.reason_texts[0] if job.reason_texts else code)
    if (over := why_over(job)) is not None:
        return AttemptEnd("timed_out", over, job)
    if record.requeue or job.stopped:
        preemptions = job.preemptions + (1 if record.requeue else 0)
        return AttemptEnd("", messages.text("job.back_in_queue"), replace(job, preemptions=preemptions))
    return _after_failure(job, messages.text("job.vanished"))


def _after_failure(job: JobRecord, reason: wire.Text) -> AttemptEnd:
    job = replace(job, failures=job.failures + 1)
    return AttemptEnd("" if job.failures <= job.retries else "failed", reason, job)


def result_state(result: str) -> wire.JobState:
    """Return the state of a job with a result; of one without: that it waits."""
    return cast(wire.JobState, result or "queued")


def outcome_told(record: LeaseRecord | None, job: JobRecord) -> wire.JobOutcome:
    """Return what a runner is told of its job after an attempt; without a record it has ended before."""
    if job.result or record is None or record.state is State.PENDING:
        return wire.JobOutcome(state=result_state(job.result), reason=job.reason)
    outcome = outcome_of(record, job)
    return wire.JobOutcome(state=result_state(outcome.result), reason=messages.english(outcome.reason))


# ---- the end of the processes ------------------------------------------------

# Between two looks at a lease that starts or ends.
LOOK_S = 0.2
# The processes of a job are killed this long after the grace period; the runner kills them at the end of it.
KILL_MARGIN_S = 0.4
# A runner that has not reported by then is killed this much later.
RECORD_S = 2.0
# A runner that has reported its end, or was killed, exits within this time or is killed (again).
EXIT_S = 5.0
# Processes that outlive the runner of their job, or have just begun, are killed this long after SIGTERM.
LEFTOVER_S = 2.0


class Ending:
    """Ends the processes of leases."""

    def __init__(self, registry: Registry, devices: DeviceBackend, observer: Observer) -> None:
        self._registry = registry
        self._devices = devices
        self._observer = observer

    async def of_job(self, record: LeaseRecord) -> None:
        """Return when a job that is to stop is gone: what it started has its grace period."""
        registry = self._registry
        job, sample = registry.job_of(record), registry.observations[record.id].sample
        grace_s = (
            min(job.grace_s, registry.policy.max_grace_s) if job is not None else registry.policy.grace_s
        )
        if sample is not None and sample.runner_ended:
            # What is left reports no result, whatever it saves.
            await self.until_gone(record, LEFTOVER_S, tell="all")
        elif job is None or job.exit_code is None:
            await self.until_gone(record, grace_s + KILL_MARGIN_S, tell="leader")
        else:
            await self.until_gone(record, grace_s + EXIT_S)

    async def until_gone(self, record: LeaseRecord, kill_after_s: float, *, tell: str = "") -> None:
        """Return when a lease has no process and the driver shows no memory of it.

        ``tell``: its ``leader`` or ``all`` get SIGTERM first; it may begin only just now, and the
        time until SIGKILL counts from then.
        """
        clock, observation = self._registry.clock, self._registry.observations[record.id]
        kill_at, spares_runner, is_first = clock() + kill_after_s, tell == "leader", True
        waits_for_record = False
        while True:
            alive = observation.sample is not None and observation.sample.alive
            if tell and (is_first or alive):
                if await self._devices.signal(record.handle, signal.SIGTERM, tell):
                    kill_at, tell = clock() + kill_after_s, ""
                is_first = False
            await self._observer.measure()
            if observation.is_gone and snapshot.sampled_since_entry(self._registry, record):
                return
            now = clock()
            if now >= kill_at or (waits_for_record and self._has_reported(record)):
                waits_for_record = spares_runner and not self._has_reported(record)
                to, spares_runner = "others" if waits_for_record else "all", False
                log.warning("lease=%s has processes after its grace: killing %s", record.handle, to)
                await self._devices.signal(record.handle, signal.SIGKILL, to)
                kill_at = now + (RECORD_S if waits_for_record else EXIT_S)
            await asyncio.sleep(min(LOOK_S, kill_at - now))

    def _has_reported(self, record: LeaseRecord) -> bool:
        """Whether the result of an attempt is known: its record is on disk before it is reported."""
        job = self._registry.job_of(record)
        return job is None or job.exit_code is not None

    async def is_gone_now(self, record: LeaseRecord) -> bool:
        """Return whether a measurement that begins from now on shows nothing of a lease; False: none came."""
        clock, observation = self._registry.clock, self._registry.observations[record.id]
        asked_at = clock()
        while observation.measured_at <= asked_at and clock() - asked_at <= STALE_S:
            await asyncio.sleep(LOOK_S)
            await self._observer.measure()
        return observation.measured_at > asked_at and observation.is_gone
