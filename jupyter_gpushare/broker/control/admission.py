"""Requests of the Hub's spawner: may this server start and with which GPUs; this server has ended.

A session is granted or refused at once, or waits on the spawn page until its capacity is
reserved (`state.session_queue`).  Servers of jobs: `job_starts`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import losses, snapshot
from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.control.job_starts import JobStarts
from jupyter_gpushare.broker.control.loop import is_job_server
from jupyter_gpushare.broker.control.ownership import Ownership
from jupyter_gpushare.broker.control.request_policy import RequestPolicy
from jupyter_gpushare.broker.control.resizes import Resizes, check_borrows
from jupyter_gpushare.broker.engine.contract import Engine, StartProgress
from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.broker.state.records import LeaseRecord, random_id
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.session_queue import QueuePlace
from jupyter_gpushare.broker.state.transitions import Released, Stopping
from jupyter_gpushare.core.model import Grant, Kind, Lease, State, Why
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import Conflict, DeviceError, HelperError, NotFound
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import exact

log = logging.getLogger("gpushare.broker")

# A start waits this long until an earlier server of the same name has released its lease.
_RELEASE_PREVIOUS_S = 10.0
# Leases of servers that started without a GPU: see `_reserved`.
_RESERVED = re.compile(r"b[a-z0-9]{10}")
_ASLEEP = (State.SUSPENDING, State.SUSPENDED, State.RESUMING)
# Of the time for which the spawner waits: to give a seat back, and to answer.
ANSWER_S = 2.0
# What the page says is to the next so many seconds: it shows every sentence that differs.
_STEP_S = 10


class ServerAdmission:
    """Admits servers and follows their ends."""

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        effects: Effects,
        request_policy: RequestPolicy,
        ownership: Ownership,
    ) -> None:
        self.registry = registry
        self.ownership = ownership
        self.engine = engine
        self.devices = effects.devices
        self.effects = effects
        self.request_policy = request_policy
        self.resizes = Resizes(engine, effects)
        self.job_starts = JobStarts(effects, self._prepare)
        # Admissions under way by user and server.
        self._admitting: dict[tuple[str, str], tuple[str, asyncio.Task[LeaseRecord]]] = {}
        self._committing: set[str] = set()  # leases of them that the engine granted

    async def start(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        """Return what a server that is about to start may use.

        Raises:
            RequestError: it must not start; the text is for the user.
            StoreError: the database failed; the broker ends.
        """
        until = self.registry.clock() + (inf if request.patience_s is None else request.patience_s - ANSWER_S)
        await self.ownership.meet_start(request)
        if is_job_server(request.server):
            return await self.job_starts.start(request)
        await self._give_up(request.user, request.server)
        await self._release_previous(request.user, request.server)
        size = request.options.size() if request.options else None
        queue = self.registry.session_queue
        if size is None:
            if queue.of(request.user, request.server) is not None:
                queue.leave(request.user, request.server, self.registry.clock())
                await self.registry.notify()
            return wire.SpawnGrant(
                lease=None,
                kind=Kind.BUILD,
                env=dict(await self._reserved(request)),
                message="Starting without a GPU.",
            )
        lease = await self._checked(request, size, "b" + random_id())
        usable = {device.uuid for device in self.registry.devices.for_planner() if device.usable}
        reserved = queue.take(lease, usable)
        # As long as sessions wait, a new one is behind them.
        considered = replace(lease, waits=bool(queue.waiting()))
        if reserved is not None:
            record = await self._grant_session(lease, request, reserved)
        else:
            record = await self._admit(considered, request, until=until)
        return await self._prepare(record)

    async def _reserved(self, request: wire.SpawnRequest) -> Mapping[str, str]:
        """Return what a server without a GPU needs at its start to get one later; empty: it cannot."""
        if not (request.may_gain and self.engine.resizes):
            return {}
        try:
            return await self.devices.reserve(f"b{random_id()}-1")
        except (HelperError, DeviceError) as error:
            log.warning("user=%s server=%s reserve: %s", request.user, request.server, error)
            return {}

    async def change_size(
        self, user: str, lease_id: str, request: wire.SizeRequest, server: wire.SpawnRequest | None = None
    ) -> wire.SpawnGrant | None:
        """Give a session of ``user`` another size, or a running server without a GPU its first one.

        ``server`` is the server that asks for itself: it alone gets a first GPU, and the grant with it.
        A repeated call changes nothing.

        Raises:
            RequestError: it cannot have this size now, or never; the text says what to change.
            StoreError: the database failed; the broker ends.
        """
        size = request.size()
        record = self.registry.leases.get(lease_id)
        if record is not None and record.lease.user != user:
            raise NotFound("there is no such lease (it may have ended)")
        if record is None or (server is not None and record.state is State.STOPPING):
            if server is None:
                raise NotFound("there is no such lease (it may have ended)")
            return await self._first_gpu(lease_id, size, request, server)
        if record.is_job:
            raise Conflict("the size of a job is changed while it is queued: gpushare edit")
        if request.project not in (None, record.lease.project):
            raise Conflict("a running session stays in its project: %1", record.lease.project)
        if server is not None and (server.server, size) == (record.server, record.lease.size):
            with self.resizes.alone(record) as record:
                await self.registry.journal.durable()
                return await self._prepare(record)
        if not self.engine.resizable(record.lease):
            raise _not_resizable()
        await self.request_policy.known()
        self.request_policy.check_share(size)
        await self.resizes.change(record, size, borrow=request.borrow)
        return None

    async def _first_gpu(
        self, lease_id: str, size: Size, request: wire.SizeRequest, server: wire.SpawnRequest
    ) -> wire.SpawnGrant:
        if not self.engine.resizes:
            raise _not_resizable()
        if not _RESERVED.fullmatch(lease_id) or await self.registry.store.has_lease(lease_id):
            raise _lost()
        lease = await self._checked(server, size, lease_id)
        lease = replace(lease, waits=bool(self.registry.session_queue.waiting()))
        return await self._prepare(await self._admit(lease, server, request))

    async def wait(self, request: wire.SpawnRequest) -> QueuePlace | None:
        """Return the place in the queue of a server that is to start when it can; None: it waits no more.

        A request without a size gives the place up.

        Raises:
            RequestError: it can never start, too many wait, or no session waits on this engine; the text
                is for the user.
        """
        await self.ownership.meet_start(request)
        queue = self.registry.session_queue
        size = request.options.size() if request.options else None
        if size is None:
            queue.leave(request.user, request.server, self.registry.clock())
            await self.registry.notify()
            return None
        if not self.engine.queues_sessions:
            raise Conflict("sessions do not wait here: start the server, and it is placed or refused")
        now = self.registry.clock()
        if not self.registry.devices.are_known(now):
            # A helper that restarts ends no wait.
            project = self._project(request)
            if (kept := queue.keep(request.user, request.server, size, project, now)) is not None:
                return kept
        lease = await self._checked(request, size, "b" + random_id(), waits=True)
        before = queue.of(lease.user, lease.server)
        place = queue.join(lease, lease.queued_at)
        if before is None or before.lease.id != place.lease.id:
            await self.registry.notify()
        return place

    async def _checked(
        self, request: wire.SpawnRequest, size: Size, lease_id: str, *, waits: bool = False
    ) -> Lease:
        """Return the lease that a session asks for.

        Raises:
            RequestError: it can never start; the text is for the user.
        """
        project = self._project(request)
        await self.request_policy.known()
        self.request_policy.check_share(size)
        now = self.registry.clock()
        lease = Lease(
            id=lease_id,
            project=project,
            kind=Kind.BUILD,
            size=size,
            user=request.user,
            server=request.server,
            waits=waits,
            submitted_at=now,
            queued_at=now,
            waits_since_at=now,
        )
        self.engine.check_request(snapshot.cluster(self.registry, self.engine, now), lease)
        return lease

    def _project(self, request: wire.SpawnRequest) -> str:
        wanted = request.options.project if request.options else None
        return self.request_policy.choose_project(request.groups, wanted)

    async def _release_previous(self, user: str, server: str) -> None:
        """Release the lease of an earlier server of the same name, which the Hub has ended.

        Raises:
            Conflict: it is not released within `_RELEASE_PREVIOUS_S`.
        """
        until = self.registry.clock() + _RELEASE_PREVIOUS_S
        while (record := self.registry.by_server(user, server)) is not None:
            if record.state is not State.STOPPING:
                await self.registry.advance(record, Stopping(reason="a new server of this name starts"))
            if self.registry.clock() > until:
                raise Conflict("the last server of this name still frees its GPU: try again in a few seconds")
            await asyncio.sleep(0.1)

    def progress(self, user: str, server: str) -> wire.SpawnProgress:
        """Return how far the start of a server is."""
        lease_id, _ = self._admitting.get((user, server), ("", None))
        found = self.engine.start_progress(lease_id)
        said = "" if found is None else messages.english(_progress_text(found))
        return wire.SpawnProgress(message=said)

    def lacks_patience(self, request: wire.SpawnRequest) -> str:
        """Return what an administrator has to set where the Hub gives starts up too early; empty: nothing."""
        needed_s = self.engine.start_s + ANSWER_S
        given_s = request.patience_s
        if not self.engine.start_s or given_s is None or given_s >= needed_s:
            return ""
        return (
            f"The Hub waits {given_s:g} s for a GPU, half of c.Spawner.start_timeout, and place_timeout and "
            f"seat_timeout of c.GPUShareKube let a start wait {self.engine.start_s:g} s: it is refused "
            f"earlier. Set start_timeout to at least {2 * needed_s:g}, or seat_timeout to less."
        )

    async def _give_up(self, user: str, server: str) -> None:
        """End an admission that is under way for this server.

        The engine's answer is cancelled, a commit is not: it leaves a lease, which the caller ends.
        """
        lease_id, task = self._admitting.get((user, server), ("", None))
        if task is not None:
            if lease_id not in self._committing:
                task.cancel()
            await asyncio.wait((task,))

    async def _admit(
        self,
        lease: Lease,
        request: wire.SpawnRequest,
        first: wire.SizeRequest | None = None,
        *,
        until: float = inf,
    ) -> LeaseRecord:
        """Return the granted session; refused at ``until`` at the latest.

        ``first`` is the request of a server that runs.

        Raises:
            Conflict: refused; or the server has ended, or has started anew, before the answer.
        """
        key = lease.user, lease.server
        task = asyncio.ensure_future(self._place(lease, request, first, until))
        self._admitting[key] = lease.id, task
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise Conflict("this start was given up", reason="given_up") from None
            raise
        finally:
            if self._admitting.get(key, ("", None))[1] is task:
                del self._admitting[key]

    async def _place(
        self, lease: Lease, request: wire.SpawnRequest, first: wire.SizeRequest | None, until: float
    ) -> LeaseRecord:
        # Nothing waits between snapshot and record where the engine answers at once: no other start
        # and no decision finds the same capacity.
        if self.registry.by_server(lease.user, lease.server) is not None:
            raise Conflict("this server has a GPU: change its size", reason="has_gpu")
        if lease.id in self.registry.leases:
            raise _lost()
        now = self.registry.clock()
        cluster = snapshot.cluster(self.registry, self.engine, now)
        answer = await self.engine.admit(
            cluster, lease, now, not_nodes=request.not_nodes, within_s=max(0.0, until - now)
        )
        if isinstance(answer, Explanation):
            needs = messages.needs_of(lease)
            why = messages.waiting(answer.why, needs=needs, free_milli=answer.free_milli)
            if answer.why is Why.AWAITING_RELEASE:
                advice = "%1 Start it again with the same size: it goes on from here."
            elif first is None:
                advice = "%1 Choose a smaller size, or start without a GPU."
            else:
                advice = "%1 Choose a smaller size, or try again later."
            raise Conflict(advice, messages.english(why), reason="no_capacity")
        if first is not None:
            check_borrows(lease, lease.size, borrows=answer.borrowed, allowed=first.borrow)
            if any(uuid.startswith("MIG-") for uuid in answer.devices):
                # The processes of a running server cannot be pointed at it.
                raise Conflict(
                    "here a server gets a part of a MIG device only when it starts: stop it, and start it "
                    "with %1",
                    lease.size.text,
                    reason="not_resizable",
                )
        self._committing.add(lease.id)
        try:
            return await self._grant_session(replace(lease, waits=False), request, answer)
        finally:
            self._committing.discard(lease.id)

    async def _grant_session(self, lease: Lease, request: wire.SpawnRequest, grant: Grant) -> LeaseRecord:
        registry = self.registry
        record = LeaseRecord(
            lease=lease,
            uid=request.uid,
            moves=request.sees_all_gpus,
            since_at=registry.iso_now(),
            entered_at=registry.clock(),
        )
        return await registry.add_granted(record, grant)

    async def _prepare(self, record: LeaseRecord) -> wire.SpawnGrant:
        asleep = record.state in _ASLEEP
        try:
            prepared = await self.effects.prepare(record, asleep=asleep)
        except (HelperError, DeviceError) as error:
            log.warning("lease=%s prepare: %s", record.handle, error)
            if record.state is State.GRANTED and not record.is_job:
                await self.registry.advance(record, Released(reason=str(error)))
            raise Conflict(
                "the GPUs of this machine cannot be reached just now; a server without GPU starts anyway",
                reason="devices_unknown",
            ) from None
        lease = record.lease
        size = lease.size.text
        limit = sum(record.limits.values())
        name = self.registry.devices.model_name(lease.devices)
        return wire.SpawnGrant(
            lease=record.handle,
            kind=lease.kind,
            env=dict(prepared.env),
            devices=list(lease.devices),
            node=prepared.node,
            mounts=list(prepared.mounts),
            memory_limit_bytes=limit,
            asleep=asleep,
            borrowed=lease.borrowed,
            message=f"Your {size} ({messages.gibibytes(limit)} of {name}) is "
            + ("lent just now and comes with your first GPU cell." if asleep else "ready."),
        )

    async def stop(self, request: wire.SpawnStop) -> None:
        """Release the lease of a server that has ended for any reason; a repeated call changes nothing."""
        await self._give_up(request.user, request.server)
        user = self.ownership.find(request.user, exact(request.created)) or request.user
        record = self.registry.by_server(user, request.server)
        if record is None or record.state is State.STOPPING:
            await self.registry.journal.durable()
            return
        if not record.is_job:
            reason = losses.why_stopped(self.registry, record, request.by_hub)
            await self.registry.advance(record, Stopping(reason=reason))
        elif record.state is State.GRANTED:
            self.job_starts.avoid(record, request.not_nodes)
            await self.effects.start_failed(record, "the Hub could not start its server")
        # A running job reports its own end; otherwise the observer misses its processes.


def _progress_text(found: StartProgress) -> wire.Text:
    if found.within_s is None:
        return messages.text(f"start.{found.phase}")
    within_s = -(-found.within_s // _STEP_S) * _STEP_S
    return messages.text(f"start.{found.phase}_within", messages.duration_text(within_s))


def _not_resizable() -> Conflict:
    return Conflict(
        "here a server gets another size only when it starts: stop it, and start it with the size that you "
        "need",
        reason="not_resizable",
    )


def _lost() -> Conflict:
    return Conflict("this server had a GPU and lost it: stop it, and start it with a GPU")
