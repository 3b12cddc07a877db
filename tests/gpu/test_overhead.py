"""What the benchmarks of a real GPU claim about an overhead, and what they refuse to claim."""

from __future__ import annotations

import pytest

from tests.gpu_real.overhead import PAIRS, added, in_turn


def pairs_of(*ratios: float) -> list[tuple[float, float]]:
    return [(2.0, 2.0 * ratio) for ratio in ratios]


def test_a_small_overhead_is_within_the_bound_and_a_large_one_is_not() -> None:
    small = added(pairs_of(*[1.01] * PAIRS))
    assert small.within is True
    assert str(small) == "+1.0 % (+1.0 to +1.0)"
    assert added(pairs_of(*[1.03] * PAIRS)).within is False


def test_what_is_added_is_a_median_that_one_disturbed_pair_on_each_side_does_not_move() -> None:
    calm = added(pairs_of(*[1.01] * (PAIRS - 2), 0.2, 9.0))
    assert (calm.median, calm.low, calm.high) == pytest.approx((0.01, 0.01, 0.01))


def test_noise_that_is_larger_than_the_bound_is_no_verdict() -> None:
    noisy = added(pairs_of(*[0.95, 1.05] * (PAIRS // 2), 1.0))
    assert noisy.within is None
    assert "too noisy to judge a bound of 2%" in str(noisy)


def test_a_machine_that_slows_down_on_the_way_adds_nothing() -> None:
    assert added([(float(n), 1.01 * n) for n in range(1, PAIRS + 1)]).within is True


def test_neither_is_always_measured_first() -> None:
    asked: list[str] = []
    pairs = in_turn(lambda: asked.append("a") or 1.0, lambda: asked.append("b") or 2.0)  # type: ignore[func-returns-value]
    assert pairs == [(1.0, 2.0)] * PAIRS
    assert "".join(asked) == "ab" + "baab" * (PAIRS // 2)
