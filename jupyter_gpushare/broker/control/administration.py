"""What administrators do with the leases and jobs of others: each act is a line in the log of decisions."""

from __future__ import annotations

from dataclasses import replace

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import Devices
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import Altered
from jupyter_gpushare.errors import Conflict, HelperError, InvalidRequest, NotFound
from jupyter_gpushare.protocol import wire

# The highest and the lowest priority of a job.
_MOST_PRIORITY = 100


async def note_act(registry: Registry, record: LeaseRecord, act: str, by: str) -> None:
    """Store that ``by`` asked for ``act`` (as in the path of the request) on the lease of another user.

    Called before the act, so that none is without its line; one that is then refused has a line too.

    Raises:
        StoreError: the database failed; the broker ends.
    """
    if record.lease.user != by:
        await registry.record_notice(record, "admin", f"notice.admin_{act}", messages.printable(by))


async def prioritize(registry: Registry, job: JobRecord, change: wire.JobChange, by: str) -> JobRecord:
    """Raise or lower the priority of another user's job, whatever the right of its project.

    Raises:
        Conflict: the job has ended.
        DiskFull: nothing is changed.
        InvalidRequest: something else is to change, or the priority is out of range.
        StoreError: the database failed; the broker ends.
    """
    priority = change.priority
    if priority is None or change != wire.JobChange(priority=priority):
        raise InvalidRequest("of another user's job an administrator changes the priority only")
    if abs(priority) > _MOST_PRIORITY:
        raise InvalidRequest("priority is a whole number from %1 to %2", -_MOST_PRIORITY, _MOST_PRIORITY)
    record = registry.leases.get(job.lease_id)
    if record is None or job.result:
        raise Conflict("job %1 has ended", job.id)
    job, before = registry.jobs.get(job.id, job), record.lease.priority
    if priority == before:
        await registry.journal.durable()
        return job
    asked = wire.replace(wire.decode(job.request.encode(), wire.JobRequest), priority=priority)
    changed = replace(job, request=wire.encode(asked).decode())
    registry.journal.check()
    subject = registry.subject_of(record)
    notice = messages.text("notice.admin_priority", subject, messages.printable(by), priority, before)
    entry = registry.decisions.add(record, "admin", notice)
    await registry.edit(record, Altered(lease=replace(record.lease, priority=priority)), changed, entry)
    return registry.jobs.get(job.id, changed)


async def end_process(registry: Registry, devices: Devices, uuid: str, name: str, by: str) -> None:
    """End a process without a lease that the last sample shows on a device, by its ``process`` there.

    The line in the log of decisions comes first.

    Raises:
        Conflict: the watchdog's rules leave it alone, or the device helper does not end it.
        DiskFull: nothing is done.
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
