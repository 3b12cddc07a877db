"""Reports of job runners: start of the command, progress, end."""

from __future__ import annotations

from dataclasses import replace

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control.ending import bounded, outcome_for_runner, with_end
from jupyter_gpushare.broker.control.requests import RequestService
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.transitions import Started
from jupyter_gpushare.core import measure, order
from jupyter_gpushare.core.model import State
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire

# Reports that are answered with the outcome for the job.
_ENDS = frozenset({"stopping", "ended"})


class JobReports:
    """Stores what runners report."""

    def __init__(self, requests: RequestService) -> None:
        self.registry = requests.registry
        self.effects = requests.effects
        self._requests = requests

    async def report(
        self, user: str, job_id: str, attempt: int, report: wire.JobReport
    ) -> wire.JobOutcome | None:
        """Store a runner's report of its attempt; a report of another attempt is ignored.

        Return the outcome for the job after ``stopping`` and ``ended``; None after other reports.

        Raises:
            NotFound: the user has no such job.
            InvalidRequest: no process can have this exit code.
        """
        if report.exit_code is not None and not -64 <= report.exit_code <= 255:
            raise InvalidRequest("exit_code is a number from 0 to 255, or a signal's, negative")
        registry = self.registry
        job = await self._requests.job(user, job_id)
        record = registry.leases.get(job.lease_id)
        # A requeued lease keeps the number of its last attempt.
        if record is None or record.attempt != attempt or record.state is State.PENDING:
            await registry.journal.durable()
            return outcome_for_runner(record, job) if report.state in _ENDS else None
        match report.state:
            case "stopping":
                await registry.journal.durable()
                return outcome_for_runner(record, job)
            case "started":
                if record.state is State.GRANTED:
                    job = replace(job, started_at=job.started_at or registry.iso_now())
                    await registry.advance(record, Started(), job=job)
                    self.effects.announcer.job("started", job, "running")
                else:
                    await registry.journal.durable()
            case "ended":
                end = bounded(report)
                registry.observations[record.id].end = end  # kept here, because a full disk may refuse it
                job = with_end(job, end, registry.iso_now())
                if record.state is State.GRANTED:
                    await registry.advance(record, Started(), job=job)
                else:
                    await registry.put_job(job)
                return outcome_for_runner(registry.leases.get(record.id), registry.jobs.get(job.id, job))
            case "progress":
                await self._progress(record, job, report)
        return None

    async def _progress(self, record: LeaseRecord, job: JobRecord, report: wire.JobReport) -> None:
        """Store a job's progress, and the measure of its remaining work; progress None withdraws it."""
        registry, before = self.registry, job.measure
        job = replace(job, done=report.done, total=report.total)
        as_guest = registry.observations[record.id].guest_gpu_s
        attained = order.attained_gpu_s(record.lease, registry.clock()) + as_guest
        gpus = order.gpus(record.lease)
        if report.done is None:
            now = measure.withdrawn(before, attempt=record.attempt, attained_gpu_s=attained, gpus=gpus)
            job = replace(job, measure=now)
        elif report.total is not None and record.state is State.RUNNING:
            seen = measure.Report(
                attempt=record.attempt,
                done=report.done,
                total=report.total,
                attained_gpu_s=attained,
                gpus=gpus,
            )
            job = replace(job, measure=measure.after(before, seen))
        if measure.on(record.lease, job.measure) != measure.on(record.lease, before):
            registry.changed.set()
        await registry.put_progress(job)
        if notice := messages.measured(record.lease, before, job.measure):
            await registry.record_notice(record, "progress", *notice)
