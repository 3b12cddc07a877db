"""A round leaves nothing to the garbage collector, which would interrupt a later one to clean up."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.engine.local import gc_paused
from jupyter_gpushare.core.model import Order
from jupyter_gpushare.core.planning.planner import dry_run, plan
from jupyter_gpushare.sim.scenario import SRTF
from tests.benchmarks.plan_speed import NOW, cluster

ROUNDS = {"plan": lambda c: plan(c, NOW), "dry_run": lambda c: dry_run(c, NOW).run()}


@pytest.mark.parametrize("order", [Order.LAS, Order.FIFO, Order.BACKFILL, SRTF])
@pytest.mark.parametrize("ask", ROUNDS.values(), ids=ROUNDS)
def test_what_a_round_was_made_of_is_gone_with_it(order, ask):
    busy = cluster(16, 100, 200, order)
    busy = replace(
        busy, lags_gpu_s={"a": 3_600.0}, settings=replace(busy.settings, fairness_horizon_s=1_800.0)
    )
    assert plan(busy, NOW).actions
    gc.collect()
    gc.disable()
    try:
        ask(busy)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_collector_goes_on_after_a_round_that_failed():
    @gc_paused()
    def fails() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert gc.isenabled()
