"""kill -9 of the broker between any two steps: no lease in two places, no job lost, none run twice.

A step is a commit, or a call to the outside; the broker may die before or
after each.  The next broker finds the store, the helper, the Hub.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from jupyter_gpushare.core.model import CheckpointMode
from jupyter_gpushare.errors import StoreError
from tests.broker.brokers import Broker
from tests.broker.machine import Program
from tests.broker.site import Site
from tests.broker.virtual_time import in_virtual_time, until

# Every fifth step, to be quick; GPUSHARE_EVERY_STEP=1 tries them all.
STRIDE = 1 if os.environ.get("GPUSHARE_EVERY_STEP") else 5


async def restart_on_death(site: Site, deaths: list[int]) -> None:
    """Start a broker again whenever one has died, as its parent does."""
    while True:
        broker = site.broker
        assert broker is not None
        await broker.dead.wait()
        await broker.end()
        await asyncio.sleep(0.5)
        await site.start_broker(deaths.pop(0) if deaths else None)


def now(site: Site) -> Broker:
    assert site.broker is not None
    return site.broker


def ended(site: Site, job) -> str:
    known = now(site).registry.jobs.get(job.id)
    assert known is not None, "a job was lost"
    return known.result


async def lending(site: Site) -> None:
    """ada lends, bo works, ada comes back, bo goes on; every byte and every step survives."""
    ada = await site.session("ada", "1/2")
    used = dict(ada.used)
    job = await site.submit("bo", "2", key="bo-1", program=Program(work_s=12))
    await until(lambda: site.worked_s[job.id] > 4, 600)
    await site.gpu_cell(ada)
    assert ada.used == used
    await until(lambda: ended(site, job), 900)
    assert ended(site, job) == "succeeded"
    assert site.started[job.id] == 1
    assert site.worked_s[job.id] == 12
    await site.end_session("ada")
    await until(lambda: not now(site).registry.leases and not site.held, 300)


async def requeueing(site: Site) -> None:
    """A job that cannot sleep is stopped for its lender and starts again; another one fails twice."""
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", checkpoint=CheckpointMode.SIGTERM, program=Program(work_s=10))
    await until(lambda: site.worked_s[job.id] > 5, 600)
    await site.gpu_cell(ada)
    flaky = await site.submit("cy", "0.5", retries=1, program=Program(work_s=3, exit_code=9))
    await until(lambda: ended(site, job) and ended(site, flaky), 900)
    assert ended(site, job) == "succeeded"
    assert site.worked_in[job.id, now(site).registry.jobs[job.id].attempts] == 10
    assert ended(site, flaky) == "failed"
    assert now(site).registry.jobs[flaky.id].exit_code == 9
    assert site.started[flaky.id] == 2
    await site.end_session("ada")
    await until(lambda: not now(site).registry.leases and not site.held, 300)


async def cancelling(site: Site) -> None:
    """Jobs are cancelled while they run and while they start; a third one gets the capacity."""
    first = await site.submit("bo", "2", program=Program(work_s=1000))
    second = await site.submit("bo", "2", program=Program(work_s=1000))
    third = await site.submit("bo", "2", program=Program(work_s=5))
    await until(lambda: site.worked_s[first.id] > 3, 300)
    await site.ask(lambda b: b.requests.cancel(b.registry.jobs[first.id]))
    await until(lambda: site.started[second.id] or str(now(site).state(second)) == "granted", 300)
    await site.ask(lambda b: b.requests.cancel(b.registry.jobs[second.id]))
    await until(lambda: all(ended(site, j) for j in (first, second, third)), 600)
    assert [ended(site, j) for j in (first, second, third)] == ["cancelled", "cancelled", "succeeded"]
    await until(lambda: not now(site).registry.leases and not site.held and not site.runs, 300)


STORIES = {story.__name__: story for story in (lending, requeueing, cancelling)}


async def play(tmp_path, name: str, deaths: list[int]) -> int:
    """Play a story while brokers die; returns how many steps the first one did."""
    async with Site(tmp_path) as site:
        site.patient = True
        site.policy = replace(site.policy, idle_timeout_s=8.0)
        first = await site.start_broker(deaths.pop(0) if deaths else None)
        supervisor = site.later(restart_on_death(site, deaths))
        await STORIES[name](site)
        if supervisor.done():
            supervisor.result()
        return first.steps


def _steps(folder, name: str, deaths: list[int]) -> int:
    done = []

    @in_virtual_time
    async def run():
        done.append(await play(folder, name, deaths))

    folder.mkdir()
    run()
    return done[0]


@pytest.mark.long_form
@pytest.mark.parametrize("name", STORIES)
def test_a_broker_may_die_at_any_step(tmp_path, name):
    steps = _steps(tmp_path / "whole", name, [])
    assert steps > 20
    for number in range(1, steps + 1, STRIDE):
        try:
            _steps(tmp_path / str(number), name, [number])
        except BaseException as error:
            error.add_note(f"the broker died at step {number} of {steps}")
            raise


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("every", [7, 13])
def test_a_broker_may_die_again_and_again(tmp_path, name, every):
    _steps(tmp_path / "often", name, [every] * 12)


async def test_an_exit_code_told_just_before_a_crash_is_settled_once(site, broker):
    job = await site.submit("bo", "1", program=Program(work_s=5))
    await until(lambda: broker.job(job).exit_code == 0, 60)
    await broker.end()
    began = site.now
    await until(lambda: site.now - began > 100)
    broker = await site.start_broker()
    assert await broker.ended(job, 60) == "succeeded"
    assert site.started[job.id] == 1
    assert not site.held


async def test_a_job_that_lives_is_adopted_after_a_crash(site, broker):
    job = await site.running("bo", "1", program=Program(work_s=300))
    await broker.end()
    began = site.now
    await until(lambda: site.now - began > 50)
    broker = await site.start_broker()
    assert await broker.ended(job, 600) == "succeeded"
    assert site.worked_s[job.id] == 300


async def test_a_job_that_died_while_no_broker_lived_has_failed(site, broker):
    job = await site.running("bo", "1", program=Program(work_s=300))
    await broker.end()
    site.kill_job(job.id)
    broker = await site.start_broker()
    assert await broker.ended(job, 60) == "failed"


async def test_after_a_reboot_running_jobs_have_failed_and_waiting_ones_start(site, broker):
    lost = await site.submit("bo", "2", program=Program(work_s=300))
    tried = await site.submit("cy", "2", program=Program(work_s=3))
    await until(lambda: broker.state(lost) == "running", 60)
    await broker.end()
    site.kill_job(lost.id)
    site.held.clear()
    site.servers.clear()
    site.boot_id = "boot-2"
    broker = await site.start_broker()
    await until(lambda: broker.job(tried).result, 200)
    assert broker.seen(lost).state == "failed"
    assert broker.seen(tried).state == "succeeded"


async def test_a_commit_that_fails_ends_the_broker_and_the_next_one_goes_on(site, broker, monkeypatch):
    job = await site.running("bo", "1", program=Program(work_s=5))

    def full(_changes):
        raise StoreError("a commit failed: disk is full")

    monkeypatch.setattr(broker.store, "_write", full)
    await until(lambda: broker._running is not None and broker._running.done(), 60)
    assert broker._running is not None
    with pytest.raises(BaseExceptionGroup) as ended_with:
        broker._running.result()
    assert ended_with.value.subgroup(StoreError) is not None
    await broker.end()
    broker = await site.start_broker()
    assert await broker.ended(job, 60) == "succeeded"
