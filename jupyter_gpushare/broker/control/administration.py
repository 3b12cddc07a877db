"""What administrators do with the leases and jobs of others: each act is a line in the log of decisions."""

from __future__ import annotations

from dataclasses import replace

from jupyter_gpushare import messages
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import Altered
from jupyter_gpushare.errors import Conflict, InvalidRequest
from jupyter_gpushare.protocol import wire

# The highest and the lowest priority of a job.
_MOST_PRIORITY = 100


async def note_act(registry: Registry, record: LeaseRecord, act: str, by: str) -> None:
    """Store that ``by`` did ``act`` (as in the path of the request) to the lease of another user.

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
