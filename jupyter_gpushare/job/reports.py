"""The runner's reports: the job's state to the broker, activity to the Hub.

Both may be unreachable for minutes.  `Reports` sends ``started`` first, then the newest
progress, then ``ended`` until it is delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from tornado.escape import json_encode
from tornado.httpclient import AsyncHTTPClient, HTTPError

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, Conflict, InvalidRequest, NotFound, RequestError
from jupyter_gpushare.internal_tls import internal_tls
from jupyter_gpushare.protocol.wire import JobOutcome, JobReport, JobSpec
from jupyter_gpushare.wall_clock import iso_now

# A broken broker is assumed to be repaired within a day; the result stays on disk.
ENDED_PATIENCE_S = 86400.0
# The broker or the Hub requests a stop and waits for the runner; a Hub that ends takes no report.
STOPPED_PATIENCE_S = 3.0
PROGRESS_EVERY_S = 2.0
_FIRST_PAUSE_S = 0.5
# With the retries of one request, a broker that is reachable again gets a report within 10 s.
_MAX_PAUSE_S = 4.0
# Well below the time-outs of idle cullers, which count minutes.
ACTIVITY_EVERY_S = 120.0

log = logging.getLogger("gpushare.job")


class Reports:
    """Reports one attempt to the broker, with the token of its server."""

    def __init__(self, client: BrokerClient, spec: JobSpec, stop: asyncio.Event) -> None:
        self._client = client
        self._stop = stop  # set when the runner must stop; retries then end after STOPPED_PATIENCE_S
        self._path = f"jobs/{spec.id}/attempts/{spec.attempt}/report"
        self._started: asyncio.Task[JobOutcome | None] | None = None

    def started(self) -> None:
        """Report the start in the background, with retries until the broker answers."""
        self._started = asyncio.create_task(self._send(JobReport(state="started"), ENDED_PATIENCE_S))

    async def progress(self, done: float | None, total: float | None) -> bool:
        """Report progress once; return whether the report was delivered.  None withdraws the last progress.

        A lost report is not retried, because the next one replaces it.
        """
        if self._started is None or not self._started.done():
            return False
        return await self._send(JobReport(state="progress", done=done, total=total), 0.0) is not None

    async def stopping(self) -> JobOutcome | None:
        """Report that the attempt must stop; return the outcome for its job, or None if not delivered."""
        return await self._send(JobReport(state="stopping"), STOPPED_PATIENCE_S)

    async def ended(self, report: JobReport) -> JobOutcome | None:
        """Report the end; return the outcome for the job, or None if the report was not delivered in time.

        The time is `ENDED_PATIENCE_S`, or `STOPPED_PATIENCE_S` after a request to stop.
        """
        if self._started is not None:
            self._started.cancel()
            await asyncio.wait([self._started])
        return await self._send(report, ENDED_PATIENCE_S)

    async def _send(self, report: JobReport, patience_s: float) -> JobOutcome | None:
        """Deliver a report; return the broker's answer, or a running job if the answer is empty."""
        until = time.monotonic() + patience_s
        pause_s = _FIRST_PAUSE_S
        stopping = False
        while True:
            if self._stop.is_set() and not stopping:
                stopping = True
                until, pause_s = min(until, time.monotonic() + STOPPED_PATIENCE_S), _FIRST_PAUSE_S
            try:
                answer = await self._client.post(self._path, report, JobOutcome, repeatable=True)
            except (NotFound, Conflict, InvalidRequest) as error:
                log.warning("report=%s refused: %s", report.state, error)
                return None
            except (RequestError, BrokerUnavailable) as error:
                # "Not allowed" is retried too: a Hub that restarts does not know tokens for a moment.
                if time.monotonic() + pause_s >= until:
                    log.warning("report=%s not delivered: %s", report.state, error)
                    return None
            else:
                return answer or JobOutcome(state="running", reason="")
            await self._pause(pause_s, stopping)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _pause(self, pause_s: float, stopping: bool) -> None:
        """Return after ``pause_s``, or when the runner must stop."""
        if stopping:
            await asyncio.sleep(pause_s)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stop.wait()


async def keep_active(env: Mapping[str, str]) -> None:
    """Report activity to the Hub periodically, so that idle cullers do not stop a running job."""
    url, server = env.get("JUPYTERHUB_ACTIVITY_URL"), env.get("JUPYTERHUB_SERVER_NAME", "")
    if not url:
        return
    client = AsyncHTTPClient(force_instance=True, defaults={"ssl_options": internal_tls(env)})
    headers = {"Authorization": f"token {env['JUPYTERHUB_API_TOKEN']}", "Content-Type": "application/json"}
    warned, every_s = False, activity_every_s(env)
    while True:
        now = iso_now()
        body = json_encode({"servers": {server: {"last_activity": now}}, "last_activity": now})
        try:
            await client.fetch(url, method="POST", headers=headers, body=body, request_timeout=30.0)
        except (HTTPError, OSError) as error:
            log.log(
                logging.INFO if warned else logging.WARNING,
                "the activity was not reported to the Hub: %s",
                error,
            )
            warned = True
        else:
            warned = False
        await asyncio.sleep(every_s)


def activity_every_s(env: Mapping[str, str]) -> float:
    """Return the interval of a job's activity reports in seconds: a notebook server's, at most 120 s."""
    interval = env.get("JUPYTERHUB_ACTIVITY_INTERVAL", "")
    return min(ACTIVITY_EVERY_S, max(1.0, float(interval))) if interval.isdecimal() else ACTIVITY_EVERY_S
