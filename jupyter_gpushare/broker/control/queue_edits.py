"""Changes of queued jobs by their owners: their request, and their place in the queue.

A change of a job that was granted its GPUs meanwhile is refused.  There is no await between that check and
the change in memory, so a job starts either with the old request or with the changed one.

`place` moves a job only among jobs of its user, project and priority that have not run: they exchange their
places in the queue, and all other jobs keep theirs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from jupyter_gpushare import messages
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.job_request import check_job
from jupyter_gpushare.broker.control.request_policy import RequestPolicy
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.transitions import altered_to
from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import Lease, State
from jupyter_gpushare.errors import Conflict, InvalidRequest
from jupyter_gpushare.protocol import wire

log = logging.getLogger("gpushare.broker")


async def change(
    policy: RequestPolicy, job: JobRecord, groups: Sequence[str], change: wire.JobChange
) -> JobRecord:
    """Change the request of a queued job; a change to the same values does nothing.

    A job that changes its project goes to the end of the queue.

    Raises:
        Conflict: the job has started or ended, or the devices are not known.
        RequestError: the changed job cannot be accepted; the text says what to change.
    """
    await policy.devices_known()
    registry = policy.registry
    job = registry.jobs.get(job.id, job)
    before = wire.replace(wire.decode(job.request.encode(), wire.JobRequest), project=job.project)
    after = change.of(before)
    if after == before:
        await registry.journal.durable()
        return job
    record = _queued(registry, job)
    project = job.project
    if after.project != project:
        project = policy.choose_project(groups, after.project)
    check_job(after)
    # A priority set by an administrator stays, even above the project's maximum.
    if (project, after.priority) != (job.project, before.priority):
        policy.check_priority(project, after.priority)
    policy.check_share(after.requested_size())
    lease = replace(record.lease, project=project, size=after.requested_size(), priority=after.priority)
    if project != job.project:
        lease = replace(lease, queued_at=registry.clock(), waits_since_at=registry.clock())
    policy.engine.check_request(snapshot.empty_machine(registry, policy.engine), lease)
    subject = registry.subject_of(record)
    notice = messages.text("notice.job_changed", subject, _numbers(after), _numbers(before))
    changed = replace(job, project=project, request=wire.encode(after).decode())
    registry.journal.check()
    if (lease.project, lease.size) != (record.lease.project, record.lease.size):
        _forget_promises(registry, record.id)
    entry = registry.decisions.add(record, "edit", notice)
    await registry.edit(record, altered_to(lease), changed, entry)
    log.info("job=%s user=%s %s", job.id, job.user, messages.english(notice))
    return registry.jobs.get(job.id, changed)


async def place(registry: Registry, job: JobRecord, place: wire.JobPlace) -> JobRecord:
    """Move a job before or behind another job of its owner; a repeated call changes nothing.

    Raises:
        InvalidRequest: the other job is missing, or differs in owner, project or priority.
        Conflict: one of the two has started or ended.
    """
    if (place.before is None) == (place.behind is None):
        raise InvalidRequest("say before or behind which job: one of the two")
    other_id = place.before or place.behind or ""
    record = _queued(registry, job)
    other = registry.jobs.get(other_id)
    leases = {x.id: x for x in _own_order(registry, record.lease)}
    if record.id in leases and (other is None or other.user != job.user or other.id == job.id):
        raise InvalidRequest("you have no other job %1", repr(other_id[:40]))
    if other is None or record.id not in leases or _queued(registry, other).id not in leases:
        raise InvalidRequest(
            "only jobs of one project and priority that have not run are moved among each other: "
            "change project or priority first"
        )
    behind = place.before is None
    altered = order.moved(leases.values(), record.id, other.lease_id, behind=behind)
    if not altered:
        await registry.journal.durable()
        return job
    key = "notice.job_behind" if behind else "notice.job_before"
    notice = messages.text(key, registry.subject_of(record), other.name)
    registry.journal.check()
    entry = registry.decisions.add(record, "move", notice)
    edits = [(registry.leases[lease.id], altered_to(lease)) for lease in altered]
    await registry.edit_all(edits, entry)
    log.info("job=%s user=%s %s", job.id, job.user, messages.english(notice))
    return registry.jobs.get(job.id, job)


def _queued(registry: Registry, job: JobRecord) -> LeaseRecord:
    record = registry.leases.get(job.lease_id)
    if record is None or record.lease.cancelled:
        raise Conflict("job %1 has ended: only jobs in the queue are changed", job.id)
    if record.state is not State.PENDING:
        raise Conflict("job %1 has started: only jobs in the queue are changed", job.id)
    return record


def _own_order(registry: Registry, lease: Lease) -> list[Lease]:
    """Return the jobs of the same owner, project and priority that have not run."""
    return [
        x.lease
        for x in registry.index.queued.values()
        if (x.lease.user, x.lease.project, x.lease.priority) == (lease.user, lease.project, lease.priority)
        and not x.lease.attained_gpu_s
        and not x.lease.cancelled
    ]


def _numbers(request: wire.JobRequest) -> wire.Text:
    size, project = messages.size_text(request.requested_size()), request.project or ""
    if request.max_run_s is None:
        return messages.text("job.numbers", size, project, request.priority)
    max_run = messages.duration_text(request.max_run_s)
    return messages.text("job.numbers_limit", size, project, request.priority, max_run)


def _forget_promises(registry: Registry, lease_id: str) -> None:
    """Forget which leases made way for a lease, because its request has changed since."""
    for observation in registry.observations.values():
        if observation.made_way_for == lease_id:
            observation.made_way_for = ""
