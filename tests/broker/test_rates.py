"""Each caller may do a thing so often, and is told when to come again."""

from __future__ import annotations

import pytest

from jupyter_gpushare.broker.http import listener
from jupyter_gpushare.broker.http.listener import Rate
from jupyter_gpushare.errors import TooMany


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_taken_then_so_many_a_second_and_others_have_their_own():
    clock = Clock()
    rate = Rate(2.0, burst=3, clock=clock)
    for _ in range(3):
        rate.take("bo")
    with pytest.raises(TooMany, match="at most 2 of these a second") as refused:
        rate.take("bo")
    assert refused.value.retry_after_s == pytest.approx(0.5)
    rate.take("ada")
    clock.now += 0.5
    rate.take("bo")
    with pytest.raises(TooMany):
        rate.take("bo")
    clock.now += 1.5
    for _ in range(3):
        rate.take("bo")


def test_what_was_refused_is_not_counted():
    clock = Clock()
    rate = Rate(1.0, burst=1, clock=clock)
    rate.take("bo")
    for _ in range(100):
        with pytest.raises(TooMany):
            rate.take("bo")
    clock.now += 1.0
    rate.take("bo")


def test_callers_that_rested_are_forgotten(monkeypatch):
    monkeypatch.setattr(listener, "_MAX_BUCKETS", 3)
    clock = Clock()
    rate = Rate(1.0, burst=1, clock=clock)
    for caller in "abc":
        rate.take(caller)
    clock.now += 1.0
    rate.take("d")
    assert rate._full_at.keys() == {"d"}
