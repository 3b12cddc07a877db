"""Acts of owners on a running session: keep it awake, wake it, lend it, free memory of dead processes."""

from __future__ import annotations

import logging
import signal
from math import floor

from jupyter_gpushare.backends.base import DeviceBackend
from jupyter_gpushare.broker.state.records import LeaseRecord, UsageRecord
from jupyter_gpushare.broker.state.registry import Registry, keep_left
from jupyter_gpushare.broker.state.transitions import kept_until, lent, sleep_allowed
from jupyter_gpushare.core.model import State
from jupyter_gpushare.errors import Conflict, HelperError, InvalidRequest, NotAllowed, TooMany
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import seconds_to_midnight

log = logging.getLogger("gpushare.broker")


class OwnSessions:
    """Carries out requests of owners; the HTTP handlers have checked the ownership of the session."""

    def __init__(self, registry: Registry, devices: DeviceBackend) -> None:
        self.registry = registry
        self.devices = devices

    async def activity(self, user: str, server: str, report: wire.ActivityReport) -> None:
        """Store a server's report of its kernels; it can only delay lending, because users can forge it."""
        record = self.registry.by_server(user, server)
        if record is None or record.is_job:
            return
        observation, now = self.registry.observations[record.id], self.registry.clock()
        busy = {k.id[:64]: k.runs for k in report.kernels[:1_000] if k.busy}
        # Kernels of servers that started before an upgrade report only that they are busy.
        requests = any(k.busy or k.handles_request for k in report.kernels)
        changed = observation.report_kernels(busy, requests=requests, now=now)
        idle = min((max(0.0, k.idle_s) for k in report.kernels), default=None)
        if observation.kernel_busy:
            observation.kernel_active_at = now
        elif idle is not None:
            observation.kernel_active_at = max(observation.kernel_active_at, min(now, now - idle))
        observation.kernels = {k.id[:64]: k.name[:255] for k in report.kernels[:64]}
        observation.kernel_ends_at = {
            k.id[:64]: now + k.ends_in_s for k in report.kernels[:64] if k.ends_in_s is not None
        }
        observation.report_ends(report.ended, now)
        if changed:
            await self.registry.notify()

    async def wake(self, record: LeaseRecord) -> None:
        """Resume a suspended session, as if it ran a GPU cell.

        Raises:
            Conflict: the session is not suspended.
        """
        if record.state is not State.SUSPENDED or record.is_job:
            raise Conflict("only a session that is asleep can be woken")
        await self.registry.want(record)

    async def stay_asleep(self, record: LeaseRecord) -> None:
        """Cancel the wake-up of a suspended session; its calls wait for the next cell or for `wake`.

        Raises:
            Conflict: the session does not wait for its GPU, or is already resuming.
        """
        observation = self.registry.observations[record.id]
        if record.state is not State.SUSPENDED or record.is_job or not observation.wanted:
            raise Conflict("only a session that waits for its GPU can stay asleep")
        observation.decline()
        log.info("lease=%s stays asleep", record.handle)
        await self.registry.notify()

    async def keep(self, record: LeaseRecord, minutes: float) -> None:
        """Protect a session from suspension for ``minutes``, within the user's daily budget (`keep_budget`).

        If the session is already protected, only the extension counts.  0 minutes end the protection, and
        return the rest of it to the budget.

        Raises:
            InvalidRequest: ``minutes`` is neither 0 nor from 1 to 240.
            TooMany: the day's budget is used up.
        """
        if minutes and not 1 <= minutes <= 240:
            raise InvalidRequest("minutes is a number from 1 to 240, or 0, not %1", minutes)
        lease, now = record.lease, self.registry.clock()
        until = max(lease.keep_until_at, now + 60 * minutes)
        longer_s = until - max(lease.keep_until_at, now)
        if not minutes:
            used_s = self.registry.usage.kept_s(self._today(), lease.user, lease.project)
            until, longer_s = now, -min(used_s, max(0.0, lease.keep_until_at - now))
        left_minutes = keep_left(self.registry, lease.user, lease.project)
        if longer_s > 60 * left_minutes:
            raise TooMany(
                "you can keep your GPU for %1 more minutes today",
                floor(left_minutes),
                retry_after_s=seconds_to_midnight(self.registry.iso_now()),
            )
        kept = UsageRecord(day=self._today(), user=lease.user, project=lease.project, kept_s=longer_s)
        await self.registry.edit(record, kept_until(until), self.registry.usage.count(kept))

    def _today(self) -> str:
        return self.registry.iso_now()[:10]

    async def lend(self, record: LeaseRecord) -> None:
        """Lend the GPU of a session at once, even if it is busy.

        Raises:
            Conflict: the session is not awake, or lending is not on.
        """
        if record.state is not State.RUNNING or record.is_job:
            raise Conflict("only a session that is awake can be lent")
        if self.registry.lending_switch.obstacle:
            raise Conflict("lending is switched off, or only watched, on this machine", reason="lending_off")
        await self.registry.edit(record, lent)

    async def release(self, record: LeaseRecord) -> None:
        """End the processes of a lease that keep GPU memory of dead processes.

        Raises:
            Conflict: there is no such process, or the device helper did not end them.
        """
        sample = self.registry.observations[record.id].sample
        keepers = [each.pid for each in sample.processes if each.keeps] if sample else []
        if not keepers:
            raise Conflict("no ended process of this session left GPU memory behind")
        try:
            await self.devices.signal(record.handle, signal.SIGKILL, "keepers")
        except HelperError as error:
            raise Conflict("the processes were not ended: %1", str(error)) from None
        log.info("lease=%s releases what an ended process left: processes %s end", record.handle, keepers)

    async def allow_sleep(self, record: LeaseRecord, allowed: bool) -> None:
        """Mark a session as never to be suspended, and wake it; with ``allowed``, remove the mark.

        Raises:
            Conflict: the lease is a job's.
            NotAllowed: its project has no right to this mark.
        """
        if record.is_job:
            raise Conflict("only sessions are marked; a job says with `checkpoint` how it is paused")
        project = self.registry.policy.project_config(record.lease.project)
        if not allowed and not (project is not None and project.never_sleep):
            raise NotAllowed(
                "project %1 may not keep sessions from sleep: the administrator gives that right "
                "(never_sleep in GPUShareBroker.projects)",
                record.lease.project,
            )
        record = await self.registry.edit(record, sleep_allowed(allowed=allowed))
        if not allowed:
            await self.registry.want(record)
