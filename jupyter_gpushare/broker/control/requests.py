"""Requests of users and job runners: jobs, and actions on one's own session.

A job is accepted into the queue; no request waits for capacity.  The HTTP
handlers have checked scopes; this module checks which leases and jobs belong to
the caller.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from dataclasses import replace
from math import floor

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.control.ending import bounded, outcome_told, with_end
from jupyter_gpushare.broker.control.job_request import check_job, default_name, job_lease, job_spec
from jupyter_gpushare.broker.control.request_policy import RequestPolicy
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord, UsageRecord, random_id
from jupyter_gpushare.broker.state.registry import Registry, keep_left
from jupyter_gpushare.broker.state.transitions import (
    Started,
    Stopping,
    cancelled,
    kept_until,
    lent,
    sleep_allowed,
)
from jupyter_gpushare.core import measure, order
from jupyter_gpushare.core.model import State, Why
from jupyter_gpushare.errors import (
    Conflict,
    HelperError,
    InvalidRequest,
    KeyReused,
    NotAllowed,
    NotFound,
    TooMany,
)
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import seconds_to_midnight

log = logging.getLogger("gpushare.broker")

# Retry-After of a full queue: jobs end every few minutes.
_QUEUE_RETRY_S = 60.0
# Reports that are answered with what becomes of the job.
_ENDS = frozenset({"stopping", "ended"})


class RequestService:
    """Checks and answers requests; effects carry them out."""

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        effects: Effects,
        request_policy: RequestPolicy,
    ) -> None:
        self.registry = registry
        self.engine = engine
        self.effects = effects
        self.request_policy = request_policy

    # ---- jobs ----------------------------------------------------------------

    async def submit(
        self, user: str, groups: Sequence[str], request: wire.JobRequest, key: str | None
    ) -> JobRecord:
        """Accept a job into the queue; the same request under the same ``key`` returns the first one.

        Raises:
            KeyReused: another request of this user has this key.
            RequestError: it cannot be accepted; the text says what to change.
        """
        registry = self.registry
        owner = registry.owners.of.get(user)
        if key is not None:
            if not 1 <= len(key) <= 255 or "\0" in key:
                raise InvalidRequest("an Idempotency-Key has 1 to 255 characters")
            stored = await registry.store.job_by_key(user, key)
            if stored is not None:
                return _same(registry.jobs.get(stored.id, stored), request)
        check_job(request)
        self.effects.announcer.receivers.check(user, request)
        project = self.request_policy.choose_project(groups, request.project)
        self.request_policy.check_priority(project, request.priority)
        await self.request_policy.known()
        # No other task runs from here until the job is in the registry.
        if owner is not None and owner.is_other(registry.owners.of.get(user, owner).created):
            raise NotAllowed("the Hub has another user of this name by now: log in again", reason="login")
        mine = (j for j in registry.jobs.values() if j.user == user and j.idempotency_key == key)
        if key is not None and (same := next(mine, None)) is not None:
            await registry.journal.durable()
            return _same(same, request)
        self._check_bounds(user, request)
        job_id, now = random_id(), registry.clock()
        lease = job_lease(f"j{job_id}", user, project, request, now)
        self.engine.check_request(snapshot.empty_machine(registry, self.engine), lease)
        job = JobRecord(
            id=job_id,
            user=user,
            project=project,
            name=request.name or default_name(request.command),
            command=tuple(request.command),
            cwd=request.cwd,
            env=request.env,
            retries=request.retries,
            grace_s=registry.policy.grace_s if request.grace_s is None else request.grace_s,
            request=wire.encode(request).decode(),
            submitted_at=registry.iso_now(),
            idempotency_key=key,
            request_digest="" if key is None else wire.digest(request),
        )
        if (size := len(wire.encode_ascii(job_spec(job, attempt=1, settled=0)))) > wire.MAX_JOB_BYTES:
            raise InvalidRequest(
                "the command and environment of this job take %1 KiB, and at most %2 KiB reach its "
                "process: put them into a file that it reads",
                size >> 10,
                wire.MAX_JOB_BYTES >> 10,
            )
        record = LeaseRecord(lease=lease, attempt=0, since_at=registry.iso_now(), entered_at=now)
        await registry.add(record, job)
        log.info("job=%s user=%s project=%s queued size=%s", job.id, user, project, request.gpus)
        return job

    def _check_bounds(self, user: str, request: wire.JobRequest) -> None:
        """Enforce the site's bounds: size, grace period, length of the queue, jobs of one user.

        Raises:
            InvalidRequest: the size or the grace period is out of bounds.
            TooMany: the queue is full, or the user has as many jobs as allowed.
        """
        registry = self.registry
        self.request_policy.check_share(request.asked_size())
        if request.grace_s is not None and request.grace_s > registry.policy.max_grace_s:
            raise InvalidRequest(
                "grace_s is at most %1 here: so long may a GPU's owner wait",
                f"{registry.policy.max_grace_s:g}",
            )
        waiting = [j for j in registry.jobs.values() if not j.result]
        if len(waiting) >= registry.policy.max_jobs:
            raise TooMany(
                "the queue is full (%1 jobs): try again later",
                registry.policy.max_jobs,
                retry_after_s=_QUEUE_RETRY_S,
            )
        if sum(j.user == user for j in waiting) >= registry.policy.max_jobs_per_user:
            raise TooMany(
                "you have %1 jobs waiting or running: wait, or cancel some",
                registry.policy.max_jobs_per_user,
                retry_after_s=_QUEUE_RETRY_S,
            )

    async def outlook(self, user: str, request: wire.JobRequest) -> wire.JobOutlook:
        """Return what would become of a job that is submitted now; its project must be named.

        Raises:
            Conflict: the devices are not known.
            InvalidRequest: it could never run, its size is none, or its priority is above its project's.
        """
        project = request.project or ""
        self.request_policy.check_priority(project, request.priority)
        await self.request_policy.known()
        now = self.registry.clock()
        lease = job_lease("j-", user, project, request, now)
        cluster = snapshot.cluster(self.registry, self.engine, now, extra=(lease,))
        self.engine.check_request(cluster, lease)
        outlook = self.engine.outlook(cluster, now)
        grant = outlook.grants.get(lease.id)
        explanation = outlook.explain(lease.id)
        sentence: messages.Texts
        if grant is not None:
            key = "job.now_guest" if grant.host else "job.now_borrowed" if grant.borrowed else "job.now"
            sentence = (messages.text(key),)
        else:
            sentence = messages.waiting(
                explanation.why,
                needs=messages.needs_of(lease),
                free_milli=explanation.free_milli,
                position=explanation.position,
            )
        if grant is None and (smaller := outlook.smaller(lease)) is not None:
            sentence += (messages.text("job.smaller", messages.size_text(smaller)),)
        is_soon = explanation.why is Why.AWAITING_RELEASE
        return wire.JobOutlook(
            starts="now" if grant is not None else "soon" if is_soon else "no",
            position=None if grant is not None else explanation.position,
            borrowed=grant is not None and grant.borrowed,
            sentence_texts=list(sentence),
        )

    async def job(self, user: str, job_id: str, *, admin: bool = False) -> JobRecord:
        """Return a job of ``user``, also one that ended long ago.

        Raises:
            NotFound: there is none, or it is another's.
            StoreError: the database cannot be read.
        """
        job = self.registry.jobs.get(job_id)
        if job is None:
            job = await self.registry.store.job(job_id, None if admin else user)
        if job is None or (job.user != user and not admin):
            raise NotFound("you have no job %1", repr(job_id[:40]))
        return job

    async def cancel(self, job: JobRecord) -> JobRecord:
        """End a job: at once when it is queued, after its grace period when it runs.

        Raises:
            Conflict: it has ended meanwhile.
        """
        record = self.registry.leases.get(job.lease_id)
        if record is None or job.result:
            await self.registry.journal.durable()
            return job
        await self.registry.edit(record, cancelled)
        record = self.registry.leases.get(record.id)
        if record is None:
            return self.registry.jobs.get(job.id, job)
        if record.state is State.PENDING:
            await self.effects.finish(record, "cancelled", messages.text("job.cancelled_early"))
        elif record.state is not State.STOPPING:
            await self.registry.advance(record, Stopping())
        return self.registry.jobs[job.id]

    async def retry(self, job: JobRecord, groups: Sequence[str]) -> JobRecord:
        """Submit the same job again.

        Raises:
            Conflict: it has not ended yet.
        """
        if not job.result:
            raise Conflict("this job has not ended: cancel it first")
        request = wire.decode(job.request.encode(), wire.JobRequest)
        # More than the right of its project was an administrator's gift to that job.
        most = self.request_policy.most_priority(job.project)
        request = wire.replace(request, priority=min(request.priority, most))
        return await self.submit(job.user, groups, request, None)

    async def report(
        self, user: str, job_id: str, attempt: int, report: wire.JobReport
    ) -> wire.JobOutcome | None:
        """Store a runner's report of its attempt; a report of another attempt is ignored.

        Returns what becomes of the job after ``stopping`` and ``ended``; None after the others.

        Raises:
            NotFound: the user has no such job.
            InvalidRequest: an exit code that no process can have.
        """
        if report.exit_code is not None and not -64 <= report.exit_code <= 255:
            raise InvalidRequest("exit_code is a number from 0 to 255, or a signal's, negative")
        registry = self.registry
        job = await self.job(user, job_id)
        record = registry.leases.get(job.lease_id)
        # A requeued lease keeps the number of its last attempt.
        if record is None or record.attempt != attempt or record.state is State.PENDING:
            await registry.journal.durable()
            return outcome_told(record, job) if report.state in _ENDS else None
        match report.state:
            case "stopping":
                await registry.journal.durable()
                return outcome_told(record, job)
            case "started":
                if record.state is State.GRANTED:
                    job = replace(job, started_at=job.started_at or registry.iso_now())
                    await registry.advance(record, Started(), job=job)
                    self.effects.announcer.job("started", job, "running")
                else:
                    await registry.journal.durable()
            case "ended":
                end = bounded(report)
                registry.observations[record.id].end = end  # a full disk may refuse it
                job = with_end(job, end, registry.iso_now())
                if record.state is State.GRANTED:
                    await registry.advance(record, Started(), job=job)
                else:
                    await registry.put_job(job)
                return outcome_told(registry.leases.get(record.id), registry.jobs.get(job.id, job))
            case "progress":
                await self._progress(record, job, report)
        return None

    async def _progress(self, record: LeaseRecord, job: JobRecord, report: wire.JobReport) -> None:
        """Store the progress of a job and what it shows of its remaining work; None withdraws it."""
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

    # ---- what owners do with their lease -------------------------------------

    async def activity(self, user: str, server: str, report: wire.ActivityReport) -> None:
        """Store a server's report of its kernels, which only delays lending: users can forge it."""
        record = self.registry.by_server(user, server)
        if record is None or record.is_job:
            return
        observation, now = self.registry.observations[record.id], self.registry.clock()
        busy = {k.id[:64]: k.runs for k in report.kernels[:1_000] if k.busy}
        # Servers that started before an upgrade say only that they are busy.
        requests = any(k.busy or k.handles_request for k in report.kernels)
        changed = observation.report_kernels(busy, requests=requests, now=now)
        idle = min((max(0.0, k.idle_s) for k in report.kernels), default=None)
        if observation.kernel_busy:
            observation.kernel_active_at = now
        elif idle is not None:
            observation.kernel_active_at = max(observation.kernel_active_at, min(now, now - idle))
        observation.kernels = {k.id[:64]: k.name[:255] for k in report.kernels[:64]}
        observation.kernel_ends_at = {
            k.id[:64]: now + k.ends_in_s for k in report.kernels[:64] if k.ends_in_s is not None
        }
        observation.report_ends(report.ended, now)
        if changed:
            await self.registry.notify()

    async def wake(self, record: LeaseRecord) -> None:
        """Resume a suspended session as if it ran a GPU cell.

        Raises:
            Conflict: it is not asleep.
        """
        if record.state is not State.SUSPENDED or record.is_job:
            raise Conflict("only a session that is asleep can be woken")
        await self.registry.want(record)

    async def stay_asleep(self, record: LeaseRecord) -> None:
        """Let a session sleep that was to wake: its calls wait until the next cell, or until it is woken.

        Raises:
            Conflict: it does not wait for its GPU, or already gets its memory back.
        """
        observation = self.registry.observations[record.id]
        if record.state is not State.SUSPENDED or record.is_job or not observation.wanted:
            raise Conflict("only a session that waits for its GPU can stay asleep")
        observation.decline()
        log.info("lease=%s stays asleep", record.handle)
        await self.registry.notify()

    async def keep(self, record: LeaseRecord, minutes: float) -> None:
        """Protect a session from suspension for ``minutes``, within the user's daily budget (`keep_budget`).

        Only the extension of an earlier protection counts; 0 ends it, and what was left of it does not count.

        Raises:
            InvalidRequest: neither 0 nor 1 to 240 minutes.
            TooMany: the day's budget is used up.
        """
        if minutes and not 1 <= minutes <= 240:
            raise InvalidRequest("minutes is a number from 1 to 240, or 0, not %1", minutes)
        lease, now = record.lease, self.registry.clock()
        until = max(lease.keep_until_at, now + 60 * minutes)
        longer_s = until - max(lease.keep_until_at, now)
        if not minutes:
            used_s = self.registry.usage.kept_s(self._today(), lease.user, lease.project)
            until, longer_s = now, -min(used_s, max(0.0, lease.keep_until_at - now))
        left = keep_left(self.registry, lease.user, lease.project)
        if longer_s > 60 * left:
            raise TooMany(
                "you can keep your GPU for %1 more minutes today",
                floor(left),
                retry_after_s=seconds_to_midnight(self.registry.iso_now()),
            )
        kept = UsageRecord(day=self._today(), user=lease.user, project=lease.project, kept_s=longer_s)
        await self.registry.edit(record, kept_until(until), self.registry.usage.count(kept))

    def _today(self) -> str:
        return self.registry.iso_now()[:10]

    async def lend(self, record: LeaseRecord) -> None:
        """Lend the GPU of a session at once, busy or not.

        Raises:
            Conflict: it is not awake.
        """
        if record.state is not State.RUNNING or record.is_job:
            raise Conflict("only a session that is awake can be lent")
        if self.registry.lending_switch.obstacle:
            raise Conflict("lending is switched off, or only watched, on this machine", reason="lending_off")
        await self.registry.edit(record, lent)

    async def release(self, record: LeaseRecord) -> None:
        """End the processes of a lease that keep GPU memory of dead ones.

        Raises:
            Conflict: none does, or the device helper does not end them.
        """
        sample = self.registry.observations[record.id].sample
        keepers = [each.pid for each in sample.processes if each.keeps] if sample else []
        if not keepers:
            raise Conflict("no ended process of this session left GPU memory behind")
        try:
            await self.effects.devices.signal(record.handle, signal.SIGKILL, "keepers")
        except HelperError as error:
            raise Conflict("the processes were not ended: %1", str(error)) from None
        log.info("lease=%s releases what an ended process left: processes %s end", record.handle, keepers)

    async def allow_sleep(self, record: LeaseRecord, allowed: bool) -> None:
        """Mark a session as never to be suspended, or take the mark away; a marked one that sleeps wakes.

        Raises:
            Conflict: it is a job.
            NotAllowed: its project has no right to this.
        """
        if record.is_job:
            raise Conflict("only sessions are marked; a job says with `checkpoint` how it is paused")
        project = self.registry.policy.project_config(record.lease.project)
        if not allowed and not (project is not None and project.never_sleep):
            raise NotAllowed(
                "project %1 may not keep sessions from sleep: the administrator gives that right "
                "(never_sleep in GPUShareBroker.projects)",
                record.lease.project,
            )
        record = await self.registry.edit(record, sleep_allowed(allowed=allowed))
        if not allowed:
            await self.registry.want(record)


def _same(job: JobRecord, request: wire.JobRequest) -> JobRecord:
    # Not compared with its request of today, which its owner may have changed in the queue.
    if job.request_digest not in ("", wire.digest(request)):
        raise KeyReused(
            "this Idempotency-Key belongs to job %1, which was submitted with other values: use a new key",
            job.id,
        )
    return job
