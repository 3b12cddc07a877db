"""Jobs in the queue that their owners change or move: rights, places of others, races."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.control import queue_edits
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.core.model import Order
from jupyter_gpushare.errors import Conflict, DiskFull, InvalidRequest, NotFound
from jupyter_gpushare.protocol import wire
from tests.broker.brokers import Broker
from tests.broker.disks import SmallDisk
from tests.broker.machine import GROUPS, Program
from tests.broker.site import Site
from tests.broker.virtual_time import until

HOUR = Program(work_s=3600)


async def queue_of(site: Site, *users: str) -> tuple[Broker, list[JobRecord]]:
    """Return jobs of project nlp in the queue, behind one that holds the machine."""
    broker = await site.start_broker()
    await site.running("cy", "2", project="nlp", program=HOUR)
    jobs = []
    for user in users:
        jobs.append(await site.submit(user, "2", project="nlp", program=HOUR))
        await asyncio.sleep(1)
    return broker, jobs


async def change(broker: Broker, job: JobRecord, **fields: object) -> JobRecord:
    asked = wire.JobChange(**fields)  # type: ignore[arg-type]
    return await queue_edits.change(broker.request_policy, broker.job(job), GROUPS[job.user], asked)


async def before(broker: Broker, job: JobRecord, other: JobRecord) -> JobRecord:
    return await queue_edits.place(broker.registry, broker.job(job), wire.JobPlace(before=other.id))


async def behind(broker: Broker, job: JobRecord, other: JobRecord) -> JobRecord:
    return await queue_edits.place(broker.registry, broker.job(job), wire.JobPlace(behind=other.id))


def order(broker: Broker, jobs: Sequence[JobRecord]) -> list[int]:
    """Return the numbers of these jobs, the next to start first."""
    position = [broker.seen(job).position or 0 for job in jobs]
    return sorted(range(len(jobs)), key=lambda n: position[n])


@pytest.mark.parametrize("kind", [Order.PROGRESS, Order.LAS, Order.FIFO, Order.BACKFILL])
async def test_a_moved_job_leaves_the_places_of_others(site, kind):
    site.policy = replace(site.policy, order=kind)
    broker, jobs = await queue_of(site, "bo", "cy", "bo", "cy", "bo")
    await before(broker, jobs[4], jobs[0])
    assert order(broker, jobs) == [4, 1, 0, 3, 2]
    await behind(broker, jobs[4], jobs[0])
    assert order(broker, jobs) == [0, 1, 4, 3, 2]


async def test_an_order_outlives_the_broker_and_decides_what_starts(site):
    broker, jobs = await queue_of(site, "bo", "bo", "bo")
    await before(broker, jobs[2], jobs[0])
    await broker.end()
    broker = await site.start_broker()
    assert order(broker, jobs) == [2, 0, 1]
    await until(lambda: broker.state(jobs[2]) == "running", within_s=8_000)
    assert [broker.state(job) for job in jobs[:2]] == ["pending", "pending"]


async def test_the_same_move_and_the_same_change_twice_are_one(site):
    broker, jobs = await queue_of(site, "bo", "bo")
    for _ in range(2):
        await before(broker, jobs[1], jobs[0])
        await change(broker, jobs[0], gpus="1", max_run_s=3600.0)
    told = [d.sentence for d in broker.registry.decisions.latest if d.action in ("edit", "move")]
    assert told == [
        "bo's job train.py (2 GPUs) was moved before train.py in the queue.",
        "bo's job train.py (2 GPUs) was changed: 1 GPU, project nlp, priority 0, at most 60 "
        "min; before: 2 GPUs, project nlp, priority 0.",
    ]
    assert order(broker, jobs) == [1, 0]


async def test_only_ones_own_jobs_of_one_project_and_priority_are_moved_among_each_other(site):
    broker, jobs = await queue_of(site, "bo", "cy", "cy")
    other = await site.submit("cy", "2", project="vision", program=HOUR)
    for beside in (jobs[0].id, "nosuchjob", jobs[1].id):
        with pytest.raises(InvalidRequest, match="no other job"):
            await queue_edits.place(broker.registry, broker.job(jobs[1]), wire.JobPlace(before=beside))
    with pytest.raises(InvalidRequest, match="of one project and priority"):
        await before(broker, other, jobs[1])
    await change(broker, jobs[2], priority=-1)
    with pytest.raises(InvalidRequest, match="of one project and priority"):
        await before(broker, jobs[2], jobs[1])
    for place in (wire.JobPlace(), wire.JobPlace(before=jobs[2].id, behind=jobs[2].id)):
        with pytest.raises(InvalidRequest, match="one of the two"):
            await queue_edits.place(broker.registry, broker.job(jobs[1]), place)


async def test_a_change_is_shown_kept_and_decided_by(site):
    broker, jobs = await queue_of(site, "bo", "bo")
    await change(broker, jobs[1], memory="20GiB", priority=-5, max_run_s=7200.0)
    for again in range(2):
        seen, lease = broker.seen(jobs[1]), broker.lease(jobs[1]).lease
        assert (seen.memory, seen.gpus, seen.priority, seen.max_run_s) == ("20GiB", "1", -5, 7200.0)
        assert (lease.size.memory_bytes, lease.priority) == (20 << 30, -5)
        if not again:
            await broker.end()
            broker = await site.start_broker()
    assert (await change(broker, jobs[1], max_run_s=0.0)).request.count("max_run_s") <= 1
    assert broker.seen(jobs[1]).max_run_s is None
    await change(broker, jobs[1], gpus="1/2")
    assert broker.seen(jobs[1]).size == "1/2 GPU"


async def test_a_raised_job_comes_first_and_another_project_has_it_at_its_end(site):
    nlp = replace(site.policy.projects[1], priority_max=5)
    site.policy = replace(site.policy, projects=(site.policy.projects[0], nlp))
    broker, jobs = await queue_of(site, "bo", "cy", "cy")
    late = await site.submit("ada", "2", project="vision", program=HOUR)
    await asyncio.sleep(1)
    await change(broker, jobs[2], priority=5)
    assert order(broker, jobs) == [2, 0, 1]
    await change(broker, jobs[1], project="vision")
    seen = broker.seen(jobs[1])
    assert (seen.project, broker.lease(jobs[1]).lease.project) == ("vision", "vision")
    assert (seen.position or 0) > (broker.seen(late).position or 0)


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"priority": 1}, InvalidRequest, "priority is at most 0 in project nlp"),
        ({"priority": -101}, InvalidRequest, "from -100 to 100"),
        ({"project": "vision"}, NotFound, "no project 'vision' for you"),
        ({"gpus": "3"}, InvalidRequest, "3 GPUs"),
        ({"gpus": "0.0001"}, InvalidRequest, "0.0001"),
        ({"memory": "900GiB"}, InvalidRequest, "largest"),
        ({"profile": "1g.10gb"}, InvalidRequest, "1g.10gb"),
        ({"max_run_s": -1.0}, InvalidRequest, "1 second to 365 days"),
    ],
)
async def test_what_could_not_be_submitted_is_no_change_either(site, fields, error, said):
    broker, (job,) = await queue_of(site, "bo")
    before = broker.job(job), broker.lease(job)
    with pytest.raises(error, match=said):
        await change(broker, job, **fields)
    assert (broker.job(job), broker.lease(job)) == before


async def test_a_job_that_started_or_ended_meanwhile_is_a_conflict(site):
    broker, (ends, waits, starts) = await queue_of(site, "bo", "bo", "bo")
    asked = broker.job(ends)
    await broker.requests.cancel(asked)
    with pytest.raises(Conflict, match="has ended: only jobs in the queue"):
        await queue_edits.change(broker.request_policy, asked, GROUPS["bo"], wire.JobChange(gpus="1"))
    await change(broker, starts, gpus="1")
    await until(lambda: broker.state(starts) == "running" or broker.state(waits) == "running", 8_000)
    running, queued = (starts, waits) if broker.state(starts) == "running" else (waits, starts)
    with pytest.raises(Conflict, match="has started: only jobs in the queue"):
        await change(broker, running, priority=-1)
    for one, two in ((running, queued), (queued, running)):
        with pytest.raises(Conflict, match="has started"):
            await before(broker, one, two)
    # What it asks for already is no change, also now.
    await change(broker, running, project="nlp", priority=0)


async def test_no_lease_made_way_for_what_a_job_asks_for_only_now(site):
    site.move_s = 20.0
    broker = await site.start_broker()
    ada = await site.session("ada", "1")
    await asyncio.sleep(site.policy.idle_timeout_s * 2)
    job = await site.submit("bo", "2", program=HOUR)
    made_way = broker.registry.observations[broker.lease(ada.handle).id]
    await until(lambda: broker.state(ada.handle) == "suspending", 600)
    assert made_way.made_way_for == broker.lease(job).id
    await change(broker, job, priority=-1)
    assert made_way.made_way_for == broker.lease(job).id
    await change(broker, job, gpus="1")
    assert made_way.made_way_for == ""
    await until(lambda: broker.state(job) == "running", 600)


async def test_a_full_disk_leaves_request_and_order(site):
    broker, jobs = await queue_of(site, "bo", "bo")
    decisions = len(broker.registry.decisions.latest)
    disk = SmallDisk(broker.store)
    disk.fill_all()
    for asked in (change(broker, jobs[0], gpus="1"), before(broker, jobs[1], jobs[0])):
        with pytest.raises(DiskFull):
            await asked
    assert order(broker, jobs) == [0, 1]
    assert broker.seen(jobs[0]).gpus == "2"
    assert len(broker.registry.decisions.latest) <= decisions
    disk.clear()
