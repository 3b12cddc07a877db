"""What the administrator reads beside the lists: what the GPUs do and did, and what needs a look."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.http.pages import HEIGHT, WIDTH, path
from jupyter_gpushare.broker.state.records import MachineUse
from jupyter_gpushare.broker.state.usage import GpuBreakdown, Meter, downsample, gpu_breakdown
from jupyter_gpushare.broker.views.overview import Overview
from jupyter_gpushare.core.model import Kind, Lease, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import DeviceSample, EventKind
from tests.broker.brokers import Broker
from tests.broker.machine import Program
from tests.broker.virtual_time import until


def lease(state: State, milli: int, *, idle: bool = False, kind: Kind = Kind.BUILD) -> Lease:
    return Lease(
        id=f"idle{milli}" if idle else f"{state}{milli}{kind}",
        project="p",
        kind=kind,
        size=Size(milli),
        held_milli=milli,
        devices=("GPU-0",),
        state=state,
    )


def overview(broker: Broker) -> Overview:
    return Overview(broker.views)


# ---- what the GPUs do


@pytest.mark.parametrize(
    ("leases", "says"),
    [
        ([], GpuBreakdown(free=1.0)),
        ([lease(State.RUNNING, 500)], GpuBreakdown(computing=0.5, free=0.5)),
        ([lease(State.RUNNING, 500, idle=True)], GpuBreakdown(idle=0.5, free=0.5)),
        ([lease(State.SUSPENDED, 500)], GpuBreakdown(free=1.0)),
        (
            [lease(State.SUSPENDED, 500), lease(State.RUNNING, 750, kind=Kind.TRAIN)],
            GpuBreakdown(computing=0.5, lent=0.25, free=0.25),
        ),
    ],
)
def test_shares_come_to_all_usable_gpus(leases, says):
    at_work = {each.id for each in leases if not each.id.startswith("idle")}
    found = gpu_breakdown(leases, ["GPU-0"], 2, at_work)
    assert found == replace(says, broken=2)
    assert found.usable == 1


def test_what_lies_on_a_broken_gpu_counts_for_nothing():
    assert gpu_breakdown([lease(State.RUNNING, 500)], [], 1, ()) == GpuBreakdown(broken=1)


async def test_a_kernel_that_is_busy_without_its_gpu_computes_nothing(site, broker):
    ada = await site.session("ada", "1/2")
    await site.gpu_cell(ada)
    assert overview(broker).now().computing == 0.5
    busy = [wire.KernelActivity(id="k", name="a.ipynb", busy=True, idle_s=0.0)]
    server = broker.lease(ada.handle).server
    await broker.own_sessions.activity("ada", server, wire.ActivityReport(kernels=busy))
    await asyncio.sleep(30)
    assert (overview(broker).now().computing, overview(broker).now().idle) == (0.0, 0.5)


def test_a_row_is_the_mean_of_its_minutes():
    meter = Meter(0.0)
    device = DeviceSample(uuid="GPU-0", used_bytes=0, utilization_percent=50, healthy=True)
    meter.note(GpuBreakdown(computing=1.0), [device])
    assert meter.row(299.0, "now") is None
    meter.note(GpuBreakdown(lent=0.5, free=0.5), [replace(device, utilization_percent=100)])
    assert meter.row(300.0, "now") == MachineUse(at="now", gpus=1.0, held=0.75, busy=0.75, lent=0.25)
    assert meter.row(900.0, "later") is None  # nothing was seen since


def use(at: str, held: float) -> MachineUse:
    return MachineUse(at=at, gpus=2.0, held=held, busy=held / 2, lent=0.0)


def test_the_past_is_told_in_equal_parts_with_gaps():
    rows = [
        use("2026-01-01T09:59:00.000Z", 9.0),
        use("2026-01-01T10:10:00.000Z", 1.0),
        use("2026-01-01T10:20:00.000Z", 2.0),
        use("2026-01-01T11:55:00.000Z", 1.0),
    ]
    parts = downsample(rows, "2026-01-01T12:00:00.000Z", 2.0, 4)
    assert [part and part.held for part in parts] == [1.5, None, None, 1.0]


def test_a_line_has_a_gap_where_nothing_is_known():
    half = use("", 1.0)
    assert path([half, None, half], lambda part: part.held) == (
        f"M0.0 {HEIGHT / 2:.1f}V{HEIGHT / 2:.1f}H{WIDTH / 3:.1f}"
        f"M{2 * WIDTH / 3:.1f} {HEIGHT / 2:.1f}V{HEIGHT / 2:.1f}H{WIDTH:.1f}"
    )
    area = path([half], lambda part: part.held, area=True)
    assert area == f"M0.0 {HEIGHT:.1f}V{HEIGHT / 2:.1f}H{WIDTH:.1f}V{HEIGHT}Z"
    assert path([None], lambda part: part.held) == ""


async def test_what_the_gpus_did_is_on_disk_and_outlives_a_broker(site, broker):
    await site.session("ada", "1/2")
    await asyncio.sleep(700)
    await broker.end()
    broker = await site.start_broker()
    known = [part for part in await overview(broker).past("24h") if part is not None]
    assert known
    assert all((part.gpus, part.held, part.lent) == (2.0, 0.5, 0.0) for part in known[1:])


# ---- what needs a look


async def test_idle_sessions_and_what_the_watchdog_saw_need_a_look(site, monkeypatch):
    monkeypatch.setattr("jupyter_gpushare.broker.views.overview.RECENT_HOURS", 0.5)
    broker = await site.start_broker()
    ada = await site.session("ada", "1/2")
    cy = await site.session("cy", "1/2")
    cy.suspendable = False
    await asyncio.sleep(2 * 3600)
    idle = {look.sentence: look.lend for look in overview(broker).alerts()}
    assert idle == {
        "ada's session (1/2 GPU) has been idle for 2 h; no other work has needed its GPU.": ada.handle[:-2],
        "cy's session (1/2 GPU) has been idle for 2 h and cannot be put to sleep: it uses CUDA IPC.": "",
    }
    site.emit(EventKind.UNLEASED_PROCESS, reason="a process without a lease uses GPU-0")
    await until(lambda: any("without a lease" in x.sentence for x in overview(broker).alerts()), 30)
    await asyncio.sleep(0.6 * 3600)
    assert not any("without a lease" in x.sentence for x in overview(broker).alerts())


async def test_an_alarm_says_when_a_job_is_larger_than_the_guarantee_of_its_project(site, broker):
    (await site.session("ada", "1")).suspendable = False
    await site.submit("bo", "2")
    await asyncio.sleep(90)
    alerts = [alert.sentence for alert in overview(broker).alerts()]
    assert alerts == [
        "A job of project nlp waits for 2 GPUs together, more than the 1 that the project is guaranteed: "
        "it starts when the rest can be borrowed."
    ]


async def test_a_project_that_waits_for_its_guarantee_reads_which_project_borrows(site, broker):
    for server in ("", "more"):
        (await site.session("bo", "1", server=server)).suspendable = False
    await site.submit("ada", "1")
    await asyncio.sleep(30)
    assert not overview(broker).alerts()
    await asyncio.sleep(60)
    alerts = [x.sentence for x in overview(broker).alerts()]
    assert alerts == ["Project vision waits for 1 GPU of what it is guaranteed; nlp borrows 1."]


async def test_more_guarantees_than_gpus_need_a_look(broker):
    assert not overview(broker).alerts()
    await broker.project_numbers.change("vision", wire.ProjectChange(quota=1.5, force=True), "root")
    assert [x.sentence for x in overview(broker).alerts()] == [
        "The projects are guaranteed 2.5 GPUs together, and there are 2: jobs share these by weight."
    ]


async def test_an_owner_that_keeps_an_idle_gpu_for_most_of_the_days_budget_is_seen(site, broker):
    ada = await site.session("ada", "1/2")
    budget = site.policy.keep_minutes_per_day
    await broker.own_sessions.keep(broker.lease(ada.handle), budget / 4)
    assert not overview(broker).alerts()
    await broker.own_sessions.keep(broker.lease(ada.handle), 0.75 * budget)
    assert [x.sentence for x in overview(broker).alerts()] == [
        f"ada kept an idle GPU for {0.75 * budget:.0f} of {budget:g} minutes today."
    ]


async def test_the_week_of_a_project_has_its_hours_and_how_long_its_jobs_waited(site, broker):
    jobs = [await site.submit("bo", "1", program=Program(work_s=100)) for _ in range(12)]
    await until(lambda: all(broker.job(job).result for job in jobs), 3_000)
    week = overview(broker).weeks()["nlp"]
    assert week.used_gpu_h == pytest.approx(12 * 100 / 3600, rel=0.1)
    half, most = week.waited_s
    assert 200 < half < 350
    assert half < most < 600
    assert overview(broker).weeks()["vision"].waited_s is None
