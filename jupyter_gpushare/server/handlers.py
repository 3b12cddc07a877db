"""``/gpushare/*`` of a Jupyter server, for the JupyterLab extension of the same origin.

    GET  gpushare/status                           the broker's `Status`, and what only this server knows:
                                                   enabled, server, silent_since
    GET  gpushare/offers?project=P&gpus=G&memory=M&profile=F&borrow=0  `Offers`
    GET  gpushare/history                          `History`
    GET  gpushare/jobs, POST gpushare/jobs         `JobList`; `JobRequest` -> `Job`
    GET  gpushare/jobs/ID, DELETE gpushare/jobs/ID `Job`
    GET  gpushare/jobs/ID/timeline                 `JobTimeline`
    POST gpushare/jobs/ID/retry                    `Job`
    GET  gpushare/jobs/ID/log                      see `LogHandler`
    GET  gpushare/launch?path=P                    `LaunchForm`: what the dialog begins with
    POST gpushare/launch                           `LaunchRequest` -> `Job`
    POST gpushare/leases/ID/resume, keep, lend     `LeaseStatus`
    POST gpushare/leases/ID/kernels/KID/release    restarts a kernel of this server: its GPU memory is free

While the broker is silent, ``status`` answers 200 with ``silent_since`` and no
numbers; everything else 503.  Errors are `ErrorAnswer`.  Writes need the
server's XSRF token or an API token, like all of a Jupyter server.  No request
counts as activity of the user: an open panel must not keep a session awake.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler
from msgspec import structs
from tornado import web

from jupyter_gpushare import wire
from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, RequestError
from jupyter_gpushare.jobfiles import attempts_of, jobs_dir, log_end, log_path, read_log, read_text
from jupyter_gpushare.server import launch
from jupyter_gpushare.server.watch import Watch, iso

T = TypeVar("T")

LOG_BYTES = 256 << 10
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Broker:
    """What the handlers need; ``None`` in their place: this server knows of no broker."""

    client: BrokerClient
    watch: Watch
    server: str  # name of this server, "" is the default one


class _Handler(APIHandler):
    auth_resource = "gpushare"
    _track_activity = False

    def initialize(self, broker: Broker | None) -> None:
        self.broker = broker

    def connected(self) -> Broker:
        if self.broker is None:
            raise _Answered(404, "not_configured", "This server was started without a GPU broker.")
        return self.broker

    def read(self, kind: type[T]) -> T:
        if len(self.request.body) > wire.MAX_BODY_BYTES:
            raise _Answered(413, "too_large", f"At most {wire.MAX_BODY_BYTES} bytes are read.")
        return wire.decode(self.request.body, kind)

    async def answer(self, coming: Awaitable[Any], status: int = 200) -> None:
        """Finish with what the broker answers, or with what it refuses."""
        try:
            self.send(await coming, status)
        except RequestError as error:
            raise _Answered(error.status, error.reason, str(error)) from None
        except BrokerUnavailable as error:
            raise _Answered(503, "unreachable", str(error)) from None

    async def with_outputs(self, jobs: list[wire.Job]) -> list[wire.Job]:
        """Return the jobs with the notebooks that they really write, as far as this server sees them."""
        root = getattr(self.contents_manager, "root_dir", "")
        if not root or all(job.source is None for job in jobs):
            return jobs
        return await asyncio.to_thread(lambda: [launch.with_output(job, Path(root)) for job in jobs])

    def send(self, message: Any, status: int = 200) -> None:
        self.set_status(status)
        self.set_header("Cache-Control", "no-store")
        self.finish(wire.encode(message))

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        error = kwargs.get("exc_info", (None, None, None))[1]
        if isinstance(error, RequestError):
            error = _Answered(error.status, error.reason, str(error))
        if isinstance(error, _Answered):
            message = wire.ErrorAnswer(status=error.status_code, reason=error.word, message=error.text)
            self.send(message, error.status_code)
        else:
            super().write_error(status_code, **kwargs)

    def log_exception(self, *exc_info: Any) -> None:
        # A refusal is an answer, not a fault of this server.
        if not isinstance(exc_info[1], RequestError | _Answered):
            super().log_exception(*exc_info)


class _Answered(web.HTTPError):
    """Ends a request with an `ErrorAnswer`."""

    def __init__(self, status: int, word: str, text: str) -> None:
        super().__init__(status)
        self.word = word
        self.text = text


class StatusHandler(_Handler):
    def _log(self) -> None:
        # An open panel asks every few seconds: only what went wrong is worth a line.
        if self.get_status() >= 400:
            super()._log()

    @web.authenticated
    @authorized
    async def get(self) -> None:
        if self.broker is None:
            self.send({"enabled": False, "silent_since": None})
            return
        mine = {"enabled": True, "server": self.broker.server}
        try:
            status = await self.broker.watch.fresh()
        except (BrokerUnavailable, RequestError) as error:
            since = self.broker.watch.silent_since or datetime.now(UTC)
            silent = {"silent_since": iso(since), "message": str(error)}
            self.send(mine | silent)
            return
        status = structs.replace(status, jobs=await self.with_outputs(status.jobs))
        self.send(json.loads(wire.encode(status)) | mine | {"silent_since": None})


class OffersHandler(_Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        names = ("project", "gpus", "memory", "profile", "borrow")
        given = {name: self.get_query_argument(name, "") for name in names}
        params = {name: value for name, value in given.items() if value}
        await self.answer(self.connected().client.get("offers", wire.Offers, params=params))


class HistoryHandler(_Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        await self.answer(self.connected().client.get("history", wire.History))


class JobsHandler(_Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        limit = self.get_query_argument("limit", "100")
        await self.answer(self._jobs(self.connected().client, limit))

    @web.authenticated
    @authorized
    async def post(self) -> None:
        client = self.connected().client
        body = self.read(wire.JobRequest)
        key = self.request.headers.get("Idempotency-Key")
        await self.answer(client.post("jobs", body, wire.Job, key=key), 201)

    async def _jobs(self, client: BrokerClient, limit: str) -> wire.JobList:
        found = await client.get("jobs", wire.JobList, params={"limit": limit})
        return structs.replace(found, jobs=await self.with_outputs(found.jobs))


class JobHandler(_Handler):
    @web.authenticated
    @authorized
    async def get(self, job: str) -> None:
        await self.answer(self._job(self.connected().client, job))

    async def _job(self, client: BrokerClient, job: str) -> wire.Job:
        (found,) = await self.with_outputs([await client.get(f"jobs/{job}", wire.Job)])
        return found

    @web.authenticated
    @authorized
    async def delete(self, job: str) -> None:
        await self.answer(self.connected().client.delete(f"jobs/{job}", wire.Job))


class TimelineHandler(_Handler):
    @web.authenticated
    @authorized
    async def get(self, job: str) -> None:
        await self.answer(self.connected().client.get(f"jobs/{job}/timeline", wire.JobTimeline))


class RetryHandler(_Handler):
    @web.authenticated
    @authorized
    async def post(self, job: str) -> None:
        await self.answer(self.connected().client.post(f"jobs/{job}/retry", None, wire.Job), 201)


class LogHandler(_Handler):
    """What a job printed, from the user's own files: `LOG_BYTES` and a few from ``offset`` on, as UTF-8.

    ``offset`` below zero counts from the end; ``attempt`` is the newest if it is not
    given; ``download`` gives all that is kept as a file.  Headers: X-Gpushare-Attempts (the
    newest of which a log is kept), -First (the oldest; both 0: none), -Offset (where the
    answer begins), -Next (where to read on).
    """

    def _log(self) -> None:
        if self.get_status() >= 400:
            super()._log()

    @web.authenticated
    @authorized
    async def get(self, job: str) -> None:
        attempts = attempts_of(jobs_dir(Path.home()) / job)
        attempt = self._number("attempt", attempts[-1] if attempts else 1)
        path = log_path(Path.home(), job, max(1, attempt))
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Gpushare-Attempts", str(attempts[-1] if attempts else 0))
        self.set_header("X-Gpushare-First", str(attempts[0] if attempts else 0))
        if self.get_query_argument("download", ""):
            self.set_header("Content-Type", _TEXT)
            self.set_header("Content-Disposition", f'attachment; filename="{job}-{attempt}.log"')
            await self._send_all(path)
            return
        offset = self._number("offset", 0)
        if from_end := offset < 0:
            offset = max(0, await asyncio.to_thread(log_end, path) + offset)
        piece = await asyncio.to_thread(read_text, path, offset, LOG_BYTES, anywhere=from_end)
        self.set_header("X-Gpushare-Offset", str(piece.offset))
        self.set_header("X-Gpushare-Next", str(piece.next_offset))
        self.finish(piece.data, set_content_type=_TEXT)

    async def _send_all(self, path: Path) -> None:
        offset = 0
        while (piece := await asyncio.to_thread(read_log, path, offset, LOG_BYTES)).data:
            if piece.offset > offset:
                self.write(f"\n[{piece.offset - offset} bytes of this log were not kept]\n")
            self.write(piece.data)
            await self.flush()
            offset = piece.next_offset
        self.finish(set_content_type=_TEXT)

    def _number(self, name: str, default: int) -> int:
        text = self.get_query_argument(name, "") or str(default)
        if not re.fullmatch(r"-?[0-9]{1,15}", text):
            raise _Answered(400, "invalid", f"{name} is a whole number")
        return int(text)


class LaunchHandler(_Handler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        path = self.get_query_argument("path", "")
        self.send(launch.form(self._root(), path, await self._specs()))

    @web.authenticated
    @authorized
    async def post(self) -> None:
        client = self.connected().client
        asked = self.read(wire.LaunchRequest)
        job = launch.job_of(asked, self._root(), await self._specs(), os.environ, datetime.now())
        key = self.request.headers.get("Idempotency-Key")
        await self.answer(client.post("jobs", job, wire.Job, key=key), 201)

    def _root(self) -> Path:
        root = getattr(self.contents_manager, "root_dir", "")
        if not root:
            raise _Answered(409, "no_files", "This server's files are not on a disk that a job could read.")
        return Path(root)

    async def _specs(self) -> tuple[launch.Spec, ...]:
        return launch.specs_of(await ensure_async(self.kernel_spec_manager.get_all_specs()))


class ReleaseHandler(_Handler):
    """Frees the GPU memory of a kernel on its owner's word: by restarting it."""

    @web.authenticated
    @authorized
    async def post(self, _lease: str, kernel: str) -> None:
        if kernel not in self.kernel_manager:
            raise _Answered(404, "not_found", "This server has no such kernel (it may have ended).")
        await ensure_async(self.kernel_manager.restart_kernel(kernel))
        self.send({})


class LeaseHandler(_Handler):
    @web.authenticated
    @authorized
    async def post(self, lease: str, verb: str) -> None:
        client = self.connected().client
        body = self.read(wire.KeepRequest) if verb == "keep" and self.request.body else None
        if verb == "keep" and body is None:
            body = wire.KeepRequest()
        await self.answer(client.post(f"leases/{lease}/{verb}", body, wire.LeaseStatus))


def routes(broker: Broker | None) -> list[tuple[str, type[_Handler], dict[str, Any]]]:
    """Return the handlers for an `ExtensionApp`, below the server's base URL."""
    given = {"broker": broker}
    return [
        (r"/gpushare/status", StatusHandler, given),
        (r"/gpushare/offers", OffersHandler, given),
        (r"/gpushare/jobs", JobsHandler, given),
        (r"/gpushare/jobs/([a-z0-9]{1,40})", JobHandler, given),
        (r"/gpushare/jobs/([a-z0-9]{1,40})/timeline", TimelineHandler, given),
        (r"/gpushare/jobs/([a-z0-9]{1,40})/retry", RetryHandler, given),
        (r"/gpushare/jobs/([a-z0-9]{1,40})/log", LogHandler, given),
        (r"/gpushare/history", HistoryHandler, given),
        (r"/gpushare/launch", LaunchHandler, given),
        (r"/gpushare/leases/([a-z0-9-]{1,64})/kernels/([a-z0-9-]{1,64})/release", ReleaseHandler, given),
        (r"/gpushare/leases/([a-z0-9-]{1,64})/(resume|keep|lend)", LeaseHandler, given),
    ]
