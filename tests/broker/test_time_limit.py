"""The maximum run time of a job: announced, enforced with grace, counted without pauses."""

from __future__ import annotations

from datetime import datetime

import pytest

from jupyter_gpushare.errors import InvalidRequest
from tests.broker.machine import Program
from tests.broker.virtual_time import until


async def test_a_job_is_stopped_with_grace_after_its_maximum_run_time_and_was_told_before(site, broker):
    job = await site.running("bo", "1", max_run_s=7200.0, retries=3, program=Program(work_s=90_000))
    began = datetime.fromisoformat(site.wall())
    assert "after its maximum run time." in broker.seen(job).reason
    assert not [d for d in broker.told("bo", 50) if d.action == "time_limit"]
    await until(lambda: [d for d in broker.told("bo", 50) if d.action == "time_limit"], 7200)
    (told,) = [d for d in broker.told("bo", 50) if d.action == "time_limit"]
    announced_s = (datetime.fromisoformat(told.at) - began).total_seconds()
    assert announced_s == pytest.approx(7200 - 300, abs=2)
    assert told.sentence.endswith("is stopped in 5 min: that is its maximum run time.")
    await until(lambda: broker.job(job).result, 600)
    seen = broker.seen(job)
    assert (seen.state, seen.attempt) == ("timed_out", 1)
    assert seen.reason == "It was stopped after its maximum run time, 2 h."
    assert 7200 <= seen.ran_s <= 7203
    assert f"signal SIGTERM leader j{job.id}-1" in site.effects
    assert not any("SIGKILL" in effect for effect in site.effects)


async def test_a_job_that_ignores_its_maximum_is_killed_after_its_grace(site, broker):
    program = Program(work_s=900, heeds_sigterm=False)
    job = await site.submit("bo", "1", max_run_s=20.0, grace_s=7.0, program=program)
    assert await broker.ended(job, 120) == "timed_out"
    assert f"signal SIGKILL all j{job.id}-1" in site.effects


async def test_pauses_do_not_count_and_a_new_broker_goes_on_counting(site, broker):
    ada, job = await site.lent(max_run_s=100.0, program=Program(work_s=900))
    await site.gpu_cell(ada)
    assert broker.state(job) == "suspended"
    await broker.end()
    broker = await site.start_broker()
    assert await broker.ended(job, 600) == "timed_out"
    assert 99 <= site.worked_s[job.id] <= 105


async def test_a_job_that_ends_or_is_cancelled_before_has_not_timed_out(site, broker):
    done = await site.submit("bo", "1", max_run_s=60.0, program=Program(work_s=20))
    stopped = await site.submit("bo", "1", max_run_s=60.0, program=Program(work_s=900))
    await until(lambda: broker.job(done).result and broker.state(stopped) == "running", 120)
    await broker.requests.cancel(broker.job(stopped))
    await until(lambda: broker.job(stopped).result, 60)
    assert [broker.seen(j).state for j in (done, stopped)] == ["succeeded", "cancelled"]
    with pytest.raises(InvalidRequest, match="maximum run time is 1 second to 365 days"):
        await site.submit("bo", "1", max_run_s=0.5)
