"""Change the size of a running session on its device.

* To grow a session, the new size is committed, then the device helper sets the limit.
* To shrink a session, the helper sets the limit first, so that no allocation exceeds it.  If the next
  sample shows that its processes fit, the size is committed; otherwise the old limit is set again.

So the helper's limit never exceeds the recorded one.  `LeaseRecord.unprepared` is stored before the request
to the helper: if the broker ends or the helper does not answer, `effects` sets the recorded limit again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.effects import Effects
from jupyter_gpushare.broker.control.request_policy import check_borrows
from jupyter_gpushare.broker.engine.contract import Engine, NotResized
from jupyter_gpushare.broker.engine.contract import NewSize as Answer
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.transitions import Resized, limits_unset
from jupyter_gpushare.core.model import WHOLE_GPU, State, Why
from jupyter_gpushare.core.size import Size, fraction_text
from jupyter_gpushare.errors import Conflict, DeviceError, HelperError

log = logging.getLogger("gpushare.broker")

# A change waits this long for a sample of the memory that the processes hold under the new limit.
_MEASURE_S = 5.0
_POLL_S = 0.1
# An allocation admitted under the old limit is on the device within this time after the new one was set.
_IN_FLIGHT_S = 0.5


class Resizes:
    """Carries out changes of size, at most one at a time for each session."""

    def __init__(self, engine: Engine, effects: Effects) -> None:
        self.registry = effects.registry
        self.engine = engine
        self.devices = effects.devices
        self.effects = effects

    async def change(self, record: LeaseRecord, size: Size, *, borrow: bool) -> None:
        """Give a session another size on its device; a repeated call changes nothing.

        Raises:
            RequestError: it cannot have this size now, or ever; the text says what to change.
            StoreError: the database failed; the broker ends.
        """
        with self.alone(record) as record:
            # No await from here to the commit, so that no other decision takes the same capacity.
            if record.state is not State.RUNNING:
                raise Conflict("only a session that is awake gets another size: run a GPU cell first")
            if size == record.lease.size:
                await self.registry.journal.durable()
                return
            before = record.lease.size
            if size.device_count > 1:
                raise Conflict(
                    "a running server keeps the number of its GPUs: stop it, and start it with %1", size.text
                )
            resized = self._transition(record, size, self._decided(record, size, borrow=borrow))
            if sum(resized.limits.values()) >= sum(record.limits.values()):
                record = await self._grow(record, resized)
            else:
                record = await self._shrink(record, resized)
        await self.registry.record_notice(record, "resize", "notice.resized", messages.size_text(before))

    @contextlib.contextmanager
    def alone(self, record: LeaseRecord) -> Iterator[LeaseRecord]:
        """Yield the present record of a lease, and keep effects and other requests away from it meanwhile.

        Raises:
            Conflict: another task works on it, or its last limits are not set yet.
            NotFound: it has ended.
        """
        tasks, task = self.effects.tasks, asyncio.current_task()
        if record.id in tasks or task is None:
            raise Conflict("this session is being moved just now: try again in a few seconds")
        record = self.registry.get(record.id)
        if record.unprepared:
            raise Conflict("its last change of size is not done yet: try again in a few seconds")
        tasks[record.id] = task
        try:
            yield record
        finally:
            tasks.pop(record.id, None)
            self.registry.changed.set()

    def _decided(self, record: LeaseRecord, size: Size, *, borrow: bool) -> Answer:
        """Return the engine's answer for a size.

        Raises:
            Conflict: the engine refuses it, or would grant it borrowed, which the request does not allow.
        """
        now = self.registry.clock()
        cluster = snapshot.cluster(self.registry, self.engine, now)
        lease = next(lease for lease in cluster.leases if lease.id == record.id)
        answer = self.engine.resize(cluster, lease, size, now)
        if isinstance(answer, NotResized):
            raise _refused(answer, lease.held_milli, lease.project)
        check_borrows(lease, size, borrows=answer.borrowed and not lease.borrowed, allowed=borrow)
        return answer

    def _transition(self, record: LeaseRecord, size: Size, answer: Answer) -> Resized:
        limits = self.registry.devices.limits(size, record.lease.devices, answer.held_milli)
        return Resized(
            size=size,
            held_milli=answer.held_milli,
            limits=limits,
            borrowed=answer.borrowed,
            prepared=(limits, answer.held_milli, answer.borrowed) == record.held[:3],
        )

    async def _grow(self, record: LeaseRecord, resized: Resized) -> LeaseRecord:
        record = await self.registry.advance(record, resized)
        try:
            return await self.effects.set_limits(record) if record.unprepared else record
        except (HelperError, DeviceError) as error:  # `Effects.set_limits` tries again
            log.warning("lease=%s prepare: %s", record.handle, error)
            return record

    async def _shrink(self, record: LeaseRecord, resized: Resized) -> LeaseRecord:
        """Lower the limit, and commit it once a sample shows that the processes fit.

        Raises:
            Conflict: they hold more, or were not measured; the old limit is set again.
        """
        observation = self.registry.observations[record.id]
        _check_fits(observation.sample.used_bytes if observation.sample else None, resized)
        record = await self.registry.edit(record, limits_unset)
        lower = resized.apply(record, self.registry.clock())
        try:
            await self.effects.prepare(lower, asleep=False)
            _check_fits(await self._measured_since(record, self.registry.clock() + _IN_FLIGHT_S), resized)
            return await self.registry.advance(record, replace(resized, prepared=True))
        except (HelperError, DeviceError) as error:
            log.warning("lease=%s prepare: %s", record.handle, error)
            raise Conflict(
                "the GPUs of this machine cannot be reached just now: the size is as it was",
                reason="devices_unknown",
            ) from None

    async def _measured_since(self, record: LeaseRecord, since: float) -> Mapping[str, int] | None:
        """Return the bytes per device that a lease used after ``since``; None without a sample in time."""
        while self.registry.clock() < since + _MEASURE_S:
            await asyncio.sleep(_POLL_S)
            for sample in (await self.devices.sample()).leases:
                if sample.lease == record.handle and sample.measured_at > since:
                    return sample.used_bytes
        return None


def _refused(answer: NotResized, held_milli: int, project: str) -> Conflict:
    """Return the refusal that names the size which the session can have instead."""
    maximum = f"{fraction_text(min(answer.max_milli, WHOLE_GPU))} GPU"
    if answer.why is Why.PROJECT_LIMIT:
        return Conflict(
            "project %1 is at its limit: choose at most %2, or end other work of it", project, maximum
        )
    if answer.why is Why.DRAINING:
        return Conflict(
            "its GPU is being emptied and takes nothing new: stop the server, and start it on another GPU"
        )
    if answer.max_milli <= held_milli:
        return Conflict(
            "the rest of its GPU is in use: stop the server, and start it on another GPU",
            reason="no_capacity",
        )
    return Conflict(
        "the rest of its GPU is in use: choose at most %1, or start the server on another GPU",
        maximum,
        reason="no_capacity",
    )


def _check_fits(used: Mapping[str, int] | None, resized: Resized) -> None:
    """Refuse limits that are below the bytes in use per device.

    Raises:
        Conflict: the processes use more, or their use is unknown.
    """
    if used is None:
        raise Conflict("what this session uses was not measured just now: try again in a few seconds")
    over = sum(max(0, used.get(uuid, 0) - limit) for uuid, limit in resized.limits.items())
    if over:
        raise Conflict(
            "its kernels use %1 of GPU memory, and %2 are left with %3: free %4 first, "
            "for example with Release beside a kernel",
            messages.gibibytes(sum(used.values())),
            messages.gibibytes(sum(resized.limits.values())),
            resized.size.text,
            messages.gibibytes(over),
            reason="in_use",
        )
