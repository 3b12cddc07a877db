"""The service's own page: what the GPUs do now, who waits, what was decided."""

from __future__ import annotations

import jinja2

from jupyter_gpushare import words
from jupyter_gpushare.broker.handlers import Base
from jupyter_gpushare.errors import NotAllowed

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("jupyter_gpushare.broker", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
)
_ENVIRONMENT.filters["gigabytes"] = words.gigabytes
_ENVIRONMENT.filters["gpus"] = lambda milli: f"{milli / 1000:g}"


class AdminPage(Base):
    """Devices, projects, leases, queue and decisions; people see their own part."""

    async def get(self) -> None:
        try:
            identity = await self.identify()
        except NotAllowed as error:
            if error.reason != "login":
                raise
            self.redirect(self.get_login_url())
            return
        views = self.service.views
        groups = () if identity.is_service else await self.service.access.groups(identity.user)
        who = None if identity.admin else identity.user
        page = _ENVIRONMENT.get_template("now.html").render(
            user=identity.user,
            admin=identity.admin,
            health=views.health(),
            devices=views.devices(),
            projects=views.projects(groups, everyone=identity.admin),
            leases=[x for x in views.leases(who) if x.state != "pending"],
            jobs=views.jobs(who, limit=50),
            decisions=views.decisions(who, 50),
        )
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header(
            "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'"
        )
        self.finish(page)
