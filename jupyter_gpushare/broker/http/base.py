"""The base of all handlers: headers, identity, errors, bodies.

Order of a request: check the head (frames, size), check the caller, read the body, run
the handler.  So the broker holds no body of a caller without a valid token, and refuses
a body above the limit by its announced length.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Self, TypeVar

import prometheus_client
from jupyterhub.services.auth import HubOAuthCallbackHandler, HubOAuthenticated
from tornado import iostream, web

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import DeviceBackend
from jupyter_gpushare.broker.control.job_reports import JobReports
from jupyter_gpushare.broker.control.job_starts import JobStarts
from jupyter_gpushare.broker.control.lending_control import LendingControl
from jupyter_gpushare.broker.control.loop import Loop
from jupyter_gpushare.broker.control.own_sessions import OwnSessions
from jupyter_gpushare.broker.control.ownership import Ownership
from jupyter_gpushare.broker.control.project_numbers import ProjectNumbers
from jupyter_gpushare.broker.control.request_policy import RequestPolicy
from jupyter_gpushare.broker.control.requests import RequestService
from jupyter_gpushare.broker.control.sessions import Sessions
from jupyter_gpushare.broker.control.sizes import Sizes
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.http.access import Access, Identity
from jupyter_gpushare.broker.http.listener import GUARDS, CallerQueues, Rate
from jupyter_gpushare.broker.state.observations import Faults
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.views.overview import Overview
from jupyter_gpushare.broker.views.views import Views
from jupyter_gpushare.errors import (
    BrokerUnavailable,
    GpuShareError,
    InvalidRequest,
    NotAllowed,
    RequestError,
    StoreError,
    TooLarge,
    TooMany,
)
from jupyter_gpushare.listener import Gate
from jupyter_gpushare.protocol import wire

T = TypeVar("T")

# A NUL in JSON from `wire.encode`: u0000 after a backslash that is not escaped itself.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
# Delay of a refused change, so that a caller in a loop gets one refusal in this time per connection.
_REFUSAL_S = 0.5
# Requests of one user in progress, each until its last byte is sent.  A page or a command has a few.
_MAX_REQUESTS = 32
# Destinations by which a browser shows that it embeds a page (Fetch Metadata, W3C).
_FRAMES = frozenset(("iframe", "frame", "embed", "object", "fencedframe"))


@dataclass(frozen=True, slots=True)
class Control:
    """The parts of the broker that change leases, jobs and policy."""

    registry: Registry
    engine: Engine
    devices: DeviceBackend
    request_policy: RequestPolicy
    requests: RequestService
    job_reports: JobReports
    own_sessions: OwnSessions
    project_numbers: ProjectNumbers
    sessions: Sessions
    sizes: Sizes
    job_starts: JobStarts
    lending: LendingControl
    faults: Faults
    ownership: Ownership

    @classmethod
    def of(cls, loop: Loop) -> Self:
        """Return the parts that handlers use, built on those of ``loop``."""
        registry, engine, effects = loop.registry, loop.engine, loop.effects
        policy = RequestPolicy(registry, engine)
        requests = RequestService(registry, engine, effects, policy)
        sessions = Sessions(engine, effects, policy, loop.ownership)
        return cls(
            registry=registry,
            engine=engine,
            devices=effects.devices,
            request_policy=policy,
            requests=requests,
            job_reports=JobReports(requests),
            own_sessions=OwnSessions(registry, effects.devices),
            project_numbers=ProjectNumbers(registry, engine),
            sessions=sessions,
            sizes=Sizes(engine, effects, policy, sessions),
            job_starts=JobStarts(effects, loop.ownership),
            lending=loop.lending,
            faults=loop.faults,
            ownership=loop.ownership,
        )


@dataclass(frozen=True, slots=True)
class Site:
    """Facts of the broker's process."""

    prefix: str
    openapi: Callable[[], dict[str, Any]]
    metrics: prometheus_client.CollectorRegistry
    sockets_inherited: bool = True


@dataclass(slots=True)
class CallerLimits:
    """Limits of each caller: simultaneous requests, and requests per second."""

    waiting: Counter[str] = field(default_factory=Counter)  # long polls, by user
    # Per server, about itself: a job's runner reports every 2 s, a server extension every second.
    reports: Rate = field(default_factory=lambda: Rate(per_s=5.0, burst=20))
    # Per user: each change is a commit to the disk, and all users wait for the disk.
    changes: Rate = field(default_factory=lambda: Rate(per_s=10.0, burst=100))
    # Per user: the spawn page of a waiting session sends a request every 5 s.
    waits: Rate = field(default_factory=lambda: Rate(per_s=2.0, burst=20))
    submits: CallerQueues = field(default_factory=CallerQueues)
    # Per user, or per peer without a token: one request in each round of the event loop, so that the
    # answers to many requests of one caller alternate with those to others.
    rounds: CallerQueues = field(default_factory=CallerQueues)
    # Per peer: requests to the Hub about tokens.
    checks: CallerQueues = field(default_factory=lambda: CallerQueues(at_once=4))
    # Per user: each reads up to `MAX_USAGE_DAYS`, or all ended work, from the database.
    scans: Rate = field(default_factory=lambda: Rate(per_s=1.0, burst=10))


@dataclass(frozen=True, slots=True)
class Service:
    """The objects that all handlers share."""

    control: Control
    views: Views
    overview: Overview
    access: Access
    site: Site
    gate: Gate
    limits: CallerLimits = field(default_factory=CallerLimits)


class Limited(web.RequestHandler):
    """Handler whose callers take turns, and whose answers no other page may embed."""

    service: Service

    def set_default_headers(self) -> None:
        """Set the headers that keep other pages from embedding an answer."""
        for name, value in GUARDS.items():
            self.set_header(name, value)

    def refuse_frames(self) -> None:
        """Refuse a request by which a browser embeds this in another page.

        Raises:
            NotAllowed: the request is one.
        """
        if self.request.headers.get("Sec-Fetch-Dest", "").lower() in _FRAMES:
            raise NotAllowed("the GPU service is not shown inside other pages", reason="framed")

    @property
    def stream(self) -> iostream.IOStream:
        """The connection of the request."""
        return self.request.connection.stream  # type: ignore[union-attr,no-any-return]

    @property
    def holder(self) -> str:
        """The holder of the connection; empty if the connection is no longer counted."""
        entry = self.service.gate.connections.of(self.stream)
        return entry.holder if entry else ""

    def stop_if_closed(self) -> None:
        """Stop if the caller has disconnected.

        Raises:
            web.Finish: the connection is closed.
        """
        if self.stream.closed():
            raise web.Finish

    @asynccontextmanager
    async def may_ask_hub(self) -> AsyncIterator[None]:
        """Wait until the peer may ask the Hub about a token.

        Raises:
            TooMany: too many requests of the same peer wait for the Hub.
            web.Finish: the caller has disconnected.
        """
        async with self.service.limits.checks.of(self.holder):
            self.stop_if_closed()
            yield


class OAuthCallback(Limited, HubOAuthCallbackHandler):
    """The Hub's answer to a login."""

    def initialize(self, service: Service) -> None:
        self.service = service
        self.hub_auth = service.access.hub_auth

    async def prepare(self) -> None:
        """Refuse to be embedded in another page.

        Raises:
            web.HTTPError: 403, if `refuse_frames` raises.
        """
        try:
            self.refuse_frames()
        except NotAllowed as error:
            raise web.HTTPError(403, str(error)) from None

    async def get(self) -> None:
        """Complete the login.

        Raises:
            web.HTTPError: 429, if too many requests of the same peer wait for the Hub.
        """
        try:
            async with self.may_ask_hub():
                # Otherwise JupyterHub's handler asks for the user and blocks the event loop.
                self.current_user = await self.hub_auth.get_user(self, sync=False)
                await super().get()  # type: ignore[misc]
        except TooMany as error:
            raise web.HTTPError(429, str(error)) from None


@web.stream_request_body
class Base(HubOAuthenticated, Limited):
    """Base of the handlers: identity, errors as `wire.ErrorAnswer`, bodies in JSON."""

    # Whether the request is only a hint, so that a cached answer of the Hub about the token suffices.
    is_hint = False

    _identity: Identity | None = None
    _is_prepared = False  # True when the body may be read
    content = b""  # the body, as far as it has been read

    def initialize(self, service: Service) -> None:
        self.service = service
        self.control = service.control
        self.hub_auth = service.access.hub_auth

    async def prepare(self) -> None:
        """Check the request before its body is read.

        Raises:
            TooLarge: the announced body is larger than `wire.MAX_BODY_BYTES`.
            InvalidRequest: the method takes no body; it would be read without a check of the token.
            NotAllowed: as for `refuse_frames` and `authorize`, which may raise other errors too.
        """
        self.refuse_frames()
        method, headers = self.request.method, self.request.headers
        length = headers.get("Content-Length", "0")
        if length.isascii() and length.isdigit() and int(length) > wire.MAX_BODY_BYTES:
            raise TooLarge("a body has at most %1 bytes", wire.MAX_BODY_BYTES)
        if method in ("POST", "PUT", "DELETE", "PATCH"):
            await self.authorize()
        elif length != "0" or "Transfer-Encoding" in headers:
            raise InvalidRequest("a request %1 has no body: send it without one", method)
        self._is_prepared = True

    def data_received(self, chunk: bytes) -> None:
        """Add a chunk of the body."""
        # The server's own limit applies to a body without an announced length.
        self.content += chunk

    async def authorize(self) -> None:
        """Check that the caller may send a body; the handler checks the rights for its content later.

        Raises:
            NotAllowed: the token is invalid or lacks access.
            BrokerUnavailable: the Hub does not answer.
            TooMany: too many of the user's requests are in progress, or too many changes at once.
        """
        # Use the cache first: a flood of requests must not become a flood to the Hub.
        token = self.hub_auth.get_token(self, in_cookie=False)
        identity = await self.service.access.identity(await self.model_of(token, cached=True), token)
        # A slow body occupies a connection of the proxy, which all users share.
        self.prove(identity.holder)
        self.begin(identity.holder)
        try:
            if not self.is_hint:
                self.service.limits.changes.take(identity.user)
        except TooMany:
            await asyncio.sleep(_REFUSAL_S)
            raise
        await self.identify()

    async def identify(self, scope: str = "") -> Identity:
        """Return the caller's identity after checking that it has ``scope``.

        Reads and hints accept an answer of the Hub about the token that is up to `identity_cache_s`
        old.  All other writes ask the Hub and accept no cookie.

        Raises:
            NotAllowed: the token is invalid, or lacks access or the scope.
            BrokerUnavailable: the Hub does not answer.
            TooMany: too many requests of the user, or of the same peer, wait.
        """
        if self._identity is None:
            auth = self.service.access.hub_auth
            token = auth.get_token(self, in_cookie=False)
            if self.request.method == "GET":
                model = await self.logged_in()
                if not getattr(self, "_token_authenticated", False):  # then the cookie counts
                    cookie = self.get_secure_cookie(auth.cookie_name)
                    token = None if cookie is None else cookie.decode()
            else:
                model = await self.model_of(token, cached=self.is_hint)
            self._identity = await self.service.access.identity(model, token)
            await self.meet(self._identity)
        if scope:
            self._identity.require(scope)
        return self._identity

    async def meet(self, identity: Identity) -> None:
        """Count the connection and the request for the caller, and wait for the caller's turn.

        Raises:
            TooMany: too many requests of the caller wait or are in progress.
            web.Finish: the caller has disconnected; nothing was done.
        """
        self.prove(identity.holder)
        await self.turn(identity.holder)
        self.begin(identity.holder)

    async def turn(self, caller: str = "") -> None:
        """Wait for the turn of a caller, by default the holder of the connection.

        Raises:
            TooMany: too many requests of that caller wait.
            web.Finish: the caller has disconnected; nothing was done.
        """
        async with self.service.limits.rounds.of(caller or self.holder):
            await asyncio.sleep(0)
        self.stop_if_closed()

    def begin(self, caller: str) -> None:
        """Count the request for ``caller`` until its answer is sent or its connection closed.

        Raises:
            TooMany: the caller has `_MAX_REQUESTS` in progress; nothing is counted.
        """
        if not self.service.gate.connections.begin(self.stream, caller, _MAX_REQUESTS):
            raise TooMany(
                "at most %1 of your requests are answered at once: wait for one of them to end",
                _MAX_REQUESTS,
                retry_after_s=1.0,
            )

    def prove(self, holder: str) -> None:
        """Count the connection for ``holder``, whom a verified token names."""
        self.service.gate.prove(self.stream, holder)

    async def logged_in(self) -> dict[str, Any] | None:
        """Return the Hub's model of the token, or else of the login, or None if neither is valid.

        Raises:
            NotAllowed, BrokerUnavailable, TooMany: as for `model_of`.
        """
        auth = self.hub_auth
        session, cookie = auth.get_session_id(self), self.get_secure_cookie(auth.cookie_name)
        for token in (auth.get_token(self, in_cookie=False), cookie.decode() if cookie else None):
            if await self.model_of(token, cached=True, session=session):
                break
        user: dict[str, Any] | None = await auth.get_user(self, sync=False)  # it needs only cached answers
        return user

    async def model_of(self, token: str | None, *, cached: bool, session: str = "") -> dict[str, Any] | None:
        """Return the Hub's model of a token, or None if the Hub does not know the token.

        Raises:
            NotAllowed: the Hub refuses to check the token.
            BrokerUnavailable: the Hub does not answer.
            TooMany: too many requests of the same peer wait for the Hub.
        """
        if not token:
            return None
        access = self.service.access
        ask = functools.partial(
            access.hub_auth.user_for_token, token, use_cache=cached, session_id=session, sync=False
        )
        try:
            if cached and access.knows(token, session):
                model: dict[str, Any] | None = await ask()
                return model
            async with self.may_ask_hub():
                model = await ask()
                return model
        except web.HTTPError as error:
            if error.status_code >= 500:
                raise BrokerUnavailable("the Hub does not answer, so no token can be checked") from None
            raise NotAllowed("the Hub does not know this token", reason="login") from None

    def body(self, kind: type[T]) -> T:
        """Return the body as a ``kind``.

        Raises:
            InvalidRequest: the body is not JSON of that kind, or has text that cannot be stored.
        """
        content = self.request.headers.get("Content-Type", "application/json")
        if content.partition(";")[0].strip() != "application/json":
            raise InvalidRequest("send JSON, with Content-Type: application/json")
        message = wire.decode(self.content, kind)
        # JSON can express text that databases, command lines and answers cannot hold.
        try:
            text = wire.encode(message)
        except UnicodeEncodeError:
            raise InvalidRequest("a text in the body has half of a character (a lone surrogate)") from None
        if _NUL.search(text):
            raise InvalidRequest("a text in the body has a NUL character")
        return message

    def answer(self, message: Any, status: int = 200) -> None:
        """Send ``message`` as JSON that caches do not store, and end the request."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.finish(wire.encode(messages.in_english(message)))

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """Return a query argument, limited to the bounds.

        Raises:
            InvalidRequest: the argument is not a number.
        """
        text = self.get_query_argument(name, "")
        try:
            value = float(text) if text else default
        except ValueError:
            raise InvalidRequest("%1 is a number", name) from None
        return min(max(value, low), high) if value == value else default

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        reason, shown = "error", GpuShareError("The GPU broker could not answer this (%1).", status_code)
        if isinstance(error, RequestError):
            status_code, reason, shown = error.status, error.reason, error
        elif isinstance(error, (BrokerUnavailable, StoreError)):
            status_code, reason, shown = 503, "unavailable", error
        elif isinstance(error, web.HTTPError):
            reason = {404: "not_found", 405: "wrong_method", 413: "invalid"}.get(status_code, "refused")
            shown = GpuShareError(error.log_message or self._reason)
        if status_code == 405:
            self.set_header("Allow", ", ".join(self._verbs()))
        if isinstance(error, TooMany):
            self.set_header("Retry-After", str(ceil(error.retry_after_s)))
        if status_code == 403 and reason == "login":
            status_code = 401
        if not self._is_prepared:
            # Tornado closes a connection that it answers before it has read the whole request.  The header
            # tells the client, which then sends no other request on it.
            self.set_header("Connection", "close")
        self.answer(wire.ErrorAnswer.of(shown, status_code, reason), status_code)

    def _verbs(self) -> list[str]:
        unset = web.RequestHandler._unimplemented_method
        return [m for m in self.SUPPORTED_METHODS if getattr(type(self), m.lower()) is not unset]

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, (RequestError, BrokerUnavailable)):
            super().log_exception(typ, value, tb)
