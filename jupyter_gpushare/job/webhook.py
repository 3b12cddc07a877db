"""Calls the webhook that a user gave for a job: from the job's own server, as that user.

It is told in order when an attempt ``started``, is ``stopping`` and has ``ended``.  Each call has
one try and a deadline; a webhook that does not answer changes nothing of the job.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping

from tornado.httpclient import AsyncHTTPClient, HTTPError

from jupyter_gpushare import messages
from jupyter_gpushare.protocol.wire import JobOutcome, JobSpec
from jupyter_gpushare.wall_clock import iso_now

# Below the 5 s after which the broker kills a runner that has reported its end.
DEADLINE_S = 4.0
_ANSWER_BYTES = 64 << 10

log = logging.getLogger("gpushare.job")


class Webhook:
    """Sends one message after the other; without a URL it sends none."""

    def __init__(self, spec: JobSpec, env: Mapping[str, str]) -> None:
        self._spec = spec
        self._user = env.get("JUPYTERHUB_USER", "")
        self._client = AsyncHTTPClient(force_instance=True, max_body_size=_ANSWER_BYTES)
        self._last: asyncio.Task[None] | None = None

    def __bool__(self) -> bool:
        """Whether there is a URL to call."""
        return bool(self._spec.notify_url)

    def send(self, event: str, outcome: JobOutcome, exit_code: int | None = None) -> None:
        """Send a message in the background, after those before."""
        if self:
            body = message(self._spec, self._user, event, outcome, exit_code)
            self._last = asyncio.create_task(self._send_after(self._last, body))

    async def close(self) -> None:
        """Return when all was sent, at most `DEADLINE_S` from now: what is left is dropped."""
        if self._last is not None:
            _, late = await asyncio.wait([self._last], timeout=DEADLINE_S)
            for task in late:
                task.cancel()
                log.warning("the webhook was not told all: it does not answer within %g s", DEADLINE_S)
        self._client.close()

    async def _send_after(self, before: asyncio.Task[None] | None, body: bytes) -> None:
        if before is not None:
            await before
        try:
            await self._client.fetch(
                self._spec.notify_url,
                method="POST",
                headers={"Content-Type": "application/json"},
                body=body,
                follow_redirects=False,
                connect_timeout=DEADLINE_S,
                request_timeout=DEADLINE_S,
            )
        except (HTTPError, OSError, ValueError) as error:
            # Not its address: it may hold a secret, and others may read the log of the Hub.
            log.warning("the webhook was not told: %s", messages.printable(str(error))[:200])


def message(spec: JobSpec, user: str, event: str, outcome: JobOutcome, exit_code: int | None) -> bytes:
    """Return the JSON of a message; its texts are one line each, without control characters."""
    return json.dumps(
        {
            # What Slack, Mattermost and others show.
            "text": messages.job_news(spec.name, event, outcome.state, outcome.reason),
            "event": event,
            "at": iso_now(),
            "user": messages.news_line(user),
            "job": spec.id,
            "name": messages.news_line(spec.name),
            "attempt": spec.attempt,
            "state": outcome.state,
            "exit_code": exit_code,
            "reason": messages.news_line(outcome.reason),
        }
    ).encode()
