"""Suspensions and resumptions that are refused, overtaken or break off."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpushare.errors import DeviceError, HelperError
from jupyter_gpushare.protocol.helper import MoveResult, Phase, Refusal
from tests.broker.machine import Program
from tests.broker.virtual_time import STEP_S, until

FULL = MoveResult(done=False, refused=Refusal.NO_MEMORY, reason="the driver shows too little free memory")
BUSY = MoveResult(done=False, refused=Refusal.BUSY, reason="the lock timed out")
LOST = MoveResult(done=False, refused=Refusal.LOST, reason="the driver lost a process")


async def test_a_call_that_comes_between_decision_and_lock_keeps_the_gpu(site, broker):
    ada = await site.session("ada", "1/2")
    await site.submit("bo", "2")
    await until(lambda: broker.state(ada.handle) == "suspending", 120)
    used = dict(ada.used)
    await site.gpu_cell(ada)
    await until(lambda: broker.state(ada.handle) == "running", 10)
    assert ada.used == used
    await until(lambda: broker.state(ada.handle) == "suspending", 120, max_step_s=STEP_S)
    assert site.now - ada.active_at >= site.policy.idle_timeout_s


async def test_a_wish_that_comes_while_the_memory_is_being_parked_is_not_forgotten(site, broker):
    ada = await site.session("ada", "1/2")
    await site.submit("bo", "2")
    await until(lambda: broker.state(ada.handle) == "suspending", 120)
    await asyncio.sleep(site.move_s / 2)
    await broker.loop.observer._wanted(broker.lease(ada.handle), queries_only=False)
    await until(lambda: broker.state(ada.handle) == "running", 10)
    assert broker.lease(ada.handle).why == "wanted"


async def test_a_refused_suspension_leaves_it_running_and_is_tried_again_later(site, broker):
    ada = await site.session("ada", "1/2")
    site.fault("suspend", BUSY)
    await site.submit("bo", "2")
    await until(lambda: "suspend" in " ".join(site.effects), 120)
    first = site.now
    await until(lambda: broker.state(ada.handle) == "running", 5)
    assert broker.lease(ada.handle).suspend_reason == "the lock timed out"
    shown = broker.shown(ada.handle)
    assert not shown.suspendable
    assert "the lock timed out" in shown.sentence
    await until(lambda: broker.state(ada.handle) == "suspended", 60)
    assert site.now - first >= 10
    assert sum(e.startswith("suspend ") for e in site.effects) == 2


@pytest.mark.parametrize("error", [HelperError("silent", "x"), DeviceError("cuCheckpointLock", 999)])
async def test_an_effect_that_breaks_is_tried_again(site, broker, error):
    ada = await site.session("ada", "1/2")
    site.fault("suspend", error, error)
    job = await site.submit("bo", "2", program=Program(work_s=5))
    assert await broker.ended(job, 200) == "succeeded"
    assert sum(e.startswith(f"suspend {ada.handle}") for e in site.effects) == 3


async def test_a_session_that_cannot_be_parked_is_never_asked(site, broker):
    ada = await site.session("ada", "1/2")
    ada.suspendable = False
    job = await site.submit("bo", "2")
    await until(lambda: site.now - ada.active_at > 500, 600)
    assert broker.state(ada.handle) == "running"
    assert broker.state(job) == "pending"
    assert "it uses CUDA IPC" in broker.shown(ada.handle).sentence


async def test_a_resume_without_free_memory_is_tried_until_there_is_some(site, broker):
    ada = await site.session("ada", "1/2")
    used = dict(ada.used)
    await site.running("bo", "2", program=Program(work_s=100))
    site.fault("resume", FULL, FULL, BUSY)
    await site.gpu_cell(ada)
    assert ada.used == used
    assert sum(e == f"resume {ada.handle}" for e in site.effects) == 4
    await until(lambda: broker.state(ada.handle) == "running", 5)
    assert broker.lease(ada.handle).note == ""


async def test_a_lost_state_is_told_and_the_session_keeps_its_devices(site, broker):
    ada, _ = await site.lent(program=Program(work_s=100))
    site.fault("resume", LOST)
    cell = site.later(site.gpu_cell(ada))
    await until(lambda: broker.state(ada.handle) == "running", 60)
    await asyncio.sleep(20)
    seen = broker.shown(ada.handle)
    assert (seen.lost, seen.badge) == (True, "GPU state lost")
    assert "have to restart" in seen.sentence
    ada.phase = Phase.RUNNING  # the kernel was restarted: the processes that were lost have ended
    await cell
    await until(lambda: not broker.shown(ada.handle).lost, 30)
    assert broker.shown(ada.handle).badge == "Active"


@pytest.mark.parametrize("dies", [False, True])
async def test_a_job_with_lost_state_starts_again_which_is_no_failure_of_its_own(site, broker, dies):
    ada, job = await site.lent(program=Program(work_s=100, dies_of_loss=dies))
    await site.gpu_cell(ada)
    await until(lambda: broker.state(job) == "suspended", 60)
    site.fault("resume", LOST)
    await site.end_session("ada")
    await until(lambda: broker.job(job).preemptions == 2, 120)
    again = broker.job(job)
    assert (again.failures, again.result) == (0, "")
    assert any("could not be brought back" in d.sentence for d in broker.registry.decisions.latest)
    await until(lambda: broker.job(job).result, 600)
    assert (broker.job(job).result, broker.job(job).attempts) == ("succeeded", 2)


async def test_a_resume_that_stays_refused_is_tried_again_and_told_once(site, broker):
    ada = await site.session("ada", "1")
    await site.submit("bo", "2", program=Program(work_s=5))
    await until(lambda: ada.phase is Phase.SUSPENDED, 120)
    site.fault("resume", *[MoveResult(done=False, refused=Refusal.BUSY, reason="not yet")] * 60)
    cell = site.later(site.gpu_cell(ada))
    await asyncio.sleep(120)
    assert not cell.done()
    tried = [d for d in broker.registry.decisions.latest if d.action == "resume"]
    assert len(tried) <= 2
    await until(cell.done, 300)
    assert ada.phase is Phase.RUNNING


async def test_a_suspension_that_the_helper_rolled_back_is_seen(site, broker):
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "1", program=Program(work_s=5))
    other = await site.submit("cy", "1", program=Program(work_s=1000))
    await until(lambda: broker.job(job).result, 60)
    await broker.own_sessions.lend(broker.lease(ada.handle))
    await until(lambda: broker.state(other) == "running", 120)
    assert broker.state(ada.handle) in ("running", "suspended")
    ada.phase, ada.saved = Phase.RUNNING, {}
    await until(lambda: broker.state(ada.handle) == "running", 30)
    assert broker.lease(ada.handle).lease.saved_bytes == 0
