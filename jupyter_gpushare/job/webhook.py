"""Calls the webhook that a user gave for a job: from the job's own server, as that user.

It is told in order when an attempt ``started``, is ``stopping`` and has ``ended``.  A webhook that does
not answer changes nothing of the job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from jupyter_gpushare import notices
from jupyter_gpushare.protocol.wire import JobOutcome, JobSpec

# Below the 5 s after which the broker kills a runner that has reported its end.
DEADLINE_S = 4.0

log = logging.getLogger("gpushare.job")


class Webhook:
    """Sends one message after the other; without a URL it sends none."""

    def __init__(self, spec: JobSpec, env: Mapping[str, str]) -> None:
        self._spec = spec
        self._user = env.get("JUPYTERHUB_USER", "")
        self._outbox = notices.Outbox("the webhook", log, DEADLINE_S)
        self._client = notices.client(DEADLINE_S) if spec.notify_url else None
        self._worker: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        """Whether there is a URL to call."""
        return self._client is not None

    def send(self, event: str, outcome: JobOutcome, exit_code: int | None = None) -> None:
        """Send a message in the background, after those before."""
        if self._client is None:
            return
        body = notices.body(
            event,
            job=self._spec.id,
            name=self._spec.name,
            user=self._user,
            state=outcome.state,
            reason=outcome.reason,
            attempt=self._spec.attempt,
            exit_code=exit_code,
        )
        self._outbox.put(self._user, partial(notices.post, self._client, self._spec.notify_url, body))
        self._worker = self._worker or asyncio.create_task(self._outbox.run())

    async def close(self) -> None:
        """Return when all was sent, at most `DEADLINE_S` from now: what is left is dropped."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._outbox.idle.wait()
        except TimeoutError:
            log.warning("the webhook was not told all: it does not answer within %g s", DEADLINE_S)
        if self._worker is not None:
            self._worker.cancel()
