"""Starts and ends of sessions at the request of the Hub's spawner.

A start is granted or refused at once, or when a cluster's scheduler has placed it.  `job_starts` starts the
servers of jobs; `page_queue` is the queue of the spawn page.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from math import inf

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import losses
from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.control.ownership import Ownership
from jupyter_gpushare.broker.control.request_policy import RequestPolicy
from jupyter_gpushare.broker.engine.contract import Engine, StartProgress
from jupyter_gpushare.broker.state.records import LeaseRecord, random_id
from jupyter_gpushare.broker.state.transitions import Stopping
from jupyter_gpushare.core.model import Kind, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import Conflict, DeviceError, HelperError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import exact

log = logging.getLogger("gpushare.broker")

# A start waits at most this long for an earlier server of the same name to release its lease.
_RELEASE_PREVIOUS_S = 10.0
# The part of the spawner's wait that is reserved to give a seat back and to answer.
ANSWER_S = 2.0
# The progress page shows every sentence that differs, so times are rounded up to this step in seconds.
_STEP_S = 10


class Sessions:
    """Starts and ends of sessions."""

    def __init__(
        self, engine: Engine, effects: Effects, request_policy: RequestPolicy, ownership: Ownership
    ) -> None:
        self.registry = effects.registry
        self.engine = engine
        self.effects = effects
        self.request_policy = request_policy
        self.ownership = ownership
        # By user and server: lease and task of each admission that has not finished.
        self._admitting: dict[tuple[str, str], tuple[str, asyncio.Task[LeaseRecord]]] = {}
        self._committing: set[str] = set()  # those leases that the engine has granted

    async def start(self, request: wire.SpawnRequest, until: float = inf) -> wire.SpawnGrant:
        """Return what a session's server may use, when the server is about to start.

        ``until`` is a deadline (monotonic); without a grant by then, the start is refused.

        Raises:
            RequestError: the server must not start; the text is for the user.
            StoreError: the database failed; the broker ends.
        """
        await self._give_up(request.user, request.server)
        await self._release_previous(request.user, request.server)
        size = request.options.size() if request.options else None
        if size is None:
            return await self._without_gpu(request)
        record = await self.admit(request, size, "b" + random_id(), until=until)
        return await self.effects.grant(record)

    async def _without_gpu(self, request: wire.SpawnRequest) -> wire.SpawnGrant:
        queue = self.registry.session_queue
        if queue.of(request.user, request.server) is not None:
            queue.leave(request.user, request.server, self.registry.clock())
            await self.registry.notify()
        return wire.SpawnGrant(
            lease=None,
            kind=Kind.BUILD,
            env=dict(await self._reserved(request)),
            message="Starting without a GPU.",
        )

    async def _reserved(self, request: wire.SpawnRequest) -> Mapping[str, str]:
        """Return the environment with which a server without a GPU can get one later; empty if it cannot."""
        if not (request.may_gain and self.engine.resizes):
            return {}
        try:
            return await self.effects.devices.reserve(f"b{random_id()}-1")
        except (HelperError, DeviceError) as error:
            log.warning("user=%s server=%s reserve: %s", request.user, request.server, error)
            return {}

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
        """Return the progress of a server's start."""
        lease_id, _ = self._admitting.get((user, server), ("", None))
        found = self.engine.start_progress(lease_id)
        message = "" if found is None else messages.english(_progress_text(found))
        return wire.SpawnProgress(message=message)

    async def admit(
        self,
        request: wire.SpawnRequest,
        size: Size,
        lease_id: str,
        *,
        until: float = inf,
        first: wire.SizeRequest | None = None,
    ) -> LeaseRecord:
        """Return the granted session; for the arguments see `RequestPolicy.admit`.

        Raises:
            Conflict: it is refused, or its server has ended or restarted before the answer.
            RequestError: see `RequestPolicy.admit`.
        """
        key = request.user, request.server
        task = asyncio.ensure_future(self._place(request, size, lease_id, until, first))
        self._admitting[key] = lease_id, task
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
        self,
        request: wire.SpawnRequest,
        size: Size,
        lease_id: str,
        until: float,
        first: wire.SizeRequest | None,
    ) -> LeaseRecord:
        registry = self.registry
        lease, grant = await self.request_policy.admit(request, size, lease_id, until=until, first=first)
        # No await from the engine's answer to the record, so that no other start or decision takes the same
        # capacity.
        record = LeaseRecord(
            lease=lease,
            uid=request.uid,
            moves=request.sees_all_gpus,
            since_at=registry.iso_now(),
            entered_at=registry.clock(),
        )
        self._committing.add(lease.id)
        try:
            return await registry.add_granted(record, grant)
        finally:
            self._committing.discard(lease.id)

    async def _give_up(self, user: str, server: str) -> None:
        """End the unfinished admission of this server, if there is one.

        A wait for the engine is cancelled.  A commit is not: it leaves a lease, which the caller ends.
        """
        lease_id, task = self._admitting.get((user, server), ("", None))
        if task is not None:
            if lease_id not in self._committing:
                task.cancel()
            await asyncio.wait((task,))

    async def stop(self, request: wire.SpawnStop) -> None:
        """Release the lease of a session whose server has ended; a repeated call changes nothing."""
        await self._give_up(request.user, request.server)
        user = self.ownership.find(request.user, exact(request.created)) or request.user
        record = self.registry.by_server(user, request.server)
        if record is None or record.state is State.STOPPING:
            await self.registry.journal.durable()
            return
        reason = losses.why_stopped(self.registry, record, request.by_hub)
        await self.registry.advance(record, Stopping(reason=reason))


def _progress_text(found: StartProgress) -> wire.Text:
    if found.within_s is None:
        return messages.text(f"start.{found.phase}")
    within_s = -(-found.within_s // _STEP_S) * _STEP_S
    return messages.text(f"start.{found.phase}_within", messages.duration_text(within_s))
