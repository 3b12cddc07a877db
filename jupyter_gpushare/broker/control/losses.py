"""Losses of saved GPU memory: a suspended process ended, and its memory in host RAM is gone.

The device helper shows the loss at once, but not what ended the process.  The session's server reports
how its kernels ended, and the Hub says that it stopped the server.  So the owner is notified of a loss when
it is explained, or after `EXPLAIN_S`.  Until then the record keeps the saved bytes, so that a restarted
broker finds the same loss.
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

# A server checks its kernels every second, and finds a dead one within 3 s.
EXPLAIN_S = 10.0
# A server and the device helper check at different moments.
_APART_S = 2.0
# Maximum number of reasons in one sentence.
_MAX_REASONS = 3


async def check(registry: Registry, record: LeaseRecord, sample: LeaseSample | None, now: float) -> None:
    """Note what a suspended lease has lost since its suspension; notify its owner once that is explained.

    Raises:
        StoreError: the database failed.
    """
    observation = registry.observations[record.id]
    if registry.journal.is_disk_full or sample is None:
        return
    if record.state is not State.SUSPENDED:
        _note_sleepers(observation, sample, now)
    elif sample.phase is not Phase.SUSPENDED or sample.unread_since:
        return
    elif snapshot.sampled_since_entry(registry, record):
        lost_bytes = record.lease.saved_bytes - sum(sample.saved_bytes.values())
        if lost_bytes <= 0:
            observation.loss = None
            _note_sleepers(observation, sample, now)
        else:
            _note(registry, observation, sample, lost_bytes, now)
    loss = observation.loss
    # Without a process its server has ended or is ending; `note_server_end` notifies of that.
    if loss is None or record.state is State.STOPPING or not sample.alive:
        return
    is_explained = loss.gone and all(_report_of(observation, each) is not None for each in loss.gone)
    if is_explained or now - loss.since >= EXPLAIN_S:
        with contextlib.suppress(DiskFull):  # a later check tries again
            await _notify(registry, record, observation, loss)


def note_resume(registry: Registry, record: LeaseRecord, back_bytes: int, now: float) -> None:
    """Note a loss that no sample showed: the lease resumes with fewer bytes than it had saved."""
    record = registry.leases.get(record.id, record)
    observation, lost_bytes = registry.observations[record.id], record.lease.saved_bytes - back_bytes
    # For a lease that already runs, the helper answers with 0 bytes.
    if observation.loss is None and back_bytes and lost_bytes > 0 and observation.sample is not None:
        _note(registry, observation, observation.sample, lost_bytes, now)


async def note_server_end(registry: Registry, record: LeaseRecord) -> None:
    """Notify the owner of what a session lost because its server ended during a suspension.

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
        await _notify(registry, record, observation, observation.loss)


def why_stopped(registry: Registry, record: LeaseRecord, by_hub: bool | None) -> str:
    """Return what ended a session's server: itself, the Hub, or the Hub at the request of a culler."""
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


def _note_sleepers(observation: Observation, sample: LeaseSample, now: float) -> None:
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


async def _notify(registry: Registry, record: LeaseRecord, observation: Observation, loss: Loss) -> None:
    reasons: list[Text] = []
    for each in loss.gone:
        if (why := _why(observation, each)) not in reasons:
            reasons.append(why)
    first, *more = reasons[:_MAX_REASONS] or [messages.text("ended.unknown")]
    why = reduce(lambda one, other: messages.text("part.and_then", one, other), more, first)
    at = messages.time_text(loss.at)
    if observation.sleepers_at is None:  # this broker has no sample from before the loss
        at = messages.text("part.or_earlier", at)
    await _store(registry, record, loss.lost_bytes, at, why)
    observation.loss, observation.has_lost = None, True


async def _store(registry: Registry, record: LeaseRecord, lost_bytes: int, at: Text, why: Text) -> None:
    """Store the event and the remaining saved bytes in one commit."""
    registry.journal.check()
    subject, lost = registry.subject_of(record), messages.memory(lost_bytes)
    notice = messages.text("notice.saved_lost", subject, lost, at, why)
    event = registry.decisions.add(record, "saved-lost", notice)

    def with_rest(current: LeaseRecord) -> LeaseRecord:
        rest_bytes = max(0, current.lease.saved_bytes - lost_bytes)
        return replace(current, lease=replace(current.lease, saved_bytes=rest_bytes))

    await registry.edit(record, with_rest, event)


def _fits(observation: Observation, ended: KernelEnded) -> bool:
    """Return whether a kernel's end may explain the loss: it is not older than the last complete sample."""
    return observation.sleepers_at is None or ended.at >= observation.sleepers_at - _APART_S


def _report_of(observation: Observation, process: ProcessSample) -> Text | None:
    """Return how a process ended as a kernel of its server; None if the server did not report that."""
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
