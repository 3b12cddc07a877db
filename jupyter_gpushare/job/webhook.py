"""Calls the webhook of a job from the job's own server, as its user.

It is called in this order: when an attempt has ``started``, is ``stopping`` and has ``ended``.  A webhook
that does not answer does not affect the job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from jupyter_gpushare import notices
from jupyter_gpushare.protocol.wire import JobOutcome, JobSpec

# The broker kills a runner 5 s after it has reported its end.
DEADLINE_S = 4.0

log = logging.getLogger("gpushare.job")


class Webhook:
    """Sends messages one after the other; none without a URL."""

    def __init__(self, spec: JobSpec, env: Mapping[str, str]) -> None:
        self._spec = spec
        self._user = env.get("JUPYTERHUB_USER", "")
        self._outbox = notices.Outbox("the webhook", log, DEADLINE_S)
        self._client = notices.client(DEADLINE_S) if spec.notify_url else None
        self._worker: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        """Return whether there is a URL to call."""
        return self._client is not None

    def send(self, event: str, outcome: JobOutcome, exit_code: int | None = None) -> None:
        """Send a message in the background, after the earlier ones."""
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
        """Wait until all messages are sent, at most `DEADLINE_S`; drop the others."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._outbox.idle.wait()
        except TimeoutError:
            log.warning("the webhook was not told all: it does not answer within %g s", DEADLINE_S)
        if self._worker is not None:
            self._worker.cancel()
