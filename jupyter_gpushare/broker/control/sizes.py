"""Requests for another size of a running server: a first GPU, more or less; `resizes` carries them out."""

from __future__ import annotations

import re

from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.control.loop import is_job_server
from jupyter_gpushare.broker.control.request_policy import RequestPolicy, lost_gpu
from jupyter_gpushare.broker.control.resizes import Resizes
from jupyter_gpushare.broker.control.sessions import Sessions
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.core.model import State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import Conflict, NotFound
from jupyter_gpushare.protocol import wire

# Lease ids of servers that started without a GPU (`Sessions._reserved`).
_RESERVED = re.compile(r"b[a-z0-9]{10}")


class Sizes:
    """Checks and answers requests for a size."""

    def __init__(
        self, engine: Engine, effects: Effects, request_policy: RequestPolicy, sessions: Sessions
    ) -> None:
        self.registry = effects.registry
        self.engine = engine
        self.effects = effects
        self.request_policy = request_policy
        self.sessions = sessions
        self.resizes = Resizes(engine, effects)

    async def change(
        self, user: str, lease_id: str, request: wire.SizeRequest, server: wire.SpawnRequest | None = None
    ) -> wire.SpawnGrant | None:
        """Give a session of ``user`` another size, or a running server without a GPU its first one.

        ``server`` is given if the server itself asks.  Only then can it get a first GPU, and the grant is
        returned.  A repeated call changes nothing.

        Raises:
            RequestError: it cannot have this size now, or ever; the text says what to change.
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
                return await self.effects.grant(record)
        if not self.engine.resizable(record.lease):
            raise _not_resizable()
        await self.request_policy.devices_known()
        self.request_policy.check_share(size)
        await self.resizes.change(record, size, borrow=request.borrow)
        return None

    async def _first_gpu(
        self, lease_id: str, size: Size, request: wire.SizeRequest, server: wire.SpawnRequest
    ) -> wire.SpawnGrant:
        if not self.engine.resizes:
            raise _not_resizable()
        if (
            is_job_server(server.server)
            or not _RESERVED.fullmatch(lease_id)
            or await self.registry.store.has_lease(lease_id)
        ):
            raise lost_gpu()
        return await self.effects.grant(await self.sessions.admit(server, size, lease_id, first=request))


def _not_resizable() -> Conflict:
    return Conflict(
        "here a server gets another size only when it starts: stop it, and start it with the size that you "
        "need",
        reason="not_resizable",
    )
