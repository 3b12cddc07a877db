"""The REST interface: each handler checks rights, decodes, asks the desk or the views, encodes.

`ROUTES` is the whole interface as a table; `openapi.py` describes the same
table, and a test holds the two together.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TypeVar

import msgspec
import prometheus_client
from jupyterhub.services.auth import HubOAuthenticated
from tornado import web

from jupyter_gpushare import wire
from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker import history
from jupyter_gpushare.broker.access import ADMIN_SCOPE, JOBS_SCOPE, Access, Identity
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.desk import Desk
from jupyter_gpushare.broker.overview import Overview
from jupyter_gpushare.broker.rates import Rate
from jupyter_gpushare.broker.records import LeaseRecord
from jupyter_gpushare.broker.spawning import Spawning
from jupyter_gpushare.broker.terms import Terms
from jupyter_gpushare.broker.views import Views
from jupyter_gpushare.errors import (
    BrokerUnavailable,
    InvalidRequest,
    NotAllowed,
    NotFound,
    RequestError,
    TooMany,
)

log = logging.getLogger("gpushare.broker")

T = TypeVar("T")

MAX_WAIT_S = 30.0
# In JSON as `wire.encode` writes it: a backslash that is not escaped itself, and u0000.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


@dataclass(slots=True)
class Service:
    """What the handlers share."""

    book: Book
    terms: Terms
    desk: Desk
    spawning: Spawning
    views: Views
    overview: Overview
    access: Access
    registry: prometheus_client.CollectorRegistry
    prefix: str
    openapi: Callable[[], dict[str, Any]]
    waiting: dict[str, int]  # long polls per user
    # Of a server about itself: a job's runner tells every 2 s, a server extension every second.
    reports: Rate = field(default_factory=lambda: Rate(per_s=5.0, burst=20))


class Base(HubOAuthenticated, web.RequestHandler):
    """Identity, errors as `wire.ErrorAnswer`, JSON in and out."""

    def initialize(self, service: Service) -> None:
        self.service = service
        self.hub_auth = service.access.hub_auth

    async def identify(self) -> Identity:
        """Return who asks.

        Raises:
            NotAllowed: nobody with access.
            BrokerUnavailable: the Hub does not answer.
        """
        auth = self.service.access.hub_auth
        try:
            if self.request.method == "GET":
                model = await auth.get_user(self, sync=False)
            else:
                token = auth.get_token(self, in_cookie=False)
                model = await auth.user_for_token(token, sync=False) if token else None
        except web.HTTPError as error:
            if error.status_code >= 500:
                raise BrokerUnavailable("the Hub does not answer, so nobody can be identified") from None
            raise NotAllowed("the Hub does not know this token", reason="login") from None
        return self.service.access.identity(model)

    def spawner_only(self) -> None:
        """Raise `NotAllowed` unless the Hub's spawner asks."""
        if not self.service.access.is_spawner(self.request.headers.get("Authorization", "")):
            raise NotAllowed("only the Hub's spawner may ask this")

    def body(self, kind: type[T]) -> T:
        content = self.request.headers.get("Content-Type", "application/json")
        if content.partition(";")[0].strip() != "application/json":
            raise InvalidRequest("send JSON, with Content-Type: application/json")
        message = wire.decode(self.request.body, kind)
        # JSON can spell what no database, no command line and no answer can hold.
        try:
            text = wire.encode(message)
        except UnicodeEncodeError:
            raise InvalidRequest("a text in the body has half of a character (a lone surrogate)") from None
        if _NUL.search(text):
            raise InvalidRequest("a text in the body has a NUL character")
        return message

    def answer(self, message: Any, status: int = 200) -> None:
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.finish(wire.encode(message))

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a query argument within bounds.

        Raises:
            InvalidRequest: it is not a number.
        """
        text = self.get_query_argument(name, "")
        try:
            value = float(text) if text else default
        except ValueError:
            raise InvalidRequest(f"{name} is a number") from None
        return min(max(value, low), high) if value == value else default

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        reason, message = "error", f"The GPU broker could not answer this ({status_code})."
        if isinstance(error, RequestError):
            status_code, reason, message = error.status, error.reason, str(error)
        elif isinstance(error, BrokerUnavailable):
            status_code, reason, message = 503, "unavailable", str(error)
        elif isinstance(error, web.HTTPError):
            reason = {404: "not_found", 405: "wrong_method", 413: "invalid"}.get(status_code, "refused")
            message = error.log_message or self._reason
        if isinstance(error, TooMany) and error.retry_after_s is not None:
            self.set_header("Retry-After", str(ceil(error.retry_after_s)))
        if status_code == 403 and reason == "login":
            status_code = 401
        self.answer(wire.ErrorAnswer(status=status_code, reason=reason, message=message), status_code)

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, (RequestError, BrokerUnavailable)):
            super().log_exception(typ, value, tb)


def _mine(record: LeaseRecord, identity: Identity) -> LeaseRecord:
    if record.lease.user != identity.user and not identity.admin:
        raise NotFound("there is no such lease (it may have ended)")
    return record


class Status(Base):
    """What is mine; ``?after=SEQ&wait=25`` waits for a change."""

    _poll: asyncio.Task[None] | None = None

    def on_connection_close(self) -> None:
        """Let a page that is gone wait no longer."""
        if self._poll is not None:
            self._poll.cancel()

    async def get(self) -> None:
        identity = await self.identify()
        book, waiting = self.service.book, self.service.waiting
        after = int(self.number("after", -1, -1, 2**53))
        wait_s = self.number("wait", 0, 0, MAX_WAIT_S)
        if wait_s and after >= book.told:
            if waiting.get(identity.user, 0) >= book.policy.max_waiters_per_user:
                raise TooMany("too many of your pages wait for news at once: close some")
            waiting[identity.user] = waiting.get(identity.user, 0) + 1
            self._poll = asyncio.create_task(book.wait_beyond(after, wait_s))
            try:
                await asyncio.wait({self._poll})
            finally:
                waiting[identity.user] -= 1
                if not waiting[identity.user]:
                    del waiting[identity.user]
        groups = () if identity.is_service else await self.service.access.groups(identity.user)
        status = self.service.views.status(identity.user, groups, admin=identity.admin)
        self.answer(
            msgspec.structs.replace(status, keep_left_minutes=self.service.desk.keep_left(identity.user))
        )


class Offers(Base):
    """What could start now for me, also a job: with ``?gpus=``, ``?memory=`` or ``?profile=``.

    With ``&borrow=0`` one that does not borrow.
    """

    async def get(self) -> None:
        identity = await self.identify()
        groups = await self.service.access.groups(identity.user)
        project = self.service.terms.choose_project(groups, self.get_query_argument("project", None))
        offers = self.service.views.offers(groups, project)
        sizes = ("gpus", "memory", "profile")
        gpus, memory, profile = (self.get_query_argument(name, "") or None for name in sizes)
        if gpus or memory or profile:
            borrow = self.get_query_argument("borrow", "1") != "0"
            asked = wire.JobRequest(
                command=["-"],
                gpus=gpus or "1",
                memory=memory,
                profile=profile,
                project=project,
                borrow=borrow,
            )
            offers = msgspec.structs.replace(
                offers, job=await self.service.desk.outlook(identity.user, asked)
            )
        self.answer(offers)


class Jobs(Base):
    """My jobs; submit one."""

    async def get(self) -> None:
        identity = await self.identify()
        limit = int(self.number("limit", 100, 1, 10_000))
        everyone = identity.admin and self.get_query_argument("all", "") == "1"
        self.answer(
            wire.JobList(jobs=self.service.views.jobs(None if everyone else identity.user, limit=limit))
        )

    async def post(self) -> None:
        identity = await self.identify()
        identity.require(JOBS_SCOPE)
        request = self.body(wire.JobRequest)
        groups = await self.service.access.groups(identity.user)
        key = self.request.headers.get("Idempotency-Key")
        job = await self.service.desk.submit(identity.user, groups, request, key)
        self.answer(self.service.views.job(job), 201)


class Job(Base):
    """One job of mine; delete cancels it."""

    async def get(self, job_id: str) -> None:
        identity = await self.identify()
        job = await self.service.desk.job(identity.user, job_id, admin=identity.admin)
        self.answer(self.service.views.job(job))

    async def delete(self, job_id: str) -> None:
        identity = await self.identify()
        if not identity.admin:
            identity.require(JOBS_SCOPE)
        job = await self.service.desk.job(identity.user, job_id, admin=identity.admin)
        self.answer(self.service.views.job(await self.service.desk.cancel(job)))


class JobTimeline(Base):
    """Every pause and resume of a job, with its reason."""

    async def get(self, job_id: str) -> None:
        identity = await self.identify()
        job = await self.service.desk.job(identity.user, job_id, admin=identity.admin)
        self.answer(await history.timeline(self.service.book, job))


class JobRetry(Base):
    """Submit an ended job again."""

    async def post(self, job_id: str) -> None:
        identity = await self.identify()
        identity.require(JOBS_SCOPE)
        job = await self.service.desk.job(identity.user, job_id)
        groups = await self.service.access.groups(identity.user)
        self.answer(self.service.views.job(await self.service.desk.retry(job, groups)), 201)


class JobReport(Base):
    """A runner tells of its own attempt."""

    async def post(self, job_id: str, attempt: str) -> None:
        identity = await self.identify()
        if identity.server != f"j{job_id}-{attempt}":
            raise NotAllowed("only the server of this attempt may report about it")
        self.service.reports.take(f"{identity.user}/{identity.server}")
        await self.service.desk.report(identity.user, job_id, int(attempt), self.body(wire.JobReport))
        self.set_status(204)


class Activity(Base):
    """A server tells of its kernels."""

    async def post(self) -> None:
        identity = await self.identify()
        if identity.server is None:
            raise NotAllowed("only a server may report its kernels, with its own token")
        self.service.reports.take(f"{identity.user}/{identity.server}")
        await self.service.desk.activity(identity.user, identity.server, self.body(wire.ActivityReport))
        self.set_status(204)


class Leases(Base):
    """My leases; all of them for an admin (``?all=1``)."""

    async def get(self) -> None:
        identity = await self.identify()
        everyone = identity.admin and self.get_query_argument("all", "") == "1"
        self.answer(wire.Leases(leases=self.service.views.leases(None if everyone else identity.user)))


class LeaseAction(Base):
    """Wake, keep or lend a lease of mine."""

    async def post(self, lease_id: str, action: str) -> None:
        identity = await self.identify()
        desk, book = self.service.desk, self.service.book
        record = _mine(book.get(lease_id), identity)
        match action:
            case "resume":
                await desk.wake(record)
            case "keep":
                await desk.keep(record, self.body(wire.KeepRequest).minutes if self.request.body else 30)
            case _:
                await desk.lend(record)
        self.answer(self.service.views.lease(book.get(lease_id)))


class KernelRelease(Base):
    """Free the GPU memory of a kernel: 307 to its server, which alone can restart it."""

    async def post(self, lease_id: str, kernel_id: str) -> None:
        identity = await self.identify()
        lease = _mine(self.service.book.get(lease_id), identity)
        url = await self.service.access.server_url(ServerKey(lease.lease.user, lease.server))
        self.redirect(f"{url}gpushare/leases/{lease_id}/kernels/{kernel_id}/release", status=307)


class Projects(Base):
    """My projects; all of them for an admin."""

    async def get(self) -> None:
        identity = await self.identify()
        groups = () if identity.is_service else await self.service.access.groups(identity.user)
        self.answer(wire.Projects(projects=self.service.views.projects(groups, everyone=identity.admin)))


class Project(Base):
    """Change a project's numbers."""

    async def put(self, name: str) -> None:
        identity = await self.identify()
        identity.require(ADMIN_SCOPE)
        await self.service.terms.change_project(name, self.body(wire.ProjectChange))
        self.answer(wire.Projects(projects=self.service.views.projects((), everyone=True)))


class Devices(Base):
    """The GPUs of this machine."""

    async def get(self) -> None:
        await self.identify()
        self.answer(self.service.views.devices())


class History(Base):
    """GPU-hours that I used and lent in the last seven days."""

    async def get(self) -> None:
        identity = await self.identify()
        self.answer(await history.week(self.service.book, identity.user))


class Decisions(Base):
    """The newest decisions that concern me; all of them for an admin."""

    async def get(self) -> None:
        identity = await self.identify()
        limit = int(self.number("limit", 100, 1, 1_000))
        who = None if identity.admin else identity.user
        self.answer(wire.Decisions(decisions=self.service.views.decisions(who, limit)))


class Health(Base):
    """Whether the broker works; for everybody."""

    async def get(self) -> None:
        health = self.service.views.health()
        self.answer(health, 200 if health.status == "ok" else 503)


class OpenApi(Base):
    """This interface, described."""

    async def get(self) -> None:
        self.answer(self.service.openapi())


class SpawnerOffers(Base):
    """What the spawn page shows to a user."""

    async def get(self) -> None:
        self.spawner_only()
        groups = self.get_query_arguments("group")
        project = self.service.terms.choose_project(groups, self.get_query_argument("project", None) or None)
        self.answer(self.service.views.offers(groups, project))


class SpawnerStart(Base):
    """A server is about to start."""

    async def post(self) -> None:
        self.spawner_only()
        self.answer(await self.service.spawning.start(self.body(wire.SpawnRequest)))


class SpawnerStop(Base):
    """A server has ended."""

    async def post(self) -> None:
        self.spawner_only()
        await self.service.spawning.stop(self.body(wire.SpawnStop))
        self.set_status(204)


class Metrics(Base):
    """Numbers for Prometheus; needs the Hub's ``read:metrics``."""

    async def get(self) -> None:
        (await self.identify()).require("read:metrics")
        self.set_header("Content-Type", prometheus_client.CONTENT_TYPE_LATEST)
        self.finish(prometheus_client.generate_latest(self.service.registry))


class NoSuchPath(Base):
    """Everything else below the API."""

    async def prepare(self) -> None:
        raise NotFound("there is no such path: see openapi.json")


@dataclass(frozen=True, slots=True)
class Route:
    """One path below ``api/v1/`` (``{name}`` is one segment), its handler and its messages."""

    path: str
    handler: type[Base]
    answers: dict[str, Any]  # by method: the type of the answer, None: no content
    takes: dict[str, Any]  # by method: the type of the body


_ID = {
    "id": "[a-z0-9]{1,40}",
    "n": "[0-9]{1,6}",
    "name": "[^/]{1,255}",
    "action": "resume|keep|lend",
    "kernel": "[a-z0-9-]{1,64}",
}

ROUTES: tuple[Route, ...] = (
    Route("status", Status, {"get": wire.Status}, {}),
    Route("offers", Offers, {"get": wire.Offers}, {}),
    Route("jobs", Jobs, {"get": wire.JobList, "post": wire.Job}, {"post": wire.JobRequest}),
    Route("jobs/{id}", Job, {"get": wire.Job, "delete": wire.Job}, {}),
    Route("jobs/{id}/timeline", JobTimeline, {"get": wire.JobTimeline}, {}),
    Route("jobs/{id}/retry", JobRetry, {"post": wire.Job}, {}),
    Route("jobs/{id}/attempts/{n}/report", JobReport, {"post": None}, {"post": wire.JobReport}),
    Route("servers/activity", Activity, {"post": None}, {"post": wire.ActivityReport}),
    Route("leases", Leases, {"get": wire.Leases}, {}),
    Route("leases/{id}/{action}", LeaseAction, {"post": wire.LeaseStatus}, {"post": wire.KeepRequest}),
    Route("leases/{id}/kernels/{kernel}/release", KernelRelease, {"post": dict}, {}),
    Route("projects", Projects, {"get": wire.Projects}, {}),
    Route("projects/{name}", Project, {"put": wire.Projects}, {"put": wire.ProjectChange}),
    Route("devices", Devices, {"get": wire.Devices}, {}),
    Route("history", History, {"get": wire.History}, {}),
    Route("decisions", Decisions, {"get": wire.Decisions}, {}),
    Route("health", Health, {"get": wire.Health}, {}),
    Route("openapi.json", OpenApi, {"get": dict}, {}),
    Route("spawner/offers", SpawnerOffers, {"get": wire.Offers}, {}),
    Route("spawner/start", SpawnerStart, {"post": wire.SpawnGrant}, {"post": wire.SpawnRequest}),
    Route("spawner/stop", SpawnerStop, {"post": None}, {"post": wire.SpawnStop}),
)


def pattern(route: Route) -> str:
    """Return the regular expression of a route's path."""
    path = route.path.replace(".", r"\.")
    for name, expression in _ID.items():
        path = path.replace("{" + name + "}", f"({expression})")
    return path
