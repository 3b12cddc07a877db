"""Idle rules of projects, and sessions that only their processor keeps busy."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.state.policy import Policy, ProjectConfig
from jupyter_gpushare.broker.state.registry import keep_left
from jupyter_gpushare.errors import TooMany
from jupyter_gpushare.protocol import wire
from tests.broker.brokers import Broker
from tests.broker.machine import Held, Program
from tests.broker.virtual_time import STEP_S, until

HOLD_S = 900.0  # of `vision`


def policy(**site: float | None) -> Policy:
    """Two projects, of which `vision` has rules of its own."""
    own = ProjectConfig(
        name="vision",
        quota_percent=50.0,
        groups=("vision",),
        idle_timeout_s=300.0,
        notice_s=60.0,
        max_hold_s=HOLD_S,
        keep_minutes_per_day=15.0,
    )
    other = ProjectConfig(name="nlp", quota_percent=50.0, groups=("nlp",))
    return Policy(projects=(own, other), **({"idle_timeout_s": 60.0, "grace_s": 5.0} | site))


pytestmark = pytest.mark.site(policy=policy())


def shown(broker: Broker, held: Held) -> wire.LeaseStatus:
    return broker.shown(held.handle)


async def test_timeout_and_notice_are_those_of_the_project(site, broker):
    ada = await site.session("ada", "1/2")
    bo = await site.session("bo", "1/2")
    offers = {p: broker.views.offers([p], p).idle_timeout_s for p in ("vision", "nlp")}
    assert offers == {"vision": 300.0, "nlp": 60.0}
    await asyncio.sleep(200)
    assert "Your GPU stays with you until" in shown(broker, ada).sentence
    assert "Nobody is waiting" in shown(broker, bo).sentence
    await asyncio.sleep(400)
    assert "Nobody is waiting" in shown(broker, ada).sentence
    await site.submit("cy", "2", project="vision", program=Program(work_s=10_000))
    began = site.now
    await until(lambda: shown(broker, ada).warned, 10)
    assert shown(broker, ada).lend_in_s == pytest.approx(60, abs=2)
    assert shown(broker, bo).lend_in_s == pytest.approx(20, abs=2)
    await until(lambda: broker.state(ada.handle) == "suspending", 120, max_step_s=STEP_S)
    assert 59 <= site.now - began <= 63


async def test_a_project_with_a_budget_of_its_own_counts_by_itself(site, broker):
    own = await site.session("cy", "1/4", project="vision")
    other = await site.session("cy", "1/4", server="other", project="nlp")
    await broker.own_sessions.keep(broker.lease(own.handle), 10)
    assert shown(broker, own).keep_left_minutes == pytest.approx(5)
    assert shown(broker, other).keep_left_minutes == pytest.approx(120)
    with pytest.raises(TooMany, match="5 more minutes"):
        await broker.own_sessions.keep(broker.lease(own.handle), 30)
    await broker.own_sessions.keep(broker.lease(other.handle), 100)
    assert keep_left(broker.registry, "cy") == pytest.approx(20)
    assert keep_left(broker.registry, "cy", "vision") == pytest.approx(5)
    await broker.own_sessions.keep(broker.lease(own.handle), 0)
    assert keep_left(broker.registry, "cy", "vision") == pytest.approx(15, abs=0.1)


async def test_requests_that_are_no_cells_keep_no_session_awake_and_the_last_cell_counts(site, broker):
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", program=Program(work_s=10_000))
    cell = wire.KernelActivity(id="k", busy=True, handles_request=True, idle_s=0.0, runs=1)
    await site.reports("ada", cell)
    await asyncio.sleep(100)
    ended_at, warned_at = site.now, None
    while broker.state(ada.handle) == "running":
        idle_s = site.now - ended_at
        await site.reports("ada", wire.replace(cell, busy=False, idle_s=idle_s))
        if warned_at is None and shown(broker, ada).warned:
            warned_at = idle_s
        await asyncio.sleep(5)
    assert 300 <= site.now - ended_at <= 310
    assert warned_at == pytest.approx(200, abs=10)
    await until(lambda: broker.state(job) == "running", 60)


async def test_a_session_that_only_its_processor_keeps_busy_is_idle_after_max_hold(site, broker):
    ada = await site.session("ada", "1/2")
    used_at = site.now
    await site.computes("ada")
    await asyncio.sleep(100)
    assert shown(broker, ada).sentence == "Your 1/2 GPU is in use.", "no GPU work for a moment"
    await asyncio.sleep(500)
    assert shown(broker, ada).idle_s is None
    assert "No GPU work for 10 min; from " in shown(broker, ada).sentence
    assert "on this session counts as idle." in shown(broker, ada).sentence
    job = await site.submit("bo", "2", program=Program(work_s=10_000))
    await asyncio.sleep(used_at + HOLD_S - site.now + 10)
    assert broker.state(ada.handle) == "running"
    assert shown(broker, ada).sentence.startswith(
        "No GPU work for 15 min, so this session counts as idle. Idle for 10 s."
    )
    await until(lambda: broker.state(ada.handle) == "suspending", 400, max_step_s=STEP_S)
    began_at = used_at + HOLD_S
    assert began_at + 300 <= site.now <= began_at + 302, "its idle timeout begins then"
    await until(lambda: broker.state(job) == "running", 60)
    assert broker.state(ada.handle) == "suspended"
    await site.gpu_cell(ada)
    await until(lambda: broker.state(ada.handle) == "running", 60)
    assert shown(broker, ada).idle_s is None, "max_hold begins anew"


async def test_cells_on_the_processor_keep_a_gpu_no_longer_together_than_one_would(site, broker):
    ada = await site.session("ada", "1/2")
    used_at = site.now
    while site.now < used_at + HOLD_S - 60:
        await site.computes("ada")
        await asyncio.sleep(30)
        await site.computes("ada", busy=False)
        await asyncio.sleep(30)
    await site.computes("ada")
    await asyncio.sleep(used_at + HOLD_S + 30 - site.now)
    assert shown(broker, ada).idle_s == pytest.approx(30, abs=5)
    await site.gpu_cell(ada)
    await asyncio.sleep(HOLD_S - 60)
    assert shown(broker, ada).idle_s is None, "one GPU call, and it is kept for as long again"


async def test_a_restart_of_the_broker_does_not_begin_max_hold_anew(site, broker):
    ada = await site.session("ada", "1/2")
    used_at = site.now
    await asyncio.sleep(HOLD_S / 2)
    await broker.end()
    broker = await site.start_broker()
    await site.computes("ada")
    await asyncio.sleep(used_at + HOLD_S + 60 - site.now)
    assert shown(broker, ada).idle_s == pytest.approx(60, abs=10)


async def test_without_a_bound_a_busy_kernel_keeps_its_gpu_and_a_reload_sets_one(site, broker):
    bo = await site.session("bo", "1/2")
    await site.computes("bo")
    await asyncio.sleep(600)
    assert shown(broker, bo).sentence == "Your 1/2 GPU is in use."
    broker.registry.policy = replace(broker.registry.policy, max_hold_s=200.0)
    assert shown(broker, bo).idle_s == pytest.approx(400, abs=5)
