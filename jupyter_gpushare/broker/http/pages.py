"""The service's own page: use of the GPUs now and in the past, leases, queue and decisions."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jinja2
from tornado import httputil

from jupyter_gpushare import messages
from jupyter_gpushare.broker.http.access import ADMIN_SCOPE, Identity
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.broker.http.handlers import usage_of
from jupyter_gpushare.broker.state.records import LendingMode, MachineUse
from jupyter_gpushare.broker.views.overview import PERIODS
from jupyter_gpushare.errors import InvalidRequest, NotAllowed, RequestError
from jupyter_gpushare.protocol import wire

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("jupyter_gpushare.broker.http", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: messages.printable(messages.one_line(value)) if type(value) is str else value,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["gibibytes"] = messages.gibibytes
_ENVIRONMENT.filters["duration"] = messages.duration
_ENVIRONMENT.filters["about"] = messages.about
_ENVIRONMENT.filters["said"] = lambda texts: messages.english(texts, time=str)
_ENVIRONMENT.filters["gpus"] = lambda milli: f"{milli / 1000:g}"
_ENVIRONMENT.filters["number"] = lambda value: f"{value:.3g}"

# Every second piece is a time (ISO 8601, UTC) without its zone.
_ENVIRONMENT.filters["pieces"] = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d)?)(?:\.\d+)?Z").split
# The only script of the page writes its times in the reader's zone.
_SCRIPT_HASH = base64.b64encode(
    hashlib.sha256(_ENVIRONMENT.get_template("times.js").render().encode()).digest()
).decode()

# The drawing of the past, in units of its own.
WIDTH, HEIGHT = 720, 120
# Decisions are read from disk, and sent, in pieces of so many.
_PIECE = 1_000
_COLUMNS = ("seq", "at", "user", "project", "lease", "action", "why", "for_lease", "sentence")


class Page(Base):
    """What pages have in common: people log in at the Hub."""

    async def current_user_or_login(self) -> Identity | None:
        """Return the user; None: redirected to the Hub's login."""
        try:
            return await self.identify()
        except NotAllowed as error:
            if error.reason != "login":
                raise
            self.redirect(self.get_login_url())
            return None


class AdminPage(Page):
    """Devices, projects, leases, queue and decisions; people see their own part."""

    async def get(self) -> None:
        identity = await self.current_user_or_login()
        if identity is not None:
            await self._show(identity)

    async def authorize(self) -> None:
        token = self.hub_auth.get_token(self)
        self.service.access.identity(await self.model_of(token, cached=True)).require(ADMIN_SCOPE)

    async def identify_writer(self) -> Identity:
        """Return the administrator behind a form: a token, or a login with the XSRF token in the body.

        A token in the address or a header is no proof: scripts of other pages of this
        origin add those, and addresses end in logs.

        Raises:
            NotAllowed: no administrator, or no XSRF token.
            BrokerUnavailable: the Hub does not answer.
        """
        form = self.request.body_arguments
        httputil.parse_body_arguments(
            self.request.headers.get("Content-Type", ""), self.content, form, self.request.files
        )
        self.request.arguments = form
        auth = self.hub_auth
        if not await self.ask_hub(auth.get_user(self, sync=False)):
            raise NotAllowed("log in again: the form was not sent by this page", reason="login")
        if not getattr(self, "_token_authenticated", False) and not any(form.get("_xsrf", ())):
            raise NotAllowed("the form was not sent by this page")
        identity = self.service.access.identity(await self.model_of(auth.get_token(self), cached=False))
        identity.require(ADMIN_SCOPE)
        return identity

    async def post(self) -> None:
        """Change a project's quota or the lending mode, or lend an idle session; then show the page again."""
        identity = await self.identify_writer()
        service = self.service
        try:
            if mode := self.get_body_argument("lending", ""):
                await self._set_lending(mode, identity)
            elif lease := self.get_body_argument("lend", ""):
                await service.control.requests.lend(service.control.registry.get(lease))
            elif project := self.get_body_argument("reset", ""):
                await service.control.request_policy.reset_project(project, identity.user)
            else:
                await service.control.request_policy.change_project(
                    self.get_body_argument("project", ""), self._change(), identity.user
                )
        except RequestError as error:
            self.set_status(error.status)
            await self._show(identity, wrong=str(error))
            return
        self.redirect(f"{service.site.prefix}?period={self._period()}", status=303)

    async def _set_lending(self, mode: str, identity: Identity) -> None:
        if mode not in (*LendingMode, "default"):
            raise InvalidRequest("lending is on, watch, off or default")
        await self.control.lending.set(None if mode == "default" else LendingMode(mode), identity.user)

    def _change(self) -> wire.ProjectChange:
        quota, weight, limit = (
            self.get_body_argument(name, "").strip() for name in ("quota", "weight", "limit")
        )
        try:
            return wire.ProjectChange(
                quota=float(quota) if quota else None,
                weight=int(weight) if weight else None,
                limit=float(limit) if limit else None,
                force=bool(self.get_body_argument("force", "")),
            )
        except ValueError:
            raise InvalidRequest(
                "guaranteed is a number of GPUs, so is the limit, weight a whole number"
            ) from None

    def _period(self) -> str:
        period: str = self.get_query_argument("period", "24h")
        return period if period in PERIODS else "24h"

    async def _show(self, identity: Identity, wrong: str = "") -> None:
        self.current_user = identity.user  # else making the token asks the Hub once more, and waits
        views, overview = self.service.views, self.service.overview
        groups = () if identity.is_service else await self.service.access.groups(identity.user)
        user = None if identity.admin else identity.user
        past = await overview.past(self._period())
        known = [part for part in past if part is not None]
        page = _ENVIRONMENT.get_template("now.html").render(
            user=identity.user,
            prefix=self.service.site.prefix,
            hub_home=f"{self.hub_auth.hub_host}{self.hub_auth.hub_prefix}home",
            levels=messages.LEVELS,
            admin=identity.admin,
            shared_origin=not self.hub_auth.hub_host,
            wrong=wrong,
            at=self.control.registry.iso_now(),
            live=bool(self.get_query_argument("live", "")) and not wrong,
            edited=self.get_query_argument("edit", "") if identity.admin else "",
            xsrf=self.xsrf_token.decode() if identity.admin else "",
            now=overview.now(),
            period=self._period(),
            periods=list(PERIODS),
            width=WIDTH,
            height=HEIGHT,
            held=path(past, lambda part: part.held, area=True),
            lent=path(past, lambda part: part.lent, area=True),
            busy=path(past, lambda part: part.busy),
            held_percent=_percent(known, lambda part: part.held),
            lent_percent=_percent(known, lambda part: part.lent),
            busy_percent=_percent(known, lambda part: part.busy),
            alerts=overview.alerts() if identity.admin else [],
            health=views.health(),
            devices=views.devices(),
            lending=views.lending(),
            projects=views.projects(groups, everyone=identity.admin),
            weeks=overview.weeks(),
            leases=[x for x in views.leases(user) if x.state != "pending"],
            jobs=views.jobs(user, limit=50),
            decisions=views.decisions(user, 50),
        )
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.set_header(
            "Content-Security-Policy",
            f"default-src 'none'; script-src 'sha256-{_SCRIPT_HASH}'; style-src 'unsafe-inline'; "
            "form-action 'self'; frame-ancestors 'none'",
        )
        self.finish(page)


class DecisionsCsv(Page):
    """The log of decisions as CSV (RFC 4180), newest first; people get their own part."""

    async def get(self) -> None:
        identity = await self.current_user_or_login()
        if identity is None:
            return
        self.set_header("Content-Type", "text/csv; charset=utf-8; header=present")
        self.set_header("Content-Disposition", 'attachment; filename="gpushare-decisions.csv"')
        self.set_header("Cache-Control", "no-store")
        seq, text = 1 << 53, io.StringIO()
        table = csv.writer(text)
        table.writerow(_COLUMNS)
        while True:
            piece = await self.control.registry.store.decisions_before(
                seq, None if identity.admin else identity.user, _PIECE
            )
            for row in piece:
                values = (getattr(row, name) or "" for name in _COLUMNS)
                table.writerow(_for_spreadsheets(value) for value in values)
            self.write(text.getvalue())
            await self.flush()
            text.seek(0)
            text.truncate()
            if len(piece) < _PIECE:
                return
            seq = piece[-1].seq


class UsageCsv(Page):
    """GPU-hours as CSV (RFC 4180), with the parameters of ``GET usage``; people get their own part."""

    async def get(self) -> None:
        identity = await self.current_user_or_login()
        if identity is None:
            return
        usage = await usage_of(self, identity)
        text = io.StringIO()
        table = csv.writer(text)
        amounts = [name for name in wire.UsageRow.__struct_fields__ if name.endswith("_gpu_h")]
        table.writerow([*usage.by, *amounts])
        for row in usage.rows:
            table.writerow(_for_spreadsheets(getattr(row, name)) for name in (*usage.by, *amounts))
        self.set_header("Content-Type", "text/csv; charset=utf-8; header=present")
        self.set_header("Content-Disposition", 'attachment; filename="gpushare-usage.csv"')
        self.set_header("Cache-Control", "no-store")
        self.finish(text.getvalue())


def _for_spreadsheets(value: Any) -> Any:
    """Return a value that starts no formula and has no control characters."""
    if not isinstance(value, str):
        return value
    value = messages.printable(messages.one_line(value))
    return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value


def path(
    parts: Sequence[MachineUse | None], value: Callable[[MachineUse], float], *, area: bool = False
) -> str:
    """Return the path (SVG) of a share of all GPUs over time, with a gap where nothing is known."""
    step, drawn = WIDTH / len(parts), []
    for is_known, run in groupby(enumerate(parts), key=lambda item: item[1] is not None):
        if not is_known:
            continue
        steps = [
            (n * step, HEIGHT * (1 - min(1.0, value(part) / part.gpus) if part.gpus else 1.0))
            for n, part in run
            if part is not None
        ]
        drawn.append(f"M{steps[0][0]:.1f} {HEIGHT if area else steps[0][1]:.1f}")
        drawn += [f"V{y:.1f}H{x + step:.1f}" for x, y in steps]
        drawn.append(f"V{HEIGHT}Z" if area else "")
    return "".join(drawn)


def _percent(known: Sequence[MachineUse], value: Callable[[MachineUse], float]) -> int | None:
    gpus = sum(part.gpus for part in known)
    return round(100 * sum(value(part) for part in known) / gpus) if gpus else None
