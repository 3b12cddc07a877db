"""What people and runners ask for: jobs, and what owners do with their session.

The desk never waits for room: a job is accepted into the queue.  Rights were
checked by the handlers as far as tokens go; what belongs to whom is checked
here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import floor

from jupyter_gpushare import wire, words
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.effects import Effects
from jupyter_gpushare.broker.forecast import Forecast
from jupyter_gpushare.broker.job_request import check_job, default_name, job_lease, job_size, job_spec
from jupyter_gpushare.broker.records import JobRecord, LeaseRecord, UsageRecord, random_id
from jupyter_gpushare.broker.terms import Terms
from jupyter_gpushare.core.explain import check_request, explain
from jupyter_gpushare.core.model import (
    Event,
    Grant,
    State,
    Why,
)
from jupyter_gpushare.core.plan import look
from jupyter_gpushare.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    TooMany,
)

log = logging.getLogger("gpushare.broker")


class Desk:
    """Answers requests; effects carry out what they lead to."""

    def __init__(self, book: Book, effects: Effects, forecast: Forecast, terms: Terms) -> None:
        self.book = book
        self.effects = effects
        self.forecast = forecast
        self.terms = terms

    # ---- jobs ----------------------------------------------------------------

    async def submit(
        self, user: str, groups: Sequence[str], request: wire.JobRequest, key: str | None
    ) -> JobRecord:
        """Accept a job into the queue; the same ``key`` again returns the first one.

        Raises:
            RequestError: it cannot be accepted; the text says what to change.
        """
        book = self.book
        if key is not None:
            if not 1 <= len(key) <= 255 or "\0" in key:
                raise InvalidRequest("an Idempotency-Key has 1 to 255 characters")
            stored = await book.store.job_by_key(user, key)
            if stored is not None:
                return book.jobs.get(stored.id, stored)
        check_job(request)
        project = self.terms.choose_project(groups, request.project)
        await self.terms.known()
        # Nobody else gets a turn from here on until the job is in the book.
        mine = (j for j in book.jobs.values() if j.user == user and j.idempotency_key == key)
        if key is not None and (same := next(mine, None)) is not None:
            return same
        self.terms.check_share(job_size(request))
        if request.grace_s is not None and request.grace_s > book.policy.max_grace_s:
            raise InvalidRequest(
                f"grace_s is at most {book.policy.max_grace_s:g} here: so long may a GPU's owner wait"
            )
        waiting = [j for j in book.jobs.values() if not j.result]
        if len(waiting) >= book.policy.max_jobs:
            raise TooMany(f"the queue is full ({book.policy.max_jobs} jobs): try again later")
        if sum(j.user == user for j in waiting) >= book.policy.max_jobs_per_user:
            raise TooMany(
                f"you have {book.policy.max_jobs_per_user} jobs waiting or running: wait, or cancel some"
            )
        job_id, now = random_id(), book.clock()
        lease = job_lease(f"j{job_id}", user, project, request, now)
        check_request(snapshot.cluster(book, now), lease)
        job = JobRecord(
            id=job_id,
            user=user,
            project=project,
            name=request.name or default_name(request.command),
            command=tuple(request.command),
            cwd=request.cwd,
            env=request.env,
            retries=request.retries,
            grace_s=book.policy.grace_s if request.grace_s is None else request.grace_s,
            request=wire.encode(request).decode(),
            submitted_at=book.iso_now(),
            idempotency_key=key,
        )
        if (size := len(wire.encode(job_spec(job, attempt=1)))) > wire.MAX_JOB_BYTES:
            raise InvalidRequest(
                f"the command and environment of this job take {size >> 10} KiB, and at most "
                f"{wire.MAX_JOB_BYTES >> 10} KiB reach its process: put them into a file that it reads"
            )
        record = LeaseRecord(lease=lease, attempt=0, since_at=book.iso_now(), entered_at=now)
        book.jobs[job.id] = job
        await book.add(record, job)
        log.info("job=%s user=%s project=%s queued size=%s", job.id, user, project, request.gpus)
        return job

    async def outlook(self, user: str, request: wire.JobRequest) -> wire.JobOutlook:
        """Return what would become of a job that is submitted now; its project must be named.

        Raises:
            Conflict: the devices are not known.
            InvalidRequest: it could never run, or its size is none.
        """
        await self.terms.known()
        now = self.book.clock()
        lease = job_lease("j-", user, request.project or "", request, now)
        cluster = snapshot.cluster(self.book, now, extra=(lease,))
        check_request(cluster, lease)
        told = explain(cluster, lease.id, now)
        round_ = look(cluster, now).run()
        grant = next((a for a in round_.actions if isinstance(a, Grant) and a.lease == lease.id), None)
        if grant is not None:
            what = "on borrowed room; it may be paused when its owner needs it" if grant.borrowed else ""
            sentence = f"Would start now{' ' if what else ''}{what}."
            return wire.JobOutlook(starts="now", position=None, borrowed=grant.borrowed, sentence=sentence)
        needs = words.needs_of(lease)
        sentence = words.waiting(told.why, needs=needs, free_milli=told.free_milli, position=told.position)
        if told.smaller is not None:
            smaller = words.size(told.smaller.fraction_milli, told.smaller.device_count)
            sentence += f" With {smaller} it would start now."
        found = await self.forecast.of_new(cluster, lease.id)
        if found is not None:
            sentence += f" {words.starts_in(found.low_s, found.likely_s, found.high_s)}"
        return wire.JobOutlook(
            starts="soon" if told.why is Why.WAITS_FOR_ROOM else "no",
            position=told.position,
            borrowed=False,
            sentence=sentence,
        )

    async def job(self, user: str, job_id: str, *, admin: bool = False) -> JobRecord:
        """Return a job of ``user``, also one that ended long ago.

        Raises:
            NotFound: there is none, or it is another's.
            StoreError: the database cannot be read.
        """
        job = self.book.jobs.get(job_id)
        if job is None:
            job = await self.book.store.job(job_id, None if admin else user)
        if job is None or (job.user != user and not admin):
            raise NotFound(f"you have no job {job_id[:40]!r}")
        return job

    async def cancel(self, job: JobRecord) -> JobRecord:
        """End a job: at once when it waits, with grace when it runs."""
        record = self.book.leases.get(job.lease_id)
        if record is None or job.result:
            return job
        record = replace(record, lease=replace(record.lease, cancelled=True))
        await self.book.put_lease(record)
        record = self.book.leases.get(record.id)
        if record is None:
            return self.book.jobs.get(job.id, job)
        if record.state is State.PENDING:
            await self.effects.finish(record, "cancelled", "Stopped by its owner before it started.")
        elif record.state is not State.STOPPING:
            await self.book.advance(record, Event.STOP)
        return self.book.jobs[job.id]

    async def retry(self, job: JobRecord, groups: Sequence[str]) -> JobRecord:
        """Submit the same job again.

        Raises:
            Conflict: it has not ended yet.
        """
        if not job.result:
            raise Conflict("this job has not ended: cancel it first")
        return await self.submit(job.user, groups, wire.decode(job.request.encode(), wire.JobRequest), None)

    async def report(self, user: str, job_id: str, attempt: int, report: wire.JobReport) -> None:
        """Note what a runner says of its attempt; a report of another attempt is ignored.

        Raises:
            NotFound: the user has no such job.
            InvalidRequest: an exit code that no process can have.
        """
        if report.exit_code is not None and not -64 <= report.exit_code <= 255:
            raise InvalidRequest("exit_code is a number from 0 to 255, or a signal's, negative")
        book = self.book
        job = await self.job(user, job_id)
        record = book.leases.get(job.lease_id)
        # A lease that waits again keeps the number of the attempt that is over.
        if record is None or record.attempt != attempt or record.state is State.PENDING:
            return
        match report.state:
            case "started":
                if record.state is State.GRANTED:
                    job = replace(job, started_at=job.started_at or book.iso_now())
                    await book.advance(record, Event.STARTED, job=job, tries=0)
            case "ended":
                code = 1 if report.exit_code is None else report.exit_code
                job = replace(
                    job,
                    exit_code=code,
                    stopped=report.stopped,
                    reason=report.reason[:500],
                    done=job.done if report.done is None else report.done,
                    total=job.total if report.total is None else report.total,
                    started_at=job.started_at or book.iso_now(),
                )
                if record.state is State.GRANTED:
                    await book.advance(record, Event.STARTED, job=job, tries=0)
                else:
                    await book.put_job(job)
            case "progress":
                await book.put_progress(replace(job, done=report.done, total=report.total))

    # ---- what owners do with their lease -------------------------------------

    async def activity(self, user: str, server: str, report: wire.ActivityReport) -> None:
        """Note what a server says of its kernels: a hint."""
        record = self.book.by_server(user, server)
        if record is None or record.is_job:
            return
        live, now = self.book.live[record.id], self.book.clock()
        was_busy = live.kernel_busy
        live.kernel_busy = any(k.busy for k in report.kernels)
        idle = min((max(0.0, k.idle_s) for k in report.kernels), default=None)
        if live.kernel_busy:
            live.kernel_active_at = now
        elif idle is not None:
            live.kernel_active_at = max(live.kernel_active_at, min(now, now - idle))
        live.kernels = {k.id[:64]: k.name[:255] for k in report.kernels[:64]}
        if was_busy != live.kernel_busy:
            await self.book.bump()

    async def wake(self, record: LeaseRecord) -> None:
        """Bring a sleeping lease back as if it ran a GPU cell.

        Raises:
            Conflict: it is not asleep.
        """
        if record.state is not State.SUSPENDED or record.is_job:
            raise Conflict(f"this lease is {record.state}, not asleep")
        live = self.book.live[record.id]
        live.wanted_at = live.wanted_at or self.book.clock()
        await self.book.bump()

    async def keep(self, record: LeaseRecord, minutes: float) -> None:
        """Keep a session from being put to sleep for a while; a day has a budget.

        Only what it is kept for longer than before is taken from the budget.

        Raises:
            InvalidRequest: not 1 to 240 minutes.
            TooMany: the day's budget is used up.
        """
        if not 1 <= minutes <= 240:
            raise InvalidRequest(f"minutes is a number from 1 to 240, not {minutes}")
        lease, now = record.lease, self.book.clock()
        until = max(lease.keep_until_at, now + 60 * minutes)
        longer_s = until - max(lease.keep_until_at, now)
        left = self.keep_left(lease.user)
        if longer_s > 60 * left:
            raise TooMany(f"you can keep your GPU for {floor(left)} more minutes today")
        kept = UsageRecord(day=self._today(), user=lease.user, project=lease.project, kept_s=longer_s)
        await self.book.put_lease(
            replace(record, lease=replace(lease, keep_until_at=until, lend_now=False)),
            self.book.usage.count(kept),
        )

    def keep_left(self, user: str) -> float:
        """Return for how many more minutes of today (UTC) a user may keep an idle session."""
        used_s = self.book.usage.kept_s(self._today(), user)
        return max(0.0, self.book.policy.keep_minutes_per_day - used_s / 60)

    def _today(self) -> str:
        return self.book.iso_now()[:10]

    async def lend(self, record: LeaseRecord) -> None:
        """Offer the room of a session at once.

        Raises:
            Conflict: it is not awake.
        """
        if record.state is not State.RUNNING or record.is_job:
            raise Conflict(f"this lease is {record.state}: only a session that is awake can be lent")
        await self.book.put_lease(
            replace(record, lease=replace(record.lease, lend_now=True, keep_until_at=0.0))
        )
