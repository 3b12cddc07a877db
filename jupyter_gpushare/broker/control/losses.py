"""Losses of saved GPU memory: a process that sleeps ended, and what it had in host memory is gone.

The device helper shows that memory is gone, at once.  What ended the process is known to others: the
session's server reports how its kernels ended, and the Hub says that it stopped the server.  So a loss is
told when one of them has, or after `EXPLAIN_S`.  The record has the bytes that were saved until then:
a broker that restarts finds the same loss again.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.state.culling import KERNEL_SETTING
from jupyter_gpushare.broker.state.observations import Loss, Observation
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import State
from jupyter_gpushare.protocol.helper import LeaseSample, ProcessSample
from jupyter_gpushare.protocol.wire import Text

# A server looks at its kernels every second, and finds a dead one within 3 s.
EXPLAIN_S = 10.0
# A report of an end is about a loss that was seen at most so long before or after it.
_APART_S = 30.0
# Reasons that one sentence names.
_REASONS = 3

_HOW: Mapping[str, str] = {
    "idle": "ended.kernel_idle",
    "shut_down": "ended.kernel_shut_down",
    "restarted": "ended.kernel_restarted",
}


async def look(registry: Registry, record: LeaseRecord, sample: LeaseSample | None, now: float) -> None:
    """Note what a sleeping lease has lost since it fell asleep, and tell it once it is explained.

    Raises:
        StoreError: the database failed.
    """
    observation = registry.observations[record.id]
    if record.state is not State.SUSPENDED:
        observation.sleepers = sample.processes if sample is not None else ()
        if record.state is not State.STOPPING and observation.loss is not None:  # it wakes with the rest
            await _tell(registry, record, observation, observation.loss)
        return
    if registry.journal.is_disk_full or sample is None or sample.unread_since:
        return
    if not snapshot.sampled_since_entry(registry, record):
        return
    left_bytes = sum(sample.saved_bytes.values())
    if left_bytes >= record.lease.saved_bytes:
        observation.sleepers, observation.loss = sample.processes, None
        return
    present = {(each.pid, each.started_at) for each in sample.processes}
    gone = tuple(each for each in observation.sleepers if (each.pid, each.started_at) not in present)
    loss = observation.loss
    if loss is None:
        loss = Loss(since=now, at=registry.iso_now(), saved_bytes=left_bytes)
    observation.loss = loss
    loss.saved_bytes, loss.gone = left_bytes, gone
    # Without a process its server is ending, or has: that is told when it is known how.
    is_explained = gone and all(_report_of(observation, loss, each) is not None for each in gone)
    if sample.alive and (is_explained or now - loss.since >= EXPLAIN_S):
        await _tell(registry, record, observation, loss)


async def server_ended(registry: Registry, record: LeaseRecord) -> None:
    """Tell what a session lost whose server ended while it slept; its record says what ended it.

    Raises:
        StoreError: the database failed.
    """
    if not record.is_job and record.lease.saved_bytes:
        observation = registry.observations[record.id]
        at = observation.loss.at if observation.loss is not None else record.since_at
        await _store(registry, record, 0, at, messages.reason_text(record.note or "its server is gone"))


def why_stopped(registry: Registry, record: LeaseRecord, by_hub: bool | None) -> str:
    """Return what ended a session's server: whether the Hub stopped it, and whether a culler asked for it."""
    if by_hub is None:
        return "its server ended"
    if not by_hub:
        return "its server ended by itself"
    end = registry.culling.end(ServerKey(record.lease.user, record.server))
    if end is None or end.at > registry.iso_now():
        return "the Hub stopped its server on request"
    if end.is_age:
        return f"the Hub's service {end.by} stopped its server for its age"
    return f"the Hub's service {end.by} stopped its server, which was idle"


async def _tell(registry: Registry, record: LeaseRecord, observation: Observation, loss: Loss) -> None:
    reasons: list[Text] = []
    for each in loss.gone:
        if (why := _why(observation, loss, each)) not in reasons:
            reasons.append(why)
    first, *more = reasons[:_REASONS] or [messages.text("ended.unknown")]
    why = reduce(lambda one, other: messages.text("part.and_then", one, other), more, first)
    await _store(registry, record, loss.saved_bytes, loss.at, why)
    observation.loss = None


async def _store(registry: Registry, record: LeaseRecord, left_bytes: int, at: str, why: Text) -> None:
    """Store the event with the bytes that are left, in one commit."""
    lost = messages.memory(max(0, record.lease.saved_bytes - left_bytes))
    subject = registry.subject_of(record)
    notice = messages.text("notice.saved_lost", subject, lost, messages.time_text(at), why)
    event = registry.decisions.add(record, "lost", notice)

    def left(current: LeaseRecord) -> LeaseRecord:
        return replace(current, lease=replace(current.lease, saved_bytes=left_bytes))

    await registry.edit(record, left, event)


def _report_of(observation: Observation, loss: Loss, process: ProcessSample) -> Text | None:
    """Return how its server says that a kernel ended; None: it does not say, or it is no kernel."""
    ended = observation.kernels_ended.get(process.kernel[:64]) if process.kernel else None
    if ended is None or abs(ended.at - loss.since) > _APART_S:
        return None
    name = messages.printable(ended.name or process.name)
    if ended.how != "died":
        return messages.text(_HOW.get(ended.how, "ended.kernel_shut_down"), name, KERNEL_SETTING)
    if ended.code == -signal.SIGKILL:
        return messages.text("ended.kernel_killed", name)
    code = ended.code
    if code is not None and code < 0:
        return messages.text("ended.kernel_signal", name, _signal_name(-code))
    return messages.text("ended.kernel_died", name) if code is None else _exit(name, code)


def _exit(name: str, code: int) -> Text:
    return messages.text("ended.kernel_exit", name, str(code))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _why(observation: Observation, loss: Loss, process: ProcessSample) -> Text:
    if (reported := _report_of(observation, loss, process)) is not None:
        return reported
    return messages.text("ended.process", str(process.pid), messages.printable(process.name))
