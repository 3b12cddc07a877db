"""Tells the administrator's webhook, and users by mail, what happens to jobs.

Only addresses and commands of the administrator are called: no text of a user chooses where a
message goes or what is run.  Names and reasons are data, one line each, without control
characters.  Each receiver has a queue and a worker of its own: it gets messages in order, one after
the other, each with one try and a deadline, and delays no other receiver.  A queue that is full
drops the oldest message of the user with the most, so that one user's jobs displace no other's.
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.message import EmailMessage

import httpx

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control.error_log import ErrorLog
from jupyter_gpushare.broker.state.receivers import Receivers
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.parent import bound
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import iso_now

log = logging.getLogger("gpushare.broker")

DEADLINE_S = 10.0
_QUEUED = 1_000
# Dropped messages are logged once in this time.
_DROPS_S = 60.0
# Of the broker's own environment, which has its tokens, a mail command gets these.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")


class NotDelivered(GpuShareError):
    """A receiver refused a message or did not answer."""


@dataclass(frozen=True, slots=True)
class _Message:
    event: str
    at: str
    job: JobRecord
    state: str
    reason: str

    def text(self) -> str:
        return messages.job_news(self.job.name, self.event, self.state, self.reason)

    def json(self) -> bytes:
        return json.dumps(
            {
                "text": self.text(),
                "event": self.event,
                "at": self.at,
                "user": messages.news_line(self.job.user),
                "project": messages.news_line(self.job.project),
                "job": self.job.id,
                "name": messages.news_line(self.job.name),
                "state": self.state,
                "reason": messages.news_line(self.reason),
            }
        ).encode()

    @property
    def is_mailed(self) -> bool:
        return wire.decode_stored(self.job.request, wire.JobNotify).notify_mail

    @property
    def may_be_mailed(self) -> bool:
        """False where its owner asked for no mail; the worker logs a request that is unreadable."""
        try:
            return self.is_mailed
        except ValueError:
            return True

    def mail(self, to: Receivers) -> bytes:
        mail = EmailMessage()
        mail["To"] = to.address_of(self.job.user)
        if to.mail_from:
            mail["From"] = to.mail_from
        mail["Subject"] = self.text().partition(". ")[0]
        mail["Auto-Submitted"] = "auto-generated"
        project = messages.news_line(self.job.project)
        mail.set_content(f"{self.text()}\n\nJob {self.job.id}, project {project}\n")
        return mail.as_bytes()


class _Queue:
    """The messages to one receiver, sent in order by one worker."""

    def __init__(self, receiver: str, send: Callable[[_Message], Awaitable[None]]) -> None:
        """``receiver`` is its name in the log; ``send`` sends one message to it."""
        self._receiver = receiver
        self._send = send
        self._waiting: deque[_Message] = deque()
        self._came = asyncio.Event()
        self._errors = ErrorLog()
        self._dropped = 0  # since the last line about it
        self._said_at = -_DROPS_S

    def put(self, message: _Message) -> None:
        self._waiting.append(message)
        if len(self._waiting) > _QUEUED:
            ((most, _),) = Counter(each.job.user for each in self._waiting).most_common(1)
            del self._waiting[next(n for n, each in enumerate(self._waiting) if each.job.user == most)]
            self._note_drop(time.monotonic())
        self._came.set()

    def _note_drop(self, now: float) -> None:
        self._dropped += 1
        if now - self._said_at >= _DROPS_S:
            log.warning("%s: %d messages wait: the %d oldest dropped", self._receiver, _QUEUED, self._dropped)
            self._said_at, self._dropped = now, 0

    async def run(self) -> None:
        """Send until cancelled; a message that cannot be sent is dropped, and a new error is logged."""
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            await self._try(self._waiting.popleft())

    async def _try(self, message: _Message) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._send(message)
        except TimeoutError:
            self._errors.failed(self._receiver, NotDelivered(f"no answer within {DEADLINE_S:g} s"))
        except (GpuShareError, OSError) as error:
            self._errors.failed(self._receiver, error)
        except Exception as error:
            self._errors.broke(self._receiver, error)
        else:
            self._errors.works(self._receiver)


class Announcer:
    """Sends messages in the background."""

    def __init__(self, receivers: Receivers | None = None) -> None:
        self.receivers = receivers or Receivers()  # a reload replaces them
        self._client: httpx.AsyncClient | None = None
        self._webhook = _Queue("the webhook of the site", self._post)
        self._mail = _Queue("the mail command", self._mail_if_asked)

    def job(self, event: str, job: JobRecord, state: str, reason: str = "") -> None:
        """Announce an ``event``: started, paused, queued (again), attention or ended."""
        message = _Message(event, iso_now(), job, state, reason)
        if self.receivers.url:
            self._webhook.put(message)
        if self.receivers.mail_command and message.may_be_mailed:
            self._mail.put(message)

    async def run(self) -> None:
        """Send until cancelled."""
        async with (
            httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False, follow_redirects=False) as self._client,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._webhook.run())
            group.create_task(self._mail.run())

    async def _post(self, message: _Message) -> None:
        if self._client is not None and self.receivers.url:
            await _post(self._client, self.receivers, message)

    async def _mail_if_asked(self, message: _Message) -> None:
        if self.receivers.mail_command and message.is_mailed:
            await _mail(self.receivers, message)


async def _post(client: httpx.AsyncClient, to: Receivers, message: _Message) -> None:
    headers = {"Content-Type": "application/json"}
    try:
        async with client.stream("POST", to.url, content=message.json(), headers=headers) as answer:
            if answer.status_code >= 300:
                raise NotDelivered(f"it answered {answer.status_code}")
    except httpx.HTTPError as error:
        raise NotDelivered(type(error).__name__) from None


async def _mail(to: Receivers, message: _Message) -> None:
    """Run the command without a shell, in a process group of its own; it is killed when this is cancelled.

    It ends with the broker: the event loop is in the main thread (`parent`).
    """
    mail = message.mail(to)
    process = await asyncio.create_subprocess_exec(
        *bound(to.mail_command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
        start_new_session=True,
    )
    try:
        await process.communicate(mail)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise NotDelivered(f"{to.mail_command[0]} ended with exit code {process.returncode}")
