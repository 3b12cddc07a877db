"""What ended while no broker looked: observed at the Hub and the driver, and settled in seconds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.protocol import wire
from tests.broker.machine import Held, Program
from tests.broker.virtual_time import until


@pytest.mark.parametrize("away", [False, True])
async def test_a_job_settles_after_its_runner_was_killed_and_leftovers_are_ended(site, broker, away):
    job = await site.running("bo", "2", retries=1, grace_s=30, program=Program(work_s=1000))
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


async def test_a_runner_killed_before_its_first_report_holds_no_gpu(site, broker):
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


@pytest.mark.parametrize("lived_s", [5, 300])
async def test_a_session_that_ended_while_the_broker_was_away_is_free_soon(site, broker, lived_s):
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


async def test_a_job_with_processes_that_do_not_answer_is_not_taken_as_ended(site, broker):
    job = await site.running("bo", "1", program=Program(work_s=1000))
    held = site.held[broker.lease(job).handle]
    site.kill_job(job.id)
    for task in list(site._tasks):
        task.cancel()
    held.alive, held.used, held.unread_since = False, {}, site.now
    await asyncio.sleep(300)
    assert (broker.state(job), broker.lease(job).attempt) == ("running", 1)
    (reason,) = broker.views.health().reasons
    assert reason.startswith(f"Lease {held.handle}: the device helper could not read processes of its user")
    held.unread_since = 0.0
    await until(lambda: held.handle not in site.held, 60)
    assert not broker.views.health().reasons


async def test_a_session_that_stops_keeps_its_gpu_while_a_process_on_it_does_not_answer(site, broker):
    ada = await site.session("ada", "1")
    await until(lambda: broker.state(ada.handle) == "running", 60)
    ada.unread_since = site.now
    await site.end_session("ada")
    await asyncio.sleep(60)
    assert broker.state(ada.handle) == "stopping"
    assert f"signal SIGKILL all {ada.handle}" in site.effects
    ada.unread_since = 0.0
    await until(lambda: not broker.registry.leases and not site.held, 60)


async def test_an_unknown_lease_is_not_dropped_while_a_process_on_it_does_not_answer(site):
    site.held["eve-1"] = eve = Held("eve-1", 1000, {"GPU-0": 1}, unread_since=1.0)
    broker = await site.start_broker()
    await asyncio.sleep(10)
    assert broker.registry.devices.orphaned == {"GPU-0": "eve-1"}
    eve.unread_since = 0.0
    await until(lambda: not site.held and not broker.registry.devices.orphaned, 60)


async def test_a_failed_start_is_not_repeated_while_a_process_on_its_gpu_does_not_answer(site, broker):
    site.spawn_s = 5.0
    job = await site.submit("bo", "1", program=Program(work_s=5))
    await until(lambda: f"j{job.id}-1" in site.held, 60)
    held, key = site.held[f"j{job.id}-1"], ServerKey("bo", f"j{job.id}-1")
    for task in list(site._tasks):
        task.cancel()
    del site.servers[key]
    held.unread_since = site.now
    await broker.stop(wire.SpawnStop(user="bo", server=key.server))
    await asyncio.sleep(60)
    assert broker.state(job) == "stopping"
    held.unread_since = 0.0
    await until(lambda: broker.job(job).result, 60)


@pytest.mark.site(gpus=1)
async def test_a_late_sample_of_an_attempt_that_is_over_says_nothing_about_the_next(site, broker):
    job = await site.running("bo", "1", retries=1, program=Program(work_s=5, exit_code=1))
    late = await broker.devices.sample()
    observer, observation = broker.loop.observer, broker.registry.observations[job.lease_id]

    async def answer():
        return replace(late, at=site.now)

    site.unhealthy.add("GPU-0")
    await until(lambda: broker.state(job) == "pending", 60)
    observer._devices = SimpleNamespace(sample=answer, drop=broker.devices.drop)
    await observer.measure()
    assert broker.state(job) == "pending"
    assert (observation.sample, observation.seen_alive) == (None, False)
    observer._devices = broker.devices


async def test_a_sample_that_was_answered_late_replaces_no_newer_one(broker):
    late = await broker.devices.sample()
    await asyncio.sleep(3)
    newest = broker.registry.devices.sampled_at

    async def answer():
        return late

    broker.loop.observer._devices = SimpleNamespace(sample=answer)
    await broker.loop.observer.measure()
    assert broker.registry.devices.sampled_at == newest
    broker.loop.observer._devices = broker.devices
