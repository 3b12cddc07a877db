"""What the runner tells others: the broker how the job does, the Hub that its server is in use.

Both may be away for minutes.  `Reports` keeps one message of each kind at most:
``started`` first, then only the newest progress, ``ended`` until it is taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from tornado.escape import json_encode
from tornado.httpclient import AsyncHTTPClient, HTTPError

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, Conflict, InvalidRequest, NotFound, RequestError
from jupyter_gpushare.wire import JobReport, JobSpec

# A broker that is upgraded or waits for its database is back within minutes; the result stays on disk.
ENDED_PATIENCE_S = 600.0
# Who told it to stop waits for it, and knows; at the end of a Hub nobody is left to take a report.
STOPPED_PATIENCE_S = 3.0
PROGRESS_EVERY_S = 2.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0
# Well below the time-outs of idle cullers, which count minutes.
ACTIVITY_EVERY_S = 120.0

log = logging.getLogger("gpushare.job")


class Reports:
    """Tells the broker about one attempt, with the token of its server."""

    def __init__(self, client: BrokerClient, spec: JobSpec) -> None:
        self._client = client
        self._path = f"jobs/{spec.id}/attempts/{spec.attempt}/report"
        self._started: asyncio.Task[bool] | None = None

    def started(self) -> None:
        """Tell, as soon as the broker listens, that the command runs."""
        self._started = asyncio.create_task(self._tell(JobReport(state="started"), ENDED_PATIENCE_S))

    async def progress(self, done: float, total: float | None) -> None:
        """Tell how far it is, once; the next number is better than a repeated one."""
        if self._started is not None and self._started.done():
            await self._tell(JobReport(state="progress", done=done, total=total), 0.0)

    async def ended(self, report: JobReport) -> bool:
        """Tell how it ended; False when the broker did not take it in time (less when it was stopped)."""
        if self._started is not None:
            self._started.cancel()
            await asyncio.wait([self._started])
        return await self._tell(report, STOPPED_PATIENCE_S if report.stopped else ENDED_PATIENCE_S)

    async def _tell(self, report: JobReport, patience_s: float) -> bool:
        until = time.monotonic() + patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._client.post(self._path, report, type(None), repeatable=True)
            except (NotFound, Conflict, InvalidRequest) as error:
                log.warning("report=%s refused: %s", report.state, error)
                return False
            except (RequestError, BrokerUnavailable) as error:
                # Also "not allowed": a Hub that restarts does not know tokens for a moment.
                if time.monotonic() + pause_s >= until:
                    log.warning("report=%s not delivered: %s", report.state, error)
                    return False
            else:
                return True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def keep_active(env: Mapping[str, str]) -> None:
    """Tell the Hub again and again that this server is in use, so that no idle culler takes it for idle."""
    url, server = env.get("JUPYTERHUB_ACTIVITY_URL"), env.get("JUPYTERHUB_SERVER_NAME", "")
    if not url:
        return
    client = AsyncHTTPClient(force_instance=True)
    headers = {"Authorization": f"token {env['JUPYTERHUB_API_TOKEN']}", "Content-Type": "application/json"}
    while True:
        now = datetime.now(UTC).isoformat()
        body = json_encode({"servers": {server: {"last_activity": now}}, "last_activity": now})
        try:
            await client.fetch(url, method="POST", headers=headers, body=body, request_timeout=30.0)
        except (HTTPError, OSError) as error:
            log.info("the Hub was not told of activity: %s", error)
        await asyncio.sleep(ACTIVITY_EVERY_S)
