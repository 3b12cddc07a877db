"""What spawners ask for: may this server start, and on which GPUs; it has ended.

A session is granted or refused at once; the server of a job starts only when
the job was granted before.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, replace

from jupyter_gpushare import wire, words
from jupyter_gpushare.backends.base import Backend
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.effects import Effects
from jupyter_gpushare.broker.job_request import job_spec
from jupyter_gpushare.broker.live import Live
from jupyter_gpushare.broker.loop import granted, is_job_server
from jupyter_gpushare.broker.records import LeaseRecord, random_id
from jupyter_gpushare.broker.terms import Terms
from jupyter_gpushare.core.explain import check_request, explain
from jupyter_gpushare.core.model import Event, Grant, Kind, Lease, State
from jupyter_gpushare.core.plan import plan
from jupyter_gpushare.errors import Conflict, DeviceError, HelperError

log = logging.getLogger("gpushare.broker")

# How long a start waits for the last server of the same name to let go.
_LETTING_GO_S = 10.0


class Spawning:
    """Starts and ends of servers."""

    def __init__(self, book: Book, backend: Backend, effects: Effects, terms: Terms) -> None:
        self.book = book
        self.backend = backend
        self.effects = effects
        self.terms = terms

    async def start(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        """Answer the spawner: what the server that is about to start may use.

        Raises:
            RequestError: it must not start; the text is for the user.
        """
        if is_job_server(request.server):
            return await self._start_job_server(request)
        await self._let_go(request.user, request.server)
        size = self.terms.size_of(request.options or wire.GpuRequest())
        if size is None:
            return wire.SpawnGrant(lease=None, kind=Kind.BUILD, env={}, message="Starting without a GPU.")
        project = self.terms.choose_project(
            request.groups, request.options.project if request.options else None
        )
        await self.terms.known()
        self.terms.check_share(size)
        now = self.book.clock()
        lease = Lease(
            id="b" + random_id(),
            project=project,
            kind=Kind.BUILD,
            **asdict(size),
            user=request.user,
            server=request.server,
            submitted_at=now,
            queued_at=now,
            waits_since_at=now,
        )
        check_request(snapshot.cluster(self.book, now), lease)
        record, grant = await self._grant_session(lease, request.uid)
        return await self._prepare(record, asleep=grant.asleep, borrowed=grant.borrowed)

    async def _let_go(self, user: str, server: str) -> None:
        """End what an earlier server of the same name holds; the Hub says that it is gone."""
        until = self.book.clock() + _LETTING_GO_S
        while (record := self.book.by_server(user, server)) is not None:
            if record.state is not State.STOPPING:
                await self.book.advance(record, Event.STOP, note="a new server of this name starts")
            if self.book.clock() > until:
                raise Conflict("the last server of this name still frees its GPU: try again in a few seconds")
            await asyncio.sleep(0.1)

    async def _grant_session(self, lease: Lease, uid: int) -> tuple[LeaseRecord, Grant]:
        book, now = self.book, self.book.clock()
        cluster = snapshot.cluster(book, now, extra=(lease,))
        grant = next(
            (a for a in plan(cluster, now).actions if isinstance(a, Grant) and a.lease == lease.id), None
        )
        if grant is None:
            told = explain(cluster, lease.id, now)
            text = words.waiting(
                told.why, needs=words.needs_of(lease), free_milli=told.free_milli, position=None
            )
            raise Conflict(f"{text} Choose a smaller size, or start without a GPU.", reason="no_room")
        record = LeaseRecord(lease=lease, uid=uid, since_at=book.iso_now(), entered_at=now)
        event = Event.GRANT_ASLEEP if grant.asleep else Event.GRANT
        # In memory first and in one step, so that nobody else is given this room meanwhile.
        book.leases[lease.id], book.live[lease.id] = record, Live.since(now)
        record = await book.advance(record, event, why=grant.why, **granted(book, record, grant))
        return record, grant

    async def _prepare(self, record: LeaseRecord, *, asleep: bool, borrowed: bool) -> wire.SpawnGrant:
        limits = record.limits
        guaranteed = dict.fromkeys(limits, 0) if record.lease.borrowed else limits
        try:
            env = await self.backend.prepare(record.handle, record.uid, limits, guaranteed, asleep=asleep)
        except (HelperError, DeviceError) as error:
            log.warning("lease=%s prepare: %s", record.handle, error)
            if not record.is_job:
                await self.book.advance(record, Event.RELEASE, note=str(error))
            raise Conflict(
                "the GPUs of this machine cannot be reached just now; a server without GPU starts anyway",
                reason="devices_unknown",
            ) from None
        lease = record.lease
        size = words.size_of(lease)
        limit = sum(limits.values())
        name = self.book.device_name(lease.devices)
        return wire.SpawnGrant(
            lease=record.handle,
            kind=lease.kind,
            env=env,
            devices=list(lease.devices),
            memory_limit_bytes=limit,
            asleep=asleep,
            borrowed=borrowed,
            message=f"Your {size} ({words.gigabytes(limit)} of {name}) is "
            + ("lent just now and comes with your first GPU cell." if asleep else "ready."),
        )

    async def stop(self, request: wire.SpawnStop) -> None:
        """Note that a server has ended, however; doing so twice is fine."""
        record = self.book.by_server(request.user, request.server)
        if record is None or record.state is State.STOPPING:
            return
        if not record.is_job:
            await self.book.advance(record, Event.STOP)
        elif record.state is State.GRANTED:
            await self.effects.start_given_up(record)
        # A running job tells its own end; if it cannot, its processes are seen to be gone.

    async def _start_job_server(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        record = self.book.by_handle(request.server)
        job = self.book.job_of(record) if record is not None else None
        if (
            record is None
            or job is None
            or record.lease.user != request.user
            or record.state is not State.GRANTED
        ):
            raise Conflict(
                f"{request.server} is a name for training jobs, and no such job is to start now: "
                "submit jobs with gpushare submit",
                reason="not_expected",
            )
        if record.uid != request.uid:
            record = replace(record, uid=request.uid)
            await self.book.put_lease(record)
        grant = await self._prepare(record, asleep=False, borrowed=False)
        return wire.SpawnGrant(
            lease=grant.lease,
            kind=grant.kind,
            env=grant.env,
            devices=grant.devices,
            memory_limit_bytes=grant.memory_limit_bytes,
            message=grant.message,
            job=job_spec(job, record.attempt),
        )
