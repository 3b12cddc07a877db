"""Jobs at the request service: rights, bounds, keys and moments."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker.control import queue_edits
from jupyter_gpushare.broker.control.job_request import default_name
from jupyter_gpushare.broker.state import registry as book_module
from jupyter_gpushare.core.model import CheckpointMode
from jupyter_gpushare.errors import (
    Conflict,
    InvalidRequest,
    KeyReused,
    NotAllowed,
    NotFound,
    TooMany,
)
from jupyter_gpushare.protocol import wire
from tests.broker.disks import SlowDisk
from tests.broker.machine import Program
from tests.broker.site import spawn
from tests.broker.virtual_time import until


async def test_the_same_idempotency_key_is_the_same_job_of_the_same_user(site, broker):
    first = await site.submit("bo", "1", key="k")
    again = await site.submit("bo", "1", key="k")
    other = await site.submit("cy", "1", key="k")
    assert first.id == again.id != other.id
    assert len(broker.registry.jobs) == 2
    for key in ("", "x" * 256):
        with pytest.raises(InvalidRequest, match="1 to 255"):
            await broker.requests.submit("bo", ("nlp",), wire.JobRequest(command=["a"]), key)


async def test_a_repeated_request_is_the_same_job_after_it_was_changed_in_the_queue(site, broker):
    await site.submit("bo", "2", program=Program(work_s=1000))
    first = await site.submit("bo", "1", key="k")
    await queue_edits.change(broker.request_policy, first, ("nlp",), wire.JobChange(gpus="1/2"))
    assert (await site.submit("bo", "1", key="k")).id == first.id
    with pytest.raises(KeyReused, match=first.id):
        await site.submit("bo", "1/2", key="k")


async def test_an_idempotency_key_is_known_long_after_its_job_left_the_memory(site, broker):
    first = await site.submit("bo", "1", key="k", program=Program(work_s=1))
    await until(lambda: broker.job(first).result)
    del broker.registry._jobs[first.id]
    with pytest.raises(KeyReused, match=first.id):
        await site.submit("bo", "1/2", key="k")
    again = await site.submit("bo", "1", key="k")
    assert again.id == first.id
    assert again.result == "succeeded"
    assert not broker.registry.journal.failed.done()


async def test_the_queue_has_a_bound_for_all_and_for_each(site):
    site.policy = replace(site.policy, max_jobs=3, max_jobs_per_user=2)
    broker = await site.start_broker()
    mine = [await site.submit("bo", "1", program=Program(work_s=1000)) for _ in range(2)]
    with pytest.raises(TooMany, match="you have 2 jobs") as refused:
        await site.submit("bo", "1")
    assert 0 < refused.value.retry_after_s <= 600
    await site.submit("cy", "1")
    with pytest.raises(TooMany, match="queue is full"):
        await site.submit("cy", "1")
    await broker.requests.cancel(mine[1])
    await until(lambda: broker.job(mine[1]).result)
    await site.submit("bo", "1")


@pytest.mark.parametrize("server", ["jabcdefghij-1", "jabcdefghij-99"])
async def test_an_unexpected_job_server_is_refused(broker, server):
    with pytest.raises(Conflict, match="gpushare submit") as refused:
        await broker.start(spawn("bo", None, server=server))
    assert refused.value.reason == "not_expected"


async def test_a_job_starts_only_for_its_user_its_attempt_and_its_moment(site):
    site.spawn_s = 30.0
    broker = await site.start_broker()
    job = await site.submit("bo", "1")
    await until(lambda: broker.state(job) == "granted")
    right = f"j{job.id}-1"
    forged = [("ada", right), ("bo", f"j{job.id}-0"), ("bo", f"j{job.id}-2"), ("bo", f"j{job.id}-01")]
    for user, server in forged:
        with pytest.raises(Conflict) as refused:
            await broker.start(spawn(user, "1/2", server=server))
        assert refused.value.reason == "not_expected"
    assert not site.held
    ticket = broker.loop.effects.tickets.issue(ServerKey("bo", right))
    asked = wire.replace(spawn("bo", "1/4", server=right), ticket=ticket)
    grant = await broker.start(asked)
    assert grant.job is not None
    assert grant.job.command == ["python", "train.py"]
    assert grant.memory_limit_bytes == 78_000_000_000  # as submitted, not as the start says


@pytest.mark.parametrize(
    ("name", "shown"),
    [("train.py", "train.py "), ("a\x1b[31m\n  b", "a?[31m? b "), ("\u591c", "\u591c "), (" ", "")],
)
async def test_the_hub_shows_the_name_of_a_job(site, broker, name, shown):
    job = await site.submit("bo", "1", name=name, program=Program(work_s=1))
    await until(lambda: broker.job(job).result)
    assert list(site.shown.values()) == [f"{shown}(job {job.id})"]


async def test_a_cancel_while_the_job_gives_way_is_not_lost(site, broker):
    """It is on its way back into the queue when its owner cancels it."""
    slow = Program(work_s=500, heeds_sigterm=False)
    job = await site.running("bo", "2", checkpoint=CheckpointMode.NONE, program=slow, grace_s=20)
    other = await site.submit("ada", "1", checkpoint=CheckpointMode.NONE, program=Program(work_s=5))
    await until(lambda: broker.state(job) == "stopping")
    await asyncio.sleep(1)
    await broker.requests.cancel(broker.job(job))
    assert await broker.ended(job) == "cancelled"
    await until(lambda: broker.job(other).result == "succeeded")


async def test_a_late_stop_of_attempt_1_does_not_hit_attempt_2(site, broker):
    job = await site.submit("bo", "1", retries=1, program=Program(work_s=100, vanishes_after_s=1))
    await until(lambda: site.started[job.id] == 1)
    site.programs[job.id] = Program(work_s=50)
    await until(lambda: broker.lease(job).handle.endswith("-2") and broker.state(job) == "running")
    await broker.stop(wire.SpawnStop(user="bo", server=f"j{job.id}-1"))
    await broker.job_reports.report("bo", job.id, 1, wire.JobReport(state="ended", exit_code=3))
    assert broker.state(job) == "running"
    assert broker.job(job).exit_code is None
    assert await broker.ended(job) == "succeeded"
    assert broker.job(job).attempts == 2


async def test_what_a_failed_job_printed_last_is_bounded_and_without_control_characters(site, broker):
    job = await site.running("bo", "1", program=Program(work_s=50))
    said = "\n".join(["Ended with exit code 1. It last printed:", "\x1b[2Ja\tb", *["x" * 999] * 99])
    await broker.job_reports.report("bo", job.id, 1, wire.JobReport(state="ended", exit_code=1, reason=said))
    lines = broker.job(job).reason.split("\n")
    assert lines[:2] == ["Ended with exit code 1. It last printed:", "?[2Ja?b"]
    assert [len(line) for line in lines[2:]] == [300] * 4


async def test_a_report_that_comes_when_its_attempt_is_over_changes_nothing(site, broker):
    blocker = await site.submit("bo", "2", program=Program(work_s=1000))
    job = await site.submit("bo", "1")
    await until(lambda: broker.state(blocker) == "running")
    attempt = broker.lease(job).attempt
    await broker.job_reports.report("bo", job.id, attempt, wire.JobReport(state="ended", exit_code=0))
    assert broker.job(job).exit_code is None
    assert broker.state(job) == "pending"


async def test_a_job_of_another_is_not_there(site, broker):
    job = await site.submit("bo", "1")
    report = wire.JobReport(state="ended", exit_code=0)
    for attempt in (
        lambda: broker.job_reports.report("ada", job.id, 1, report),
        lambda: broker.requests.job("ada", job.id),
        lambda: broker.requests.job("bo", "nosuchjob1"),
    ):
        with pytest.raises(NotFound):
            await attempt()
    assert (await broker.requests.job("root", job.id, admin=True)).id == job.id


async def test_an_ended_job_is_found_however_many_live_or_ended_after_it(site, monkeypatch):
    monkeypatch.setattr(book_module, "_MAX_ENDED_JOBS", 2)
    broker = await site.start_broker()
    jobs = [await site.submit("bo", "1", program=Program(work_s=1)) for _ in range(6)]
    await until(lambda: broker.registry.jobs.get(jobs[0].id, jobs[0]).result)
    assert jobs[0].id in broker.registry.jobs, "living jobs do not push ended ones out"
    for job in jobs:
        await until(lambda job=job: job.lease_id not in broker.registry.leases)
    assert len(broker.registry.jobs) <= 2
    gone = [job for job in jobs if job.id not in broker.registry.jobs]
    for job in gone:
        found = await broker.requests.job("bo", job.id)
        assert found.result == "succeeded"
        assert broker.views.job(found).state == "succeeded"
        assert await broker.requests.cancel(found) == found
        with pytest.raises(NotFound):
            await broker.requests.job("ada", job.id)


@pytest.mark.site(gpus=1)
async def test_a_status_tells_of_queued_jobs_as_jobs_only(site, broker):
    """There may be thousands, and every page of their owner asks for it."""
    runs = await site.running("bo", "1", program=Program(work_s=100))
    waits = await site.submit("bo", "1")
    status = broker.views.status("bo", ("nlp",), admin=False)
    assert [lease.job for lease in status.leases] == [runs.id]
    assert {job.id for job in status.jobs} == {runs.id, waits.id}


async def test_the_same_key_twice_before_the_devices_are_known_is_one_job(site):
    broker = await site.start_broker(running=False)
    request = wire.JobRequest(command=["x"])
    twice = [
        site.later(broker.requests.submit("bo", site.groups["bo"], request, "the-key")) for _ in range(2)
    ]
    await asyncio.sleep(0.1)  # both wait for the first measurement
    await broker.loop.observer.measure()
    await broker.registry.notify()
    first, second = await asyncio.gather(*twice)
    assert first.id == second.id
    assert len(broker.registry.jobs) == 1
    assert not broker.registry.journal.failed.done()
    site.helper_silent = True
    await asyncio.sleep(60)
    again = await broker.requests.submit("bo", site.groups["bo"], request, "the-key")
    assert again.id == first.id, "an accepted job is told whether or not the devices are known"


async def test_only_an_ended_job_can_be_tried_again_and_it_is_a_new_one(site, broker):
    job = await site.submit("bo", "0.5", name="n", program=Program(work_s=5, exit_code=3))
    with pytest.raises(Conflict, match="has not ended"):
        await broker.requests.retry(job, ("nlp",))
    await until(lambda: broker.job(job).result)
    assert broker.job(job).exit_code == 3
    assert broker.job(job).result == "failed"
    again = await broker.requests.retry(broker.job(job), ("nlp",))
    assert again.id != job.id
    assert again.name == "n"
    assert again.command == job.command
    with pytest.raises(NotAllowed):
        await broker.requests.retry(broker.job(job), ())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 1", "train.py"),
        ("/usr/bin/python3.11 -u sub/train.py", "train.py"),
        ("python -m package.train", "package.train"),
        ("./fit --deep", "fit"),
        ("bash", "bash"),
        ("python -", "python"),
        ("x" * 100, "x" * 60),
    ],
)
def test_a_job_without_a_name_is_called_like_its_program(command, name):
    assert default_name(command.split()) == name


async def test_a_runner_that_reports_its_end_is_told_what_becomes_of_the_job(site, broker):
    failing = await site.submit("bo", "1", retries=1, program=Program(work_s=900))
    timed = await site.submit("bo", "1", max_run_s=20.0, grace_s=5.0, program=Program(work_s=900))
    await until(lambda: broker.state(failing) == broker.state(timed) == "running")

    async def told(job, state, attempt=1, **report):
        return await broker.job_reports.report("bo", job.id, attempt, wire.JobReport(state=state, **report))

    assert await told(failing, "progress", done=1.0) is None
    # A failed attempt that is tried again, then one that is not.
    again = await told(failing, "ended", exit_code=3)
    assert (again.state, again.reason) == ("queued", "It ended with exit code 3.")
    await until(lambda: broker.lease(failing).attempt == 2 and broker.state(failing) == "running", 60)
    ended = await told(failing, "ended", attempt=2, exit_code=3, reason="It is bad.")
    assert (ended.state, ended.reason) == ("failed", "It is bad.")
    # Of an attempt that is over: what its job is now.
    await until(lambda: broker.job(failing).result == "failed", 60)
    assert (await told(failing, "ended", exit_code=0)).state == "failed"

    await until(lambda: broker.state(timed) == "stopping", 60)
    stopping = await told(timed, "stopping")
    assert (stopping.state, stopping.reason) == (
        "timed_out",
        "It was stopped after its maximum run time, 20 s.",
    )


async def test_a_preempted_and_a_cancelled_job_are_told_apart_as_they_stop(site, broker, monkeypatch):
    ada = await site.session("ada", "1/2")
    options = {
        "checkpoint": "sigterm",
        "grace_s": 20.0,
        "program": Program(work_s=900, heeds_sigterm=False),
    }
    job = await site.running("bo", "2", **options)
    cell = asyncio.create_task(site.gpu_cell(ada))
    await until(lambda: broker.state(job) == "stopping", 60)
    said = await broker.job_reports.report("bo", job.id, 1, wire.JobReport(state="stopping"))
    assert (said.state, said.reason) == ("queued", "It is back in the queue.")
    disk = SlowDisk(broker, monkeypatch)
    cancelled = asyncio.create_task(broker.requests.cancel(broker.job(job)))
    await asyncio.sleep(1)
    told = asyncio.create_task(broker.job_reports.report("bo", job.id, 1, wire.JobReport(state="stopping")))
    await asyncio.sleep(1)
    assert not told.done(), "a crash would lose what the runner was told"
    disk.release()
    said = await told
    assert (said.state, said.reason) == ("cancelled", "It was stopped on request.")
    await asyncio.gather(cancelled, cell)
