"""Start estimates of waiting jobs: a range for each, computed beside the event loop.

`Engine.estimates` replays running and queued work in virtual time in a thread,
so that requests are answered meanwhile.  It needs the run times of ended jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Any

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.engine import Engine, Estimate
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import Cluster, State

log = logging.getLogger("gpushare.broker")

EVERY_S = 15.0
# An older estimate is not shown.
STALE_S = 60.0
# No estimates with more waiting jobs: a replay would take longer than `EVERY_S`.
MAX_WAITING = 1_000
# The same for one request, which waits for the answer.
MAX_WAITING_REQUEST = 200
# Number of newest ended jobs that estimates are based on.
MAX_SAMPLES = 500


class Forecast:
    """The last estimates, corrected for the time that has passed since.

    ``run_in_thread`` calls a function beside the event loop.
    """

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        run_in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self._registry = registry
        self._engine = engine
        self._run_in_thread = run_in_thread
        self._found: Mapping[str, Estimate] = {}
        self._at = 0.0
        self._asked = False

    def estimate(self, lease_id: str) -> Estimate | None:
        """Return in how many seconds a waiting job starts; None: no estimate, or an outdated one."""
        passed_s = self._registry.clock() - self._at
        found = self._found.get(lease_id)
        if found is None or passed_s > STALE_S:
            return None
        return Estimate(*(max(0.0, s - passed_s) for s in (found.low_s, found.likely_s, found.high_s)))

    async def estimate_new(self, cluster: Cluster, lease_id: str) -> Estimate | None:
        """Return in how many seconds a job that only ``cluster`` has would start; None: no estimate.

        One replay runs at a time; a request during it gets None.
        """
        if self._asked or self._waiting() > MAX_WAITING_REQUEST:
            return None
        self._asked = True
        try:
            found = await self._run_in_thread(
                self._engine.estimates, cluster, self._registry.clock(), self._durations_s()
            )
        finally:
            self._asked = False
        estimate: Estimate | None = found.get(lease_id)
        return estimate

    async def run(self) -> None:
        """Update the estimates every `EVERY_S` until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:  # an estimate is dispensable, the task is not
                log.exception("no estimates")
            await asyncio.sleep(EVERY_S)

    async def refresh(self) -> None:
        """Compute all estimates once."""
        registry, now = self._registry, self._registry.clock()
        if not 0 < self._waiting() <= MAX_WAITING or registry.devices.inventory is None:
            self._found = {}
            return
        cluster = snapshot.cluster(registry, self._engine, now)
        self._found = await self._run_in_thread(self._engine.estimates, cluster, now, self._durations_s())
        self._at = now

    def _waiting(self) -> int:
        index = self._registry.index
        asleep = sum(r.is_job and r.state is State.SUSPENDED for r in index.placed.values())
        return len(index.queued) + asleep

    def _durations_s(self) -> list[float]:
        ran = (
            j.ran_s
            for j in reversed(tuple(self._registry.jobs.values()))
            if j.result in ("succeeded", "failed", "timed_out")
        )
        return list(islice((seconds for seconds in ran if seconds > 0), MAX_SAMPLES))
