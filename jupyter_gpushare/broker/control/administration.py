"""Acts of administrators: on leases and jobs of other users, on processes, and on devices to be emptied."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import DeviceBackend
from jupyter_gpushare.broker.control.job_request import check_job
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.state.records import MACHINE, Drain, Drains, JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import altered_to
from jupyter_gpushare.errors import Conflict, HelperError, InvalidRequest, NotFound
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.wire import Text
from jupyter_gpushare.wall_clock import iso


async def note_act(registry: Registry, record: LeaseRecord, act: str, by: str) -> None:
    """Log that ``by`` asked for ``act`` (as in the path of the request) on the lease of another user.

    Call it before the act, so that no act is without its line.  An act that is then refused has a line too.

    Raises:
        StoreError: the database failed; the broker ends.
    """
    if record.lease.user != by:
        await registry.record_notice(record, "admin", f"notice.admin_{act}", messages.printable(by))


async def prioritize(registry: Registry, job: JobRecord, change: wire.JobChange, by: str) -> JobRecord:
    """Change the priority of another user's job, even above its project's maximum.

    Raises:
        Conflict: the job has ended.
        DiskFull: nothing is changed.
        InvalidRequest: the change is not of the priority only, or the priority is out of range.
        StoreError: the database failed; the broker ends.
    """
    priority = change.priority
    if priority is None or change != wire.JobChange(priority=priority):
        raise InvalidRequest("of another user's job an administrator changes the priority only")
    record = registry.leases.get(job.lease_id)
    if record is None or job.result:
        raise Conflict("job %1 has ended", job.id)
    job, before = registry.jobs.get(job.id, job), record.lease.priority
    if priority == before:
        await registry.journal.durable()
        return job
    request = wire.replace(wire.decode(job.request.encode(), wire.JobRequest), priority=priority)
    check_job(request)
    changed = replace(job, request=wire.encode(request).decode())
    registry.journal.check()
    subject = registry.subject_of(record)
    notice = messages.text("notice.admin_priority", subject, messages.printable(by), priority, before)
    entry = registry.decisions.add(record, "admin", notice)
    await registry.edit(record, altered_to(replace(record.lease, priority=priority)), changed, entry)
    return registry.jobs.get(job.id, changed)


async def end_process(registry: Registry, devices: DeviceBackend, uuid: str, name: str, by: str) -> None:
    """End a process without a lease on a device; ``name`` is its ``process`` in the last sample.

    The line in the log of decisions is stored first.

    Raises:
        Conflict: the watchdog's rules spare it, or the device helper did not end it.
        DiskFull: nothing is changed.
        NotFound: there is no such device or process.
        StoreError: the database failed; the broker ends.
    """
    device = next((each for each in registry.devices.measured if each.uuid == uuid), None)
    if device is None:
        raise NotFound("there is no GPU %1", repr(uuid[:60]))
    found = next((each for each in device.unleased if each.process == name), None)
    if found is None:
        raise NotFound("no such process without a lease uses this GPU")
    if found.kept:
        raise Conflict("this process is left alone: %1", found.kept)
    shown = messages.printable(found.name)
    notice = messages.text(
        "notice.admin_end_process", messages.printable(by), found.pid, shown, found.uid, uuid
    )
    registry.journal.check()
    await registry.journal.commit(registry.decisions.add(None, "admin", notice))
    await registry.notify()
    try:
        await devices.end_process(uuid, name)
    except HelperError as error:
        raise Conflict("the process was not ended: %1", str(error)) from None


# ---- emptying devices: an administrator bars new work from a device, or from the whole machine
# Leases that are on the device stay: sessions may sleep, wake and end, and jobs may end.  Owners of sessions
# are asked to finish.  Nothing is stopped, not even at the announced time.  For the planner, a device that is
# being emptied is not usable (`core.model.Device`).

MAX_DRAINS = 1_000
_MAX_AHEAD = timedelta(days=366)


async def drain(registry: Registry, engine: Engine, name: str, until: str | None, by: str) -> None:
    """Bar new work from a device (UUID), or from all (`MACHINE`), until `undrain`.

    ``until`` (ISO 8601 with a zone) is only announced to the owners of sessions there.

    Raises:
        Conflict: the engine cannot keep a device empty, or `MAX_DRAINS` devices are being emptied.
        NotFound: there is no such device.
        InvalidRequest: ``until`` is not a time within the next year.
        DiskFull: nothing is changed.
        StoreError: the database failed; the broker ends.
    """
    if not engine.drains:
        raise Conflict("the cluster's scheduler places work here: empty a node with kubectl cordon")
    _check_name(registry, name)
    at = registry.iso_now()
    # A drain of an absent device stays, because the device may come back.
    drains = registry.devices.drains.of
    if name not in drains and len(drains) >= MAX_DRAINS:
        raise Conflict("%1 GPUs are being emptied: let one of them take work again", MAX_DRAINS)
    by = messages.printable(by)
    wanted = Drain(by=by, at=at, until="" if until is None else _time(until, at))
    before = drains.get(name)
    if before is not None and (before.by, before.until) == (wanted.by, wanted.until):
        await registry.journal.durable()
        return
    target = _target(name)
    sentence = messages.text("notice.drain", by, target)
    if wanted.until:
        sentence = messages.text("notice.drain_until", by, target, messages.time_text(wanted.until))
    await _set(registry, Drains(of={**drains, name: wanted}), sentence)


async def undrain(registry: Registry, name: str, by: str) -> None:
    """Let a device, or with `MACHINE` every device, take work again; a repeated call changes nothing.

    Raises:
        NotFound: there is no such device.
        InvalidRequest: ``name`` is one device, but the whole machine is being emptied.
        DiskFull: nothing is changed.
        StoreError: the database failed; the broker ends.
    """
    drains = registry.devices.drains
    if name not in drains.of:
        _check_name(registry, name)
    if drains.on(name) is not None and name not in drains.of:
        raise InvalidRequest("the whole machine is being emptied: let the machine take work again")
    kept = {} if name == MACHINE else {uuid: each for uuid, each in drains.of.items() if uuid != name}
    if kept == drains.of:
        await registry.journal.durable()
        return
    sentence = messages.text("notice.drain_over", messages.printable(by), _target(name))
    await _set(registry, replace(drains, of=kept), sentence)


async def _set(registry: Registry, drains: Drains, sentence: Text) -> None:
    registry.journal.check()
    registry.devices.drains = drains
    await registry.journal.commit(drains, registry.decisions.add(None, "drain", sentence))
    await registry.notify()


def _target(name: str) -> Text:
    return messages.text("part.machine") if name == MACHINE else messages.text("verbatim", f"GPU {name}")


def _check_name(registry: Registry, name: str) -> None:
    if name != MACHINE and all(name != device.uuid for device in registry.devices.listed):
        raise NotFound("there is no GPU %1", repr(name[:60]))


def _time(text: str, now: str) -> str:
    """Return a time in the broker's own format.

    Raises:
        InvalidRequest: the text is no time, has no zone, or names a time that is past or over a year ahead.
    """
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None or len(text) > 40:
        raise InvalidRequest("until is a time with its zone, like 2026-11-22T18:00+01:00")
    if not timedelta(0) < at - datetime.fromisoformat(now) <= _MAX_AHEAD:
        raise InvalidRequest("until is a time in the future, at most a year ahead")
    return iso(at)
