"""The loop on a site in memory: the story, refusals, failures, stale news."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from jupyter_gpushare import wire
from jupyter_gpushare.backends.base import HubError, ServerKey
from jupyter_gpushare.broker.loop import STALE_S, is_job_server
from jupyter_gpushare.broker.policy import Policy, ProjectConfig
from jupyter_gpushare.core.model import Survival
from jupyter_gpushare.core.plan import Keeper, plan
from jupyter_gpushare.errors import DeviceError, HelperError, InvalidRequest, StoreError
from jupyter_gpushare.gpu.verbs import EventKind, Moved, Phase, Refusal
from tests.broker.fake_backend import Program, Site, in_virtual_time, until

NO_ROOM = Moved(done=False, refused=Refusal.NO_ROOM, reason="the driver shows too little room")
BUSY = Moved(done=False, refused=Refusal.BUSY, reason="the lock timed out")
LOST = Moved(done=False, refused=Refusal.LOST, reason="the driver lost a process")
UNKNOWN = HelperError("unknown_lease", "no such lease on this machine")


@in_virtual_time
async def test_the_story_ada_lends_bo_works_ada_comes_back_bo_goes_on(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        used = dict(ada.used)
        job = await site.submit("bo", "2", program=Program(work_s=100))
        await until(lambda: broker.state(job) == "running", 120)
        assert broker.state(ada.handle) == "suspended"
        assert ada.used == {}
        assert ada.saved == used
        assert broker.lease(ada.handle).lease.saved_bytes == sum(used.values())
        await site.gpu_cell(ada)
        assert ada.used == used
        assert broker.state(job) == "suspended"
        assert "owner of the GPU came back" in broker.seen(job).reason
        await until(lambda: broker.job(job).result, 400)
        assert broker.job(job).result == "succeeded"
        assert broker.job(job).exit_code == 0
        assert broker.job(job).preemptions >= 1
        assert site.worked_s[job.id] == 100
        assert site.started[job.id] == 1
        assert site.held.keys() == {ada.handle}


@in_virtual_time
async def test_an_idle_session_keeps_its_gpu_while_nobody_waits(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        await until(lambda: site.now - ada.active_at > 500, 600)
        assert broker.state(ada.handle) == "running"


@in_virtual_time
async def test_a_session_is_put_to_sleep_exactly_when_its_idle_time_is_over(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        await site.submit("bo", "2")
        await until(lambda: broker.state(ada.handle) == "suspending", 120)
        idle_s = site.now - ada.active_at
        assert site.policy.idle_timeout_s <= idle_s <= site.policy.idle_timeout_s + 2


@in_virtual_time
async def test_a_busy_kernel_is_never_idle(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        kernel = wire.KernelActivity(id="k", busy=True, idle_s=0.0)
        await broker.desk.activity("ada", "", wire.ActivityReport(kernels=[kernel]))
        job = await site.submit("bo", "2")
        await until(lambda: site.now - ada.active_at > 1_000, 2_000)
        assert broker.state(ada.handle) == "running"
        assert broker.state(job) == "pending"


@in_virtual_time
async def test_a_call_that_comes_between_decision_and_lock_keeps_the_gpu(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        await site.submit("bo", "2")
        await until(lambda: broker.state(ada.handle) == "suspending", 120)
        used = dict(ada.used)
        await site.gpu_cell(ada)
        await until(lambda: broker.state(ada.handle) == "running", 10)
        assert ada.used == used
        await until(lambda: broker.state(ada.handle) == "suspending", 120)
        assert site.now - ada.active_at >= site.policy.idle_timeout_s


@in_virtual_time
async def test_a_wish_that_comes_while_the_memory_is_being_parked_is_not_forgotten(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        await site.submit("bo", "2")
        await until(lambda: broker.state(ada.handle) == "suspending", 120)
        await asyncio.sleep(site.move_s / 2)
        await broker.loop._wanted(broker.lease(ada.handle), queries_only=False)
        await until(lambda: broker.state(ada.handle) == "running", 10)
        assert broker.lease(ada.handle).why == "wanted"


@in_virtual_time
async def test_a_refused_suspension_leaves_it_running_and_is_tried_again_later(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        site.fault("suspend", BUSY)
        await site.submit("bo", "2")
        await until(lambda: "suspend" in " ".join(site.effects), 120)
        first = site.now
        await until(lambda: broker.state(ada.handle) == "running", 5)
        assert broker.lease(ada.handle).suspend_reason == "the lock timed out"
        shown = broker.views.lease(broker.lease(ada.handle))
        assert not shown.suspendable
        assert "the lock timed out" in shown.sentence
        await until(lambda: broker.state(ada.handle) == "suspended", 60)
        assert site.now - first >= 10
        assert sum(e.startswith("suspend ") for e in site.effects) == 2


@pytest.mark.parametrize("error", [HelperError("silent", "x"), DeviceError("cuCheckpointLock", 999)])
@in_virtual_time
async def test_an_effect_that_breaks_is_tried_again(tmp_path, error):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        site.fault("suspend", error, error)
        job = await site.submit("bo", "2", program=Program(work_s=5))
        await until(lambda: broker.job(job).result, 200)
        assert broker.job(job).result == "succeeded"
        assert sum(e.startswith(f"suspend {ada.handle}") for e in site.effects) == 3


@in_virtual_time
async def test_a_session_that_cannot_be_parked_is_never_asked(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        ada.suspendable = False
        job = await site.submit("bo", "2")
        await until(lambda: site.now - ada.active_at > 500, 600)
        assert broker.state(ada.handle) == "running"
        assert broker.state(job) == "pending"
        assert "it uses CUDA IPC" in broker.views.lease(broker.lease(ada.handle)).sentence


@in_virtual_time
async def test_a_resume_without_room_is_tried_until_there_is_some(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        used = dict(ada.used)
        job = await site.submit("bo", "2", program=Program(work_s=100))
        await until(lambda: broker.state(job) == "running", 120)
        site.fault("resume", NO_ROOM, NO_ROOM, BUSY)
        await site.gpu_cell(ada)
        assert ada.used == used
        assert sum(e == f"resume {ada.handle}" for e in site.effects) == 4
        await until(lambda: broker.state(ada.handle) == "running", 5)
        assert broker.lease(ada.handle).note == ""


@in_virtual_time
async def test_a_lost_state_is_told_and_the_session_keeps_its_room(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        job = await site.submit("bo", "2", program=Program(work_s=100))
        await until(lambda: broker.state(job) == "running", 120)
        site.fault("resume", LOST)
        await site.gpu_cell(ada)
        await until(lambda: broker.state(ada.handle) == "running", 5)
        assert "have to restart" in broker.views.lease(broker.lease(ada.handle)).sentence


@in_virtual_time
async def test_a_job_that_ends_with_an_error_has_failed_with_its_code(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=5, exit_code=7))
        await until(lambda: broker.job(job).result, 60)
        seen = broker.seen(job)
        assert (seen.state, seen.exit_code, seen.attempt) == ("failed", 7, 1)
        assert "exit code 7" in seen.reason
        assert not broker.book.leases
        assert not site.held


@in_virtual_time
async def test_a_job_that_ends_at_once_is_a_result(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=0))
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "succeeded"
        assert broker.seen(job).started_at is not None


@in_virtual_time
async def test_a_job_whose_processes_vanish_has_failed(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(vanishes_after_s=3))
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "failed"
        assert "vanished" in broker.seen(job).reason
        assert broker.seen(job).exit_code is None


@in_virtual_time
async def test_a_job_with_retries_is_tried_again_and_counts(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", retries=2, program=Program(work_s=5, exit_code=1))
        await until(lambda: broker.job(job).result, 200)
        assert site.started[job.id] == 3
        assert (broker.job(job).failures, broker.job(job).attempts) == (3, 3)
        assert broker.seen(job).state == "failed"


@pytest.mark.parametrize("survival", [Survival.SIGTERM, Survival.NONE])
@in_virtual_time
async def test_a_job_that_cannot_sleep_is_stopped_with_grace_and_starts_again(tmp_path, survival):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        job = await site.submit("bo", "2", checkpoint=survival, program=Program(work_s=90))
        await until(lambda: broker.state(job) == "running", 120)
        await site.gpu_cell(ada)
        assert f"signal SIGTERM leader j{job.id}-1" in site.effects
        await until(lambda: broker.state(job) == "pending", 10)
        assert broker.job(job).preemptions == 1
        assert broker.job(job).exit_code is None
        await until(lambda: broker.job(job).result, 300)
        assert broker.seen(job).state == "succeeded"
        assert broker.seen(job).attempt == 2
        assert site.worked_in[job.id, 2] == 90
        assert not any("SIGKILL" in e for e in site.effects)


@in_virtual_time
async def test_a_job_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", grace_s=7.0, program=Program(work_s=900, heeds_sigterm=False))
        await until(lambda: broker.state(job) == "running", 60)
        await broker.desk.cancel(broker.job(job))
        asked = site.now
        await until(lambda: broker.job(job).result, 60)
        assert f"signal SIGKILL all j{job.id}-1" in site.effects
        assert 7 <= site.now - asked < 20
        assert broker.seen(job).state == "cancelled"


@in_virtual_time
async def test_room_is_given_on_only_when_the_driver_shows_the_memory_gone(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        first = await site.submit("bo", "2", program=Program(work_s=10, lingers_s=40, memory=1.0))
        second = await site.submit("bo", "2", program=Program(work_s=5, memory=1.0))
        await until(lambda: broker.job(first).exit_code == 0, 60)
        ended = site.now
        await until(lambda: broker.state(second) == "granted", 120)
        assert site.now - ended >= 40
        await until(lambda: broker.job(second).result, 60)


# ---- cancelling in every state ---------------------------------------------------


@in_virtual_time
async def test_a_waiting_job_is_cancelled_at_once(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        await site.submit("bo", "2", program=Program(work_s=100))
        job = await site.submit("bo", "2")
        cancelled = await broker.desk.cancel(job)
        assert cancelled.result == "cancelled"
        assert job.lease_id not in broker.book.leases
        assert (await broker.desk.cancel(cancelled)) == cancelled


@pytest.mark.parametrize("after_s", [0.05, 0.15, 0.25, 0.35, 0.45])
@in_virtual_time
async def test_a_starting_job_is_cancelled_and_its_command_never_goes_on(tmp_path, after_s):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=1000))
        await until(lambda: broker.state(job) == "granted", 10)
        began = site.now
        await until(lambda: site.now >= began + after_s)
        await broker.desk.cancel(broker.job(job))
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "cancelled"
        await until(lambda: not site.runs and not site.servers, 60)
        assert not site.held


@in_virtual_time
async def test_a_starting_job_whose_lease_the_helper_does_not_know_is_cancelled(tmp_path):
    async with Site(tmp_path) as site:
        site.spawn_s = 3.0
        broker = await site.start_broker()
        job = await site.submit("bo", "1")
        await until(lambda: broker.state(job) == "granted", 10)
        await broker.desk.cancel(broker.job(job))
        await until(lambda: broker.job(job).result, 60)
        await until(lambda: not site.servers, 60)
        assert site.started[job.id] == 0


@in_virtual_time
async def test_a_sleeping_job_is_cancelled(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        job = await site.submit("bo", "2", program=Program(work_s=1000))
        await until(lambda: broker.state(job) == "running", 120)
        await site.gpu_cell(ada)
        assert broker.state(job) == "suspended"
        await broker.desk.cancel(broker.job(job))
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "cancelled"
        assert broker.state(ada.handle) == "running"


@pytest.mark.parametrize("state", ["suspending", "resuming", "stopping"])
@in_virtual_time
async def test_a_moving_job_is_cancelled(tmp_path, state):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        how = Survival.SIGTERM if state == "stopping" else Survival.SUSPEND
        job = await site.submit("bo", "2", checkpoint=how, program=Program(work_s=1000))
        await until(lambda: broker.state(job) == "running", 120)
        site.later(site.gpu_cell(ada))
        await until(lambda: broker.state(job) == state, 300)
        await broker.desk.cancel(broker.job(job))
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "cancelled"
        assert not site.runs


# ---- starts that fail ------------------------------------------------------------


@in_virtual_time
async def test_a_start_that_the_hub_refuses_for_good_fails_the_job(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        site.fault("start_server", HubError("no such user", permanent=True))
        job = await site.submit("bo", "1")
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "failed"
        assert "no such user" in broker.seen(job).reason


@in_virtual_time
async def test_a_start_that_fails_is_tried_again_with_longer_pauses_then_given_up(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        site.fault("start_server", *[HubError("the Hub is busy")] * 5)
        job = await site.submit("bo", "1")
        began = site.now
        await until(lambda: broker.job(job).result, 300)
        assert broker.seen(job).state == "failed"
        assert "the Hub is busy" in broker.seen(job).reason
        assert site.now - began >= 2 + 4 + 8 + 16


@in_virtual_time
async def test_a_start_that_fails_once_succeeds_the_next_time(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        site.fault("start_server", HubError("the Hub is busy"))
        job = await site.submit("bo", "1", program=Program(work_s=1))
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "succeeded"
        assert site.started[job.id] == 1


@in_virtual_time
async def test_a_hub_that_starts_nothing_costs_no_job_its_tries(tmp_path, monkeypatch):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        real, asked = broker.backend.start_server, []

        async def refuse(key):
            asked.append(site.now)
            raise HubError("Missing or invalid credentials.", not_now=True)

        monkeypatch.setattr(broker.backend, "start_server", refuse)
        jobs = [await site.submit("bo", "1", program=Program(work_s=1)) for _ in range(8)]
        began = site.now
        await asyncio.sleep(1800)
        assert [broker.job(job).result for job in jobs] == [""] * 8
        assert "Missing or invalid credentials" in broker.lease(jobs[0]).note
        # The pauses grow to a minute; a round asks once for each GPU.
        assert len(asked) <= 2 * (6 + 1800 / 60)
        assert all(at - began < 60 or b - a <= 62 for at, a, b in zip(asked, asked, asked[1:], strict=False))
        monkeypatch.setattr(broker.backend, "start_server", real)
        await until(lambda: all(broker.job(job).result == "succeeded" for job in jobs), 300)


@in_virtual_time
async def test_a_start_that_the_hub_gave_up_is_not_tried_again_beside_what_came_of_it(tmp_path):
    """Its spawn timed out, but processes of it are there: they go first (the fake tells of two at once)."""
    async with Site(tmp_path) as site:
        site.spawn_s = 5.0
        broker = await site.start_broker()
        job = await site.submit("bo", "1", retries=1, program=Program(work_s=10))
        await until(lambda: f"prepare j{job.id}-1" in site.effects, 30)
        for task in list(site._tasks):
            task.cancel()  # the Hub kills the runner ...
        site.servers.clear()
        held = site.held[f"j{job.id}-1"]
        held.alive = True  # ... and not what it had started
        site.use(held, dict(held.limits))
        await broker.desk.stop(wire.SpawnStop(user="bo", server=f"j{job.id}-1"))
        assert broker.state(job) == "stopping"
        site.spawn_s = 0.2
        await asyncio.sleep(5)
        assert site.started[job.id] == 0
        held.alive, held.used = False, {}
        await until(lambda: broker.job(job).result, 200)
        assert broker.job(job).result == "succeeded"
        assert broker.job(job).attempts == 2


@in_virtual_time
async def test_a_server_that_only_bears_a_name_like_a_jobs_is_left_alone(tmp_path):
    async with Site(tmp_path) as site:
        await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=1))
        await until(lambda: site.broker.job(job).result, 60)
        site.servers[ServerKey("ada", "juliaserver-1")] = "ready"
        site.servers[ServerKey("ada", f"j{job.id}-1")] = "ready"
        site.servers[ServerKey("bo", "jaaaaaaaaaa-1")] = "ready"
        site.servers[ServerKey("bo", f"j{job.id}-1")] = "ready"
        await until(lambda: f"stop_server j{job.id}-1" in site.effects, 60)
        await asyncio.sleep(60)
        assert not {"stop_server juliaserver-1", "stop_server jaaaaaaaaaa-1"} & set(site.effects)
        assert ServerKey("ada", f"j{job.id}-1") in site.servers


@in_virtual_time
async def test_a_resume_that_stays_refused_is_tried_again_and_told_once(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1")
        await site.submit("bo", "2", program=Program(work_s=5))
        await until(lambda: ada.phase is Phase.SUSPENDED, 120)
        site.fault("resume", *[Moved(done=False, refused=Refusal.BUSY, reason="not yet")] * 60)
        cell = site.later(site.gpu_cell(ada))
        await asyncio.sleep(120)
        assert not cell.done()
        tried = [d for d in broker.book.decisions if d.action == "resume"]
        assert len(tried) <= 2
        await until(cell.done, 300)
        assert ada.phase is Phase.RUNNING


@in_virtual_time
async def test_a_device_that_is_not_measured_any_more_takes_nothing_new(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        site.unmeasured = {site.uuids[0]}
        await until(lambda: [d.usable for d in broker.book.devices()] == [False, True], 10)
        site.unmeasured = set()
        await until(lambda: all(d.usable for d in broker.book.devices()), 10)


@in_virtual_time
async def test_a_server_that_never_comes_is_a_failed_start(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1")
        await until(lambda: broker.state(job) == "granted", 10)
        key = ServerKey("bo", f"j{job.id}-1")
        site.spawn_s = 1e5  # this one hangs for ever
        await until(lambda: key in site.servers, 10)
        for task in list(site._tasks):
            task.cancel()
        site.servers.pop(key)
        await until(lambda: broker.state(job) == "pending", 120)
        site.spawn_s = 0.2
        await until(lambda: broker.job(job).result, 120)
        assert broker.seen(job).state == "succeeded"


@in_virtual_time
async def test_a_start_whose_answer_was_lost_is_not_started_a_second_time(tmp_path, monkeypatch):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        real = broker.backend.start_server

        async def answer_lost(key):
            await real(key)
            raise HubError("the Hub does not answer (ReadTimeout)")

        monkeypatch.setattr(broker.backend, "start_server", answer_lost)
        job = await site.submit("bo", "1", program=Program(work_s=20))
        await until(lambda: broker.job(job).result, 120)
        assert broker.seen(job).state == "succeeded"
        assert site.started[job.id] == 1
        assert broker.seen(job).attempt == 1


@in_virtual_time
async def test_a_job_cancelled_while_its_server_starts_ends_only_with_that_server(tmp_path):
    async with Site(tmp_path) as site:
        site.spawn_s = 6.0
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=1000))
        await until(lambda: f"prepare j{job.id}-1" in site.effects, 30)
        await broker.desk.cancel(broker.job(job))
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "cancelled"
        assert not site.runs
        assert not site.servers
        assert not site.held


# ---- news that is old, or missing ---------------------------------------------------


@in_virtual_time
async def test_without_news_from_the_helper_nothing_is_decided(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        job = await site.submit("bo", "2")
        await until(lambda: broker.state(ada.handle) == "running", 5)
        site.helper_silent = True
        before = site.now
        await until(lambda: site.now - before > 500, 600)
        assert broker.state(ada.handle) == "running"
        assert broker.state(job) == "pending"
        assert broker.views.health().status == "degraded"
        assert not broker.views.status("ada", ("vision",), admin=False).devices_known
        site.helper_silent = False
        await until(lambda: broker.job(job).result, 300)
        assert site.now - before > STALE_S


@in_virtual_time
async def test_a_helper_that_falls_silent_while_a_job_runs_costs_nothing(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=100))
        await until(lambda: broker.state(job) == "running", 60)
        site.helper_silent = True
        await until(lambda: broker.job(job).exit_code == 0, 200)
        site.helper_silent = False
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "succeeded"
        assert site.started[job.id] == 1


@in_virtual_time
async def test_a_session_whose_server_the_hub_no_longer_knows_is_released(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        site.servers.clear()
        ada.alive, ada.used = False, {}
        await until(lambda: not broker.book.leases, 200)
        assert not site.held


@in_virtual_time
async def test_a_session_that_lives_is_not_released_because_the_hub_forgot_it(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        site.servers.clear()
        began = site.now
        await until(lambda: site.now - began > 300, 400)
        assert broker.state(ada.handle) == "running"


@in_virtual_time
async def test_a_server_that_ends_frees_its_room_within_two_seconds(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        await site.session("ada", "1/2")
        await site.end_session("ada")
        await until(lambda: not broker.book.leases, 2)
        assert not site.held


@in_virtual_time
async def test_processes_that_outlive_their_server_are_killed_after_the_grace(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        await broker.desk.stop(wire.SpawnStop(user="ada", server=""))
        await broker.desk.stop(wire.SpawnStop(user="ada", server=""))
        assert broker.state(ada.handle) == "stopping"
        await until(lambda: not broker.book.leases, 60)
        assert f"signal SIGKILL all {ada.handle}" in site.effects


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("jabcdefghij-1", True),
        ("j0123456789-12", True),
        ("jabcdefghi-1", False),
        ("jabcdefghijk-1", False),
        ("jabcdefghij-", False),
        ("jabcdefghij-x", False),
        ("jabcdefghij", False),
        ("kabcdefghij-1", False),
        ("", False),
        ("-1", False),
    ],
)
def test_names_of_job_servers_are_told_from_others(name, ours):
    assert is_job_server(name) is ours


@in_virtual_time
async def test_a_broken_device_takes_nothing_new(tmp_path):
    async with Site(tmp_path) as site:
        site.unhealthy = {"GPU-0"}
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=1))
        pair = await site.submit("bo", "2")
        await until(lambda: broker.job(job).result, 60)
        assert broker.state(pair) == "pending"
        assert broker.views.health().status == "degraded"
        site.unhealthy = set()
        site.tell(EventKind.DEVICE)
        await until(lambda: broker.job(pair).result, 60)


@in_virtual_time
async def test_the_owner_is_told_what_the_watchdog_and_the_device_said(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada, bo = await site.session("ada", "1/2"), await site.session("bo", "1/2")
        fields = {"action": "stop", "pid": "77", "name": "python3"}
        site.tell(EventKind.OVER_LIMIT, ada.handle, "uses 9 bytes, 8 are granted", **fields)
        site.tell(EventKind.DEVICE, ada.handle, "XID 79: GPU has fallen off the bus", healthy="false")
        site.tell(EventKind.DEVICE, ada.handle, healthy="true")

        def told(user):
            return [
                d.sentence for d in broker.views.decisions(user, 10) if d.action in ("watchdog", "device")
            ]

        await until(lambda: len(told("ada")) == 3, 30)
        assert sorted(told("ada")) == [
            "ada's session (1/2 GPU) has its GPU back in service.",
            "ada's session (1/2 GPU) lost its GPU for now: XID 79: GPU has fallen off the bus.",
            "ada's session (1/2 GPU) uses 9 bytes, 8 are granted; process 77 (python3) was stopped.",
        ]
        assert told("bo") == []
        assert bo

        # Whose it is nobody knows: the administrator is told.
        reason = "a process without a lease uses this device"
        site.tell(EventKind.STRANGER, "", reason, action="warn", pid="78", name="miner")
        await until(lambda: len(told(None)) == 4, 30)
        assert told(None)[0] == f"This machine: {reason}; process 78 (miner) should be stopped."
        assert (len(told("ada")), told("bo")) == (3, [])


@in_virtual_time
async def test_background_queries_wake_nobody_but_a_busy_kernels_do(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        job = await site.submit("bo", "2", program=Program(work_s=1000))
        await until(lambda: broker.state(job) == "running", 120)
        site.tell(EventKind.WANTED, ada.handle, queries_only="true")
        began = site.now
        await until(lambda: site.now - began > 30)
        assert broker.state(ada.handle) == "suspended"
        kernel = wire.KernelActivity(id="k", busy=True, idle_s=0.0)
        await broker.desk.activity("ada", "", wire.ActivityReport(kernels=[kernel]))
        site.tell(EventKind.WANTED, ada.handle, queries_only="true")
        await until(lambda: broker.state(ada.handle) == "running", 30)


@in_virtual_time
async def test_a_wish_that_no_event_told_is_seen_in_the_samples(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        job = await site.submit("bo", "2", program=Program(work_s=1000))
        await until(lambda: broker.state(job) == "running", 120)
        ada.wanted = True
        await until(lambda: broker.state(ada.handle) == "running", 30)


@in_virtual_time
async def test_a_suspension_that_the_helper_rolled_back_is_seen(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        job = await site.submit("bo", "1", program=Program(work_s=5))
        other = await site.submit("cy", "1", program=Program(work_s=1000))
        await until(lambda: broker.job(job).result, 60)
        await broker.desk.lend(broker.lease(ada.handle))
        await until(lambda: broker.state(other) == "running", 120)
        assert broker.state(ada.handle) in ("running", "suspended")
        ada.phase, ada.saved = Phase.RUNNING, {}
        await until(lambda: broker.state(ada.handle) == "running", 30)
        assert broker.lease(ada.handle).lease.saved_bytes == 0


@in_virtual_time
async def test_a_lease_that_somebody_else_locked_goes_on(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        site.fault("resume", BUSY)
        ada.phase = Phase.LOCKED
        await until(lambda: ada.phase is Phase.RUNNING, 30)
        assert broker.state(ada.handle) == "running"


@in_virtual_time
async def test_the_next_session_on_lent_room_starts_asleep_and_gets_its_claim(tmp_path):
    async with Site(tmp_path, gpus=1) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=300))
        await until(lambda: broker.state(job) == "running", 60)
        ada = await site.session("ada", "1/2")
        assert broker.state(ada.handle) == "suspended"
        await site.gpu_cell(ada)
        assert broker.state(job) == "suspended"
        assert broker.state(ada.handle) == "running"


@in_virtual_time
async def test_a_job_of_higher_priority_goes_first_inside_its_project(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        await site.submit("bo", "2", program=Program(work_s=20))
        late = await site.submit("bo", "2", priority=-5, program=Program(work_s=5))
        urgent = await site.submit("bo", "2", priority=-1, program=Program(work_s=5))
        assert broker.seen(late).position == 2
        assert broker.seen(urgent).position == 1
        await until(lambda: broker.job(late).result, 200)
        assert broker.job(urgent).ended_at <= broker.job(late).ended_at
        assert broker.job(urgent).result == "succeeded"


@in_virtual_time
async def test_progress_is_shown(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=100))
        await until(lambda: broker.state(job) == "running", 60)
        await broker.desk.report("bo", job.id, 1, wire.JobReport(state="progress", done=3.0, total=10.0))
        assert (broker.seen(job).done, broker.seen(job).total) == (3.0, 10.0)
        last = wire.JobReport(state="ended", exit_code=0, done=10.0, total=10.0)
        await broker.desk.report("bo", job.id, 1, last)
        assert (broker.seen(job).done, broker.seen(job).total) == (10.0, 10.0)


@in_virtual_time
async def test_many_changes_reach_a_page_together_and_soon(tmp_path):
    async with Site(tmp_path) as site:
        book = (await site.start_broker(running=False)).book
        told = []

        async def page():
            seq = book.seq
            while True:
                await book.wait_beyond(seq, 30)
                seq = book.seq
                told.append((site.now, seq))

        site.later(page())
        await asyncio.sleep(1)
        first = site.now
        for _ in range(100):
            await book.bump()
            await asyncio.sleep(0.01)
        last = site.now
        await asyncio.sleep(1)
        assert told[0][0] == first, "the first one is told at once"
        assert 9 <= len(told) <= 12
        assert told[-1][0] <= last + 0.1
        assert told[-1][1] == book.seq


@in_virtual_time
async def test_progress_is_seen_at_once_and_stored_now_and_then(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=1_000))
        await until(lambda: broker.state(job) == "running", 60)
        stored = []
        sa.event.listen(
            broker.store._engine,
            "before_cursor_execute",
            lambda *a: stored.append(a[2].startswith("UPDATE jobs")),
        )
        for step in range(1, 301):  # ten a second
            report = wire.JobReport(state="progress", done=float(step), total=300.0)
            await broker.desk.report("bo", job.id, 1, report)
            assert broker.seen(job).done == step
            await asyncio.sleep(0.1)
        assert 3 <= sum(stored) <= 4
        await broker.desk.report("bo", job.id, 1, wire.JobReport(state="ended", exit_code=0))
        assert (await broker.store.job(job.id, "bo")).done == 300.0


@in_virtual_time
async def test_a_broker_on_a_restored_database_acts_again_and_keeps_clear_of_what_it_forgot(tmp_path):
    async with Site(tmp_path, gpus=2) as site:
        database = Path(sa.make_url(site.url).database)
        backup = database.read_bytes()
        for _ in range(2):
            await (await site.start_broker()).end()
        broker = await site.start_broker()
        forgotten = await site.session("ada", "1")
        await broker.end()
        for extra in database.parent.glob(f"{database.name}-*"):
            extra.unlink()
        database.write_bytes(backup)
        (busy,) = forgotten.limits
        broker = await site.start_broker()
        assert broker.store.epoch == 5  # the database counted to 2, the helper saw 4
        jobs = [await site.submit("bo", "1", program=Program(work_s=1)) for _ in range(2)]
        for job in jobs:
            await until(lambda job=job: broker.state(job) == "granted")
            assert busy not in broker.lease(job).lease.devices
            await until(lambda job=job: broker.job(job).result)
        assert any(busy in reason and forgotten.handle in reason for reason in broker.views.health().reasons)
        forgotten.alive, forgotten.used = False, {}
        await until(lambda: not broker.book.strayed)
        assert forgotten.handle not in site.held
        assert all(device.usable for device in broker.book.devices())


@in_virtual_time
async def test_a_broker_that_another_one_followed_never_takes_a_higher_epoch(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        before = broker.store.epoch
        site.epoch = 9  # another broker was at work on this machine
        with pytest.raises(HelperError, match="newer broker"):
            await broker.backend.drop("b-1")
        await asyncio.sleep(30)
        assert broker.store.epoch == before
        site.wrong.clear()  # what it tried was refused


@in_virtual_time
async def test_a_broker_whose_database_another_one_took_ends_instead_of_taking_a_higher_epoch(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker(running=False)
        with broker.store._engine.begin() as connection:
            connection.execute(sa.text("update meta set value = '9' where key = 'epoch'"))
        site.epoch = 9
        with pytest.raises(StoreError, match="a newer broker"):
            await broker.loop.measure()
        assert broker.book.failed.done()


@in_virtual_time
async def test_a_trouble_that_lasts_is_logged_once_a_minute(tmp_path, monkeypatch, caplog):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()

        async def sample():
            raise HelperError("gone", "no device helper")

        monkeypatch.setattr(broker.backend, "sample", sample)
        await asyncio.sleep(150)
        assert caplog.text.count("measuring: gone: no device helper") + caplog.text.count(
            "measuring: no device helper"
        ) in (3, 4)


@in_virtual_time
async def test_a_mistake_in_one_part_does_not_end_the_others(tmp_path, monkeypatch, caplog):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        broken = replace(broker.book.sample, leases=None)
        real = broker.backend.sample
        answers = iter([broken, broken])

        async def sample():
            return next(answers, None) or await real()

        monkeypatch.setattr(broker.backend, "sample", sample)
        job = await site.submit("bo", "1", program=Program(work_s=1))
        await until(lambda: broker.job(job).result, 60)
        assert "measuring failed" in caplog.text


@in_virtual_time
async def test_equal_jobs_of_a_project_take_turns_by_the_service_they_received(tmp_path):
    """Least attained service: the long job has had its share, the short one comes first, nothing is lost."""
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        long = await site.submit("bo", "2", program=Program(work_s=8_000))
        await until(lambda: broker.state(long) == "running", 60)
        await asyncio.sleep(1_000)  # 2,000 GPU-seconds: still in the first queue
        short = await site.submit("bo", "2", program=Program(work_s=100))
        await asyncio.sleep(60)
        assert (broker.state(long), broker.state(short)) == ("running", "pending")
        await asyncio.sleep(700)  # 3,250 are over
        await until(lambda: broker.job(short).result == "succeeded", 300)
        assert broker.job(long).result == ""
        await until(lambda: broker.job(long).result == "succeeded", 8_000)
        assert broker.job(long).preemptions == 1


@in_virtual_time
async def test_a_session_is_lent_sooner_after_long_work_and_later_after_a_break(tmp_path):
    async with Site(tmp_path) as site:
        site.policy = replace(site.policy, adaptive_idle=True)
        broker = await site.start_broker()
        ada = await site.session("ada", "1")
        await asyncio.sleep(5)
        record = broker.lease(ada.handle)
        live, now = broker.book.live[record.id], broker.book.clock()
        assert live.habit.idle_from is not None  # the loop has seen her idle
        usual = broker.book.measured(record, now).idle_timeout_s
        timeouts = []
        for _ in range(2):  # works for five hours, and after a break of an hour once more
            live.habit.saw(None, now)
            now += 5 * 3600
            live.habit.saw(now, now)
            timeouts.append(broker.book.measured(record, now).idle_timeout_s)
            now += 3600
        assert timeouts[0] < timeouts[1] < usual


@in_virtual_time
async def test_a_start_is_foretold_as_a_range_once_ten_jobs_have_ended(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        forecast = broker.views.forecast
        for _ in range(10):
            ended = await site.submit("bo", "2", program=Program(work_s=60))
            await forecast.look()
            assert broker.seen(ended).estimate is None
            asked = wire.JobRequest(command=["-"], gpus="2", project="nlp")
            assert "Starts in" not in (await broker.desk.outlook("bo", asked)).sentence
            await until(lambda ended=ended: broker.job(ended).result == "succeeded", 200)
        await site.submit("bo", "2", program=Program(work_s=60))
        job = await site.submit("bo", "2", program=Program(work_s=60))
        await asyncio.sleep(10)
        await forecast.look()
        seen = broker.seen(job)
        assert seen.estimate.low_s <= seen.estimate.likely_s <= seen.estimate.high_s
        assert 30 < seen.estimate.likely_s < 70
        assert "Starts in about 1 min (1-1)." in seen.reason
        # So is that of a job which somebody only thinks of: it would be behind both.
        asked = wire.JobRequest(command=["-"], gpus="2", project="nlp")
        answers = await asyncio.gather(*(broker.desk.outlook("bo", asked) for _ in range(2)))
        assert answers[0].sentence.endswith("Starts in about 2 min (2-2).")
        assert answers[0].position == 2
        await asyncio.sleep(20)
        assert broker.seen(job).estimate.likely_s == seen.estimate.likely_s - 20


@in_virtual_time
async def test_a_job_that_does_not_borrow_waits_for_its_quota_though_a_gpu_is_free(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        first = await site.submit("bo", "1", borrow=False, program=Program(work_s=100))
        second = await site.submit("bo", "1", borrow=False, program=Program(work_s=100))
        await until(lambda: broker.state(first) == "running", 120)
        assert broker.state(second) == "pending"
        assert not broker.seen(second).borrow
        assert "guaranteed" in broker.seen(second).reason
        await until(lambda: broker.job(second).result, 400)
        assert broker.job(first).result == broker.job(second).result == "succeeded"


@in_virtual_time
async def test_what_the_quota_can_never_cover_without_borrowing_is_refused(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        with pytest.raises(InvalidRequest, match="without borrowing; project nlp is guaranteed 1 GPU"):
            await site.submit("bo", "2", borrow=False)
        outlook = await broker.desk.outlook("bo", wire.JobRequest(command=["-"], project="nlp", borrow=False))
        assert outlook.starts == "now"
        assert not outlook.borrowed


@in_virtual_time
async def test_who_lags_behind_its_fair_share_is_remembered_over_a_restart(tmp_path):
    policy = Policy(
        projects=tuple(ProjectConfig(name=n, quota_milli=0, groups=(n,)) for n in ("vision", "nlp")),
        grace_s=5.0,
        min_run_s=100_000.0,
    )
    async with Site(tmp_path, policy=policy) as site:
        broker = await site.start_broker()
        first = await site.submit("bo", "2", program=Program(work_s=10_000))
        await until(lambda: broker.state(first) == "running", 120)
        await site.submit("ada", "2", program=Program(work_s=10))
        await until(lambda: broker.book.lags.gpu_s, 2_000)
        lags = dict(broker.book.lags.gpu_s)
        assert lags["vision"] > 0
        assert lags["nlp"] == pytest.approx(-lags["vision"], abs=0.2)
        await broker.end()
        broker = await site.start_broker()
        assert broker.book.cluster(site.now).lags_gpu_s["vision"] >= 0.9 * lags["vision"]


@in_virtual_time
async def test_every_round_decides_as_one_that_looks_at_everything_anew(tmp_path, monkeypatch):
    rounds = []

    def both(keeper, cluster, now):
        rounds.append(planned := of_the_keeper(keeper, cluster, now))
        assert planned == plan(cluster, now)
        return planned

    of_the_keeper = Keeper.plan
    monkeypatch.setattr(Keeper, "plan", both)
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        jobs = [await site.submit("bo", size, program=Program(work_s=100)) for size in ("2", "1", "1/2")]
        await until(lambda: broker.state(ada.handle) == "suspended", 400)
        await site.gpu_cell(ada)
        await until(lambda: all(broker.job(job).result for job in jobs), 2_000)
        assert {broker.job(job).result for job in jobs} == {"succeeded"}
    assert sum(bool(planned.actions) for planned in rounds) >= 4
