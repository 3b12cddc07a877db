"""What people, spawners and runners ask for: checked, written down, answered.

The desk never waits for room: a session is granted or refused at once, a job
is accepted into the queue.  Rights were checked by the handlers as far as
tokens go; what belongs to whom is checked here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

from jupyter_gpushare import wire, words
from jupyter_gpushare.backends.base import Backend
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.effects import Effects
from jupyter_gpushare.broker.forecast import Forecast
from jupyter_gpushare.broker.job_request import check_job, job_lease, job_size, job_spec
from jupyter_gpushare.broker.live import Live
from jupyter_gpushare.broker.loop import STALE_S, granted, is_job_server
from jupyter_gpushare.broker.policy import gpus_to_milli, parse_memory, parse_profile
from jupyter_gpushare.broker.records import JobRecord, LeaseRecord, ProjectOverride
from jupyter_gpushare.core.explain import Size, check_request, explain
from jupyter_gpushare.core.model import (
    WHOLE_GPU,
    Event,
    Grant,
    Kind,
    Lease,
    State,
    Why,
    parse_fraction,
)
from jupyter_gpushare.core.plan import look, plan
from jupyter_gpushare.errors import (
    Conflict,
    DeviceError,
    HelperError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    TooMany,
)

log = logging.getLogger("gpushare.broker")

_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
# How long a start waits for the last server of the same name to let go.
_LETTING_GO_S = 10.0
# How long a request waits for the first measurement of a broker that has just started.
_FIRST_LOOK_S = 3.0


def random_id() -> str:
    """Return 10 random letters and digits: ids are not to be guessed."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(10))


class Desk:
    """Answers requests; effects carry out what they lead to."""

    def __init__(self, book: Book, backend: Backend, effects: Effects, forecast: Forecast) -> None:
        self.book = book
        self.backend = backend
        self.effects = effects
        self.forecast = forecast
        self._kept: dict[tuple[str, str], float] = {}  # (user, day) -> minutes kept

    # ---- what is asked for ---------------------------------------------------

    def choose_project(self, groups: Sequence[str], wanted: str | None) -> str:
        """Return the project a request counts towards.

        Raises:
            NotFound: there is no such project, or it is not the user's.
            NotAllowed: the user belongs to no project.
        """
        mine = self.book.policy.projects_of(groups)
        if wanted is not None:
            if wanted not in mine:
                yours = f"yours: {', '.join(mine)}" if mine else "you belong to none"
                raise NotFound(
                    f"there is no project {wanted[:60]!r} for you; {yours}", reason="unknown_project"
                )
            return wanted
        if not mine:
            raise NotAllowed("you belong to no project that may use GPUs: ask the admin of this Hub")
        return mine[0]

    def size_of(self, request: wire.GpuRequest) -> Size | None:
        """Return what a session asks for; None: no GPU.

        Raises:
            InvalidRequest: no size, several, or one that cannot be.
        """
        sizes = (request.fraction, request.memory, request.gpus, request.profile)
        if sum(x is not None for x in sizes) > 1:
            raise InvalidRequest("give one of fraction, memory, gpus and profile, not several")
        if request.fraction is not None:
            return Size(fraction_milli=parse_fraction(request.fraction))
        if request.memory is not None:
            return Size(memory_bytes=parse_memory(request.memory))
        if request.profile is not None:
            return Size(fraction_milli=WHOLE_GPU, profile=parse_profile(request.profile))
        count = request.gpus or 0
        if not 0 <= count <= 1024:
            raise InvalidRequest(f"gpus is a whole number from 0 to 1024, not {count}")
        return Size(fraction_milli=WHOLE_GPU, device_count=count) if count else None

    def _check_share(self, size: Size) -> None:
        """Refuse parts so small that a machine's places go to a few people.

        Raises:
            InvalidRequest: less than the site gives out.
        """
        least = self.book.policy.min_fraction_milli
        if size.memory_bytes:
            smallest = min((d.grantable_bytes for d in snapshot.devices(self.book)), default=0)
            least_bytes = smallest * least // WHOLE_GPU
            if size.memory_bytes < least_bytes:
                raise InvalidRequest(
                    f"ask for at least {words.gigabytes(least_bytes)}: less is not given out here"
                )
        elif size.fraction_milli < least:
            raise InvalidRequest(f"ask for at least {least / WHOLE_GPU:g} GPU: less is not given out here")

    async def _known(self) -> None:
        """Return when the devices are known: a broker that has just started measures first."""
        if self.book.inventory is None:
            await self.book.wait_beyond(self.book.seq, _FIRST_LOOK_S)
        if self.book.inventory is None or self.book.clock() - self.book.sampled_at > STALE_S:
            raise Conflict(
                "the GPUs of this machine cannot be reached just now; a server without GPU starts anyway",
                reason="devices_unknown",
            )

    # ---- sessions ------------------------------------------------------------

    async def start(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        """Answer the spawner: what the server that is about to start may use.

        Raises:
            RequestError: it must not start; the text is for the user.
        """
        if is_job_server(request.server):
            return await self._start_job_server(request)
        await self._let_go(request.user, request.server)
        size = self.size_of(request.options or wire.GpuRequest())
        if size is None:
            return wire.SpawnGrant(lease=None, kind=Kind.BUILD, env={}, message="Starting without a GPU.")
        project = self.choose_project(request.groups, request.options.project if request.options else None)
        await self._known()
        self._check_share(size)
        now = self.book.clock()
        lease = Lease(
            id="b" + random_id(),
            project=project,
            kind=Kind.BUILD,
            **asdict(size),
            user=request.user,
            server=request.server,
            submitted_at=now,
            queued_at=now,
            waits_since_at=now,
        )
        check_request(snapshot.cluster(self.book, now), lease)
        record, grant = await self._grant_session(lease, request.uid)
        return await self._prepare(record, asleep=grant.asleep, borrowed=grant.borrowed)

    async def _let_go(self, user: str, server: str) -> None:
        """End what an earlier server of the same name holds; the Hub says that it is gone."""
        until = self.book.clock() + _LETTING_GO_S
        while (record := self.book.by_server(user, server)) is not None:
            if record.state is not State.STOPPING:
                await self.book.advance(record, Event.STOP, note="a new server of this name starts")
            if self.book.clock() > until:
                raise Conflict("the last server of this name still frees its GPU: try again in a few seconds")
            await asyncio.sleep(0.1)

    async def _grant_session(self, lease: Lease, uid: int) -> tuple[LeaseRecord, Grant]:
        book, now = self.book, self.book.clock()
        cluster = snapshot.cluster(book, now, extra=(lease,))
        grant = next(
            (a for a in plan(cluster, now).actions if isinstance(a, Grant) and a.lease == lease.id), None
        )
        if grant is None:
            told = explain(cluster, lease.id, now)
            size = words.size_of(lease)
            text = words.waiting(told.why, needs=size, free_milli=told.free_milli, position=None)
            raise Conflict(f"{text} Choose a smaller size, or start without a GPU.", reason="no_room")
        record = LeaseRecord(lease=lease, uid=uid, since_at=book.iso_now(), entered_at=now)
        event = Event.GRANT_ASLEEP if grant.asleep else Event.GRANT
        # In memory first and in one step, so that nobody else is given this room meanwhile.
        book.leases[lease.id], book.live[lease.id] = record, Live.since(now)
        record = await book.advance(record, event, why=grant.why, **granted(book, record, grant))
        return record, grant

    async def _prepare(self, record: LeaseRecord, *, asleep: bool, borrowed: bool) -> wire.SpawnGrant:
        limits = record.limits
        guaranteed = dict.fromkeys(limits, 0) if record.lease.borrowed else limits
        try:
            env = await self.backend.prepare(record.handle, record.uid, limits, guaranteed, asleep=asleep)
        except (HelperError, DeviceError) as error:
            log.warning("lease=%s prepare: %s", record.handle, error)
            if not record.is_job:
                await self.book.advance(record, Event.RELEASE, note=str(error))
            raise Conflict(
                "the GPUs of this machine cannot be reached just now; a server without GPU starts anyway",
                reason="devices_unknown",
            ) from None
        lease = record.lease
        size = words.size_of(lease)
        limit = sum(limits.values())
        name = self.book.device_name(lease.devices)
        return wire.SpawnGrant(
            lease=record.handle,
            kind=lease.kind,
            env=env,
            devices=list(lease.devices),
            memory_limit_bytes=limit,
            asleep=asleep,
            borrowed=borrowed,
            message=f"Your {size} ({words.gigabytes(limit)} of {name}) is "
            + ("lent just now and comes with your first GPU cell." if asleep else "ready."),
        )

    async def stop(self, request: wire.SpawnStop) -> None:
        """Note that a server has ended, however; doing so twice is fine."""
        record = self.book.by_server(request.user, request.server)
        if record is None or record.state is State.STOPPING:
            return
        if not record.is_job:
            await self.book.advance(record, Event.STOP)
        elif record.state is State.GRANTED:
            await self.effects.start_given_up(record)
        # A running job tells its own end; if it cannot, its processes are seen to be gone.

    # ---- jobs ----------------------------------------------------------------

    async def _start_job_server(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        record = self.book.by_handle(request.server)
        job = self.book.job_of(record) if record is not None else None
        if (
            record is None
            or job is None
            or record.lease.user != request.user
            or record.state is not State.GRANTED
        ):
            raise Conflict(
                f"{request.server} is a name for training jobs, and no such job is to start now: "
                "submit jobs with gpushare submit",
                reason="not_expected",
            )
        if record.uid != request.uid:
            record = replace(record, uid=request.uid)
            await self.book.put_lease(record)
        grant = await self._prepare(record, asleep=False, borrowed=False)
        return wire.SpawnGrant(
            lease=grant.lease,
            kind=grant.kind,
            env=grant.env,
            devices=grant.devices,
            memory_limit_bytes=grant.memory_limit_bytes,
            message=grant.message,
            job=job_spec(job, record.attempt),
        )

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
        project = self.choose_project(groups, request.project)
        await self._known()
        # Nobody else gets a turn from here on until the job is in the book.
        mine = (j for j in book.jobs.values() if j.user == user and j.idempotency_key == key)
        if key is not None and (same := next(mine, None)) is not None:
            return same
        self._check_share(job_size(request))
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
            name=request.name or request.command[0].rsplit("/", 1)[-1][:60],
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
        await self._known()
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
        size = words.size_of(lease)
        sentence = words.waiting(told.why, needs=size, free_milli=told.free_milli, position=told.position)
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
        self.book.live[record.id].wanted = True
        await self.book.bump()

    async def keep(self, record: LeaseRecord, minutes: float) -> None:
        """Keep a session from being put to sleep for a while; a day has a budget.

        Raises:
            InvalidRequest: not 1 to 240 minutes.
            TooMany: the day's budget is used up.
        """
        if not 1 <= minutes <= 240:
            raise InvalidRequest(f"minutes is a number from 1 to 240, not {minutes}")
        left = self.keep_left(record.lease.user)
        if minutes > left:
            raise TooMany(f"you can keep your GPU for {left:.0f} more minutes today")
        day = (record.lease.user, datetime.now(UTC).date().isoformat())
        used = self._kept.get(day, 0.0)
        self._kept = {k: v for k, v in self._kept.items() if k[1] == day[1]} | {day: used + minutes}
        until = self.book.clock() + 60 * minutes
        await self.book.put_lease(
            replace(record, lease=replace(record.lease, keep_until_at=until, lend_now=False))
        )

    def keep_left(self, user: str) -> float:
        """Return for how many more minutes of today (UTC) a user may keep an idle session."""
        used = self._kept.get((user, datetime.now(UTC).date().isoformat()), 0.0)
        return max(0.0, self.book.policy.keep_minutes_per_day - used)

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

    async def change_project(self, name: str, change: wire.ProjectChange) -> None:
        """Override the configured numbers of a project.

        Raises:
            NotFound: no such project.
            InvalidRequest: a value is out of range.
        """
        if self.book.policy.project_config(name) is None:
            raise NotFound(f"there is no project {name[:60]!r}")
        old = self.book.overrides.get(name, ProjectOverride(name=name))
        if change.weight is not None and not 0 <= change.weight <= 1000:
            raise InvalidRequest(f"weight is a whole number from 0 to 1000, not {change.weight}")
        await self.book.put_override(
            replace(
                old,
                quota_milli=old.quota_milli if change.quota is None else gpus_to_milli(change.quota, "quota"),
                weight=old.weight if change.weight is None else change.weight,
                limit_milli=old.limit_milli if change.limit is None else gpus_to_milli(change.limit, "limit"),
            )
        )
