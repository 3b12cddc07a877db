"""Long poll to the broker, and Jupyter Events for the changes in its answers.

The first request, and the first after a failure, omits ``after``.  The numbers of a restarted broker
continue above its predecessor's.  So the newer of two answers has the higher number, also if the client
repeated a request across a restart without a failure.  An unreachable broker is retried after
1, 2, 4, ... `MAX_PAUSE_S` seconds.  Answers from before the start of an outage cause no events.  Long
polls are limited per user: a server without one polls every `NO_POLL_S` until a slot is free.

Events report state changes (`lease_key`, `job_key`) of this server's lease and of the user's jobs, and
the start and end of an outage, but no numbers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, RequestError, TooMany
from jupyter_gpushare.messages import local
from jupyter_gpushare.protocol.wire import Job, LeaseStatus, Status
from jupyter_gpushare.wall_clock import iso_now

# The broker answers a long poll within WAIT_S; ANSWER_S is added for the network.
WAIT_S = 25
ANSWER_S = 10.0
# A page that polls learns after this time that the broker does not answer.  The request to the broker
# continues, and a later answer ends the outage.
PAGE_S = 3.0
# Changes within this time come in one answer.
GATHER_S = 0.1
MAX_PAUSE_S = 60.0
NO_POLL_S = 30.0

EVENTS_DIR = Path(__file__).parent / "events"
LEASE_EVENT = "https://jupyter-gpushare.readthedocs.io/events/lease_state"
JOB_EVENT = "https://jupyter-gpushare.readthedocs.io/events/job_state"
BROKER_EVENT = "https://jupyter-gpushare.readthedocs.io/events/broker_state"

Emit = Callable[[str, dict[str, Any]], None]


def lease_key(lease: LeaseStatus) -> tuple[object, ...]:
    """Return the fields of a lease that cause an event when they change."""
    return lease.id, lease.state, lease.warned, lease.wanted


def job_key(job: Job) -> tuple[object, ...]:
    """Return the fields of a job that cause an event when they change."""
    return job.state, job.attempt


def changes(before: Status | None, now: Status, server: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (schema id, data) of the events between two answers; none for the first answer."""
    if before is None:
        return []
    events = []
    old, new = before.lease_of(server), now.lease_of(server)
    if new is not None and (old is None or lease_key(old) != lease_key(new)):
        events.append((LEASE_EVENT, _lease_data(now.seq, old, new)))
    elif new is None and old is not None:
        gone = {"state": "released", "warned": False, "lend_in_s": None, "wanted": False}
        texts = {"badge": "Ended", "sentence": "This server holds no GPU any more."}
        events.append((LEASE_EVENT, _lease_data(now.seq, old, old) | gone | texts))
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
        "warned": lease.warned,
        "lend_in_s": lease.lend_in_s,
        "wanted": lease.wanted,
        "badge": lease.badge,
        "sentence": local(lease.sentence, lease.sentence_texts),
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
        "reason": local(job.reason, job.reason_texts),
    }


async def _pause(about_s: float) -> None:
    """Sleep for ``about_s`` with jitter, which spreads the requests of many servers."""
    await asyncio.sleep(about_s * random.uniform(0.8, 1.2))  # noqa: S311


class Watch:
    """Polls the broker; has its last status, and the start of an outage."""

    def __init__(self, client: BrokerClient, server: str, emit: Emit, log: logging.Logger) -> None:
        self.status: Status | None = None
        self.unreachable_since: str | None = None
        self._client = client
        self._server = server
        self._emit = emit
        self._log = log
        self._fetching: asyncio.Task[Status] | None = None
        self._failed_at = float("-inf")

    async def run(self) -> None:
        """Poll until cancelled."""
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
                self._on_failure(error)
                after = None
                await _pause(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            after, pause_s = status.seq, 1.0
            await asyncio.sleep(GATHER_S)

    async def fresh(self) -> Status:
        """Return the broker's current status; concurrent callers share one request.

        Raises:
            BrokerUnavailable: the broker cannot be reached, or did not answer within `PAGE_S`.
            RequestError: the broker refuses the request.
        """
        if self._fetching is None or self._fetching.done():
            self._fetching = asyncio.ensure_future(self._fetch())
            self._fetching.add_done_callback(lambda task: task.cancelled() or task.exception())
        fetching = self._fetching
        try:
            async with asyncio.timeout(PAGE_S):
                return await asyncio.shield(fetching)
        except TimeoutError:
            if fetching.done():  # the answer and the timeout came while this process did not run
                return await fetching
            silent = f"nothing for {PAGE_S:g} s"
            error = BrokerUnavailable("the GPU broker at %1 does not answer (%2)", self._client.url, silent)
            self._on_failure(error)
            raise error from None

    async def _fetch(self) -> Status:
        try:
            return await self._ask(None)
        except (BrokerUnavailable, RequestError) as error:
            self._on_failure(error)
            raise

    async def stop(self) -> None:
        """Cancel the request in flight, if any."""
        if self._fetching is not None and not self._fetching.done():
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    async def _ask(self, after: int | None) -> Status:
        sent_at = time.monotonic()
        if after is None:
            return self._on_answer(await self._client.get("status", Status, timeout_s=ANSWER_S), sent_at)
        params = {"after": after, "wait": WAIT_S}
        status = await self._client.get("status", Status, params=params, timeout_s=WAIT_S + ANSWER_S)
        return self._on_answer(status, sent_at)

    def _on_answer(self, status: Status, sent_at: float) -> Status:
        """Return ``status``, or a newer answer that arrived first.

        The first answer to a request that began after a failure always counts: the broker may be another
        one, with lower numbers.
        """
        newer = self.status if self.status is not None and status.seq < self.status.seq else None
        if newer is not None and sent_at <= self._failed_at:
            return newer
        if self.unreachable_since is not None:
            self._log.info("gpushare: the broker answers again")
            self.unreachable_since = None
            self._emit(BROKER_EVENT, {"unreachable_since": None})
        elif newer is not None:
            return newer
        for schema, data in changes(self.status, status, self._server):
            self._emit(schema, data)
        self.status = status
        return status

    def _on_failure(self, error: Exception) -> None:
        self._failed_at = time.monotonic()
        if self.unreachable_since is None:
            self.unreachable_since = iso_now()
            self._log.warning("gpushare: the broker is unreachable: %s", error)
            self._emit(BROKER_EVENT, {"unreachable_since": self.unreachable_since})
