"""Requests about jobs: submit, outlook, cancel, submit again.

A job is accepted into the queue; no request waits for capacity.  The HTTP handlers have checked scopes; this
module checks which jobs belong to the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.control.job_request import check_job, default_name, job_lease, job_spec
from jupyter_gpushare.broker.control.request_policy import RequestPolicy
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord, random_id
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import (
    Stopping,
    cancelled,
)
from jupyter_gpushare.core.model import State, Why
from jupyter_gpushare.errors import (
    Conflict,
    InvalidRequest,
    KeyReused,
    NotAllowed,
    NotFound,
    TooMany,
)
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")

# Retry-After of a full queue: jobs end every few minutes.
_QUEUE_RETRY_S = 60.0


class RequestService:
    """Checks and answers requests; `Effects` carries them out."""

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

    async def submit(
        self, user: str, groups: Sequence[str], request: wire.JobRequest, key: str | None
    ) -> JobRecord:
        """Accept a job into the queue and return it; a repeated ``key`` returns the job of the first request.

        Raises:
            KeyReused: another request of this user has this key.
            RequestError: the job cannot be accepted; the text says what to change.
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
        await self.request_policy.devices_known()
        # No other task runs from here until the job is in the registry.
        if owner is not None and owner.is_other(registry.owners.of.get(user, owner).created):
            raise NotAllowed("the Hub has another user of this name by now: log in again", reason="login")
        repeated = (j for j in registry.jobs.values() if j.user == user and j.idempotency_key == key)
        if key is not None and (same := next(repeated, None)) is not None:
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
        """Enforce the site's bounds on size, grace period, length of the queue and jobs per user.

        Raises:
            InvalidRequest: the size or the grace period is out of bounds.
            TooMany: the queue is full, or the user has as many jobs as allowed.
        """
        registry = self.registry
        self.request_policy.check_share(request.requested_size())
        if request.grace_s is not None and request.grace_s > registry.policy.max_grace_s:
            raise InvalidRequest(
                "grace_s is at most %1 here: a GPU's owner may have to wait that long",
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
        """Return the outlook of a job as if it were submitted now; its project must be named.

        Raises:
            Conflict: the devices are not known.
            InvalidRequest: the job could never run, has no size, or has a priority above its project's.
        """
        project = request.project or ""
        self.request_policy.check_priority(project, request.priority)
        await self.request_policy.devices_known()
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
        """Return a job of ``user``, even if it ended long ago; with ``admin`` a job of any user.

        Raises:
            NotFound: there is no such job, or it is another user's.
            StoreError: the database cannot be read.
        """
        job = self.registry.jobs.get(job_id)
        if job is None:
            job = await self.registry.store.job(job_id, None if admin else user)
        if job is None or (job.user != user and not admin):
            raise NotFound("you have no job %1", repr(job_id[:40]))
        return job

    async def cancel(self, job: JobRecord) -> JobRecord:
        """End a queued job at once, or a running job within its grace period.

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
        # A priority above the project's maximum was an administrator's gift to the first job only.
        maximum = self.request_policy.max_priority(job.project)
        request = wire.replace(request, priority=min(request.priority, maximum))
        return await self.submit(job.user, groups, request, None)


def _same(job: JobRecord, request: wire.JobRequest) -> JobRecord:
    # The digest is compared, because the owner may have changed the stored request in the queue.
    if job.request_digest not in ("", wire.digest(request)):
        raise KeyReused(
            "this Idempotency-Key belongs to job %1, which was submitted with other values: use a new key",
            job.id,
        )
    return job
