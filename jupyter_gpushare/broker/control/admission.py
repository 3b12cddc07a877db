"""Requests of the Hub's spawner: may this server start and with which GPUs; this server has ended.

A session is granted or refused at once; a job's server starts only after the
job was granted.
"""

from __future__ import annotations

import asyncio
import logging

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import Devices, Holder
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.control.job_request import job_spec
from jupyter_gpushare.broker.control.loop import is_job_server
from jupyter_gpushare.broker.control.request_policy import RequestPolicy
from jupyter_gpushare.broker.engine import Engine, Explanation
from jupyter_gpushare.broker.state.records import LeaseRecord, random_id
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import OwnedBy, Released, Stopping
from jupyter_gpushare.core.model import Grant, Kind, Lease, State
from jupyter_gpushare.errors import Conflict, DeviceError, HelperError
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")

# A start waits this long until an earlier server of the same name has released its lease.
_RELEASE_PREVIOUS_S = 10.0


class ServerAdmission:
    """Admits servers and follows their ends."""

    def __init__(
        self,
        registry: Registry,
        engine: Engine,
        devices: Devices,
        effects: Effects,
        request_policy: RequestPolicy,
    ) -> None:
        self.registry = registry
        self.engine = engine
        self.devices = devices
        self.effects = effects
        self.request_policy = request_policy

    async def start(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        """Return what a server that is about to start may use.

        Raises:
            RequestError: it must not start; the text is for the user.
            StoreError: the database failed; the broker ends.
        """
        if is_job_server(request.server):
            return await self._start_job_server(request)
        await self._release_previous(request.user, request.server)
        size = request.options.size() if request.options else None
        if size is None:
            return wire.SpawnGrant(lease=None, kind=Kind.BUILD, env={}, message="Starting without a GPU.")
        project = self.request_policy.choose_project(
            request.groups, request.options.project if request.options else None
        )
        await self.request_policy.known()
        self.request_policy.check_share(size)
        now = self.registry.clock()
        lease = Lease(
            id="b" + random_id(),
            project=project,
            kind=Kind.BUILD,
            size=size,
            user=request.user,
            server=request.server,
            submitted_at=now,
            queued_at=now,
            waits_since_at=now,
        )
        self.engine.check_request(snapshot.cluster(self.registry, self.engine, now), lease)
        record, grant = await self._grant_session(lease, request.uid)
        return await self._prepare(record, asleep=grant.asleep, borrowed=grant.borrowed)

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

    async def _grant_session(self, lease: Lease, uid: int) -> tuple[LeaseRecord, Grant]:
        registry, now = self.registry, self.registry.clock()
        grant = await self.engine.admit(snapshot.cluster(registry, self.engine, now), lease, now)
        if isinstance(grant, Explanation):
            why = messages.waiting(
                grant.why,
                needs=messages.needs_of(lease),
                free_milli=grant.free_milli,
                position=None,
            )
            raise Conflict(
                "%1 Choose a smaller size, or start without a GPU.",
                messages.english(why),
                reason="no_capacity",
            )
        record = LeaseRecord(lease=lease, uid=uid, since_at=registry.iso_now(), entered_at=now)
        return await registry.add_granted(record, snapshot.granted(registry, record, grant)), grant

    async def _prepare(self, record: LeaseRecord, *, asleep: bool, borrowed: bool) -> wire.SpawnGrant:
        limits = record.limits
        guaranteed = dict.fromkeys(limits, 0) if record.lease.borrowed else limits
        try:
            prepared = await self.devices.prepare(
                Holder(
                    handle=record.handle,
                    uid=record.uid,
                    limits=limits,
                    guaranteed=guaranteed,
                    asleep=asleep,
                    unattended=not record.is_job and not record.lease.borrowed,
                )
            )
        except (HelperError, DeviceError) as error:
            log.warning("lease=%s prepare: %s", record.handle, error)
            if not record.is_job:
                await self.registry.advance(record, Released(reason=str(error)))
            raise Conflict(
                "the GPUs of this machine cannot be reached just now; a server without GPU starts anyway",
                reason="devices_unknown",
            ) from None
        lease = record.lease
        size = lease.size.text
        limit = sum(limits.values())
        name = self.registry.devices.model_name(lease.devices)
        return wire.SpawnGrant(
            lease=record.handle,
            kind=lease.kind,
            env=dict(prepared.env),
            devices=list(lease.devices),
            memory_limit_bytes=limit,
            asleep=asleep,
            borrowed=borrowed,
            message=f"Your {size} ({messages.gibibytes(limit)} of {name}) is "
            + ("lent just now and comes with your first GPU cell." if asleep else "ready."),
        )

    async def stop(self, request: wire.SpawnStop) -> None:
        """Release the lease of a server that has ended for any reason; a repeated call changes nothing."""
        record = self.registry.by_server(request.user, request.server)
        if record is None or record.state is State.STOPPING:
            await self.registry.journal.durable()
            return
        if not record.is_job:
            await self.registry.advance(record, Stopping())
        elif record.state is State.GRANTED:
            await self.effects.on_start_failed(record)
        # A running job reports its own end; otherwise the observer misses its processes.

    async def _start_job_server(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        record = self.registry.by_handle(request.server)
        job = self.registry.job_of(record) if record is not None else None
        if (
            record is None
            or job is None
            or record.lease.user != request.user
            or record.state is not State.GRANTED
        ):
            raise Conflict(
                "%1 is a name for training jobs, and no such job is to start now: submit jobs with "
                "gpushare submit",
                request.server,
                reason="not_expected",
            )
        if record.uid != request.uid:
            record = await self.registry.edit(record, OwnedBy(uid=request.uid))
        else:
            await self.registry.journal.durable()
        grant = await self._prepare(record, asleep=False, borrowed=False)
        current = self.registry.by_handle(request.server)
        if current is None or current.state is not State.GRANTED:
            # It was stopped meanwhile; with its files back, its runner would start the command.
            await self.devices.drop(record.handle)
            raise Conflict("the attempt %1 was stopped while its server started", request.server)
        return wire.SpawnGrant(
            lease=grant.lease,
            kind=grant.kind,
            env=grant.env,
            devices=grant.devices,
            memory_limit_bytes=grant.memory_limit_bytes,
            message=grant.message,
            job=job_spec(job, record.attempt, record.settled),
        )
