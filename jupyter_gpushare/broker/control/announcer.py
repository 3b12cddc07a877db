"""Messages about jobs, to the administrator's webhook and by mail to users.

Only URLs and commands of the administrator are used: no text of a user chooses where a message goes or what
is run.  Each receiver has its own queue and worker, so that none delays another.
"""

from __future__ import annotations

import asyncio
import logging
from email.message import EmailMessage
from functools import partial

import httpx

from jupyter_gpushare import messages, notices
from jupyter_gpushare.broker.state.policy import Receivers
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")

DEADLINE_S = 10.0


class Announcer:
    """Sends messages in the background."""

    def __init__(self, receivers: Receivers | None = None) -> None:
        self.receivers = receivers or Receivers()  # a reload replaces them
        self._client: httpx.AsyncClient | None = None
        self._webhook = notices.Outbox("the webhook of the site", log, DEADLINE_S)
        self._mail = notices.Outbox("the mail command", log, DEADLINE_S)

    def job(self, event: str, job: JobRecord, state: str, reason: str = "") -> None:
        """Announce an ``event`` of a job: started, paused, queued (again), attention or ended."""
        if self.receivers.url:
            project = messages.news_line(job.project)
            body = notices.body(
                event, job=job.id, name=job.name, user=job.user, state=state, reason=reason, project=project
            )
            self._webhook.put(job.user, partial(self._post, body))
        if self.receivers.mail_command and wire.decode_stored(job.request, wire.JobTerms).notify_mail:
            text = messages.job_news(job.name, event, state, reason)
            self._mail.put(job.user, partial(self._pipe, job, text))

    async def run(self) -> None:
        """Send until cancelled."""
        async with notices.client(DEADLINE_S) as self._client, asyncio.TaskGroup() as group:
            group.create_task(self._webhook.run())
            group.create_task(self._mail.run())

    async def _post(self, body: bytes) -> None:
        if self._client is not None and self.receivers.url:
            await notices.post(self._client, self.receivers.url, body)

    async def _pipe(self, job: JobRecord, text: str) -> None:
        if self.receivers.mail_command:
            await notices.pipe(self.receivers.mail_command, _mail(self.receivers, job, text))


def _mail(to: Receivers, job: JobRecord, text: str) -> bytes:
    mail = EmailMessage()
    mail["To"] = to.address_of(job.user)
    if to.mail_from:
        mail["From"] = to.mail_from
    mail["Subject"] = text.partition(". ")[0]
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(f"{text}\n\nJob {job.id}, project {messages.news_line(job.project)}\n")
    return mail.as_bytes()
