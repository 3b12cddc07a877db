"""A full disk: writes are refused with 507, the broker stays, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpushare.errors import DiskFull
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import Phase
from tests.broker.brokers import Broker
from tests.broker.disks import SmallDisk
from tests.broker.machine import Program
from tests.broker.site import Site
from tests.broker.virtual_time import in_virtual_time, until

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


@in_virtual_time
async def test_a_refused_submit_leaves_nothing_and_the_broker_goes_on(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        before = await site.submit("bo", "1", program=Program(work_s=30))
        await until(lambda: broker.state(before) == "running", 60)
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
        after = await site.submit("bo", "1", program=Program(work_s=5))
        await until(lambda: broker.job(before).result and broker.job(after).result, 120)
        assert broker.job(before).result == broker.job(after).result == "succeeded"
        assert site.started[before.id] == 1


@in_virtual_time
async def test_every_write_is_refused_at_once_and_changes_nothing(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        job = await site.submit("bo", "1", program=Program(work_s=1000))
        await until(lambda: broker.state(ada.handle) == broker.state(job) == "running", 60)
        await fill(broker)
        before = dict(broker.registry.leases)
        writes = (
            lambda: broker.requests.cancel(broker.job(job)),
            lambda: broker.requests.keep(broker.lease(ada.handle), 5),
            lambda: broker.requests.lend(broker.lease(ada.handle)),
            lambda: broker.request_policy.change_project("nlp", wire.ProjectChange(weight=2), "root"),
            lambda: broker.requests.submit("bo", ("nlp",), wire.JobRequest(command=["a"]), None),
            lambda: broker.admission.stop(wire.SpawnStop(user="ada", server="")),
            lambda: site.session("cy", "1/4", project="nlp"),
            lambda: broker.requests.report("bo", job.id, 1, wire.JobReport(state="ended", exit_code=0)),
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


@in_virtual_time
async def test_commits_that_wait_behind_a_refused_one_are_refused_too(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        SmallDisk(broker.store).fill()
        big, small = (wire.JobRequest(command=["a"], env=env) for env in (BIG, {}))
        submits = [site.later(broker.requests.submit("bo", ("nlp",), each, "k")) for each in (big, small)]
        answers = await asyncio.gather(*submits, return_exceptions=True)
        assert [type(answer) for answer in answers] == [DiskFull, DiskFull], "the same key: the same job"
        assert not broker.registry.jobs


@in_virtual_time
async def test_a_session_wakes_on_a_full_disk_where_its_gpu_is_free(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
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
        disk.clear()
        await until(lambda: broker.state(ada.handle) == "running", 10)


@in_virtual_time
async def test_a_session_does_not_wake_on_a_full_disk_into_capacity_that_another_lease_holds(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        job = await site.submit("bo", "2", program=Program(work_s=1000, memory=0.1))
        await until(lambda: broker.state(job) == "running", 600)
        await fill(broker)
        site.later(site.gpu_cell(ada))
        await asyncio.sleep(60)
        assert ada.phase is Phase.SUSPENDED
        assert not [effect for effect in site.effects if effect == f"resume {ada.handle}"]


async def test_a_refused_write_is_answered_507_with_the_reason(http):
    disk = SmallDisk(http.broker.store)
    disk.fill()
    refused = await http.refused("POST", "jobs", json={"command": ["true"], "env": BIG})
    assert (refused.status, refused.reason) == (507, "disk_full")
    assert "disk" in refused.message
    assert (await http.ask("GET", "jobs")).json() == {"jobs": []}
    assert (await http.ask("GET", "status")).status_code == 200
