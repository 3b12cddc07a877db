"""What pages are told while jobs run: progress, and many changes at once."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.broker.views.history import timeline
from tests.broker.brokers import Broker, sent
from tests.broker.machine import Program
from tests.broker.site import Site


async def test_progress_is_shown(site, broker):
    job = await site.running("bo", "1", program=Program(work_s=100))
    await site.report(job, state="progress", done=3.0, total=10.0)
    assert (broker.seen(job).done, broker.seen(job).total) == (3.0, 10.0)
    await site.report(job, state="ended", exit_code=0, done=10.0, total=10.0)
    assert (broker.seen(job).done, broker.seen(job).total) == (10.0, 10.0)


async def test_many_changes_reach_a_page_together_and_soon(site):
    registry = (await site.start_broker(running=False)).registry
    told = []

    async def page():
        seq = registry.notifications.seq
        while True:
            await registry.notifications.wait_after(seq, 30)
            seq = registry.notifications.seq
            told.append((site.now, seq))

    site.later(page())
    await asyncio.sleep(1)
    first = site.now
    for _ in range(100):
        await registry.notify()
        await asyncio.sleep(0.01)
    last = site.now
    await asyncio.sleep(1)
    assert told[0][0] == first, "the first one is told at once"
    assert 9 <= len(told) <= 12
    assert told[-1][0] <= last + 0.1
    assert told[-1][1] == registry.notifications.seq


async def test_progress_is_seen_at_once_and_stored_now_and_then(site, broker):
    job = await site.running("bo", "1", program=Program(work_s=1_000))
    stored = []
    sa.event.listen(
        broker.store._engine,
        "before_cursor_execute",
        lambda *a: stored.append(a[2].startswith("UPDATE jobs")),
    )
    for step in range(1, 301):  # ten a second
        await site.report(job, state="progress", done=float(step), total=300.0)
        assert broker.seen(job).done == step
        await asyncio.sleep(0.1)
    assert 3 <= sum(stored) <= 4
    await site.report(job, state="ended", exit_code=0)
    assert (await broker.store.job(job.id, "bo")).done == 300.0


async def test_progress_is_news_for_pages_and_nothing_to_decide(site, broker):
    job = await site.running("bo", "1", program=Program(work_s=100))
    for step in (1.0, 2.0):
        broker.registry.changed.clear()
        seq = broker.registry.notifications.seq
        await site.report(job, state="progress", done=step)
        assert broker.registry.notifications.seq == seq + 1
    assert not broker.registry.changed.is_set()


async def _measured(site: Site, broker: Broker) -> JobRecord:
    """A job on 1 GPU that has done a tenth of its work in 1,000 s."""
    job = await site.running("bo", "1", program=Program(work_s=50_000))
    for done in (0.0, 10.0):
        await site.report(job, state="progress", done=done, total=100.0)
        if not done:
            await asyncio.sleep(1_000)
    return job


async def test_sentence_rest_and_timeline_say_when_a_measured_job_ends(site, broker):
    job = await _measured(site, broker)
    seen = broker.seen(job)
    assert seen.left_s == pytest.approx(9_000, rel=0.02)
    assert seen.reason.endswith("Ends in 2 to 7 h.")
    moments = sent(await timeline(broker.registry, broker.job(job), "bo")).moments
    (told,) = (moment for moment in moments if moment.what == "progress")
    assert "h left, by its progress." in told.sentence
    (planned,) = snapshot.cluster(broker.registry, broker.engine, site.now).leases
    assert planned.left_gpu_s == 7_680


async def test_a_job_with_a_total_that_begins_again_says_no_longer_how_long_it_runs(site, broker):
    job = await _measured(site, broker)
    await site.report(job, state="progress", done=1.0, total=100.0)
    seen = broker.seen(job)
    assert seen.left_s is None
    assert "left" not in seen.reason
    (planned,) = snapshot.cluster(broker.registry, broker.engine, site.now).leases
    assert planned.left_gpu_s is None


async def test_progress_that_is_withdrawn_is_shown_no_longer_and_wakes_the_planner(site, broker):
    """A bar that proved not to be that of the whole job."""
    job = await _measured(site, broker)
    broker.registry.changed.clear()
    await site.report(job, state="progress")
    seen = broker.seen(job)
    assert (seen.done, seen.total, seen.left_s) == (None, None, None)
    assert "Ends" not in seen.reason
    (planned,) = snapshot.cluster(broker.registry, broker.engine, site.now).leases
    assert planned.left_gpu_s is None
    assert broker.registry.changed.is_set()
    await site.report(job, state="ended", exit_code=0)
    assert broker.seen(job).done is None


async def test_what_progress_has_shown_outlives_the_broker(site, broker):
    job = await _measured(site, broker)
    known = broker.job(job).measure
    await broker.end()
    broker = await site.start_broker()
    assert broker.job(job).measure == known


async def test_progress_that_changes_the_order_wakes_the_planner(site, broker):
    job = await _measured(site, broker)
    broker.registry.changed.clear()
    for done, wakes in ((10.001, False), (60.0, True)):
        await site.report(job, state="progress", done=done, total=100.0)
        assert broker.registry.changed.is_set() is wakes
