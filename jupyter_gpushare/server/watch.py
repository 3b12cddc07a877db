"""Holds the one long poll to the broker, and tells the page what changed.

The first request, and the first after any failure, asks without ``after``: a
broker that was restarted counts from elsewhere.  A broker that does not answer
is asked again after 1, 2, 4, ... `MAX_PAUSE_S` seconds; since when it has been
silent is known meanwhile, and what it said before is not shown as news.
A user's servers have a number of long polls in common: a server that gets none asks
every `NO_POLL_S` seconds instead, until one is free.

An event is emitted for this server's own lease and for the user's jobs, when a
person would call it a change (`lease_key`, `job_key`), never for numbers; and
when the broker falls silent or is heard again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, RequestError, TooMany
from jupyter_gpushare.wire import Job, LeaseStatus, Status

# The broker answers after WAIT_S at the latest; then a little for the way.
WAIT_S = 25
ANSWER_S = 10.0
# Changes that come closer together are one answer.
GATHER_S = 0.1
MAX_PAUSE_S = 60.0
NO_POLL_S = 30.0

EVENTS_DIR = Path(__file__).parent / "events"
LEASE_EVENT = "https://jupyter-gpushare.readthedocs.io/events/lease_state"
JOB_EVENT = "https://jupyter-gpushare.readthedocs.io/events/job_state"
BROKER_EVENT = "https://jupyter-gpushare.readthedocs.io/events/broker_state"

Emit = Callable[[str, dict[str, Any]], None]


# The warning comes this long before the GPU is lent, or a third of the idle time-out when that is shorter.
WARNING_S = 300.0


def iso(moment: datetime) -> str:
    """Return a moment as in every message: ISO 8601 in UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_warned(lease: LeaseStatus) -> bool:
    """Return whether the GPU is about to be lent."""
    if lease.lend_in_s is None or lease.idle_s is None:
        return False
    return lease.lend_in_s <= min(WARNING_S, (lease.idle_s + lease.lend_in_s) / 3)


def lease_key(lease: LeaseStatus) -> tuple[object, ...]:
    """What of a lease makes an event when it changes."""
    return lease.id, lease.state, is_warned(lease), lease.wanted


def job_key(job: Job) -> tuple[object, ...]:
    """What of a job makes an event when it changes."""
    return job.state, job.attempt


def own_lease(status: Status, server: str) -> LeaseStatus | None:
    """Return the lease of the user's server of this name."""
    return next((lease for lease in status.leases if lease.server == server), None)


def changes(before: Status | None, now: Status, server: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (schema id, data) of the events between two answers; none for the first answer."""
    if before is None:
        return []
    events = []
    old, new = own_lease(before, server), own_lease(now, server)
    if new is not None and (old is None or lease_key(old) != lease_key(new)):
        events.append((LEASE_EVENT, _lease_data(now.seq, old, new)))
    elif new is None and old is not None:
        gone = {"state": "released", "warned": False, "lend_in_s": None, "wanted": False}
        said = {"badge": "Ended", "sentence": "This server holds no GPU any more."}
        events.append((LEASE_EVENT, _lease_data(now.seq, old, old) | gone | said))
    known = {job.id: job for job in before.jobs}
    for job in now.jobs:
        earlier = known.get(job.id)
        if earlier is None or job_key(earlier) != job_key(job):
            events.append((JOB_EVENT, _job_data(now.seq, earlier, job)))
    return events


def _lease_data(seq: int, before: LeaseStatus | None, lease: LeaseStatus) -> dict[str, Any]:
    return {
        "seq": seq,
        "lease": lease.id,
        "state": str(lease.state),
        "previous": str(before.state) if before is not None and before.id == lease.id else "",
        "warned": is_warned(lease),
        "lend_in_s": lease.lend_in_s,
        "wanted": lease.wanted,
        "badge": lease.badge,
        "sentence": lease.sentence,
    }


def _job_data(seq: int, before: Job | None, job: Job) -> dict[str, Any]:
    return {
        "seq": seq,
        "job": job.id,
        "name": job.name,
        "state": job.state,
        "previous": before.state if before is not None else "",
        "attempt": job.attempt,
        "exit_code": job.exit_code,
        "reason": job.reason,
    }


async def _pause(about_s: float) -> None:
    """Many servers ask one broker: not all at once."""
    await asyncio.sleep(about_s * random.uniform(0.8, 1.2))  # noqa: S311


class Watch:
    """What the broker last said, and since when it has been silent."""

    def __init__(self, client: BrokerClient, server: str, emit: Emit, log: logging.Logger) -> None:
        self.status: Status | None = None
        self.silent_since: datetime | None = None
        self._client = client
        self._server = server
        self._emit = emit
        self._log = log
        self._fetching: asyncio.Task[Status] | None = None

    async def run(self) -> None:
        """Ask for news until cancelled."""
        after: int | None = None
        pause_s = 1.0
        while True:
            try:
                status = await self._ask(after)
            except (BrokerUnavailable, RequestError) as error:
                if after is not None and isinstance(error, TooMany):
                    after = None
                    await _pause(NO_POLL_S)
                    continue
                self._is_silent(error)
                after = None
                await _pause(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            self._hears(status)
            after, pause_s = status.seq, 1.0
            await asyncio.sleep(GATHER_S)

    async def fresh(self) -> Status:
        """Return the broker's answer of now; callers at the same time share one request.

        Raises:
            BrokerUnavailable: it does not answer; ``silent_since`` says since when.
            RequestError: it refuses.
        """
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.ensure_future(self._ask(None))
        try:
            status = await asyncio.shield(self._fetching)
        except (BrokerUnavailable, RequestError) as error:
            self._is_silent(error)
            raise
        return self._hears(status)

    async def stop(self) -> None:
        """End a request that is under way."""
        if self._fetching is not None and not self._fetching.done():
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    async def _ask(self, after: int | None) -> Status:
        if after is None:
            return await self._client.get("status", Status, timeout_s=ANSWER_S)
        params = {"after": after, "wait": WAIT_S}
        return await self._client.get("status", Status, params=params, timeout_s=WAIT_S + ANSWER_S)

    def _hears(self, status: Status) -> Status:
        """Return what is known now: ``status``, unless a newer answer overtook it."""
        if self.silent_since is not None:
            self._log.info("gpushare: the broker answers again")
            self.silent_since = None
            self._emit(BROKER_EVENT, {"silent_since": None})
        elif self.status is not None and status.seq < self.status.seq:
            return self.status
        for schema, data in changes(self.status, status, self._server):
            self._emit(schema, data)
        self.status = status
        return status

    def _is_silent(self, error: Exception) -> None:
        if self.silent_since is None:
            self.silent_since = datetime.now(UTC)
            self._log.warning("gpushare: no news from the broker: %s", error)
            self._emit(BROKER_EVENT, {"silent_since": iso(self.silent_since)})
