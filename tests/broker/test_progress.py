"""What pages are told while jobs run: progress, and many changes at once."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa

from jupyter_gpushare import wire
from tests.broker.machine import Program
from tests.broker.site import Site
from tests.broker.virtual_time import in_virtual_time, until


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
async def test_progress_is_news_for_pages_and_nothing_to_decide(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=100))
        await until(lambda: broker.state(job) == "running", 60)
        for step in (1.0, 2.0):
            broker.book.woken.clear()
            seq = broker.book.seq
            await broker.desk.report("bo", job.id, 1, wire.JobReport(state="progress", done=step))
            assert broker.book.seq == seq + 1
        assert not broker.book.woken.is_set()
