"""Delivers notices about jobs to users, by a webhook or a mail command.

Names and reasons are data: one line each, without control characters.  The address of a webhook may
contain a secret, so no log has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence

import httpx

from jupyter_gpushare import messages
from jupyter_gpushare.error_log import ErrorLog
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.parent import bound
from jupyter_gpushare.wall_clock import iso_now

_MAX_QUEUED = 1_000
# Dropped notices are logged at most once in this time.
_DROPS_S = 60.0
# The variables that a mail command gets; the environment of this process has tokens.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")


class NotDelivered(GpuShareError):
    """A receiver refused a notice or did not answer."""


class Outbox:
    """Sends the notices to one receiver in order, with one try and a deadline for each.

    A full outbox drops the oldest notice of the user with the most notices, so that one user's jobs cannot
    displace those of others.
    """

    def __init__(self, receiver: str, log: logging.Logger, deadline_s: float) -> None:
        """Create an empty outbox; the log uses the name ``receiver``."""
        self.idle = asyncio.Event()  # set when all notices are sent
        self.idle.set()
        self._receiver = receiver
        self._log = log
        self._deadline_s = deadline_s
        self._waiting: deque[tuple[str, Callable[[], Awaitable[None]]]] = deque()
        self._arrived = asyncio.Event()
        self._errors = ErrorLog(log)
        self._dropped = 0  # since drops were last logged
        self._logged_at = -_DROPS_S

    def put(self, user: str, send: Callable[[], Awaitable[None]]) -> None:
        """Queue a notice about a job of ``user``."""
        self._waiting.append((user, send))
        if len(self._waiting) > _MAX_QUEUED:
            ((largest, _),) = Counter(each for each, _ in self._waiting).most_common(1)
            del self._waiting[next(n for n, (each, _) in enumerate(self._waiting) if each == largest)]
            self._note_drop(time.monotonic())
        self.idle.clear()
        self._arrived.set()

    def _note_drop(self, now: float) -> None:
        self._dropped += 1
        if now - self._logged_at >= _DROPS_S:
            self._log.warning(
                "%s: %d messages wait: the %d oldest dropped", self._receiver, _MAX_QUEUED, self._dropped
            )
            self._logged_at, self._dropped = now, 0

    async def run(self) -> None:
        """Send notices until cancelled; drop a notice that cannot be sent, and log a new error."""
        while True:
            while not self._waiting:
                self.idle.set()
                self._arrived.clear()
                await self._arrived.wait()
            _, send = self._waiting.popleft()
            try:
                async with asyncio.timeout(self._deadline_s):
                    await send()
            except TimeoutError:
                late = NotDelivered(f"no answer within {self._deadline_s:g} s")
                self._errors.failed(self._receiver, late)
            except (GpuShareError, OSError) as error:
                self._errors.failed(self._receiver, error)
            except Exception as error:
                self._errors.broke(self._receiver, error)
            else:
                self._errors.works(self._receiver)


def body(
    event: str, *, job: str, name: str, user: str, state: str, reason: str, **more: str | int | None
) -> bytes:
    """Return the JSON for a webhook, with ``more`` fields of the sender."""
    return json.dumps(
        {
            # Slack, Mattermost and others show this field.
            "text": messages.job_news(name, event, state, reason),
            "event": event,
            "at": iso_now(),
            "user": messages.news_line(user),
            "job": job,
            "name": messages.news_line(name),
            "state": state,
            "reason": messages.news_line(reason),
            **more,
        }
    ).encode()


def client(timeout_s: float) -> httpx.AsyncClient:
    """Return a client for `post`; it trusts this machine's authorities and the public ones."""
    tls = httpx.create_ssl_context(trust_env=False)
    tls.load_default_certs()
    return httpx.AsyncClient(timeout=timeout_s, trust_env=False, follow_redirects=False, verify=tls)


async def post(to: httpx.AsyncClient, url: str, content: bytes) -> None:
    """Post JSON to a webhook, without following redirects or reading the answer's body.

    Raises:
        NotDelivered: the webhook refused the notice, or cannot be reached.
    """
    headers = {"Content-Type": "application/json"}
    try:
        async with to.stream("POST", url, content=content, headers=headers) as answer:
            if answer.status_code >= 300:
                raise NotDelivered(f"it answered {answer.status_code}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotDelivered(type(error).__name__) from None


async def pipe(command: Sequence[str], content: bytes) -> None:
    """Run a mail command without a shell, with ``content`` on its standard input.

    The command runs in its own process group, which is killed when this coroutine is cancelled.  It ends
    with this process, because the event loop is in the main thread (`parent`).

    Raises:
        NotDelivered: the command failed.
        OSError: the command cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *bound(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        start_new_session=True,
    )
    try:
        await process.communicate(content)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise NotDelivered(f"{command[0]} ended with exit code {process.returncode}")
