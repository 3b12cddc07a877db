"""The service's own page: current and past use of the GPUs, leases, queue and decisions.

It looks like the Hub's pages: same markup, stylesheet, navigation and theme.  It works without
scripts; two small ones show times in the reader's zone and follow the Hub's theme.

It works without a mouse.  A panel confirms every change that affects others.  An opened panel
gets the focus; after it is closed or done, the control that opened it gets the focus again,
because the fragment of the address names that control.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from operator import attrgetter
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import jinja2
from tornado import httputil

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import administration
from jupyter_gpushare.broker.control.administration import end_process, prioritize
from jupyter_gpushare.broker.http.access import ADMIN_SCOPE, Identity
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.broker.http.handlers import act, usage_of
from jupyter_gpushare.broker.state.records import LeaseRecord, LendingMode, MachineUse
from jupyter_gpushare.broker.views.overview import PERIODS
from jupyter_gpushare.errors import InvalidRequest, NotAllowed, RequestError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import before

# ---- files to download from the service's page: the log of decisions and GPU-hours, as CSV

# Decisions are read from disk and sent in chunks of this number.
_CHUNK = 1_000
_COLUMNS = ("seq", "at", "user", "project", "lease", "action", "why", "for_lease", "sentence")


class Page(Base):
    """A page for people, who log in at the Hub."""

    async def current_user_or_login(self) -> Identity | None:
        """Return the user, or None after a redirect to the Hub's login."""
        try:
            return await self.identify()
        except NotAllowed as error:
            if error.reason != "login":
                raise
            self.redirect(self.get_login_url())
            return None


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
            chunk = await self.control.registry.store.decisions_before(
                seq, None if identity.admin else identity.user, _CHUNK
            )
            for row in chunk:
                values = (getattr(row, name) or "" for name in _COLUMNS)
                table.writerow(_for_spreadsheets(value) for value in values)
            self.write(text.getvalue())
            await self.flush()
            text.seek(0)
            text.truncate()
            if len(chunk) < _CHUNK:
                return
            seq = chunk[-1].seq


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
    """Return a value that a spreadsheet does not read as a formula, without control characters."""
    if not isinstance(value, str):
        return value
    value = messages.printable(messages.one_line(value))
    return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value


# ---- the page ----------------------------------------------------------------

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
_ENVIRONMENT.filters["english"] = lambda texts: messages.english(texts, time=str)
_ENVIRONMENT.filters["gpus"] = lambda milli: f"{milli / 1000:g}"
_ENVIRONMENT.filters["number"] = lambda value: f"{value:.3g}"

# In a list of pieces every second one is a time (ISO 8601, UTC) without its zone.
_ENVIRONMENT.filters["pieces"] = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d)?)(?:\.\d+)?Z").split


def _hash(script: str) -> str:
    text = _ENVIRONMENT.get_template(script).render().encode()
    return base64.b64encode(hashlib.sha256(text).digest()).decode()


# Only the page's own scripts run, so a user's name cannot inject one.
_SCRIPTS = " ".join(f"'sha256-{_hash(script)}'" for script in ("theme.js", "times.js"))

# Size of the chart, in its own units.
WIDTH, HEIGHT = 720, 120
_MAX_FIND = 100


_FIRST_PAGES: dict[str, str | int] = {"users": 1, "sessions": 1, "jobs": 1}
_PANELS: dict[str, str | int] = {"act": "", "edit": "", "empty": ""}  # at most one is open


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """The query of the page's address: what to show."""

    period: str = "24h"
    live: str = ""
    q: str = ""  # shows only rows that match it
    edit: str = ""  # the project whose numbers the administrator changes
    act: str = ""  # the lease on which the administrator acts
    empty: str = ""  # the device to drain
    back: str = ""  # id of the control that gets the focus afterwards
    users: int = 1  # pages of the tables
    sessions: int = 1
    jobs: int = 1

    def link(self, **changes: str | int) -> str:
        """Return the query of the same page with ``changes``; a new search starts on the first pages."""
        if "q" in changes:
            changes = {**_FIRST_PAGES, **changes}
        changed = replace(self, **changes)  # type: ignore[arg-type]
        parameters = {f.name: value for f in fields(self) if (value := getattr(changed, f.name)) != f.default}
        return "?" + urlencode({"period": changed.period, **parameters})

    @property
    def panel(self) -> str:
        """Id of the open panel; empty if none is open."""
        return next((name for name in _PANELS if getattr(self, name)), "")

    def opened(self, panel: str, of: str, back: str) -> str:
        """Return the link by which the control with the id ``back`` opens a panel."""
        return f"{self.link(**{**_PANELS, panel: of, 'back': back})}#{panel}"

    def closed(self, focus: str | None = None) -> str:
        """Return the link that closes the panel and focuses ``focus``, by default what opened the panel."""
        focus = self.back if focus is None else focus
        return self.link(**_PANELS, back="") + (f"#{quote(focus)}" if focus else "")


class AdminPage(Page):
    """Devices, projects, leases, queue and decisions; people see their own part."""

    async def get(self) -> None:
        identity = await self.current_user_or_login()
        if identity is not None:
            await self._show(identity)

    async def authorize(self) -> None:
        token = self.hub_auth.get_token(self)
        model = await self.model_of(token, cached=True)
        identity = await self.service.access.identity(model, token)
        identity.require(ADMIN_SCOPE)
        self.prove(identity.holder)

    async def identify_writer(self) -> Identity:
        """Return the administrator who sent a form, by a token or a login with the XSRF token in the body.

        An XSRF token in the address or a header is no proof: scripts of other pages of this origin can
        add those, and logs show addresses.

        Raises:
            NotAllowed: the caller is no administrator, or the XSRF token is missing.
            BrokerUnavailable: the Hub does not answer.
        """
        form = self.request.body_arguments
        httputil.parse_body_arguments(
            self.request.headers.get("Content-Type", ""), self.content, form, self.request.files
        )
        self.request.arguments = form
        auth = self.hub_auth
        if not await self.logged_in():
            raise NotAllowed("log in again: the form was not sent by this page", reason="login")
        if not getattr(self, "_token_authenticated", False) and not any(form.get("_xsrf", ())):
            raise NotAllowed("the form was not sent by this page")
        token = auth.get_token(self)
        identity = await self.service.access.identity(await self.model_of(token, cached=False), token)
        identity.require(ADMIN_SCOPE)
        await self.meet(identity)
        return identity

    async def post(self) -> None:
        """Do what a form requests, with a line in the log of decisions; then show the page again."""
        identity = await self.identify_writer()
        service, argument = self.service, self.get_body_argument
        registry = service.control.registry
        try:
            if mode := argument("lending", ""):
                await self._set_lending(mode, identity)
            elif action := argument("act", ""):
                await self._act(registry.get(argument("lease", "")), action, identity)
            elif device := argument("drain", ""):
                await administration.drain(
                    registry, service.control.engine, device, self._finish_by(), identity.user
                )
            elif process := argument("end", ""):
                await self._end_process(argument("device", ""), process, identity)
            elif device := argument("undrain", ""):
                await administration.undrain(registry, device, identity.user)
            elif project := self.get_body_argument("reset", ""):
                await service.control.project_numbers.reset(project, identity.user)
            else:
                await service.control.project_numbers.change(
                    self.get_body_argument("project", ""), self._change(), identity.user
                )
        except RequestError as error:
            self.set_status(error.status)
            await self._show(identity, wrong=str(error))
            return
        query = self._query()
        self.redirect(f"{service.site.prefix}{query.closed(self._focus_after(query))}", status=303)

    def _focus_after(self, query: PageQuery) -> str:
        """Return the id of the control that opened the panel, or of its table if its row will leave it."""
        table = query.back.partition("-")[0]
        leaves = table == "looks" or self.get_body_argument("act", "") == "stop"
        return table if query.act and leaves else query.back

    async def _act(self, record: LeaseRecord, action: str, identity: Identity) -> None:
        if action == "priority":
            registry = self.control.registry
            if (job := registry.job_of(record)) is None:
                raise InvalidRequest("only a job has a priority")
            change = wire.JobChange(priority=_whole(self.get_body_argument("priority", "")))
            await prioritize(registry, job, change, identity.user)
            return
        if action not in ("resume", "lend", "stop"):
            raise InvalidRequest("this page wakes, lends and stops")
        if action == "stop" and not self.get_body_argument("sure", ""):
            raise InvalidRequest("confirm that you want to stop it: tick the box beside the button")
        await act(self, record, action, identity, wire.KeepRequest().minutes)

    async def _end_process(self, device: str, process: str, identity: Identity) -> None:
        if not self.get_body_argument("sure", ""):
            raise InvalidRequest("confirm that you want to end it: tick the box beside the button")
        control = self.control
        await end_process(control.registry, control.devices, device, process, identity.user)

    def _finish_by(self) -> str | None:
        hours = self.get_body_argument("hours", "")
        return before(self.control.registry.iso_now(), hours=-_whole(hours)) if hours else None

    async def _set_lending(self, mode: str, identity: Identity) -> None:
        if mode not in (*LendingMode, "default"):
            raise InvalidRequest("lending is on, watch, off or default")
        await self.control.lending.set(None if mode == "default" else LendingMode(mode), identity.user)

    def _change(self) -> wire.ProjectChange:
        numbers = {"quota": float, "weight": int, "limit": float, "priority_max": int}
        texts = {name: self.get_body_argument(name, "").strip() for name in numbers}
        try:
            changes: dict[str, Any] = {name: numbers[name](text) for name, text in texts.items() if text}
            return wire.ProjectChange(**changes, force=bool(self.get_body_argument("force", "")))
        except ValueError:
            raise InvalidRequest(
                "guaranteed and limit are numbers of GPUs, weight and highest priority whole numbers"
            ) from None

    def _query(self) -> PageQuery:
        argument = self.get_query_argument
        period = argument("period", "24h")
        parts: dict[str, Any] = {name: argument(name, "") for name in _PANELS}
        parts |= {name: _page(argument(name, "")) for name in _FIRST_PAGES}
        return PageQuery(
            period=period if period in PERIODS else "24h",
            live="1" if argument("live", "") else "",
            q=argument("q", "").strip()[:_MAX_FIND],
            back=argument("back", ""),
            **parts,
        )

    async def _show(self, identity: Identity, wrong: str = "") -> None:
        self.current_user = identity.user  # otherwise `xsrf_token` asks the Hub again and blocks
        views, overview, registry = self.service.views, self.service.overview, self.control.registry
        groups = await self.service.access.groups(identity)
        user = None if identity.admin else identity.user
        query = self._query()
        past = await overview.past(query.period)
        hub = f"{self.hub_auth.hub_host}{self.hub_auth.hub_prefix}"
        page = _ENVIRONMENT.get_template("now.html").render(
            user=identity.user,
            prefix=self.service.site.prefix,
            hub=hub,
            levels=messages.LEVELS,
            admin=identity.admin,
            # The Hub's address of the callback has a host only with subdomains.
            shared_origin=not urlsplit(self.hub_auth.oauth_redirect_uri).netloc,
            wrong=wrong,
            at=registry.iso_now(),
            query=query,
            live=bool(query.live) and not wrong and not query.panel,
            entered=lambda name, stored: self.get_body_argument(name, stored) if wrong else stored,
            xsrf=self.xsrf_token.decode() if identity.admin else "",
            now=overview.now(),
            oldest=overview.oldest_wait(user),
            periods=list(PERIODS),
            **_drawing(past),
            alerts=overview.alerts() if identity.admin else [],
            health=views.health(),
            devices=views.devices(admin=identity.admin),
            lending=views.lending(),
            projects=views.projects(groups, everyone=identity.admin),
            weeks=overview.weeks(),
            acting=overview.acting(query.act) if identity.admin and query.act else None,
            users=overview.users(query.q, query.users) if identity.admin else None,
            placed=[
                record.lease for record in registry.index.placed.values() if user in (None, record.lease.user)
            ],
            sessions=overview.sessions(user, query.q, query.sessions),
            jobs=overview.jobs(user, query.q, query.jobs),
            decisions=views.decisions(user, 50, identity.user),
        )
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        sources = f"'self' {self.hub_auth.hub_host}".strip()
        self.set_header(
            "Content-Security-Policy",
            f"default-src 'none'; script-src {_SCRIPTS}; style-src {sources} 'unsafe-inline'; "
            f"img-src {sources} data:; font-src {sources}; form-action 'self'; frame-ancestors 'none'",
        )
        self.finish(page)


def _page(text: str) -> int:
    """Return the number of a page, or 1 if the text is no number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 1


def _whole(text: str) -> int:
    """Return a whole number.

    Raises:
        InvalidRequest: the text is no whole number, or has more than 4 digits.
    """
    if not re.fullmatch("-?[0-9]{1,4}", text.strip()):
        raise InvalidRequest("%1 is not a whole number", repr(text[:20]))
    return int(text)


def _drawing(past: Sequence[MachineUse | None]) -> dict[str, Any]:
    """Return the values of the chart for the template."""
    measured = [part for part in past if part is not None]
    drawn: dict[str, Any] = {"width": WIDTH, "height": HEIGHT}
    for name in ("held", "lent", "busy"):
        drawn[name] = path(past, attrgetter(name), area=name != "busy")
        drawn[f"{name}_percent"] = _percent(measured, attrgetter(name))
    return drawn


def path(
    parts: Sequence[MachineUse | None], value: Callable[[MachineUse], float], *, area: bool = False
) -> str:
    """Return the SVG path of a share of all GPUs over time, with a gap where nothing was measured."""
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


def _percent(measured: Sequence[MachineUse], value: Callable[[MachineUse], float]) -> int | None:
    gpus = sum(part.gpus for part in measured)
    return round(100 * sum(value(part) for part in measured) / gpus) if gpus else None
