"""The REST interface: each handler checks rights, decodes the request and encodes the answer.

`routes.ROUTES` is the whole interface as a table, from which `routes.describe` makes ``openapi.json``.
"""

from __future__ import annotations

import asyncio
import logging

import prometheus_client

from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker.control import administration, queue_edits
from jupyter_gpushare.broker.control.administration import end_process, note_act, prioritize
from jupyter_gpushare.broker.http.access import ADMIN_SCOPE, JOBS_SCOPE, Identity
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.broker.state.records import LeaseRecord, LendingMode
from jupyter_gpushare.broker.state.registry import keep_left
from jupyter_gpushare.broker.state.transitions import Stopping
from jupyter_gpushare.broker.views import history
from jupyter_gpushare.broker.views.views import owners, waiting_sessions
from jupyter_gpushare.errors import NotAllowed, NotFound, TooMany
from jupyter_gpushare.peers import socket_uid
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")

MAX_WAIT_S = 30.0


def _mine(record: LeaseRecord, identity: Identity) -> LeaseRecord:
    if record.lease.user != identity.user and not identity.admin:
        raise NotFound("there is no such lease (it may have ended)")
    return record


class StatusHandler(Base):
    """The user's leases, jobs and projects; ``?after=SEQ&wait=25`` waits for a change."""

    _poll: asyncio.Task[None] | None = None

    def on_connection_close(self) -> None:
        """End the long poll of a page that has disconnected."""
        super().on_connection_close()
        if self._poll is not None:
            self._poll.cancel()

    async def get(self) -> None:
        """Answer now, or at the next change if ``after`` and ``wait`` are given.

        Raises:
            TooMany: the user has the maximum number of waiting requests.
        """
        identity = await self.identify()
        registry, waiting = self.control.registry, self.service.limits.waiting
        after = int(self.number("after", -1, -1, 2**53))
        wait_s = self.number("wait", 0, 0, MAX_WAIT_S)
        if wait_s and registry.notifications.is_last(after):
            if waiting.get(identity.user, 0) >= registry.policy.max_waiters_per_user:
                raise TooMany(
                    "too many of your pages wait for news at once: close some", retry_after_s=MAX_WAIT_S
                )
            waiting[identity.user] = waiting.get(identity.user, 0) + 1
            self._poll = asyncio.create_task(registry.notifications.wait_after(after, wait_s))
            try:
                await asyncio.wait({self._poll})
            finally:
                waiting[identity.user] -= 1
                if not waiting[identity.user]:
                    del waiting[identity.user]
            self._identity = None  # another user may have the name by now
            identity = await self.identify()
        groups = await self.service.access.groups(identity)
        views, user = self.service.views, identity.user
        status = views.status(user, groups, admin=identity.admin)
        left_minutes, waits = keep_left(registry, user), waiting_sessions(views, user)
        self.answer(wire.replace(status, keep_left_minutes=left_minutes, waiting=waits))


class OffersHandler(Base):
    """What could start now for me; ``?gpus=``, ``?memory=`` or ``?profile=`` asks about a job too.

    With ``&borrow=0`` the job does not borrow; with ``&share=1`` it may share a GPU.
    """

    async def get(self) -> None:
        identity = await self.identify()
        groups = await self.service.access.groups(identity)
        project = self.control.request_policy.choose_project(groups, self.get_query_argument("project", None))
        offers = self.service.views.offers(groups, project)
        terms = wire.requested_terms(
            {name: self.get_query_argument(name, "") for name in wire.REQUESTED_TERMS}
        )
        if not {"gpus", "memory", "profile"}.isdisjoint(terms):
            request = wire.JobRequest(command=["-"], project=project, **terms)
            offers = wire.replace(offers, job=await self.control.requests.outlook(identity.user, request))
        self.answer(offers)


class JobsHandler(Base):
    """My jobs; submit one."""

    async def get(self) -> None:
        identity = await self.identify()
        limit = int(self.number("limit", 100, 1, 10_000))
        everyone = identity.admin and self.get_query_argument("all", "") == "1"
        self.answer(
            wire.JobList(jobs=self.service.views.jobs(None if everyone else identity.user, limit=limit))
        )

    async def post(self) -> None:
        identity = await self.identify(JOBS_SCOPE)
        request = self.body(wire.JobRequest)
        key = self.request.headers.get("Idempotency-Key")
        async with self.service.limits.submits.of(identity.user):
            groups = await self.service.access.groups(identity, fresh=True)
            job = await self.control.requests.submit(identity.user, groups, request, key)
            self.answer(self.service.views.job(job, is_new=True), 201)


class JobHandler(Base):
    """One job of mine; put changes it while it is queued, delete cancels it."""

    async def get(self, job_id: str) -> None:
        identity = await self.identify()
        job = await self.control.requests.job(identity.user, job_id, admin=identity.admin)
        self.answer(self.service.views.job(job))

    async def delete(self, job_id: str) -> None:
        identity = await self.identify()
        if not identity.admin:
            identity.require(JOBS_SCOPE)
        requests, registry = self.control.requests, self.control.registry
        job = await requests.job(identity.user, job_id, admin=identity.admin)
        record = registry.leases.get(job.lease_id)
        if record is not None:
            await note_act(registry, record, "stop", identity.user)
        self.answer(self.service.views.job(await requests.cancel(job)))

    async def put(self, job_id: str) -> None:
        """Change size, project, priority or time limit; an admin may set the priority of any user's job."""
        identity = await self.identify()
        job = await self.control.requests.job(identity.user, job_id, admin=identity.admin)
        change = self.body(wire.JobChange)
        if job.user != identity.user:
            job = await prioritize(self.control.registry, job, change, identity.user)
            self.answer(self.service.views.job(job))
            return
        identity.require(JOBS_SCOPE)
        groups = await self.service.access.groups(identity, fresh=True)
        job = await queue_edits.change(self.control.request_policy, job, groups, change)
        self.answer(self.service.views.job(job))


class JobPlaceHandler(Base):
    """Move a queued job of mine before or behind another."""

    async def put(self, job_id: str) -> None:
        identity = await self.identify(JOBS_SCOPE)
        job = await self.control.requests.job(identity.user, job_id)
        place = self.body(wire.JobPlace)
        self.answer(self.service.views.job(await queue_edits.place(self.control.registry, job, place)))


class JobTimelineHandler(Base):
    """Every pause and resume of a job, with its reason."""

    async def get(self, job_id: str) -> None:
        identity = await self.identify()
        job = await self.control.requests.job(identity.user, job_id, admin=identity.admin)
        self.answer(await history.timeline(self.control.registry, job, identity.user))


class JobRetryHandler(Base):
    """Submit an ended job again."""

    async def post(self, job_id: str) -> None:
        identity = await self.identify(JOBS_SCOPE)
        job = await self.control.requests.job(identity.user, job_id)
        async with self.service.limits.submits.of(identity.user):
            groups = await self.service.access.groups(identity, fresh=True)
            again = await self.control.requests.retry(job, groups)
            self.answer(self.service.views.job(again, is_new=True), 201)


class JobReportHandler(Base):
    """A runner reports its own attempt."""

    is_hint = True

    async def post(self, job_id: str, attempt: str) -> None:
        """Note the runner's report.

        Raises:
            NotAllowed: the token does not belong to this attempt's server.
        """
        identity = await self.identify()
        if identity.server != f"j{job_id}-{attempt}":
            raise NotAllowed("only the server of this attempt may report about it")
        self.service.limits.reports.take(f"{identity.user}/{identity.server}")
        report = self.body(wire.JobReport)
        outcome = await self.control.job_reports.report(identity.user, job_id, int(attempt), report)
        if outcome is None:
            self.set_status(204)
        else:
            self.answer(outcome)


class ActivityHandler(Base):
    """A server reports its kernels."""

    is_hint = True

    async def post(self) -> None:
        """Note the server's report about its kernels.

        Raises:
            NotAllowed: the token does not belong to a server.
        """
        identity = await self.identify()
        if identity.server is None:
            raise NotAllowed("only a server may report its kernels, with its own token")
        self.service.limits.reports.take(f"{identity.user}/{identity.server}")
        await self.control.own_sessions.activity(
            identity.user, identity.server, self.body(wire.ActivityReport)
        )
        self.set_status(204)


class LeasesHandler(Base):
    """My leases; all of them for an admin (``?all=1``)."""

    async def get(self) -> None:
        identity = await self.identify()
        everyone = identity.admin and self.get_query_argument("all", "") == "1"
        user, views = None if everyone else identity.user, self.service.views
        self.answer(wire.Leases(leases=views.leases(user), waiting=waiting_sessions(views, user)))


class LeaseActionHandler(Base):
    """Wake, keep, lend, stop or release a lease of mine, let it sleep; mark it never to sleep, or undo that.

    ``release`` ends the processes that keep GPU memory of ended ones.
    An admin may do this to any user's lease, with a line in the log of decisions.
    """

    async def post(self, lease_id: str, action: str) -> None:
        identity = await self.identify()
        record = _mine(self.control.registry.get(lease_id), identity)
        if action == "stop" and not identity.admin:
            identity.require(JOBS_SCOPE if record.is_job else ADMIN_SCOPE)
        minutes = self.body(wire.KeepRequest).minutes if action == "keep" and self.content else 30
        await act(self, record, action, identity, minutes)
        current = self.control.registry.leases.get(lease_id)
        if current is None:  # a job that had not begun
            self.set_status(204)
            return
        self.answer(self.service.views.lease(current))


async def act(handler: Base, record: LeaseRecord, action: str, identity: Identity, minutes: float) -> None:
    """Do an action of `LeaseActionHandler`; log it first if ``identity`` is not the owner.

    Raises:
        RequestError: the action is not possible now; the text says why.
        BrokerUnavailable: the Hub does not stop the server.
    """
    control, registry = handler.control, handler.control.registry
    own = control.own_sessions
    job = registry.job_of(record)
    await note_act(registry, record, action, identity.user)
    match action:
        case "resume":
            await own.wake(record)
        case "stay-asleep":
            await own.stay_asleep(record)
        case "keep":
            await own.keep(record, minutes)
        case "lend":
            await own.lend(record)
        case "release":
            await own.release(record)
        case "stop" if job is not None:
            await control.requests.cancel(job)
        case "stop" if record.lease.user in registry.owners.absent:
            # The Hub would stop the server of another user of this name.
            await registry.advance(record, Stopping(reason="an administrator released it"))
        case "stop":
            await handler.service.access.stop_server(ServerKey(record.lease.user, record.server))
        case _:
            await own.allow_sleep(record, action == "may-sleep")


class KernelReleaseHandler(Base):
    """Free the GPU memory of a kernel of mine: 307 to its server, which alone can restart it."""

    async def post(self, lease_id: str, kernel_id: str) -> None:
        """Redirect to the server.

        Raises:
            NotAllowed: the kernel belongs to another user than the administrator who asks.
        """
        identity = await self.identify()
        lease = _mine(self.control.registry.get(lease_id), identity)
        if lease.lease.user != identity.user:  # a client sends its token to the target
            raise NotAllowed("a kernel is restarted by its owner only: stop the server instead")
        url = await self.service.access.server_url(ServerKey(lease.lease.user, lease.server))
        self.redirect(f"{url}gpushare/leases/{lease_id}/kernels/{kernel_id}/release", status=307)


class ProjectsHandler(Base):
    """My projects; all of them for an admin."""

    async def get(self) -> None:
        identity = await self.identify()
        groups = await self.service.access.groups(identity)
        self.answer(wire.Projects(projects=self.service.views.projects(groups, everyone=identity.admin)))


class ProjectHandler(Base):
    """Change a project's numbers."""

    async def put(self, name: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        await self.control.project_numbers.change(name, self.body(wire.ProjectChange), identity.user)
        self.answer(wire.Projects(projects=self.service.views.projects((), everyone=True)))

    async def delete(self, name: str) -> None:
        """Undo all changes of a project's numbers."""
        identity = await self.identify(ADMIN_SCOPE)
        await self.control.project_numbers.reset(name, identity.user)
        self.answer(wire.Projects(projects=self.service.views.projects((), everyone=True)))


class LendingHandler(Base):
    """Whether GPUs of idle sessions are lent; change it."""

    async def get(self) -> None:
        await self.identify()
        self.answer(self.service.views.lending())

    async def put(self) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        mode = self.body(wire.LendingChange).mode
        await self.control.lending.set(None if mode is None else LendingMode(mode), identity.user)
        self.answer(self.service.views.lending())


class DevicesHandler(Base):
    """The GPUs of this machine."""

    async def get(self) -> None:
        identity = await self.identify()
        self.answer(self.service.views.devices(admin=identity.admin))


class HistoryHandler(Base):
    """GPU-hours that I used and lent in the last seven days."""

    async def get(self) -> None:
        identity = await self.identify()
        self.answer(await history.week(self.control.registry, identity.user))


class UsageHandler(Base):
    """GPU-hours by user, project, GPU model, day or month, of all users for an admin, else mine.

    ``?by=user,month&since=2031-05-01&until=2031-05-31&user=&project=``
    """

    async def get(self) -> None:
        self.answer(await usage_of(self, await self.identify()))


async def usage_of(handler: Base, identity: Identity) -> wire.Usage:
    """Return the use that a request selects, within the rights of its user.

    Raises:
        InvalidRequest: the query is invalid.
        StoreError: the database cannot be read.
        TooMany: the user exceeds one request a second after a burst of 10.
    """
    registry, names = handler.control.registry, ("by", "since", "until", "user", "project")
    arguments = {name: handler.get_query_argument(name, "") for name in names}
    if not identity.admin:
        arguments["user"] = identity.user
    handler.service.limits.scans.take(identity.user)
    return await history.usage(registry, history.query(registry.iso_now()[:10], **arguments))


class DecisionsHandler(Base):
    """The newest decisions that concern me; all of them for an admin."""

    async def get(self) -> None:
        identity = await self.identify()
        limit = int(self.number("limit", 100, 1, 1_000))
        user = None if identity.admin else identity.user
        self.answer(wire.Decisions(decisions=self.service.views.decisions(user, limit, identity.user)))


class HealthHandler(Base):
    """Whether the broker works; needs no token."""

    async def get(self) -> None:
        await self.turn()
        health = wire.replace(
            self.service.views.health(), sockets_inherited=self.service.site.sockets_inherited
        )
        self.answer(health, 200 if health.status == "ok" else 503)


class OpenApiHandler(Base):
    """This interface, described."""

    async def get(self) -> None:
        await self.turn()
        self.answer(self.service.site.openapi())


class MetricsHandler(Base):
    """Numbers for Prometheus; needs the Hub's ``read:metrics``."""

    async def get(self) -> None:
        await self.identify("read:metrics")
        self.set_header("Content-Type", prometheus_client.CONTENT_TYPE_LATEST)
        self.finish(prometheus_client.generate_latest(self.service.site.metrics))


class NoSuchPathHandler(Base):
    """Everything else below the API."""

    async def prepare(self) -> None:
        """Refuse before a body is read.

        Raises:
            NotAllowed, TooMany: as for `refuse_frames` and `turn`.
            NotFound: in all other cases.
        """
        self.refuse_frames()
        await self.turn()
        raise NotFound("there is no such path: see openapi.json", reason=wire.NO_SUCH_PATH)


# ---- the route that resizes a running session or gives a running server its first GPU


class LeaseSizeHandler(Base):
    """Give my session another size on its GPU, or the calling server its first GPU.

    A server without a GPU names the lease of its environment and calls over the unix socket: the lease
    gets the uid of its process.
    """

    async def put(self, lease_id: str) -> None:
        """Answer with the lease when its processes may use it.

        Raises:
            NotFound: there is no such lease, or it is another user's, even if an admin asks.
        """
        identity, request = await self.identify(JOBS_SCOPE), self.body(wire.SizeRequest)
        uid, server = socket_uid(self.stream.socket), None
        if identity.server is not None and uid is not None:
            is_new = lease_id not in self.control.registry.leases
            server = wire.SpawnRequest(
                user=identity.user,
                server=identity.server,
                groups=list(await self.service.access.groups(identity, fresh=True)) if is_new else [],
                uid=uid,
                options=wire.GpuRequest(project=request.project),
            )
        grant = await self.control.sizes.change(identity.user, lease_id, request, server)
        lease = self.service.views.lease(self.control.registry.get(lease_id))
        self.answer(wire.SizedLease.of(lease, env=grant.env if grant else {}))


# ---- routes for administrators only ------------------------------------------


class DeviceDrainHandler(Base):
    """Drain a GPU (by its UUID) or the ``machine``: it takes no new work; delete ends the drain."""

    async def put(self, name: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        request = self.body(wire.DrainRequest) if self.content else wire.DrainRequest()
        await administration.drain(
            self.control.registry, self.control.engine, name, request.until, identity.user
        )
        self.answer(self.service.views.devices(admin=True))

    async def delete(self, name: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        await administration.undrain(self.control.registry, name, identity.user)
        self.answer(self.service.views.devices(admin=True))


class UnleasedProcessHandler(Base):
    """End a process without a lease on a GPU; the watchdog's rules say which are left alone."""

    async def delete(self, name: str, process: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        control = self.control
        await end_process(control.registry, control.devices, name, process, identity.user)
        self.answer(self.service.views.devices(admin=True))


class OwnersHandler(Base):
    """Owners of leases that are absent from the Hub, or whose name has a new user."""

    async def get(self) -> None:
        await self.identify(ADMIN_SCOPE)
        self.answer(owners(self.control.registry))


class OwnerHandler(Base):
    """Give all that belongs to an absent owner to a user of the Hub; delete fails the waiting jobs."""

    async def put(self, name: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        to = (self.body(wire.Adoption) if self.content else wire.Adoption()).to
        await self.control.ownership.adopt(name, to, identity.user)
        self.answer(owners(self.control.registry))

    async def delete(self, name: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        await self.control.ownership.end(name, identity.user)
        self.answer(owners(self.control.registry))


class TraceHandler(Base):
    """Past ``jobs`` or ``cells`` as a trace for the simulator; ``?names=1`` includes names."""

    async def get(self, kind: str) -> None:
        identity = await self.identify(ADMIN_SCOPE)
        self.service.limits.scans.take(identity.user)
        trace = history.jobs if kind == "jobs" else history.cells
        names = self.get_query_argument("names", "") == "1"
        self.answer(await trace(self.control.registry, names=names))
