"""Estimates that people see: one forecast of all jobs, computed beside the event loop.

`Engine.forecast` replays running and queued work in virtual time in a thread,
so that requests are answered meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import islice

from jupyter_gpushare.broker.control import ending, snapshot
from jupyter_gpushare.broker.engine import Engine, Estimate, JobForecast, Work
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import Cluster, State
from jupyter_gpushare.core.order import attained_gpu_s
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")

EVERY_S = 5.0
# An older estimate is not shown.
STALE_S = 60.0
# No estimates with more waiting jobs.
MAX_WAITING = 5_000
# The same for one request, which waits for the answer.
MAX_WAITING_REQUEST = 1_000
# Requests that follow each other closely share a forecast.
_FRESH_S = 1.0
# Number of newest ended jobs that estimates are based on.
MAX_SAMPLES = 500


class Forecasts:
    """The last forecast, corrected for the time that has passed since."""

    def __init__(self, registry: Registry, engine: Engine) -> None:
        self._registry = registry
        self._engine = engine
        self._found = JobForecast()
        self._at = 0.0
        self._asked = False

    def start(self, lease_id: str) -> Estimate | None:
        """Return in how many seconds a waiting job starts; None: not known well enough, or outdated."""
        return self._by_now(self._found.starts.get(lease_id))

    def end(self, lease_id: str) -> Estimate | None:
        """Return in how many seconds a job ends, its pauses included; None: as `start`."""
        return self._by_now(self._found.ends.get(lease_id))

    def free(self, gpus: float) -> Estimate | None:
        """Return in how many seconds so many GPUs are free, for a session; None: as `start`."""
        return self._by_now(self._found.free_in(gpus))

    async def start_of_new(self, cluster: Cluster, lease_id: str) -> Estimate | None:
        """Return in how many seconds a job that only ``cluster`` has would start; None: as `start`.

        One replay runs at a time; a request during it gets None.
        """
        if self._asked or self._waiting() > MAX_WAITING_REQUEST:
            return None
        self._asked = True
        try:
            now = self._registry.clock()
            found = await asyncio.to_thread(self._engine.forecast, cluster, now, self._work(now))
        finally:
            self._asked = False
        return found.starts.get(lease_id)

    async def renew(self) -> None:
        """Compute the forecast for the answer to a request, unless it is fresh or would take long."""
        is_fresh = self._registry.clock() - self._at < _FRESH_S
        if not (is_fresh or self._asked or self._waiting() > MAX_WAITING_REQUEST):
            self._asked = True
            try:
                await self.refresh()
            finally:
                self._asked = False

    async def run(self) -> None:
        """Update the forecast every `EVERY_S` until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(EVERY_S)

    async def refresh(self) -> None:
        """Compute the forecast once; an error is logged, because no request fails for an estimate."""
        try:
            await self._refresh()
        except Exception:
            log.exception("no estimates")
            self._found = JobForecast()

    async def _refresh(self) -> None:
        registry, now = self._registry, self._registry.clock()
        if self._waiting() > MAX_WAITING or registry.devices.inventory is None:
            self._found = JobForecast()
            return
        cluster = snapshot.cluster(registry, self._engine, now)
        self._found = await asyncio.to_thread(self._engine.forecast, cluster, now, self._work(now))
        self._at = now

    def _by_now(self, found: Estimate | None) -> Estimate | None:
        passed_s = self._registry.clock() - self._at
        if found is None or passed_s > STALE_S:
            return None
        return Estimate(max(0.0, found.low_s - passed_s), max(0.0, found.high_s - passed_s))

    def _waiting(self) -> int:
        index = self._registry.index
        asleep = sum(r.is_job and r.state is State.SUSPENDED for r in index.placed.values())
        return len(index.queued) + asleep

    def _work(self, now: float) -> Work:
        """Return what is known of the work of jobs: by progress, and by those that ended."""
        registry = self._registry
        left: dict[str, float] = {}
        limits: dict[str, float] = {}
        ran_s: dict[str, list[float]] = {}
        for record in registry.leases.values():
            if (job := registry.job_of(record)) is None:
                continue
            if job.measure is not None:
                found = job.measure.left_at(attained_gpu_s(record.lease, now))
                if found is not None:
                    left[record.id] = found
            if (limit_s := ending.limit_s(job)) is not None:
                running_s = ending.left_s(job, record, now)
                left_s = limit_s - job.ran_s if running_s is None else running_s
                limits[record.id] = max(0.0, left_s)
        newest = (j for j in reversed(tuple(registry.jobs.values())) if _has_run(j))
        for job in islice(newest, MAX_SAMPLES):
            ran_s.setdefault(job.project, []).append(job.ran_s)
        return Work(left_gpu_s=left, ran_s=ran_s, limit_s=limits)


def seconds(found: Estimate | None) -> wire.Estimate | None:
    """Return an estimate as it is sent."""
    return None if found is None else wire.Estimate(low_s=round(found.low_s), high_s=round(found.high_s))


def _has_run(job: JobRecord) -> bool:
    return job.result in ("succeeded", "failed", "timed_out") and job.ran_s > 0
