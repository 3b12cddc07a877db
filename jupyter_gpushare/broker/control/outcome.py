"""What becomes of a job after an attempt: cancelled, finished, preempted, lost or failed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import time_limit
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.core.model import State
from jupyter_gpushare.protocol import wire

# Of what a runner says about an end: a sentence, and the last lines that its command printed.
_REASON_LINES = 6
_REASON_CHARS = 300  # of each line
_STATES: dict[str, wire.JobState] = {
    "": "queued",
    "succeeded": "succeeded",
    "cancelled": "cancelled",
    "timed_out": "timed_out",
}


@dataclass(frozen=True, slots=True)
class Outcome:
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


def outcome_of(record: LeaseRecord, job: JobRecord) -> Outcome:
    """Return what an attempt that has ended, or is about to stop, makes of its job."""
    lost = record.lost and job.exit_code != 0
    if record.lease.cancelled:
        return Outcome("cancelled", messages.text("job.cancelled"), job)
    if job.exit_code is not None and not job.stopped and not lost:
        if job.exit_code == 0:
            return Outcome("succeeded", messages.text("job.done"), job)
        code = messages.text("job.ended_with", job.exit_code)
        return _after_failure(job, job.reason_texts[0] if job.reason_texts else code)
    if (over := time_limit.why_over(job)) is not None:
        return Outcome("timed_out", over, job)
    if record.requeue or job.stopped:
        preemptions = job.preemptions + (1 if record.requeue else 0)
        return Outcome("", messages.text("job.back_in_queue"), replace(job, preemptions=preemptions))
    return _after_failure(job, messages.text("job.vanished"))


def _after_failure(job: JobRecord, reason: wire.Text) -> Outcome:
    job = replace(job, failures=job.failures + 1)
    return Outcome("" if job.failures <= job.retries else "failed", reason, job)


def result_state(result: str) -> wire.JobState:
    """Return the state of a job with a result; of one without: that it waits."""
    return _STATES.get(result, "failed")


def outcome_told(record: LeaseRecord | None, job: JobRecord) -> wire.JobOutcome:
    """Return what a runner is told of its job after an attempt; without a record it has ended before."""
    if job.result or record is None or record.state is State.PENDING:
        return wire.JobOutcome(state=result_state(job.result), reason=job.reason)
    outcome = outcome_of(record, job)
    return wire.JobOutcome(state=result_state(outcome.result), reason=messages.english(outcome.reason))
