"""Attained service of users, and the levels that decide between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpushare.core import order
from jupyter_gpushare.core.fairshare import BASE_GPU_S, HALF_LIFE_S, STEP, UserLedger
from jupyter_gpushare.core.model import Order, State
from jupyter_gpushare.core.planner import Planner
from tests.core.build import NOW, build, cluster, started, stops

HOUR_S = 3600.0
A, B = ("p", "a"), ("p", "b")


def test_service_grows_with_what_the_jobs_hold_and_halves_in_a_day():
    ledger = UserLedger({}, now=0)
    ledger.count(stops("x", "0 1", user="a"), 1)
    ledger.count(build("s", 1000, "2", user="a"), 1)  # sessions are paid with quota
    ledger.advance(1.0)
    assert ledger.service_gpu_s()[A] == pytest.approx(2.0, rel=1e-3)
    ledger.count(stops("x", "0 1", user="a"), -1)
    ledger.count(stops("x", user="a"), 1)
    ledger.advance(1.0 + HALF_LIFE_S)
    assert ledger.service_gpu_s()[A] == pytest.approx(1.0, rel=1e-3)


def test_recounting_keeps_what_was_received():
    ledger = UserLedger({}, now=0)
    ledger.recount([stops("x", "0", user="a")])
    ledger.advance(HOUR_S)
    ledger.recount([stops("x", user="a"), stops("ended", user="b", state=State.RELEASED)])
    ledger.advance(2 * HOUR_S)
    assert ledger.service_gpu_s() == {A: pytest.approx(HOUR_S, rel=0.05)}


def test_the_only_user_of_a_project_has_no_level():
    ledger = UserLedger({A: 10 * BASE_GPU_S}, now=0)
    ledger.count(stops("x", user="a"), 1)
    assert ledger.levels() == {}
    ledger.count(stops("y", user="b"), 1)
    assert set(ledger.levels()) == {A}
    ledger.count(stops("z", project="q", user="c"), 1)
    ledger.count(stops("y", user="b"), -1)
    assert ledger.levels() == {}


def test_a_service_that_has_faded_is_forgotten():
    ledger = UserLedger({A: 10.0, B: 10.0}, now=0)
    ledger.count(stops("x", user="b"), 1)
    ledger.advance(10 * HALF_LIFE_S)
    assert set(ledger.service_gpu_s()) == {B}


def test_a_user_sinks_only_so_many_levels_below_the_own_one():
    def service(levels: float) -> float:
        return BASE_GPU_S * (STEP**levels - 1)

    ledger = UserLedger({A: service(4.1), B: 0.0}, now=0)
    for user in "ab":
        ledger.count(stops(user, user=user), 1)
    seen, sinks_at = [], (2.5, 1.5, 1.0, 0.5)
    while ledger.next_at < 99 * HALF_LIFE_S:
        before = ledger.service_gpu_s()[A]
        ledger.advance(ledger.next_at)
        seen.append((ledger.levels().get(A, 0), before > ledger.service_gpu_s()[A]))
        assert ledger.service_gpu_s()[A] == pytest.approx(service(sinks_at[len(seen) - 1]), rel=1e-3)
    assert seen == [(3, True), (2, True), (1, True), (0, True)]


@settings(max_examples=100, deadline=None)
@given(
    gpus=st.integers(1, 64), service=st.floats(0, 1e8), held=st.booleans(), waits=st.lists(st.floats(1, 1e5))
)
def test_levels_change_at_the_moments_that_were_told(gpus, service, held, waits):
    ledger = UserLedger({A: service}, now=0)
    ledger.count(stops("x", " ".join(map(str, range(gpus))) if held else "", user="a"), 1)
    ledger.count(stops("y", user="b"), 1)
    now = 0.0
    for wait_s in waits:
        before, told = ledger.levels(), ledger.next_at
        now = min(now + wait_s, told)
        ledger.advance(now)
        ledger.service_gpu_s()
        changed = ledger.levels() != before
        assert changed == (now == told)
        assert ledger.next_at > now


def test_the_user_with_less_service_comes_first_whatever_the_jobs_received():
    c = cluster(
        stops("mine", user="a", attained_gpu_s=9_000.0),
        stops("new", user="b"),
        order=Order.PROGRESS,
        min_run_s=60.0,
    )
    assert started(c) == ["new"]
    assert started(replace(c, user_levels={B: 1})) == ["mine"]


@pytest.mark.parametrize("kind", [Order.FIFO, Order.BACKFILL])
def test_an_order_that_does_not_preempt_knows_no_levels_of_users(kind):
    first, second = (
        stops("first", user="b", queued_at=NOW - 20),
        stops("second", user="a", queued_at=NOW - 10),
    )
    c = replace(cluster(first, second, order=kind), user_levels={B: 1})
    assert started(c) == ["first"]
    assert order.level(first, NOW, c.settings, 1) == order.level(second, NOW, c.settings, 0)


def test_a_user_with_less_service_preempts_jobs_of_one_with_more():
    c = cluster(
        stops("mine", user="a", attained_gpu_s=9_000.0),
        stops("new", "0", user="b", granted_at=NOW - 600),
        order=Order.PROGRESS,
        min_run_s=60.0,
    )
    planner = Planner.of(c)
    assert not planner.plan(NOW).actions
    planner.user_levels = {B: 1}
    assert [a.lease for a in planner.plan(NOW).actions] == ["new"]
