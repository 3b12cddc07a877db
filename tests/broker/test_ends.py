"""How jobs end: by themselves, after their grace, cancelled in every state."""

from __future__ import annotations

import asyncio
import signal as signals
from dataclasses import replace

import pytest

from jupyter_gpushare.backends.base import HubError
from jupyter_gpushare.core.model import CheckpointMode
from tests.broker.machine import Program
from tests.broker.virtual_time import until


@pytest.mark.parametrize(
    ("program", "ended", "reason"),
    [
        (Program(work_s=5, exit_code=7), ("failed", 7), "exit code 7"),
        (Program(work_s=0), ("succeeded", 0), "ran to its end"),
        (Program(vanishes_after_s=3), ("failed", None), "ended without a report"),
    ],
    ids=["error", "at once", "killed"],
)
async def test_a_job_that_ends_has_a_result_and_leaves_nothing(site, broker, program, ended, reason):
    job = await site.submit("bo", "1", program=program)
    await until(lambda: broker.job(job).result, 60)
    seen = broker.seen(job)
    assert (seen.state, seen.exit_code, seen.attempt) == (*ended, 1)
    assert reason in seen.reason
    assert seen.started_at is not None
    assert not broker.registry.leases
    assert not site.held


@pytest.mark.parametrize(
    ("host", "told"), [("", ["ada's session (1/2 GPU) has ended: the cluster lost its node."]), ("here", [])]
)
async def test_a_session_that_ends_with_its_node_is_told_so(site, host, told):
    site.host = host
    broker = await site.start_broker()
    held = await site.session("ada")
    site.unmeasured = set(held.limits)
    await site.end_session("ada")
    await until(lambda: not broker.registry.leases, 60)
    assert [d.sentence for d in broker.registry.decisions.latest if d.action == "lost"] == told


async def test_a_job_with_retries_is_tried_again_and_counts(site, broker):
    job = await site.submit("bo", "1", retries=2, program=Program(work_s=5, exit_code=1))
    await until(lambda: broker.job(job).result, 200)
    assert site.started[job.id] == 3
    assert (broker.job(job).failures, broker.job(job).attempts) == (3, 3)
    assert broker.seen(job).state == "failed"


@pytest.mark.parametrize("survival", [CheckpointMode.SIGTERM, CheckpointMode.NONE])
async def test_a_job_that_cannot_sleep_is_stopped_with_grace_and_starts_again(site, broker, survival):
    ada, job = await site.lent(checkpoint=survival, program=Program(work_s=90))
    await site.gpu_cell(ada)
    assert f"signal SIGTERM leader j{job.id}-1" in site.effects
    await until(lambda: broker.state(job) == "pending", 10)
    assert broker.job(job).preemptions == 1
    assert broker.job(job).exit_code is None
    assert await broker.ended(job, 300) == "succeeded"
    assert broker.seen(job).attempt == 2
    assert site.worked_in[job.id, 2] == 90
    assert not any("SIGKILL" in e for e in site.effects)


async def test_a_job_that_ignores_sigterm_is_killed_after_its_grace(site, broker):
    job = await site.running("bo", "1", grace_s=7.0, program=Program(work_s=900, heeds_sigterm=False))
    await broker.requests.cancel(broker.job(job))
    asked = site.now
    await until(lambda: broker.job(job).result, 60)
    assert f"signal SIGKILL all j{job.id}-1" in site.effects
    assert 7 <= site.now - asked <= 8, "at most a second after its grace"
    assert broker.seen(job).state == "cancelled"


async def test_capacity_is_granted_on_only_when_the_driver_shows_the_memory_gone(site, broker):
    first = await site.submit("bo", "2", program=Program(work_s=10, lingers_s=40, memory=1.0))
    second = await site.submit("bo", "2", program=Program(work_s=5, memory=1.0))
    await until(lambda: broker.job(first).exit_code == 0, 60)
    ended = site.now
    await until(lambda: broker.state(second) == "granted", 120)
    assert site.now - ended >= 40
    await until(lambda: broker.job(second).result, 60)


async def test_a_waiting_job_is_cancelled_at_once(site, broker):
    await site.submit("bo", "2", program=Program(work_s=100))
    job = await site.submit("bo", "2")
    cancelled = await broker.requests.cancel(job)
    assert cancelled.result == "cancelled"
    assert job.lease_id not in broker.registry.leases
    assert (await broker.requests.cancel(cancelled)) == cancelled


async def test_a_returning_owner_waits_for_no_grace_of_a_borrower_that_starts(site):
    site.policy = replace(site.policy, max_grace_s=60.0)
    site.spawn_s, site.move_s = 0.5, 0.1
    broker = await site.start_broker()
    ada = await site.session("ada", "1/2")
    stubborn = Program(work_s=900, heeds_sigterm=False)
    job = await site.submit("bo", "2", grace_s=60.0, checkpoint=CheckpointMode.SIGTERM, program=stubborn)
    await until(lambda: f"prepare j{job.id}-1" in site.effects, 120)
    assert broker.state(job) == "granted"
    asked = site.now
    await site.gpu_cell(ada)
    assert site.now - asked <= 5
    assert broker.job(job).preemptions == 1


@pytest.mark.parametrize("spawn_s", [8.0, 300.0])  # half before the broker is asked, half after it
async def test_a_returning_owner_does_not_wait_until_the_hub_has_started_the_borrower(site, spawn_s):
    site.spawn_s, site.move_s = spawn_s / 2, 0.1
    broker = await site.start_broker()
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", program=Program(work_s=30))
    await until(lambda: f"prepare j{job.id}-1" in site.effects, 600)
    assert broker.state(job) == "granted"
    asked = site.now
    await site.gpu_cell(ada)
    assert site.now - asked <= 5
    assert broker.job(job).preemptions == 1
    # What the Hub was still starting finds no lease, and is removed; the next attempt runs.
    site.spawn_s = 0.2
    await until(lambda: broker.job(job).result, 600)
    assert site.started[job.id] == 1


@pytest.mark.parametrize(
    ("spawn_s", "after_s"),
    [(0.2, 0.05), (0.2, 0.15), (0.2, 0.25), (0.2, 0.35), (0.2, 0.45), (3.0, 0.0), (6.0, 6.5)],
)
async def test_a_starting_job_is_cancelled_and_its_command_never_goes_on(site, spawn_s, after_s):
    """Cancelled at once the helper does not know its lease yet; after 6.5 s it does, and nothing runs."""
    site.spawn_s = spawn_s
    broker = await site.start_broker()
    job = await site.submit("bo", "1", program=Program(work_s=1000))
    await until(lambda: broker.state(job) == "granted", 10)
    await asyncio.sleep(after_s)
    assert (f"prepare j{job.id}-1" in site.effects) is (after_s > spawn_s)
    await broker.requests.cancel(broker.job(job))
    assert await broker.ended(job, 60) == "cancelled"
    await until(lambda: not site.runs and not site.servers, 60)
    assert not site.held
    assert not site.started[job.id] or spawn_s == 0.2


@pytest.mark.parametrize("state", ["suspending", "suspended", "resuming", "stopping"])
async def test_a_sleeping_or_moving_job_is_cancelled(site, broker, state):
    ada = await site.session("ada", "1/2")
    how = CheckpointMode.SIGTERM if state == "stopping" else CheckpointMode.SUSPEND
    job = await site.running("bo", "2", checkpoint=how, program=Program(work_s=1000))
    site.later(site.gpu_cell(ada))
    await until(lambda: broker.state(job) == state, 300)
    await broker.requests.cancel(broker.job(job))
    assert await broker.ended(job, 60) == "cancelled"
    assert not site.runs
    # The owner has the GPU, or slept when the job was to have it back.
    await until(lambda: broker.state(ada.handle) == "running" or state == "resuming", 10)


async def test_the_servers_of_attempts_that_have_ended_are_removed_at_the_hub_until_it_did(site, broker):
    site.fault("stop_server", HubError("the Hub is busy"))
    job = await site.submit("bo", "1", retries=1, program=Program(work_s=5, exit_code=1))
    await until(lambda: broker.job(job).result, 200)
    await until(lambda: not broker.loop.effects.ended_servers, 3)
    asked = [effect for effect in site.effects if effect.startswith("stop_server")]
    assert asked == [f"stop_server j{job.id}-{attempt}" for attempt in (1, 1, 2)]


async def test_a_job_with_a_first_process_just_after_the_stop_gets_sigterm(site, broker, monkeypatch):
    job = await site.running("bo", "1", grace_s=60, program=Program(work_s=1000))
    signalled, sent = broker.devices.signal, []

    async def signal(handle, number, to):
        sent.append((number, to))
        return await signalled(handle, number, to) if len(sent) > 1 else 0

    monkeypatch.setattr(broker.devices, "signal", signal)
    began = site.now
    await broker.requests.cancel(broker.job(job))
    await until(lambda: broker.job(job).result == "cancelled", 60)
    assert site.now - began < 10
    assert broker.job(job).exit_code == -signals.SIGTERM


async def test_a_runner_writes_down_the_end_of_a_job_without_grace(site, broker):
    program = Program(work_s=1000, heeds_sigterm=False, records_s=1.0)
    job = await site.running("bo", "1", grace_s=0, program=program)
    await broker.requests.cancel(broker.job(job))
    await until(lambda: broker.job(job).result == "cancelled", 60)
    assert broker.job(job).exit_code == -signals.SIGKILL
