"""When waiting jobs will probably start: a range for each, worked out beside the loop.

`core.estimate` replays the running and the queued work in virtual time, in a
thread of its own, so that requests are answered meanwhile.  It knows how long
ended jobs ran; while they are few it says nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Any

from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.core.estimate import Estimate, estimates
from jupyter_gpushare.core.model import Cluster, State

log = logging.getLogger("gpushare.broker")

EVERY_S = 15.0
# An older forecast is not told.
STALE_S = 60.0
# Beyond so many waiting jobs nothing is foretold: a replay would take too long.
MOST_WAITING = 1_000
# The same for a job that somebody only asks about: who asks waits for the answer.
MOST_WAITING_ASKED = 200
# The newest ended jobs that count.
MOST_SAMPLES = 500
_WAITING = (State.PENDING, State.SUSPENDED)


class Forecast:
    """Keeps the last estimates; `of` tells one as of now.

    ``beside`` calls a function beside the event loop.
    """

    def __init__(self, book: Book, beside: Callable[..., Awaitable[Any]] = asyncio.to_thread) -> None:
        self._book = book
        self._beside = beside
        self._found: Mapping[str, Estimate] = {}
        self._at = 0.0
        self._asked = False

    def of(self, lease_id: str) -> Estimate | None:
        """Return in how many seconds a job probably gets room; None: nobody can tell."""
        passed_s = self._book.clock() - self._at
        found = self._found.get(lease_id)
        if found is None or passed_s > STALE_S:
            return None
        return Estimate(*(max(0.0, s - passed_s) for s in (found.low_s, found.likely_s, found.high_s)))

    async def of_new(self, cluster: Cluster, lease_id: str) -> Estimate | None:
        """Return in how many seconds a job that is in ``cluster`` only would get room; None: nobody can tell.

        One answer is worked out at a time; who asks meanwhile gets none.
        """
        if self._asked or self._waiting() > MOST_WAITING_ASKED:
            return None
        self._asked = True
        try:
            found = await self._beside(estimates, cluster, self._book.clock(), self._durations_s())
        finally:
            self._asked = False
        estimate: Estimate | None = found.get(lease_id)
        return estimate

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            try:
                await self.look()
            except Exception:  # the outermost loop: without it only an estimate is missing
                log.exception("no estimates")
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Work the estimates out anew."""
        book, now = self._book, self._book.clock()
        if not 0 < self._waiting() <= MOST_WAITING or book.inventory is None:
            self._found = {}
            return
        self._found = await self._beside(estimates, snapshot.cluster(book, now), now, self._durations_s())
        self._at = now

    def _waiting(self) -> int:
        return sum(r.is_job and r.state in _WAITING for r in self._book.leases.values())

    def _durations_s(self) -> list[float]:
        ran = (j.ran_s for j in reversed(self._book.jobs.values()) if j.result in ("succeeded", "failed"))
        return list(islice((seconds for seconds in ran if seconds > 0), MOST_SAMPLES))
