"""Files to download from the service's page: the log of decisions and GPU-hours, as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from jupyter_gpushare import messages
from jupyter_gpushare.broker.http.access import Identity
from jupyter_gpushare.broker.http.base import Base
from jupyter_gpushare.broker.http.handlers import usage_of
from jupyter_gpushare.errors import NotAllowed
from jupyter_gpushare.protocol import wire

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
