"""Sessions that lend and wake, and the jobs that run meanwhile: the loop on a site in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.errors import Conflict
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import EventKind
from tests.broker.machine import Program
from tests.broker.virtual_time import STEP_S, until


async def test_the_story_ada_lends_bo_works_ada_comes_back_bo_goes_on(site, broker):
    ada = await site.session("ada", "1/2")
    used = dict(ada.used)
    job = await site.running("bo", "2", program=Program(work_s=100))
    assert broker.state(ada.handle) == "suspended"
    granted = next(
        d for d in broker.registry.decisions.latest if (d.lease, d.action) == (job.lease_id, "grant")
    )
    assert granted.sentence.endswith("starts: others were put to sleep for it.")
    assert ada.used == {}
    assert ada.saved == used
    assert broker.lease(ada.handle).lease.saved_bytes == sum(used.values())
    await site.gpu_cell(ada)
    assert ada.used == used
    assert broker.state(job) == "suspended"
    assert "the session that lent the GPU needs it" in broker.seen(job).reason
    assert await broker.ended(job, 400) == "succeeded"
    assert broker.job(job).exit_code == 0
    assert broker.job(job).preemptions >= 1
    assert site.worked_s[job.id] == 100
    assert site.started[job.id] == 1
    assert site.held.keys() == {ada.handle}


async def test_a_session_is_put_to_sleep_exactly_when_its_idle_time_is_over(site, broker):
    ada = await site.session("ada", "1/2")
    await site.submit("bo", "2")
    await until(lambda: broker.state(ada.handle) == "suspending", 120, max_step_s=STEP_S)
    idle_s = site.now - ada.active_at
    assert site.policy.idle_timeout_s <= idle_s <= site.policy.idle_timeout_s + 2


async def test_a_busy_kernel_is_never_idle(site, broker):
    ada = await site.session("ada", "1/2")
    await site.computes("ada")
    job = await site.submit("bo", "2")
    await until(lambda: site.now - ada.active_at > 1_000, 2_000)
    assert broker.state(ada.handle) == "running"
    assert broker.state(job) == "pending"


@pytest.mark.parametrize("kind", ["cell", "widget"])
async def test_background_queries_wake_no_session_but_a_busy_kernels_do(site, broker, kind):
    ada, _ = await site.lent(program=Program(work_s=1000))
    site.emit(EventKind.WANTED, ada.handle, queries_only="true")
    began = site.now
    await until(lambda: site.now - began > 30)
    assert broker.state(ada.handle) == "suspended"
    if kind == "cell":
        await site.computes("ada")
    else:
        widget = wire.KernelActivity(id="k", busy=False, handles_request=True, idle_s=100.0)
        await site.reports("ada", widget)
    site.emit(EventKind.WANTED, ada.handle, queries_only="true")
    await until(lambda: broker.state(ada.handle) == "running", 30)


async def test_a_stalled_process_wakes_its_session_5_s_into_a_cell_and_once_in_it(site, broker):
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", program=Program(work_s=1000))

    async def report(busy: bool) -> None:
        await site.computes("ada", busy=busy)

    async def sleeps_for(seconds: float) -> None:
        began = site.now
        while site.now < began + seconds:
            assert broker.state(ada.handle) == "suspended"
            await asyncio.sleep(0.1)

    await until(lambda: broker.state(job) == "running", 120)
    ada.stalled = True
    await sleeps_for(30)  # no cell runs: a thread of its own waits
    await report(busy=True)
    await sleeps_for(5)
    await until(lambda: broker.state(ada.handle) == "running", 3)
    ada.stalled = False
    observation = broker.registry.observations[broker.lease(ada.handle).id]
    assert not observation.wake_by_stall(site.now + 100)
    await report(busy=True)
    assert not observation.wake_by_stall(site.now + 100)
    await report(busy=False)
    await report(busy=True)
    assert observation.wake_by_stall(site.now + 100)


async def test_a_cell_that_waits_for_less_than_5_s_wakes_no_session(site, broker):
    ada, _ = await site.lent(program=Program(work_s=1000))
    for busy in (True, False) * 5:
        ada.stalled = busy
        await site.computes("ada", busy=busy)
        await asyncio.sleep(4)
        assert broker.state(ada.handle) == "suspended"


async def test_a_wish_that_no_event_told_is_seen_in_the_samples(site, broker):
    ada, _ = await site.lent(program=Program(work_s=1000))
    ada.wanted = True
    await until(lambda: broker.state(ada.handle) == "running", 30)


@pytest.mark.site(gpus=1)
async def test_the_next_session_on_lent_capacity_starts_asleep_and_gets_its_claim(site, broker):
    job = await site.running("bo", "1", program=Program(work_s=300))
    ada = await site.session("ada", "1/2")
    assert broker.state(ada.handle) == "suspended"
    await site.gpu_cell(ada)
    assert broker.state(job) == "suspended"
    assert broker.state(ada.handle) == "running"


async def test_a_session_is_lent_sooner_after_long_work_and_later_after_a_break(site):
    site.policy = replace(site.policy, adaptive_idle=True)
    broker = await site.start_broker()
    ada = await site.session("ada", "1")
    await asyncio.sleep(5)
    record = broker.lease(ada.handle)
    live, now = broker.registry.observations[record.id], broker.registry.clock()
    assert live.pauses.idle_from is not None  # the loop has seen her idle
    usual = snapshot.measured(broker.registry, record, now).idle_timeout_s
    timeouts = []
    for _ in range(2):  # works for five hours, and after a break of an hour once more
        live.pauses.saw(None, now)
        now += 5 * 3600
        live.pauses.saw(now, now)
        timeouts.append(snapshot.measured(broker.registry, record, now).idle_timeout_s)
        now += 3600
    assert timeouts[0] < timeouts[1] < usual


async def test_the_machine_is_told_what_stays_a_leases_own_and_what_is_only_borrowed(site, broker):
    ada = await site.session("ada", "1/2")
    assert ada.guaranteed == ada.limits
    job = await site.running("bo", "2", program=Program(work_s=100))
    borrower = site.held[broker.lease(job).handle]
    assert borrower.guaranteed == dict.fromkeys(borrower.limits, 0)


@pytest.mark.parametrize("looks", [((False, 1), (True, 2)), ((True, 2),)])
async def test_an_owner_lets_a_session_sleep_whose_cell_waits_until_its_next_cell(site, broker, looks):
    ada, job = await site.lent(program=Program(work_s=3_000))
    record = broker.lease(ada.handle)
    with pytest.raises(Conflict, match="waits for its GPU"):
        await broker.own_sessions.stay_asleep(record)
    cell = asyncio.create_task(site.gpu_cell(ada))
    await until(lambda: broker.registry.observations[record.id].wanted, 10)
    other = wire.KernelActivity(id="other", busy=True, idle_s=0.0, runs=7)
    waits = wire.KernelActivity(id="k", busy=True, idle_s=0.0, runs=1)
    await broker.own_sessions.activity("ada", "", wire.ActivityReport(kernels=[waits, other]))
    await broker.own_sessions.stay_asleep(broker.lease(ada.handle))
    await asyncio.sleep(120)
    assert (broker.state(ada.handle), broker.state(job)) == ("suspended", "running")
    # Beside another kernel, which is busy all the time; with and without a look between its cells.
    for busy, runs in looks:
        k = wire.KernelActivity(id="k", busy=busy, idle_s=0.0, runs=runs)
        await broker.own_sessions.activity("ada", "", wire.ActivityReport(kernels=[k, other]))
    await until(lambda: broker.state(ada.handle) == "running", 60)
    await cell
