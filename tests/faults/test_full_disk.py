"""A full disk: writes are refused with 507, the broker stays, and nothing is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import prometheus_client
import pytest

from jupyter_gpushare.broker.http.metrics import collectors
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.errors import DiskFull, HelperError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import Phase
from tests.broker.brokers import Broker
from tests.broker.disks import SmallDisk
from tests.broker.machine import Held, Program
from tests.broker.site import Site
from tests.broker.virtual_time import until

BIG = {"A": "x" * 50_000}


async def fill(broker: Broker) -> SmallDisk:
    """Fill the disk of a broker; returns once a submit was refused."""
    disk = SmallDisk(broker.store)
    disk.fill_all()
    with pytest.raises(DiskFull):
        await broker.requests.submit("bo", ("nlp",), wire.JobRequest(command=["a"], env=BIG), "lost")
    return disk


def assert_memory_is_disk(broker: Broker) -> None:
    stored = broker.store.load()
    assert dict(broker.registry.leases) == {record.id: record for record in stored.leases}
    assert dict(broker.registry.jobs) == {job.id: job for job in stored.jobs}


async def test_a_refused_submit_leaves_nothing_and_the_broker_goes_on(site, broker):
    before = await site.running("bo", "1", program=Program(work_s=30))
    disk = SmallDisk(broker.store)
    disk.fill()
    with pytest.raises(DiskFull):
        await broker.requests.submit("bo", ("nlp",), wire.JobRequest(command=["a"], env=BIG), "lost")
    disk.fill_all()
    assert_memory_is_disk(broker)
    assert broker._running is not None
    assert not broker._running.done()
    assert [job.id for job in broker.views.jobs("bo", limit=9)] == [before.id]
    assert any("disk" in reason for reason in broker.views.health().reasons)
    disk.clear()
    await until(lambda: not broker.registry.journal.is_disk_full, 5)
    after = await site.submit("bo", "1", program=Program(work_s=5), key="lost")
    await until(lambda: broker.job(before).result and broker.job(after).result, 120)
    assert broker.job(before).result == broker.job(after).result == "succeeded"
    assert site.started[before.id] == 1


async def test_every_write_is_refused_at_once_and_changes_nothing(site, broker):
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "1", program=Program(work_s=1000))
    await until(lambda: broker.state(ada.handle) == broker.state(job) == "running", 60)
    await fill(broker)
    before = dict(broker.registry.leases)
    writes = (
        lambda: broker.requests.cancel(broker.job(job)),
        lambda: broker.own_sessions.keep(broker.lease(ada.handle), 5),
        lambda: broker.own_sessions.lend(broker.lease(ada.handle)),
        lambda: broker.project_numbers.change("nlp", wire.ProjectChange(weight=2), "root"),
        lambda: broker.requests.submit("bo", ("nlp",), wire.JobRequest(command=["a"]), None),
        lambda: broker.stop(wire.SpawnStop(user="ada", server="")),
        lambda: site.session("cy", "1/4", project="nlp"),
        lambda: broker.job_reports.report("bo", job.id, 1, wire.JobReport(state="ended", exit_code=0)),
    )
    began = site.now
    for number, write in enumerate(writes):
        with pytest.raises(DiskFull):
            pytest.fail(f"write {number} was answered: {await write()}")
    assert site.now - began < 1
    assert dict(broker.registry.leases) == before
    await asyncio.sleep(60)
    assert dict(broker.registry.leases) == before, "what runs goes on"
    assert_memory_is_disk(broker)


async def test_commits_that_wait_behind_a_refused_one_are_refused_too(site, broker):
    SmallDisk(broker.store).fill()
    big, small = (wire.JobRequest(command=["a"], env=env) for env in (BIG, {}))
    submits = [site.later(broker.requests.submit("bo", ("nlp",), each, "k")) for each in (big, small)]
    answers = await asyncio.gather(*submits, return_exceptions=True)
    assert [type(answer) for answer in answers] == [DiskFull, DiskFull], "the same key: the same job"
    assert not broker.registry.jobs


async def test_a_session_wakes_on_a_full_disk_where_its_gpu_is_free(site, broker):
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", program=Program(work_s=5))
    await until(lambda: broker.job(job).result, 600)
    assert ada.phase is Phase.SUSPENDED
    disk = await fill(broker)
    began = site.now
    await site.gpu_cell(ada)
    assert site.now - began <= 5
    await asyncio.sleep(30)
    assert site.effects.count(f"resume {ada.handle}") == 1
    assert ada.unconfirmed
    disk.clear()
    await until(lambda: broker.state(ada.handle) == "running", 10)


async def lent(site: Site, broker: Broker, work_s: float = 60, **request: Any) -> tuple[Held, JobRecord]:
    """Return a session that sleeps and the job that borrows its GPU."""
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", program=Program(work_s=work_s), **request)
    await until(lambda: broker.state(job) == "running", 600)
    assert ada.phase is Phase.SUSPENDED
    return ada, job


async def cell_returns(site: Site, ada: Held) -> None:
    began = site.now
    await asyncio.wait_for(site.gpu_cell(ada), 60)
    assert site.now - began <= 30


async def is_recorded(broker: Broker, ada: Held, job: JobRecord) -> None:
    """Return when the database says that the session is awake and that its job ran once."""
    await until(lambda: broker.state(ada.handle) == "running" and not ada.unconfirmed, 60)
    assert await broker.ended(job, 60) == "succeeded"
    assert broker.site.started[job.id] == 1
    assert_memory_is_disk(broker)


@pytest.mark.parametrize("checkpoint", ["suspend", "sigterm"])
async def test_a_session_wakes_when_the_job_on_its_gpu_ends_on_a_full_disk(site, broker, checkpoint):
    ada, job = await lent(site, broker, checkpoint=checkpoint)
    disk = await fill(broker)
    await until(lambda: site.held[broker.lease(job).handle].command_ended, 600)
    assert site.held[broker.lease(job).handle].alive, "its runner reports the end until it is stored"
    await cell_returns(site, ada)
    with pytest.raises(DiskFull):
        await broker.requests.submit("bo", ("nlp",), wire.JobRequest(command=["a"]), None)
    await asyncio.sleep(30)
    assert ada.phase is Phase.RUNNING
    disk.clear()
    await is_recorded(broker, ada, job)


@pytest.mark.parametrize("was_told", [True, False], ids=["told to stop", "by itself"])
async def test_a_job_that_succeeded_while_the_disk_was_full_does_not_run_again(site, broker, was_told):
    ada, job = await lent(site, broker, checkpoint="sigterm")
    site.programs[job.id].heeds_sigterm = False
    if was_told:
        site.programs[job.id].work_s = 4  # of the 5 s that it has
        cell = site.later(site.gpu_cell(ada))
        await until(lambda: broker.state(job) == "stopping", 60)
        disk = SmallDisk(broker.store)
        disk.fill_all()
    else:
        disk = await fill(broker)
        cell = site.later(site.gpu_cell(ada))
    await until(lambda: site.held[broker.lease(job).handle].command_ended, 600)
    await asyncio.sleep(3)  # as long as a runner that is told to stop tries to report
    site.kill_job(job.id)
    await asyncio.wait_for(cell, 30)
    disk.clear()
    await is_recorded(broker, ada, job)


async def test_a_borrower_wakes_on_a_full_disk_only_where_the_records_have_its_part_free(site, broker):
    (await site.session("ada", "1")).suspendable = False
    more = await site.session("ada", "1/2", server="more")
    job = await site.running("bo", "1", program=Program(work_s=30))
    assert more.phase is Phase.SUSPENDED
    disk = await fill(broker)
    cell = site.later(site.gpu_cell(more))
    await until(lambda: site.held[broker.lease(job).handle].command_ended, 60)
    await asyncio.sleep(30)
    assert more.phase is Phase.SUSPENDED
    disk.clear()
    await asyncio.wait_for(cell, 60)
    await until(lambda: broker.job(job).result == "succeeded", 60)


async def test_of_a_reported_end_no_more_is_kept_than_is_stored(site, broker):
    _, job = await lent(site, broker)
    await fill(broker)
    report = wire.JobReport(state="ended", exit_code=1, reason="long " * 100_000)
    with pytest.raises(DiskFull):
        await broker.job_reports.report("bo", job.id, 1, report)
    end = broker.registry.observations[broker.lease(job).id].end
    assert end is not None
    assert len(end.reason) == 300


@pytest.mark.parametrize("commits", [0, 1])
async def test_a_disk_that_fills_up_again_forgets_no_reported_end(site, broker, commits):
    ada, job = await lent(site, broker, checkpoint="sigterm")
    site.programs[job.id].heeds_sigterm = False
    site.programs[job.id].work_s = 4  # of the 5 s that it has
    cell = site.later(site.gpu_cell(ada))
    await until(lambda: broker.state(job) == "stopping", 60)
    disk = SmallDisk(broker.store)
    disk.fill_all()
    await until(lambda: site.held[broker.lease(job).handle].command_ended, 600)
    await asyncio.sleep(3)
    site.kill_job(job.id)
    await asyncio.wait_for(cell, 30)
    commit, tried = broker.store.commit, 0

    async def full_again(changes: Any) -> None:
        nonlocal tried
        if any(isinstance(each, JobRecord) for each in changes):
            tried += 1
            if tried == commits + 1:
                disk.fill_all()
        await commit(changes)

    broker.store.commit = full_again  # type: ignore[method-assign]
    disk.clear()
    await until(lambda: tried > commits, 60)
    await asyncio.sleep(5)
    disk.clear()
    await is_recorded(broker, ada, job)


async def test_a_session_that_waits_wakes_once_the_job_on_its_gpu_has_ended(site, broker):
    ada, job = await lent(site, broker)
    disk = await fill(broker)
    cell = site.later(site.gpu_cell(ada))
    await until(lambda: site.held[broker.lease(job).handle].command_ended, 600)
    assert ada.phase is Phase.SUSPENDED
    await asyncio.wait_for(cell, 30)
    disk.clear()
    await is_recorded(broker, ada, job)


@pytest.mark.parametrize(
    ("checkpoint", "effect", "seen", "tries", "after"),
    [
        ("sigterm", "signal SIGTERM leader", "stopping", 1, "pending"),
        ("sigterm", "signal SIGTERM leader", "stopping", 2, "pending"),
        ("suspend", "suspend", "suspending", 1, "suspended"),
        ("suspend", "suspend", "suspending", 2, "suspended"),
        ("suspend", "suspend", "suspended", 1, "suspended"),
    ],
)
async def test_a_job_that_was_told_to_stop_or_put_to_sleep_makes_way_on_a_full_disk(
    site, broker, checkpoint, effect, seen, tries, after
):
    ada, job = await lent(site, broker, work_s=1000, checkpoint=checkpoint)
    site.fault(effect, *[HelperError("silent", "no answer")] * (tries - 1))
    cell = site.later(site.gpu_cell(ada))
    await until(lambda: broker.state(job) == seen, 60)
    disk = await fill(broker)
    await asyncio.wait_for(cell, 30)
    assert broker.state(job) == seen
    disk.clear()
    await until(lambda: broker.state(ada.handle) == "running" and not ada.unconfirmed, 60)
    await until(lambda: broker.state(job) == after, 60)
    assert_memory_is_disk(broker)


@pytest.mark.parametrize("why", ["idle", "lend_now"])
async def test_a_session_that_was_being_put_to_sleep_wakes_on_a_full_disk_and_stays_awake(
    site, broker, why, caplog
):
    ada = await site.session("ada", "1/2")
    await site.submit("bo", "2", program=Program(work_s=5))
    if why == "lend_now":
        await until(lambda: broker.state(ada.handle) == "running", 10)
        await broker.own_sessions.lend(broker.lease(ada.handle))
    await until(lambda: broker.state(ada.handle) == "suspending", 600)
    disk = SmallDisk(broker.store)
    disk.fill_all()
    await until(lambda: ada.phase is Phase.SUSPENDED, 60)
    await asyncio.sleep(5)
    assert broker.state(ada.handle) == "suspending", "its end cannot be stored"
    assert broker.lease(ada.handle).why == why
    assert caplog.text.count("could not be stored is undone") == 1
    await cell_returns(site, ada)
    began = len(site.effects)
    await asyncio.sleep(30)
    disk.clear()
    await until(lambda: broker.state(ada.handle) == "running" and not ada.unconfirmed, 60)
    assert f"suspend {ada.handle}" not in site.effects[began:]
    assert ada.phase is Phase.RUNNING


async def test_a_borrower_that_woke_on_a_full_disk_gives_its_capacity_back_afterwards(site, broker):
    (await site.session("ada", "1")).suspendable = False
    more = await site.session("ada", "1/2", server="more")
    await until(lambda: broker.state(more.handle) == "running", 10)
    job = await site.submit("bo", "1", program=Program(work_s=5))
    await until(lambda: broker.state(more.handle) == "suspending", 60)
    disk = SmallDisk(broker.store)
    disk.fill_all()
    await until(lambda: more.phase is Phase.SUSPENDED, 60)
    await cell_returns(site, more)
    await asyncio.sleep(5)
    assert more.unconfirmed
    commit = broker.store.commit

    async def synced(changes: Any) -> None:  # takes its time, as on a disk
        await asyncio.sleep(0.01)
        await commit(changes)

    broker.store.commit = synced  # type: ignore[method-assign]
    began = len(site.effects)
    disk.clear()
    await until(lambda: broker.job(job).result, 60)
    assert site.effects[began:].count(f"suspend {more.handle}") == 1


@pytest.mark.parametrize("is_job_reported", [True, False])
async def test_the_next_broker_follows_what_could_not_be_stored(site, broker, is_job_reported):
    ada, job = await lent(site, broker)
    waiting = await site.submit("bo", "2", program=Program(work_s=5))
    await fill(broker)
    await until(lambda: site.held[broker.lease(job).handle].command_ended, 600)
    await cell_returns(site, ada)
    await broker.end()
    if not is_job_reported:
        site.kill_job(job.id)
    broker = await site.start_broker()
    await until(lambda: broker.state(ada.handle) == "running" and not ada.unconfirmed, 60)
    if is_job_reported:
        await is_recorded(broker, ada, job)
    await until(lambda: broker.job(waiting).result, 600)
    assert site.started[waiting.id] == 1


async def test_a_session_wakes_while_the_database_hangs(site, broker):
    ada, job = await lent(site, broker)
    answers, commit = asyncio.Event(), broker.store.commit

    async def late(changes: Any) -> None:
        await answers.wait()
        await commit(changes)

    broker.store.commit = late  # type: ignore[method-assign]
    await until(lambda: site.held[broker.lease(job).handle].command_ended, 600)
    await cell_returns(site, ada)
    assert any("does not answer" in reason for reason in broker.views.health().reasons)
    answers.set()
    await is_recorded(broker, ada, job)


async def test_a_broker_on_a_restored_database_waits_for_space(site):
    site.epoch = 50  # which the helper has seen
    broker = await site.start_broker(running=False)
    disk = SmallDisk(broker.store)
    disk.fill_all()
    broker.begin()
    await asyncio.sleep(10)
    assert any("disk" in reason for reason in broker.views.health().reasons)
    disk.clear()
    await until(lambda: not broker.registry.journal.is_disk_full, 10)
    job = await site.submit("bo", "1", program=Program(work_s=5))
    await until(lambda: broker.job(job).result == "succeeded", 60)


async def test_a_session_does_not_wake_on_a_full_disk_into_capacity_that_another_lease_holds(site, broker):
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", program=Program(work_s=1000, memory=0.1))
    await until(lambda: broker.state(job) == "running", 600)
    await fill(broker)
    site.later(site.gpu_cell(ada))
    await asyncio.sleep(60)
    assert ada.phase is Phase.SUSPENDED


async def test_a_refused_write_is_answered_507_with_the_reason(http):
    disk = SmallDisk(http.broker.store)
    disk.fill()
    refused = await http.refused("POST", "jobs", json={"command": ["true"], "env": BIG})
    assert (refused.status, refused.reason) == (507, "disk_full")
    assert "disk" in refused.message
    assert (await http.ask("GET", "jobs")).json() == {"jobs": []}
    assert (await http.ask("GET", "status")).status_code == 200
    metrics = prometheus_client.generate_latest(collectors(http.broker.registry)).decode()
    assert "gpushare_database_writable 0.0" in metrics
