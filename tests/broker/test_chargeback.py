"""GPU-hours for chargeback: held, computing, borrowed and lent, by user, project, model, day and month."""

from __future__ import annotations

import asyncio
import csv
import io
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.http.listener import Rate
from jupyter_gpushare.broker.state.records import LeaseRecord, UsageRecord
from jupyter_gpushare.broker.state.usage import UsageSums
from jupyter_gpushare.broker.views import history
from jupyter_gpushare.core.model import Kind, Lease, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.wall_clock import by_day
from tests.broker.http_site import PREFIX
from tests.broker.machine import Program
from tests.broker.virtual_time import until

# From the begin of a site in memory to its first midnight (UTC).
TO_MIDNIGHT_S = 6_400.0


async def told(broker, by, **only):
    today = broker.registry.iso_now()[:10]
    asked = {"since": "2023-11-01"} | only
    return await history.usage(broker.registry, history.query(today, by=by, **asked))


def test_a_stretch_is_divided_at_midnight():
    assert list(by_day("2023-11-15T00:00:00.000Z", 10)) == [("2023-11-14", 10)]
    assert list(by_day("2023-11-15T01:00:00.000Z", 0)) == []
    assert list(by_day("2023-11-15T01:00:00.000Z", 3600 + 86_400 + 5)) == [
        ("2023-11-13", 5),
        ("2023-11-14", 86_400),
        ("2023-11-15", 3600),
    ]


async def test_each_day_has_the_hours_that_were_held_in_it(site, broker):
    job = await site.running("bo", "2", program=Program(work_s=TO_MIDNIGHT_S + 3_600))
    began_s = site.now
    # Before it ends, too: the broker dies, and the day has passed.
    await asyncio.sleep(TO_MIDNIGHT_S + 1_000 - site.now)
    await broker.end()
    broker = await site.start_broker()
    running = await told(broker, "day,user")
    first, second = running.rows
    assert (first.day, second.day) == ("2023-11-14", "2023-11-15")
    assert first.held_gpu_h == pytest.approx(2 * (TO_MIDNIGHT_S - began_s) / 3600, rel=1e-3)
    assert second.held_gpu_h == pytest.approx(2 * (site.now - TO_MIDNIGHT_S) / 3600, rel=1e-3)
    await until(lambda: broker.job(job).result, 10_000)
    after = await told(broker, "day,user")
    assert after.rows[0].held_gpu_h == pytest.approx(first.held_gpu_h, rel=1e-3)
    assert after.total.held_gpu_h == pytest.approx(2 * broker.job(job).ran_s / 3600, rel=1e-3)


def test_many_days_without_a_sum_change_no_day_before_them():
    """More of them than are kept in memory: the broker was away while a session ran on."""
    usage = UsageSums(lambda _: "", 0.0)
    before = UsageRecord(day="2023-11-10", user="ada", project="vision", used_gpu_s=36_000.0)
    usage.load([replace(before, day=f"2023-11-{day:02}") for day in range(4, 11)])
    lease = Lease(id="x", project="vision", kind=Kind.BUILD, size=Size(1000), user="ada", state=State.RUNNING)
    session = LeaseRecord(lease=replace(lease, held_milli=1000, devices=("GPU-0",)))
    stored = {}
    for use in usage.of(session, "2023-11-22T12:00:00.000Z", 12 * 86_400):
        found = usage.count(use)
        assert isinstance(found, UsageRecord)
        stored[found.day] = found.used_gpu_s
    assert stored == {
        "2023-11-10": 36_000 + 43_200,
        **{f"2023-11-{day}": 86_400 for day in range(11, 22)},
        "2023-11-22": 43_200,
    }


async def test_use_of_a_day_that_is_not_in_memory_is_added_to_it_on_disk(broker):
    old = UsageRecord(day="2023-11-01", user="ada", project="vision", used_gpu_s=3600.0)
    for day in (1, *range(5, 12), 1):
        use = replace(old, day=f"2023-11-{day:02}")
        await broker.registry.journal.commit(broker.registry.usage.count(use))
    found = await told(broker, "day")
    days = [(row.day, row.held_gpu_h) for row in found.rows]
    assert days[:2] == [("2023-11-01", 2.0), ("2023-11-05", 1.0)]


async def test_a_power_cut_loses_minutes_and_not_the_days_of_a_session(site, broker):
    await site.session("ada", "1/2")
    await asyncio.sleep(5_000)
    before = (await told(broker, "user")).total.held_gpu_h
    assert before == pytest.approx(0.5 * 5_000 / 3600, rel=0.02)
    await broker.end()
    stored = sum(use.used_gpu_s for use in broker.store.load().usage) / 3600
    assert before - stored <= 0.5 * 310 / 3600


async def test_what_is_lent_borrowed_and_computed_goes_to_its_user_and_model(site, broker):
    await site.session("ada", "1/2")
    # Guaranteed 1 of 2: a job of 2 borrows 1, and ada's half of it is lent.
    job = await site.running("bo", "2", program=Program(work_s=1_000))
    began_s = site.now
    await until(lambda: broker.job(job).result, 2_000)
    ran_s = site.now - began_s
    by_user = {row.user: row for row in (await told(broker, "user")).rows}
    bo, ada = by_user["bo"], by_user["ada"]
    assert bo.held_gpu_h == pytest.approx(2 * ran_s / 3600, rel=0.02)
    assert bo.borrowed_gpu_h == pytest.approx(1 * ran_s / 3600, rel=0.05)
    assert 0 < bo.computing_gpu_h <= bo.held_gpu_h + 1e-3
    assert (bo.lent_gpu_h, ada.borrowed_gpu_h) == (0, 0)
    assert ada.lent_gpu_h == pytest.approx(0.5 * ran_s / 3600, rel=0.05)
    models = {device.name for device in broker.registry.devices.listed}
    assert {row.gpu for row in (await told(broker, "gpu")).rows} == models
    only = await told(broker, "project,month", user="ada")
    assert [(row.project, row.month) for row in only.rows] == [("vision", "2023-11")]


async def test_days_that_are_on_disk_only_are_told_with_those_in_memory(site, broker):
    old = [
        UsageRecord(day=f"2023-{month:02}-01", user="bo", project="nlp", gpu="old", used_gpu_s=3600.0)
        for month in range(1, 11)
    ]
    await broker.registry.journal.commit(*old)
    job = await site.submit("bo", "1", program=Program(work_s=3_600))
    await until(lambda: broker.job(job).result, 5_000)
    year = await told(broker, "month", since="2023-01-01")
    assert [row.month for row in year.rows] == [f"2023-{month:02}" for month in range(1, 12)]
    assert [row.held_gpu_h for row in year.rows] == pytest.approx([1.0] * 11, rel=0.02)


@pytest.mark.parametrize(
    "wrong",
    [
        {"by": "users"},
        {"by": "user,user"},
        {"by": "day,month"},
        {"since": "2023-02-30"},
        {"until": "now"},
    ],
)
def test_a_wrong_query_is_refused(wrong):
    with pytest.raises(InvalidRequest):
        history.query("2023-11-14", **wrong)


async def test_too_many_rows_are_refused_with_what_to_do(http, monkeypatch):
    monkeypatch.setattr(history, "MAX_ROWS", 1)
    registry = http.broker.registry
    for user in ("ada", "bo"):
        registry.usage.count(UsageRecord(day="2023-11-14", user=user, project="nlp", used_gpu_s=1))
    answer = await http.ask("GET", "usage?by=user&since=2023-01-01", "root")
    assert (answer.status_code, "fewer days" in answer.text) == (400, True)


async def test_an_administrator_gets_all_and_a_user_the_own_part(http):
    registry = http.broker.registry
    for user in ("ada", "=bo"):
        registry.usage.count(UsageRecord(day="2023-11-14", user=user, project="nlp", used_gpu_s=7_200))
    query = "usage?by=user,day&since=2023-11-01"
    rows = (await http.ask("GET", query, "root")).json()["rows"]
    assert [(row["user"], row["held_gpu_h"], row["project"]) for row in rows] == [
        ("=bo", 2.0, None),
        ("ada", 2.0, None),
    ]
    mine = (await http.ask("GET", f"{query}&user=%3Dbo", "ada")).json()["rows"]
    assert [row["user"] for row in mine] == ["ada"]
    table = f"{http.url}{PREFIX}{query.replace('usage', 'usage.csv', 1)}"
    answer = await http.ask("GET", table, "root")
    assert answer.headers["Content-Type"].startswith("text/csv")
    assert list(csv.reader(io.StringIO(answer.text))) == [
        ["user", "day", "held_gpu_h", "computing_gpu_h", "borrowed_gpu_h", "lent_gpu_h"],
        ["'=bo", "2023-11-14", "2.0", "0.0", "0.0", "0.0"],
        ["ada", "2023-11-14", "2.0", "0.0", "0.0", "0.0"],
    ]
    assert "=bo" not in (await http.ask("GET", table, "ada")).text


@pytest.mark.parametrize(("paths", "user"), [(["usage"], "bo"), (["trace/jobs", "trace/cells"], "root")])
async def test_one_user_asks_for_use_or_a_trace_ten_times_at_once_and_then_waits(http, paths, user):
    http.service.limits.scans = Rate(per_s=0.01, burst=10)
    answers = [await http.ask("GET", paths[n % len(paths)], user) for n in range(12)]
    assert [each.status_code for each in answers] == [200] * 10 + [429] * 2
    assert int(answers[-1].headers["Retry-After"]) >= 1
    assert (await http.ask("GET", "usage", "ada")).status_code == 200
