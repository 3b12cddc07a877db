"""Wait for the end of a lease: SIGTERM, SIGKILL after its grace, and the proof that it is gone.

A job's runner kills its command at the end of the grace period, writes the result and reports
it; only then it may be killed.  So a job whose runner is late loses its processes on time,
and its result `RECORD_S` later at the earliest.  Whether a lease is gone is said by measurements
that began after it entered its state.
"""

from __future__ import annotations

import asyncio
import logging
import signal

from jupyter_gpushare.backends.base import Devices
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.observer import Observer
from jupyter_gpushare.broker.state.devices import STALE_S
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry

log = logging.getLogger("gpushare.broker")

# Between two looks at a lease that starts or ends.
LOOK_S = 0.2
# The processes of a job are killed this long after the grace period; the runner kills them at the end of it.
KILL_MARGIN_S = 0.4
# A runner that has not reported by then is killed this much later.
RECORD_S = 2.0
# A runner that has reported its end, or was killed, exits within this time or is killed (again).
EXIT_S = 5.0
# Processes that outlive the runner of their job, or have just begun, are killed this long after SIGTERM.
LEFTOVER_S = 2.0


class Ending:
    """Ends the processes of leases."""

    def __init__(self, registry: Registry, devices: Devices, observer: Observer) -> None:
        self._registry = registry
        self._devices = devices
        self._observer = observer

    async def of_job(self, record: LeaseRecord) -> None:
        """Return when a job that is to stop is gone: what it started has its grace period."""
        registry = self._registry
        job, sample = registry.job_of(record), registry.observations[record.id].sample
        grace_s = (
            min(job.grace_s, registry.policy.max_grace_s) if job is not None else registry.policy.grace_s
        )
        if sample is not None and sample.runner_ended:
            # What is left reports no result, whatever it saves.
            await self.until_gone(record, LEFTOVER_S, tell="all")
        elif job is None or job.exit_code is None:
            await self.until_gone(record, grace_s + KILL_MARGIN_S, tell="leader")
        else:
            await self.until_gone(record, grace_s + EXIT_S)

    async def until_gone(self, record: LeaseRecord, kill_after_s: float, *, tell: str = "") -> None:
        """Return when a lease has no process and the driver shows no memory of it.

        ``tell``: its ``leader`` or ``all`` get SIGTERM first; it may begin only just now, and the
        time until SIGKILL counts from then.
        """
        clock, observation = self._registry.clock, self._registry.observations[record.id]
        kill_at, spares_runner, is_first = clock() + kill_after_s, tell == "leader", True
        waits_for_record = False
        while True:
            alive = observation.sample is not None and observation.sample.alive
            if tell and (is_first or alive):
                if await self._devices.signal(record.handle, signal.SIGTERM, tell):
                    kill_at, tell = clock() + kill_after_s, ""
                is_first = False
            await self._observer.measure()
            if observation.is_gone and snapshot.sampled_since_entry(self._registry, record):
                return
            now = clock()
            if now >= kill_at or (waits_for_record and self._has_reported(record)):
                waits_for_record = spares_runner and not self._has_reported(record)
                to, spares_runner = "others" if waits_for_record else "all", False
                log.warning("lease=%s has processes after its grace: killing %s", record.handle, to)
                await self._devices.signal(record.handle, signal.SIGKILL, to)
                kill_at = now + (RECORD_S if waits_for_record else EXIT_S)
            await asyncio.sleep(min(LOOK_S, kill_at - now))

    def _has_reported(self, record: LeaseRecord) -> bool:
        """Whether the result of an attempt is known: its record is on disk before it is reported."""
        job = self._registry.job_of(record)
        return job is None or job.exit_code is not None

    async def is_gone_now(self, record: LeaseRecord) -> bool:
        """Return whether a measurement that begins from now on shows nothing of a lease; False: none came."""
        clock, observation = self._registry.clock, self._registry.observations[record.id]
        asked_at = clock()
        while observation.measured_at <= asked_at and clock() - asked_at <= STALE_S:
            await asyncio.sleep(LOOK_S)
            await self._observer.measure()
        return observation.measured_at > asked_at and observation.is_gone
