"""Delivers notices of jobs to people: by a webhook or by a mail command.

Names and reasons are data: one line each, without control characters.  No log has the address of a
webhook, which may hold a secret.
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

_QUEUED = 1_000
# Dropped notices are logged once in this time.
_DROPS_S = 60.0
# Of its own environment, which has tokens, a process gives these to a mail command.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")


class NotDelivered(GpuShareError):
    """A receiver refused a notice or did not answer."""


class Outbox:
    """The notices to one receiver, sent in order, each with one try and a deadline.

    A full one drops the oldest notice of the user with the most, so that one user's jobs displace no other's.
    """

    def __init__(self, receiver: str, log: logging.Logger, deadline_s: float) -> None:
        """``receiver`` is its name in the log."""
        self.idle = asyncio.Event()  # all was sent
        self.idle.set()
        self._receiver = receiver
        self._log = log
        self._deadline_s = deadline_s
        self._waiting: deque[tuple[str, Callable[[], Awaitable[None]]]] = deque()
        self._came = asyncio.Event()
        self._errors = ErrorLog(log)
        self._dropped = 0  # since the last line about it
        self._said_at = -_DROPS_S

    def put(self, user: str, send: Callable[[], Awaitable[None]]) -> None:
        """Queue a notice about a job of ``user``."""
        self._waiting.append((user, send))
        if len(self._waiting) > _QUEUED:
            ((most, _),) = Counter(each for each, _ in self._waiting).most_common(1)
            del self._waiting[next(n for n, (each, _) in enumerate(self._waiting) if each == most)]
            self._note_drop(time.monotonic())
        self.idle.clear()
        self._came.set()

    def _note_drop(self, now: float) -> None:
        self._dropped += 1
        if now - self._said_at >= _DROPS_S:
            self._log.warning(
                "%s: %d messages wait: the %d oldest dropped", self._receiver, _QUEUED, self._dropped
            )
            self._said_at, self._dropped = now, 0

    async def run(self) -> None:
        """Send until cancelled; a notice that cannot be sent is dropped, and a new error is logged."""
        while True:
            while not self._waiting:
                self.idle.set()
                self._came.clear()
                await self._came.wait()
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
    """Return the JSON that a webhook gets, with ``more`` fields of its sender."""
    return json.dumps(
        {
            # What Slack, Mattermost and others show.
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
    """Return a client for `post`, which trusts the authorities of this machine beside the public ones."""
    tls = httpx.create_ssl_context(trust_env=False)
    tls.load_default_certs()
    return httpx.AsyncClient(timeout=timeout_s, trust_env=False, follow_redirects=False, verify=tls)


async def post(to: httpx.AsyncClient, url: str, content: bytes) -> None:
    """Post JSON to a webhook, without following redirects or reading the answer's body.

    Raises:
        NotDelivered: it does not take it.
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

    It runs in a process group of its own, which is killed when this is cancelled.  It ends with this
    process: the event loop is in the main thread (`parent`).

    Raises:
        NotDelivered: it failed.
        OSError: it cannot be started.
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
