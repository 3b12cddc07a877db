"""Losses of saved GPU memory: a process that sleeps ended, and what it had in host memory is gone.

The device helper shows that memory is gone, at once.  What ended the process is known to others: the
session's server reports how its kernels ended, and the Hub says that it stopped the server.  So a loss is
told when one of them has, or after `EXPLAIN_S`.  The record has the bytes that were saved until then:
a broker that restarts finds the same loss again.
"""

from __future__ import annotations

import contextlib
import signal
from dataclasses import replace
from functools import reduce

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.state.culling import KERNEL_SETTING
from jupyter_gpushare.broker.state.observations import KernelEnded, Loss, Observation
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import State
from jupyter_gpushare.errors import DiskFull
from jupyter_gpushare.protocol.helper import LeaseSample, Phase, ProcessSample
from jupyter_gpushare.protocol.wire import Text

# A server looks at its kernels every second, and finds a dead one within 3 s.
EXPLAIN_S = 10.0
# A server and the device helper look at different moments.
_APART_S = 2.0
# Reasons that one sentence names.
_REASONS = 3


async def look(registry: Registry, record: LeaseRecord, sample: LeaseSample | None, now: float) -> None:
    """Note what a sleeping lease has lost since it fell asleep, and tell it once it is explained.

    Raises:
        StoreError: the database failed.
    """
    observation = registry.observations[record.id]
    if registry.journal.is_disk_full or sample is None:
        return
    if record.state is not State.SUSPENDED:
        _saw(observation, sample, now)
    elif sample.phase is not Phase.SUSPENDED or sample.unread_since:
        return
    elif snapshot.sampled_since_entry(registry, record):
        lost_bytes = record.lease.saved_bytes - sum(sample.saved_bytes.values())
        if lost_bytes <= 0:
            observation.loss = None
            _saw(observation, sample, now)
        else:
            _note(registry, observation, sample, lost_bytes, now)
    loss = observation.loss
    # Without a process its server is ending, or has: that is told when it is known how.
    if loss is None or record.state is State.STOPPING or not sample.alive:
        return
    is_explained = loss.gone and all(_report_of(observation, each) is not None for each in loss.gone)
    if is_explained or now - loss.since >= EXPLAIN_S:
        with contextlib.suppress(DiskFull):  # told when there is room
            await _tell(registry, record, observation, loss)


def woke(registry: Registry, record: LeaseRecord, back_bytes: int, now: float) -> None:
    """Note what a lease lost that no measurement saw: it wakes with fewer bytes than it slept with."""
    record = registry.leases.get(record.id, record)
    observation, lost_bytes = registry.observations[record.id], record.lease.saved_bytes - back_bytes
    # A lease that runs already is answered without bytes.
    if observation.loss is None and back_bytes and lost_bytes > 0 and observation.sample is not None:
        _note(registry, observation, observation.sample, lost_bytes, now)


async def server_ended(registry: Registry, record: LeaseRecord) -> None:
    """Tell what a session lost whose server ended while it slept; its record says what ended it.

    Raises:
        DiskFull: it could not be stored.
        StoreError: the database failed.
    """
    observation = registry.observations[record.id]
    if record.is_job:
        return
    if record.lease.saved_bytes:
        at = observation.loss.at if observation.loss is not None else record.since_at
        why = messages.reason_text(record.note or "its server is gone")
        await _store(registry, record, record.lease.saved_bytes, messages.time_text(at), why)
    elif observation.loss is not None:
        await _tell(registry, record, observation, observation.loss)


def why_stopped(registry: Registry, record: LeaseRecord, by_hub: bool | None) -> str:
    """Return what ended a session's server: whether the Hub stopped it, and whether a culler asked for it."""
    if by_hub is None:
        return "its server ended"
    if not by_hub:
        return "its server ended without a request of the Hub"
    end = registry.culling.end(ServerKey(record.lease.user, record.server))
    if end is None or not end.at or end.at > registry.iso_now():
        return "the Hub stopped its server"
    if end.is_age:
        return f"the Hub stopped its server, which had run longer than its service {end.by} allows"
    return f"the Hub stopped its server, idle longer than its service {end.by} allows"


def _saw(observation: Observation, sample: LeaseSample, now: float) -> None:
    if observation.loss is None:
        observation.sleepers, observation.sleepers_at = sample.processes, now


def _note(
    registry: Registry, observation: Observation, sample: LeaseSample, lost_bytes: int, now: float
) -> None:
    present = {(each.pid, each.started_at) for each in sample.processes}
    gone = tuple(each for each in observation.sleepers if (each.pid, each.started_at) not in present)
    if observation.loss is None:
        observation.loss = Loss(since=now, at=registry.iso_now(), lost_bytes=lost_bytes)
    observation.loss.lost_bytes, observation.loss.gone = lost_bytes, gone


async def _tell(registry: Registry, record: LeaseRecord, observation: Observation, loss: Loss) -> None:
    reasons: list[Text] = []
    for each in loss.gone:
        if (why := _why(observation, each)) not in reasons:
            reasons.append(why)
    first, *more = reasons[:_REASONS] or [messages.text("ended.unknown")]
    why = reduce(lambda one, other: messages.text("part.and_then", one, other), more, first)
    at = messages.time_text(loss.at)
    if observation.sleepers_at is None:  # this broker never saw it whole
        at = messages.text("part.or_earlier", at)
    await _store(registry, record, loss.lost_bytes, at, why)
    observation.loss, observation.has_lost = None, True


async def _store(registry: Registry, record: LeaseRecord, lost_bytes: int, at: Text, why: Text) -> None:
    """Store the event with the bytes that are left, in one commit."""
    registry.journal.check()
    subject, lost = registry.subject_of(record), messages.memory(lost_bytes)
    notice = messages.text("notice.saved_lost", subject, lost, at, why)
    event = registry.decisions.add(record, "saved-lost", notice)

    def left(current: LeaseRecord) -> LeaseRecord:
        left_bytes = max(0, current.lease.saved_bytes - lost_bytes)
        return replace(current, lease=replace(current.lease, saved_bytes=left_bytes))

    await registry.edit(record, left, event)


def _fits(observation: Observation, ended: KernelEnded) -> bool:
    """Return whether the end of a kernel may be that of a process that is gone: it is not an older one."""
    return observation.sleepers_at is None or ended.at >= observation.sleepers_at - _APART_S


def _report_of(observation: Observation, process: ProcessSample) -> Text | None:
    """Return how its server says that a kernel ended; None: it does not say, or it is no kernel."""
    ended = observation.kernels_ended.get(process.kernel[:64]) if process.kernel else None
    if ended is None or not _fits(observation, ended):
        return None
    return _ended(replace(ended, name=ended.name or process.name))


def _ended(ended: KernelEnded) -> Text:
    name, code = messages.printable(ended.name), ended.code
    if ended.how == "idle":
        return messages.text("ended.kernel_idle", name, KERNEL_SETTING)
    if ended.how != "died":
        return messages.text(f"ended.kernel_{ended.how}", name)
    if code is None:
        return messages.text("ended.kernel_died", name)
    if code == -signal.SIGKILL:
        return messages.text("ended.kernel_killed", name)
    if code < 0:
        return messages.text("ended.kernel_signal", name, _signal_name(-code))
    return messages.text("ended.kernel_exit", name, str(code))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _why(observation: Observation, process: ProcessSample) -> Text:
    if (reported := _report_of(observation, process)) is not None:
        return reported
    return messages.text("ended.process", str(process.pid), messages.printable(process.name))
