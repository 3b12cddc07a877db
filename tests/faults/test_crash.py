"""kill -9 of the broker between any two steps: no lease in two places, no job lost, none run twice.

A step is a commit, or a call to the outside; the broker may die before or
after each.  The next broker finds the store, the helper, the Hub.
"""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.core.model import CheckpointMode
from jupyter_gpushare.errors import HelperError, StoreError
from jupyter_gpushare.protocol.helper import MoveResult, Phase, Refusal
from tests.broker.brokers import Broker
from tests.broker.machine import Program
from tests.broker.site import Site
from tests.broker.virtual_time import in_virtual_time, until

# Every seventh step, to be quick, from another first step in each run; GPUSHARE_EVERY_STEP=1 tries
# them all.
STRIDE = 1 if os.environ.get("GPUSHARE_EVERY_STEP") else 7
FIRST_STEP = 1 + random.randrange(STRIDE)
ROUNDS = int(os.environ.get("GPUSHARE_TEST_ROUNDS", "5"))
SEED = random.randrange(1 << 32) if "GPUSHARE_TEST_ROUNDS" in os.environ else 20261128
REFUSED = (Refusal.NO_MEMORY, Refusal.BUSY, Refusal.NOT_SUSPENDABLE)


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


async def moving(site: Site) -> None:
    """A job is paused for another project and goes on, with its memory and limit, on the other GPU."""
    first = await site.submit("bo", "1", key="bo-1", program=Program(work_s=10_000))
    await until(lambda: site.worked_s[first.id] > 1, 300)
    job = await site.submit("bo", "1/2", key="bo-2", program=Program(work_s=10))
    await until(lambda: site.worked_s[job.id] > 2, 300)
    held = site.held[f"j{job.id}-1"]
    (home, limit), (used,) = *held.limits.items(), held.used.values()
    owner = await site.submit("ada", "1", key="ada-1", program=Program(work_s=10_000))
    await until(lambda: site.worked_s[owner.id] > 1, 300)
    await site.ask(lambda b: b.requests.cancel(b.registry.jobs[first.id]))
    await until(lambda: held.phase is Phase.RUNNING, 600)
    ((there, moved_limit),) = held.limits.items()
    assert (home != there, moved_limit, held.used) == (True, limit, {there: used})
    await until(lambda: now(site).lease(job).limits == held.limits, 300)
    await until(lambda: ended(site, job), 900)
    assert ended(site, job) == "succeeded"
    assert site.started[job.id] == 1
    assert site.worked_s[job.id] == 10
    await site.ask(lambda b: b.requests.cancel(b.registry.jobs[owner.id]))
    await until(lambda: not now(site).registry.leases and not site.held and not site.runs, 300)


STORIES = {story.__name__: story for story in (lending, requeueing, cancelling, moving)}


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
    print(f"every {STRIDE} steps from step {FIRST_STEP}")
    for number in range(FIRST_STEP, steps + 1, STRIDE):
        try:
            _steps(tmp_path / str(number), name, [number])
        except BaseException as error:
            error.add_note(
                f"the broker died at step {number} of {steps}; tried: every {STRIDE} from {FIRST_STEP}"
            )
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


async def random_history(site: Site, chance: random.Random) -> int:
    """Jobs and a session use the GPUs while brokers die and resumes are refused; return how many moved."""
    devices: dict[str, list[tuple[str, ...]]] = {}  # of each lease, one after the other

    async def watch() -> None:
        while True:
            for handle, held in site.held.items():
                seen = devices.setdefault(handle, [])
                seen += [here] if (here := tuple(held.limits)) not in seen[-1:] else []
            await asyncio.sleep(0.2)

    watching = site.later(watch())
    ada = await site.session("ada", "1/2")
    jobs: list[tuple[JobRecord, bool]] = []
    for number in range(16):
        await asyncio.sleep(chance.uniform(0, 15))
        if chance.random() < 0.3:
            await site.gpu_cell(ada)
        if chance.random() < 0.2:
            site.fault("resume", MoveResult(done=False, refused=chance.choice(REFUSED), reason="not now"))
        if chance.random() < 0.1:
            site.fault("resume", HelperError("silent", "the device helper did not answer"))
        job = await site.submit(
            chance.choice(("ada", "bo", "cy")),
            chance.choice(("1/4", "1/2", "1", "1", "2")),
            key=f"key-{number}",
            move=(may_move := chance.random() < 0.8),
            priority=chance.choice((0, -10)),
            program=Program(work_s=chance.uniform(1, 40), memory=1.0),
        )
        jobs.append((job, may_move))
    await until(lambda: all(ended(site, job) for job, _ in jobs), 6000)
    assert {ended(site, job) for job, _ in jobs} == {"succeeded"}
    moved = [handle for handle, seen in devices.items() if len(seen) > 1]
    bound = tuple(f"j{job.id}-" for job, may_move in jobs if not may_move)
    assert not [handle for handle in moved if handle.startswith(bound)]
    watching.cancel()
    await site.end_session("ada")
    await until(lambda: not now(site).registry.leases and not site.held, 300)
    return len(moved)


@pytest.mark.long_form
def test_a_random_history_of_moves_loses_no_job(tmp_path):
    moves: list[int] = []

    @in_virtual_time
    async def run(seed: int) -> None:
        folder = tmp_path / str(seed)
        folder.mkdir()
        chance = random.Random(seed)
        deaths = [chance.randrange(20, 200) for _ in range(8)]
        async with Site(folder) as site:
            site.patient = True
            site.policy = replace(site.policy, idle_timeout_s=8.0, min_run_s=0.0)
            await site.start_broker(deaths.pop())
            supervisor = site.later(restart_on_death(site, deaths))
            moves.append(await random_history(site, chance))
            if supervisor.done():
                supervisor.result()

    for seed in range(SEED, SEED + ROUNDS):
        try:
            run(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    print(f"seeds {SEED} to {SEED + ROUNDS - 1}: {sum(moves)} leases moved")
    assert sum(moves) > ROUNDS / 2
