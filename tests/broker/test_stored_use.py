"""Use of GPUs in the broker's database: added up, kept for 400 days, read apart from commits."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from datetime import date, timedelta

from jupyter_gpushare.broker.state.usage import Amounts, UsageQuery
from tests.broker.stored import USAGE
from tests.waiting import PATIENCE_S


async def test_no_commit_waits_for_a_query_of_the_use_of_many_days(database, monkeypatch):
    store, reads, goes_on = database(), threading.Event(), threading.Event()
    rows = store._rows
    monkeypatch.setattr(store, "_rows", lambda query: (reads.set(), goes_on.wait(PATIENCE_S), rows(query))[2])
    query = UsageQuery(since="2000-01-01", until="2100-01-01", by=("day",))
    asked = asyncio.create_task(store.usage(query, "2100-01-01", 10))
    await asyncio.to_thread(reads.wait, PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S / 2):
        await store.commit([USAGE])
    assert not asked.done()
    goes_on.set()
    assert [day for (day,), _ in await asked] == [USAGE.day]


async def test_use_of_a_day_is_replaced_and_kept_for_400_days(store):
    """A day in the future, of a wrong clock, is one of them and drops no more than one."""
    last = date(2025, 3, 1)
    days = [(last - timedelta(days=n)).isoformat() for n in range(401, -1, -1)]
    await store.commit([replace(USAGE, day=day) for day in days])
    await store.commit([replace(USAGE, day=days[-1], used_gpu_s=9.0)])
    everything = UsageQuery(since="2000-01-01", until="2100-01-01", by=("day",))
    found = await store.usage(everything, "2100-01-01", 1000)
    assert [day for (day,), _ in found] == days[2:]
    assert [amounts.used_gpu_s for _, amounts in found] == [*[1.5] * 399, 9.0]
    await store.commit([replace(USAGE, day="2099-01-01")])
    found = await store.usage(everything, "2100-01-01", 1000)
    assert [day for (day,), _ in found] == [*days[3:], "2099-01-01"]


async def test_only_the_newest_week_of_use_is_loaded(store):
    days = [f"2025-01-{n:02}" for n in range(1, 11)]
    await store.commit([replace(USAGE, day=day, gpu=gpu) for day in days for gpu in ("A", "B")])
    loaded = store.load()
    assert sorted({u.day for u in loaded.usage}) == days[-7:]
    assert len(loaded.usage) == 14


async def test_use_is_added_up_by_what_is_asked_for(store):
    rows_of = [
        replace(USAGE, day=day, user=user, gpu=gpu, used_gpu_s=1.0)
        for day in ("2025-01-31", "2025-02-01")
        for user in ("ada", "bo")
        for gpu in ("A", "B")
    ]
    await store.commit(rows_of)
    query = UsageQuery(since="2025-01-01", until="2025-12-31", by=("month", "user"))
    by_month = await store.usage(query, "2025-12-31", 10)
    assert [(group, amounts.used_gpu_s) for group, amounts in by_month] == [
        ((month, user), 2.0) for month in ("2025-01", "2025-02") for user in ("ada", "bo")
    ]
    ada = await store.usage(replace(query, by=("gpu",), user="ada"), "2025-02-01", 10)
    none = await store.usage(replace(query, project="vision"), "2025-12-31", 10)
    assert (ada, none) == (
        [(("A",), Amounts(1.0, 0.75, 0.25, 2.5)), (("B",), Amounts(1.0, 0.75, 0.25, 2.5))],
        [],
    )
