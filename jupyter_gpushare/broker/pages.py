"""The service's own page: what the GPUs do now and did before, who waits, what was decided and why."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jinja2

from jupyter_gpushare import wire, words
from jupyter_gpushare.broker.access import ADMIN_SCOPE, Identity
from jupyter_gpushare.broker.handlers import Base
from jupyter_gpushare.broker.overview import PERIODS
from jupyter_gpushare.broker.records import MachineUse
from jupyter_gpushare.errors import InvalidRequest, NotAllowed, RequestError

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("jupyter_gpushare.broker", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["gigabytes"] = words.gigabytes
_ENVIRONMENT.filters["duration"] = words.duration
_ENVIRONMENT.filters["gpus"] = lambda milli: f"{milli / 1000:g}"
_ENVIRONMENT.filters["number"] = lambda value: f"{value:.3g}"

# The drawing of the past, in units of its own.
WIDTH, HEIGHT = 720, 120
# Decisions are read from disk, and sent, in pieces of so many.
_PIECE = 1_000
_COLUMNS = ("seq", "at", "user", "project", "lease", "action", "why", "for_lease", "sentence")


class Page(Base):
    """What pages have in common: people log in at the Hub."""

    async def somebody(self) -> Identity | None:
        """Return who looks; None: sent to the Hub's login."""
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
        identity = await self.somebody()
        if identity is not None:
            await self._show(identity)

    async def post(self) -> None:
        """Change a project's quota, or lend an idle session at once; then show the page again."""
        auth = self.service.access.hub_auth
        identity = self.service.access.identity(await auth.get_user(self, sync=False))
        identity.require(ADMIN_SCOPE)
        service = self.service
        try:
            if lease := self.get_body_argument("lend", ""):
                await service.desk.lend(service.book.get(lease))
            else:
                await service.terms.change_project(self.get_body_argument("project", ""), self._change())
        except RequestError as error:
            self.set_status(error.status)
            await self._show(identity, wrong=str(error))
            return
        self.redirect(f"{service.prefix}?period={self._period()}", status=303)

    def _change(self) -> wire.ProjectChange:
        quota, weight = (self.get_body_argument(name, "").strip() for name in ("quota", "weight"))
        try:
            return wire.ProjectChange(
                quota=float(quota) if quota else None, weight=int(weight) if weight else None
            )
        except ValueError:
            raise InvalidRequest("guaranteed is a number of GPUs, weight a whole number") from None

    def _period(self) -> str:
        period: str = self.get_argument("period", "24h")
        return period if period in PERIODS else "24h"

    async def _show(self, identity: Identity, wrong: str = "") -> None:
        self.current_user = identity.user  # else making the token asks the Hub once more, and waits
        views, overview = self.service.views, self.service.overview
        groups = () if identity.is_service else await self.service.access.groups(identity.user)
        who = None if identity.admin else identity.user
        past = await overview.past(self._period())
        known = [part for part in past if part is not None]
        page = _ENVIRONMENT.get_template("now.html").render(
            user=identity.user,
            prefix=self.service.prefix,
            hub_home=f"{self.hub_auth.hub_host}{self.hub_auth.hub_prefix}home",
            levels=words.LEVELS,
            admin=identity.admin,
            wrong=wrong,
            at=self.service.book.iso_now(),
            live=bool(self.get_argument("live", "")) and not wrong,
            edited=self.get_argument("edit", "") if identity.admin else "",
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
            looks=overview.looks() if identity.admin else [],
            health=views.health(),
            devices=views.devices(),
            projects=views.projects(groups, everyone=identity.admin),
            weeks=overview.weeks(),
            leases=[x for x in views.leases(who) if x.state != "pending"],
            jobs=views.jobs(who, limit=50),
            decisions=views.decisions(who, 50),
        )
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.set_header(
            "Content-Security-Policy",
            "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'self'",
        )
        self.finish(page)


class DecisionsCsv(Page):
    """The log of decisions as CSV (RFC 4180), newest first; people get their own part."""

    async def get(self) -> None:
        identity = await self.somebody()
        if identity is None:
            return
        self.set_header("Content-Type", "text/csv; charset=utf-8; header=present")
        self.set_header("Content-Disposition", 'attachment; filename="gpushare-decisions.csv"')
        self.set_header("Cache-Control", "no-store")
        seq, text = 1 << 53, io.StringIO()
        table = csv.writer(text)
        table.writerow(_COLUMNS)
        while True:
            piece = await self.service.book.store.decisions_before(
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


def _for_spreadsheets(value: Any) -> Any:
    """A text that begins like a formula must not become one."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


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
