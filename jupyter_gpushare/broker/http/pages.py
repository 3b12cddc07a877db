"""The service's own page: use of the GPUs now and in the past, leases, queue and decisions.

It has the look of the Hub's pages: their markup, stylesheet, navigation and theme.  It works
without scripts; two small ones write times in the reader's zone and follow the Hub's theme.

It works without a mouse.  Whatever changes something for others is confirmed in a panel; a
panel has the focus when it opens, and when it is closed, or has done its work, the control
that opened it has the focus again: the fragment of the address names it.
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
_ENVIRONMENT.filters["said"] = lambda texts: messages.english(texts, time=str)
_ENVIRONMENT.filters["gpus"] = lambda milli: f"{milli / 1000:g}"
_ENVIRONMENT.filters["number"] = lambda value: f"{value:.3g}"

# Every second piece is a time (ISO 8601, UTC) without its zone.
_ENVIRONMENT.filters["pieces"] = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d)?)(?:\.\d+)?Z").split


def _hash(script: str) -> str:
    text = _ENVIRONMENT.get_template(script).render().encode()
    return base64.b64encode(hashlib.sha256(text).digest()).decode()


# The page's own scripts: no other runs, whatever a user's name holds.
_SCRIPTS = " ".join(f"'sha256-{_hash(script)}'" for script in ("theme.js", "times.js"))

# The drawing of the past, in units of its own.
WIDTH, HEIGHT = 720, 120
_MAX_FIND = 100


_FIRST: dict[str, str | int] = {"users": 1, "sessions": 1, "jobs": 1}
_PANELS: dict[str, str | int] = {"act": "", "edit": "", "empty": ""}  # one is open at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the address asks to be shown."""

    period: str = "24h"
    live: str = ""
    q: str = ""  # only rows that are like it
    edit: str = ""  # the project whose numbers are being changed
    act: str = ""  # the lease about which the administrator decides
    empty: str = ""  # the device that is to take nothing new
    back: str = ""  # id of the control that has the focus afterwards
    users: int = 1  # pages of the tables
    sessions: int = 1
    jobs: int = 1

    def link(self, **changes: str | int) -> str:
        """Return the query of the same page with ``changes``; another search begins on its first pages."""
        if "q" in changes:
            changes = {**_FIRST, **changes}
        changed = replace(self, **changes)  # type: ignore[arg-type]
        given = {f.name: value for f in fields(self) if (value := getattr(changed, f.name)) != f.default}
        return "?" + urlencode({"period": changed.period, **given})

    @property
    def panel(self) -> str:
        """Id of the panel that is open; empty: none is."""
        return next((name for name in _PANELS if getattr(self, name)), "")

    def opened(self, panel: str, of: str, back: str) -> str:
        """Return the link that opens a panel, from the control with the id ``back``."""
        return f"{self.link(**{**_PANELS, panel: of, 'back': back})}#{panel}"

    def closed(self, focus: str | None = None) -> str:
        """Return the link that closes the panel; the focus is on ``focus``, else on what opened it."""
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
        """Do what a form says, with a line in the log of decisions; then show the page again."""
        identity = await self.identify_writer()
        service, given = self.service, self.get_body_argument
        registry = service.control.registry
        try:
            if mode := given("lending", ""):
                await self._set_lending(mode, identity)
            elif wanted := given("act", ""):
                await self._act(registry.get(given("lease", "")), wanted, identity)
            elif device := given("drain", ""):
                await administration.drain(
                    registry, service.control.engine, device, self._finish_by(), identity.user
                )
            elif process := given("end", ""):
                await self._end_process(given("device", ""), process, identity)
            elif device := given("undrain", ""):
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
        asked = self._asked()
        self.redirect(f"{service.site.prefix}{asked.closed(self._focus_after(asked))}", status=303)

    def _focus_after(self, asked: Asked) -> str:
        """Return the id of what opened the panel; of its table where that is about to leave it."""
        table = asked.back.partition("-")[0]
        leaves = table == "looks" or self.get_body_argument("act", "") == "stop"
        return table if asked.act and leaves else asked.back

    async def _act(self, record: LeaseRecord, wanted: str, identity: Identity) -> None:
        if wanted == "priority":
            registry = self.control.registry
            if (job := registry.job_of(record)) is None:
                raise InvalidRequest("only a job has a priority")
            change = wire.JobChange(priority=_whole(self.get_body_argument("priority", "")))
            await prioritize(registry, job, change, identity.user)
            return
        if wanted not in ("resume", "lend", "stop"):
            raise InvalidRequest("this page wakes, lends and stops")
        if wanted == "stop" and not self.get_body_argument("sure", ""):
            raise InvalidRequest("say that it is to be stopped: tick the box beside the button")
        await act(self, record, wanted, identity, wire.KeepRequest().minutes)

    async def _end_process(self, device: str, process: str, identity: Identity) -> None:
        if not self.get_body_argument("sure", ""):
            raise InvalidRequest("say that it is to be ended: tick the box beside the button")
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
        given = {name: self.get_body_argument(name, "").strip() for name in numbers}
        try:
            changes: dict[str, Any] = {name: numbers[name](text) for name, text in given.items() if text}
            return wire.ProjectChange(**changes, force=bool(self.get_body_argument("force", "")))
        except ValueError:
            raise InvalidRequest(
                "guaranteed and limit are numbers of GPUs, weight and highest priority whole numbers"
            ) from None

    def _asked(self) -> Asked:
        query = self.get_query_argument
        period = query("period", "24h")
        parts: dict[str, Any] = {name: query(name, "") for name in _PANELS}
        parts |= {name: _page(query(name, "")) for name in _FIRST}
        return Asked(
            period=period if period in PERIODS else "24h",
            live="1" if query("live", "") else "",
            q=query("q", "").strip()[:_MAX_FIND],
            back=query("back", ""),
            **parts,
        )

    async def _show(self, identity: Identity, wrong: str = "") -> None:
        self.current_user = identity.user  # else making the token asks the Hub once more, and waits
        views, overview, registry = self.service.views, self.service.overview, self.control.registry
        groups = await self.service.access.groups(identity)
        user = None if identity.admin else identity.user
        asked = self._asked()
        past = await overview.past(asked.period)
        hub = f"{self.hub_auth.hub_host}{self.hub_auth.hub_prefix}"
        page = _ENVIRONMENT.get_template("now.html").render(
            user=identity.user,
            prefix=self.service.site.prefix,
            hub=hub,
            levels=messages.LEVELS,
            admin=identity.admin,
            # With subdomains, and only then, the Hub names the callback with a host.
            shared_origin=not urlsplit(self.hub_auth.oauth_redirect_uri).netloc,
            wrong=wrong,
            at=registry.iso_now(),
            asked=asked,
            live=bool(asked.live) and not wrong and not asked.panel,
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
            acting=overview.acting(asked.act) if identity.admin and asked.act else None,
            users=overview.users(asked.q, asked.users) if identity.admin else None,
            placed=[
                record.lease for record in registry.index.placed.values() if user in (None, record.lease.user)
            ],
            sessions=overview.sessions(user, asked.q, asked.sessions),
            jobs=overview.jobs(user, asked.q, asked.jobs),
            decisions=views.decisions(user, 50, identity.user),
        )
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        theirs = f"'self' {self.hub_auth.hub_host}".strip()
        self.set_header(
            "Content-Security-Policy",
            f"default-src 'none'; script-src {_SCRIPTS}; style-src {theirs} 'unsafe-inline'; "
            f"img-src {theirs} data:; font-src {theirs}; form-action 'self'; frame-ancestors 'none'",
        )
        self.finish(page)


def _page(text: str) -> int:
    """Return the number of a page, the first for anything that is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 1


def _whole(text: str) -> int:
    """Return a whole number.

    Raises:
        InvalidRequest: it is none, or has more than 4 digits.
    """
    if not re.fullmatch("-?[0-9]{1,4}", text.strip()):
        raise InvalidRequest("%1 is not a whole number", repr(text[:20]))
    return int(text)


def _drawing(past: Sequence[MachineUse | None]) -> dict[str, Any]:
    """Return the parts of the chart of the past."""
    known = [part for part in past if part is not None]
    drawn: dict[str, Any] = {"width": WIDTH, "height": HEIGHT}
    for name in ("held", "lent", "busy"):
        drawn[name] = path(past, attrgetter(name), area=name != "busy")
        drawn[f"{name}_percent"] = _percent(known, attrgetter(name))
    return drawn


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
