"""A round leaves nothing to the garbage collector, which would interrupt a later one to clean up."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.loop import uninterrupted
from jupyter_gpushare.core.model import Order
from jupyter_gpushare.core.plan import look, plan
from tests.benchmarks.plan_speed import NOW, cluster


@pytest.mark.parametrize("order", [Order.LAS, Order.FIFO, Order.BACKFILL, Order.SRTF])
@pytest.mark.parametrize("ask", [lambda c: plan(c, NOW), lambda c: look(c, NOW).run()], ids=["plan", "look"])
def test_what_a_round_was_made_of_is_gone_with_it(order, ask):
    busy = cluster(16, 100, 200, order)
    busy = replace(busy, lags_gpu_s={"a": 3_600.0}, settings=replace(busy.settings, catch_up_s=1_800.0))
    assert plan(busy, NOW).actions
    gc.collect()
    gc.disable()
    try:
        ask(busy)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_the_collector_goes_on_after_a_round_that_failed():
    @uninterrupted()
    def fails() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert gc.isenabled()
