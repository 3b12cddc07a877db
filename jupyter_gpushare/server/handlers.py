"""``/gpushare/*`` of a Jupyter server, for the JupyterLab extension of the same origin.

    GET  gpushare/status                         the broker's `Status` with enabled, server, unreachable_since
    GET  gpushare/jobs/ID/log                    see `LogHandler`
    GET  gpushare/launch?path=P                  `LaunchForm`: defaults of the launch dialog
    POST gpushare/launch                         `LaunchRequest` -> `Job`
    PUT  gpushare/leases/ID/size                 `SizeRequest` -> `SizedLease`: see `SizeHandler`
    POST gpushare/leases/ID/kernels/KID/release  restarts a kernel of this server, which frees its GPU memory
    all other paths                              see `handlers.FORWARDS`

While the broker is unreachable, ``status`` answers 200 with ``unreachable_since`` and
no numbers; all other paths answer 503.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jupyter_core.utils import ensure_async

from jupyter_gpushare.errors import BrokerUnavailable, RequestError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.heldlog import held_of, read_kept
from jupyter_gpushare.protocol.jobfiles import Piece, attempts_of, jobs_dir, log_end, log_path, read_text
from jupyter_gpushare.server import gain, launch
from jupyter_gpushare.server.activity import notebooks_of
from jupyter_gpushare.server.base import Broker, Handler, Refused, for_user
from jupyter_gpushare.wall_clock import iso_now

# ---- requests that are forwarded to the broker with this server's identity -----
# `FORWARDS` is the whole list.  A row has the method and the path, which are the same at the broker, and
# the types of the messages.

_JOB = "([a-z0-9]{1,40})"
_LEASE = "([a-z0-9-]{1,64})"


@dataclass(frozen=True, slots=True)
class Forward:
    """One kind of request; ``{}`` in ``path`` stands for the id that ``pattern`` matches."""

    method: str
    path: str
    answer: type[Any]
    pattern: str = ""
    body: type[Any] | None = None  # an empty body counts as an empty object
    query: tuple[str, ...] = ()  # parameters that are passed on
    status: int = 200


FORWARDS: tuple[Forward, ...] = (
    Forward("GET", "offers", wire.Offers, query=("project", *wire.REQUESTED_TERMS)),
    Forward("GET", "history", wire.History),
    Forward("GET", "jobs", wire.JobList, query=("limit",)),
    Forward("POST", "jobs", wire.Job, body=wire.JobRequest, status=201),
    Forward("GET", "jobs/{}", wire.Job, _JOB),
    Forward("PUT", "jobs/{}", wire.Job, _JOB, body=wire.JobChange),
    Forward("DELETE", "jobs/{}", wire.Job, _JOB),
    Forward("PUT", "jobs/{}/place", wire.Job, _JOB, body=wire.JobPlace),
    Forward("GET", "jobs/{}/timeline", wire.JobTimeline, _JOB),
    Forward("POST", "jobs/{}/retry", wire.Job, _JOB, status=201),
    Forward("POST", "leases/{}/resume", wire.LeaseStatus, _LEASE),
    Forward("POST", "leases/{}/stay-asleep", wire.LeaseStatus, _LEASE),
    Forward("POST", "leases/{}/keep", wire.LeaseStatus, _LEASE, body=wire.KeepRequest),
    Forward("POST", "leases/{}/lend", wire.LeaseStatus, _LEASE),
    Forward("POST", "leases/{}/release", wire.LeaseStatus, _LEASE),
)


class ForwardHandler(Handler):
    """Forwards the requests to one path."""

    def initialize(
        self, broker: Broker | None, forwards: Mapping[str, Forward] = MappingProxyType({})
    ) -> None:
        super().initialize(broker)
        self._forwards = forwards

    async def _forward(self, *ids: str) -> None:
        client = self.connected().client
        forward = self._forwards.get(self.request.method or "")
        if forward is None:
            raise Refused(405, "not_allowed", "%1 is not possible here.", self.request.method)
        body = None
        if forward.body is not None:
            body = self.read(forward.body) if self.request.body else wire.decode(b"{}", forward.body)
        given = {name: self.get_query_argument(name, "") for name in forward.query}
        awaitable = client.request(
            forward.method,
            forward.path.format(*ids),
            forward.answer,
            body,
            params={name: value for name, value in given.items() if value},
            key=self.request.headers.get("Idempotency-Key") if body is not None else None,
        )
        await self.answer(awaitable, forward.status)

    # Each method needs its own wrapper: `authorized` keeps the action ("read", "write") of its first request.
    get = for_user(_forward)
    post = for_user(_forward)
    put = for_user(_forward)
    delete = for_user(_forward)


def forward_routes(broker: Broker | None) -> list[tuple[str, type[Handler], dict[str, Any]]]:
    """Return one handler per path of `FORWARDS`, below the server's base URL."""
    return [
        (
            "/gpushare/" + path.format(pattern),
            ForwardHandler,
            {"broker": broker, "forwards": {forward.method: forward for forward in forwards}},
        )
        for (path, pattern), forwards in groupby(FORWARDS, lambda each: (each.path, each.pattern))
    ]


# ---- requests that this server answers ---------------------------------------

LOG_BYTES = 256 << 10
_TEXT = "text/plain; charset=utf-8"


class PolledHandler(Handler):
    """Base of handlers that log only errors, because an open panel polls them every few seconds."""

    def _log(self) -> None:
        if self.get_status() >= 400:
            super()._log()


class SessionStatusHandler(PolledHandler):
    """Answers with the broker's status of this server."""

    @for_user
    async def get(self) -> None:
        if self.broker is None:
            self.send({"enabled": False, "unreachable_since": None})
            return
        mine = {"enabled": True, "server": self.broker.server, "may_gain": bool(gain.reserved(os.environ))}
        try:
            status = await self.broker.watch.fresh()
        except (BrokerUnavailable, RequestError) as error:
            since = self.broker.watch.unreachable_since or iso_now()
            silent = {"unreachable_since": since, "message": str(error)}
            self.send(mine | silent)
            return
        status = wire.replace(status, jobs=await self.with_outputs(status.jobs))
        self.send(json.loads(wire.encode(status)) | mine | {"unreachable_since": None})


class LogHandler(PolledHandler):
    """Answers with the log of a job: about `LOG_BYTES` from ``offset`` on, as UTF-8.

    The log is in the user's files.  Bytes that the disk did not take come from the memory of a runner on
    this machine.

    A negative ``offset`` counts from the end; ``attempt`` defaults to the newest; ``download`` returns the
    whole stored log as a file.  Headers: X-Gpushare-Attempts and -First (the newest and the oldest attempt
    with a stored log; 0 if there is none), -Offset (start of the answer), -Next (offset of the next piece),
    and, while the attempt runs, -Left-Out (bytes that the disk did not take) and -Why (the reason).
    """

    @for_user
    async def get(self, job: str) -> None:
        held = await asyncio.to_thread(held_of, job)
        attempts = await asyncio.to_thread(attempts_of, jobs_dir(Path.home()) / job)
        if held is not None:
            attempts = sorted({*attempts, held.attempt})
        attempt = self._number("attempt", attempts[-1] if attempts else 1)
        path = log_path(Path.home(), job, max(1, attempt))
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Gpushare-Attempts", str(attempts[-1] if attempts else 0))
        self.set_header("X-Gpushare-First", str(attempts[0] if attempts else 0))
        if held is not None and held.attempt != attempt:
            held = None
        if held is not None:
            self.set_header("X-Gpushare-Left-Out", str(held.left_out_bytes))
            self.set_header("X-Gpushare-Why", held.why)
        read = partial(read_kept, path, held)
        if self.get_query_argument("download", ""):
            self.set_header("Content-Type", _TEXT)
            self.set_header("Content-Disposition", f'attachment; filename="{job}-{attempt}.log"')
            await self._send_all(read)
            return
        offset = self._number("offset", 0)
        if from_end := offset < 0:
            end = await asyncio.to_thread(log_end, path)
            offset = max(0, max(end, held.piece.next_offset if held else 0) + offset)
        piece = await asyncio.to_thread(read_text, read, offset, LOG_BYTES, anywhere=from_end)
        self.set_header("X-Gpushare-Offset", str(piece.offset))
        self.set_header("X-Gpushare-Next", str(piece.next_offset))
        self.finish(piece.data, set_content_type=_TEXT)

    async def _send_all(self, read: Callable[[int, int], Piece]) -> None:
        offset = 0
        while (piece := await asyncio.to_thread(read, offset, LOG_BYTES)).data:
            if piece.offset > offset:
                self.write(f"\n[{piece.offset - offset} bytes of this log were not kept]\n")
            self.write(piece.data)
            await self.flush()
            offset = piece.next_offset
        self.finish(set_content_type=_TEXT)

    def _number(self, name: str, default: int) -> int:
        text = self.get_query_argument(name, "") or str(default)
        if not re.fullmatch(r"-?[0-9]{1,15}", text):
            raise Refused(400, "invalid", "%1 is a whole number", name)
        return int(text)


class LaunchHandler(Handler):
    """Answers with the defaults of the launch dialog, and submits its job."""

    @for_user
    async def get(self) -> None:
        path = self.get_query_argument("path", "")
        self.send(launch.form(self._root(), path, await self._specs()))

    @for_user
    async def post(self) -> None:
        client = self.connected().client
        request = self.read(wire.LaunchRequest)
        key = self.request.headers.get("Idempotency-Key")
        # A repeated request is the same job, also if this server has restarted in between.
        job = launch.job_of(request, self._root(), await self._specs(), os.environ, datetime.now())
        await self.answer(client.post("jobs", job, wire.Job, key=key), 201)

    def _root(self) -> Path:
        root = getattr(self.contents_manager, "root_dir", "")
        if not root:
            raise Refused(409, "no_files", "This server's files are not on a disk that a job could read.")
        return Path(root)

    async def _specs(self) -> tuple[launch.Spec, ...]:
        return launch.specs_of(await ensure_async(self.kernel_spec_manager.get_all_specs()))


class SizeHandler(Handler):
    """Changes the size of a session; the lease ``own`` is the one reserved for a server without a GPU."""

    @for_user
    async def put(self, lease: str) -> None:
        """Answer with `wire.SizedLease` when kernels of this server may use the new size.

        Raises:
            Refused: 409, this server has a GPU, or must be started again to get one; or the broker refuses.
        """
        client, first = self.connected().client, gain.reserved(os.environ)
        lease = first if lease == "own" else lease
        if not lease:
            raise Refused(
                409,
                "not_resizable",
                "This server has a GPU, or must be started again to get one: stop it, and start it with the "
                "size that you need.",
            )
        put = client.put(
            f"leases/{lease}/size", self.read(wire.SizeRequest), wire.SizedLease, repeatable=True
        )
        sized = await self.answered(put)
        restart = []
        if lease == first and sized.env:
            os.environ.update(shown := gain.shown(sized.env))
            notebooks = await notebooks_of(self.settings["session_manager"])
            restart = await gain.show(self.kernel_manager, shown, notebooks)
        self.send(wire.replace(sized, env={}, restart=restart))


class ReleaseHandler(Handler):
    """Restarts a kernel at its owner's request, which frees its GPU memory."""

    @for_user
    async def post(self, _lease: str, kernel: str) -> None:
        """Restart the kernel and answer ``{}``.

        Raises:
            Refused: 404, the server has no such kernel.
        """
        if kernel not in self.kernel_manager:
            raise Refused(404, "not_found", "This server has no such kernel (it may have ended).")
        await ensure_async(self.kernel_manager.restart_kernel(kernel))
        self.send({})


def routes(broker: Broker | None) -> list[tuple[str, type[Handler], dict[str, Any]]]:
    """Return the handlers for an `ExtensionApp`, below the server's base URL."""
    given = {"broker": broker}
    return [
        (r"/gpushare/status", SessionStatusHandler, given),
        (r"/gpushare/jobs/([a-z0-9]{1,40})/log", LogHandler, given),
        (r"/gpushare/launch", LaunchHandler, given),
        (r"/gpushare/leases/([a-z0-9-]{1,64})/size", SizeHandler, given),
        (r"/gpushare/leases/([a-z0-9-]{1,64})/kernels/([a-z0-9-]{1,64})/release", ReleaseHandler, given),
        *forward_routes(broker),
    ]
