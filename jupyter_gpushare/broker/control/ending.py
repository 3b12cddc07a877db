"""How attempts end: the maximum run time, the end of the processes, and the outcome for the job.

At the end of the grace period, a job's runner kills its command, writes the result and reports it.  The
runner may be killed only after that.  So if a runner is late, the other processes are killed on time, and
the runner itself `RECORD_S` later at the earliest.  Only a measurement that began after a lease entered its
state shows whether the lease is gone.
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
# It covers the time in which a job runs, in all its attempts together; pauses do not count.  The owner can
# see when it ends, and gets a line in the log of decisions `ANNOUNCED_S` before the end.  At the end the job
# is stopped with its grace period, as if by its owner, and counts as timed out.

# A short run is announced at half of its maximum.
ANNOUNCED_S = 300.0


def limit_s(job: JobRecord) -> float | None:
    """Return the maximum run time of a job in seconds; None if it has none."""
    return wire.decode_stored(job.request, wire.JobTerms).max_run_s


def left_s(job: JobRecord, record: LeaseRecord, now: float) -> float | None:
    """Return the seconds until a job's maximum run time ends; None if it has none or does not run."""
    limit = limit_s(job)
    if limit is None or record.state is not State.RUNNING:
        return None
    return limit - job.ran_s - max(0.0, now - record.entered_at)


def timeout_reason(job: JobRecord) -> wire.Text | None:
    """Return the reason that ends a job which has run for its maximum; None if it has not."""
    limit = limit_s(job)
    if limit is None or job.ran_s < limit:
        return None
    return messages.text("job.timed_out", messages.duration_text(limit))


async def apply_time_limits(registry: Registry, announcer: Announcer, now: float) -> None:
    """Stop jobs that have run for their maximum, and announce the end of jobs close to it.

    Raises:
        DiskFull: nothing is changed.
        StoreError: the database failed; the broker ends.
    """
    for record in list(registry.index.placed.values()):
        job = registry.job_of(record) if record.is_job else None
        if job is None or job.exit_code is not None or (rest_s := left_s(job, record, now)) is None:
            continue
        observation = registry.observations[record.id]
        if rest_s <= 0:
            await registry.advance(record, Stopping(reason="its maximum run time is over"))
        elif not observation.end_announced and rest_s <= min(ANNOUNCED_S, (limit_s(job) or 0.0) / 2):
            observation.end_announced = True
            duration = messages.duration_text(rest_s)
            await registry.record_notice(record, "time_limit", "notice.time_limit", duration)
            notice = messages.text("job.stopped_in", duration)
            announcer.job("attention", job, "running", messages.english(notice))


# ---- the outcome of an attempt: cancelled, finished, preempted, lost or failed

# Bounds on a runner's reason for an end: a sentence, and the last lines that its command printed.
_REASON_LINES = 6
_REASON_CHARS = 300  # per line


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """A job after an attempt.  With a ``result`` it has ended; without one it waits for its next attempt."""

    result: str
    reason: wire.Text
    job: JobRecord  # with this attempt counted


def bounded(report: wire.JobReport) -> wire.JobReport:
    """Return a report with its reason cut to the part that is stored."""
    return wire.replace(report, reason=_plain(report.reason))


def with_end(job: JobRecord, report: wire.JobReport, at: str) -> JobRecord:
    """Return a job with the values of a `bounded` report of its end, made ``at`` a time (ISO 8601)."""
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
    """Return a bounded reason without unprintable characters other than line breaks."""
    lines = reason.splitlines()[:_REASON_LINES]
    return "\n".join(messages.printable(line[:_REASON_CHARS]) for line in lines)


def outcome_of(record: LeaseRecord, job: JobRecord) -> AttemptEnd:
    """Return the outcome for the job of an attempt that has ended or is about to stop."""
    # A job does not fail because its memory was lost, or because it was ended for its host.
    lost = (record.lost or record.why == Why.CANNOT_YIELD) and job.exit_code != 0
    if record.lease.cancelled:
        return AttemptEnd("cancelled", messages.text("job.cancelled"), job)
    if job.exit_code is not None and not job.stopped and not lost:
        if job.exit_code == 0:
            # Its reason names what is missing in its log.
            done = job.reason_texts[0] if job.reason_texts else messages.text("job.done")
            return AttemptEnd("succeeded", done, job)
        code = messages.text("job.ended_with", job.exit_code)
        return _after_failure(job, job.reason_texts[0] if job.reason_texts else code)
    if (over := timeout_reason(job)) is not None:
        return AttemptEnd("timed_out", over, job)
    if record.requeue or job.stopped:
        preemptions = job.preemptions + (1 if record.requeue else 0)
        return AttemptEnd("", messages.text("job.back_in_queue"), replace(job, preemptions=preemptions))
    return _after_failure(job, messages.text("job.vanished"))


def _after_failure(job: JobRecord, reason: wire.Text) -> AttemptEnd:
    job = replace(job, failures=job.failures + 1)
    return AttemptEnd("" if job.failures <= job.retries else "failed", reason, job)


def result_state(result: str) -> wire.JobState:
    """Return the state of a job with this result; an empty result means that the job waits."""
    return cast(wire.JobState, result or "queued")


def outcome_for_runner(record: LeaseRecord | None, job: JobRecord) -> wire.JobOutcome:
    """Return the answer to a runner whose attempt ends; without a ``record`` the job has already ended."""
    if job.result or record is None or record.state is State.PENDING:
        return wire.JobOutcome(state=result_state(job.result), reason=job.reason)
    outcome = outcome_of(record, job)
    return wire.JobOutcome(state=result_state(outcome.result), reason=messages.english(outcome.reason))


# ---- the end of the processes ------------------------------------------------

# Between two checks of a lease that starts or ends.
LEASE_POLL_S = 0.2
# The broker kills a job's processes this long after the grace period; the runner kills them at its end.
KILL_MARGIN_S = 0.4
# A runner that has not reported by then is killed this long after the other processes.
RECORD_S = 2.0
# A runner that has reported its end, or was killed, is killed (again) if it does not exit within this time.
EXIT_S = 5.0
# Processes that outlive the runner of their job are killed this long after SIGTERM.
LEFTOVER_S = 2.0


class Ending:
    """Ends the processes of leases."""

    def __init__(self, registry: Registry, devices: DeviceBackend, observer: Observer) -> None:
        self._registry = registry
        self._devices = devices
        self._observer = observer

    async def until_job_gone(self, record: LeaseRecord) -> None:
        """Stop a job, and return when it is gone; its processes have the job's grace period."""
        registry = self._registry
        job, sample = registry.job_of(record), registry.observations[record.id].sample
        grace_s = (
            min(job.grace_s, registry.policy.max_grace_s) if job is not None else registry.policy.grace_s
        )
        if sample is not None and sample.runner_ended:
            # Whatever the other processes save, none of them reports a result.
            await self.until_gone(record, LEFTOVER_S, terminate="all")
        elif job is None or job.exit_code is None:
            await self.until_gone(record, grace_s + KILL_MARGIN_S, terminate="leader")
        else:
            await self.until_gone(record, grace_s + EXIT_S)

    async def until_gone(self, record: LeaseRecord, kill_after_s: float, *, terminate: str = "") -> None:
        """Return when a lease has no process and the driver shows no memory of it.

        Its processes get SIGKILL after ``kill_after_s``.  With ``terminate``, its ``leader`` or ``all`` get
        SIGTERM first, as soon as they exist, and the time counts from that signal.
        """
        clock, observation = self._registry.clock, self._registry.observations[record.id]
        kill_at, spares_runner, is_first = clock() + kill_after_s, terminate == "leader", True
        waits_for_record = False
        while True:
            alive = observation.sample is not None and observation.sample.alive
            if terminate and (is_first or alive):
                if await self._devices.signal(record.handle, signal.SIGTERM, terminate):
                    kill_at, terminate = clock() + kill_after_s, ""
                is_first = False
            await self._observer.measure()
            if observation.is_gone and snapshot.sampled_since_entry(self._registry, record):
                return
            now = clock()
            if now >= kill_at or (waits_for_record and self._has_reported(record)):
                waits_for_record = spares_runner and not self._has_reported(record)
                target, spares_runner = "others" if waits_for_record else "all", False
                log.warning("lease=%s has processes after its grace: killing %s", record.handle, target)
                await self._devices.signal(record.handle, signal.SIGKILL, target)
                kill_at = now + (RECORD_S if waits_for_record else EXIT_S)
            await asyncio.sleep(min(LEASE_POLL_S, kill_at - now))

    def _has_reported(self, record: LeaseRecord) -> bool:
        """Return whether an attempt has reported its result, which the runner writes to disk before that."""
        job = self._registry.job_of(record)
        return job is None or job.exit_code is not None

    async def is_gone_now(self, record: LeaseRecord) -> bool:
        """Return whether a new measurement shows nothing of a lease; False if none comes within `STALE_S`."""
        clock, observation = self._registry.clock, self._registry.observations[record.id]
        began_at = clock()
        while observation.measured_at <= began_at and clock() - began_at <= STALE_S:
            await asyncio.sleep(LEASE_POLL_S)
            await self._observer.measure()
        return observation.measured_at > began_at and observation.is_gone
