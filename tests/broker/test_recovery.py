"""What ended while no broker looked: observed at the Hub and the driver, and settled in seconds."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpushare.backends.base import ServerKey
from tests.broker.machine import Program
from tests.broker.site import Site
from tests.broker.virtual_time import in_virtual_time, until


@in_virtual_time
@pytest.mark.parametrize("away", [False, True])
async def test_a_job_settles_after_its_runner_was_killed_and_leftovers_are_ended(tmp_path, away):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "2", retries=1, grace_s=30, program=Program(work_s=1000))
        await until(lambda: broker.state(job) == "running", 60)
        if away:
            await broker.end()
        await site.kill_runner(job.id)
        if away:
            broker = await site.start_broker()
        began = site.now
        await until(lambda: f"j{job.id}-1" not in site.held, 10)
        await until(lambda: broker.lease(job).attempt == 2, 5)
        assert site.now - began <= 10
        assert broker.job(job).failures == 1


@in_virtual_time
async def test_a_runner_killed_before_its_first_report_holds_no_gpu(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "2", program=Program(work_s=1000))
        await until(lambda: broker.state(job) == "granted", 60)
        handle = broker.lease(job).handle
        await until(lambda: handle in site.held, 10)
        held = site.held[handle]
        site.kill_job(job.id)
        for task in list(site._tasks):
            task.cancel()
        await asyncio.sleep(0.01)
        held.alive = held.runner_ended = True
        site.servers.clear()
        began = site.now
        await until(lambda: broker.job(job).result, 30)
        assert site.now - began <= 15
        assert handle not in site.held


@in_virtual_time
@pytest.mark.parametrize("lived_s", [5, 300])
async def test_a_session_that_ended_while_the_broker_was_away_is_free_soon(tmp_path, lived_s):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        await until(lambda: broker.state(ada.handle) == "running", 60)
        await asyncio.sleep(lived_s)
        await broker.end()
        ada.alive, ada.used = False, {}
        del site.servers[ServerKey("ada", "")]
        broker = await site.start_broker()
        began = site.now
        await until(lambda: not broker.registry.leases and not site.held, 30)
        assert site.now - began <= 30


@in_virtual_time
async def test_a_superseded_broker_that_the_hub_starts_again_takes_a_higher_epoch(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        site.epoch = 9  # a broker on another database has acted here
        await until(lambda: broker.registry.journal.failed.done(), 30)
        site.wrong.clear()  # what it tried was refused
        await broker.end()
        broker = await site.start_broker()
        assert broker.store.epoch == site.epoch == 10
        job = await site.submit("bo", "1", program=Program(work_s=1))
        await until(lambda: broker.job(job).result, 60)


@in_virtual_time
async def test_a_job_with_processes_that_do_not_answer_is_not_taken_as_ended(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=1000))
        await until(lambda: broker.state(job) == "running", 60)
        held = site.held[broker.lease(job).handle]
        site.kill_job(job.id)
        for task in list(site._tasks):
            task.cancel()
        held.alive, held.used, held.unread_since = False, {}, site.now
        await asyncio.sleep(300)
        assert (broker.state(job), broker.lease(job).attempt) == ("running", 1)
        (reason,) = broker.views.health().reasons
        assert reason.startswith(f"Lease {held.handle}: processes of its user have not let")
        held.unread_since = 0.0
        await until(lambda: held.handle not in site.held, 60)
        assert not broker.views.health().reasons
