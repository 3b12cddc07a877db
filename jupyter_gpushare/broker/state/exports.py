"""What ran on this site, read from the database in pages.

No commit waits for it: pages are read by the thread for long queries, which also converts their
rows.  A page holds at most `PAGE` rows of short columns; requests of jobs, of up to 1 MiB each, are
read by their keys, `_REQUESTS` at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jupyter_gpushare.broker.state.records import BusyStretch
from jupyter_gpushare.broker.state.rows import MAX_CELLS, MAX_ENDED
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.broker.state.tables import cells_select, ended_select, requests_select
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire

PAGE = 1_000
_REQUESTS = 20
# After every time of a submission, and every number of a stretch.
_NEWEST = "9999"
_LAST = 1 << 53


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended."""

    id: str
    user: str
    project: str
    submitted_at: str  # wall clock (ISO 8601, UTC)
    ran_s: float


async def ended_jobs(store: Store) -> list[EndedJob]:
    """Return the newest `MAX_ENDED` jobs that have ended, by the time of their submission.

    Raises:
        StoreError: the database cannot be read.
    """
    found: list[EndedJob] = []
    before = _NEWEST, ""
    while len(found) < MAX_ENDED:
        page = await store.scan(ended_select(before, PAGE), lambda row: EndedJob(**row))
        found += page
        if len(page) < PAGE:
            break
        before = page[-1].submitted_at, page[-1].id
    return found[::-1]


async def sizes(store: Store, ids: Iterable[str]) -> dict[str, Size]:
    """Return what jobs asked for, by their ids; a job whose request is unreadable or gone is left out.

    Raises:
        StoreError: the database cannot be read.
    """
    found: dict[str, Size] = {}
    wanted = list(ids)
    for start in range(0, len(wanted), _REQUESTS):
        query = requests_select(wanted[start : start + _REQUESTS])
        for job_id, size in await store.scan(query, lambda row: (row["id"], _size(row["request"]))):
            if size is not None:
                found[job_id] = size
    return found


def _size(request: str) -> Size | None:
    try:
        return wire.decode_stored(request, wire.JobTerms).asked_size()
    except (ValueError, InvalidRequest):  # of an earlier version
        return None


async def cells(store: Store) -> list[BusyStretch]:
    """Return the newest `MAX_CELLS` stretches of work of sessions, in the order in which they ended.

    Raises:
        StoreError: the database cannot be read.
    """
    found: list[BusyStretch] = []
    before = _LAST
    while len(found) < MAX_CELLS:
        page = await store.scan(
            cells_select(before, PAGE),
            lambda row: (row["seq"], BusyStretch(**{k: v for k, v in row.items() if k != "seq"})),
        )
        found += [stretch for _, stretch in page]
        if len(page) < PAGE:
            break
        before = page[-1][0]
    return found[::-1]
