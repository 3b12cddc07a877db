"""Compute an overhead from alternating pairs of measurements: the median and its confidence range.

A machine that speeds up or slows down does so for both of a pair.  The range of the
true median follows from the order of the ratios, whatever their distribution: of 11
pairs, the second lowest to the second highest contain it with 98.8 % (binomial,
p = 1/2).  If that range is not on one side of the bound, nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

PAIRS = 11
MOST = 0.02

_Measured = TypeVar("_Measured")


@dataclass(frozen=True, slots=True)
class Added:
    """The median overhead and its range; 0.01 is one percent."""

    median: float
    low: float
    high: float

    @property
    def within(self) -> bool | None:
        """Return whether the overhead is at most `MOST`, or None if the noise is too large."""
        return True if self.high <= MOST else False if self.low > MOST else None

    def __str__(self) -> str:
        shown = f"{100 * self.median:+.1f} % ({100 * self.low:+.1f} to {100 * self.high:+.1f})"
        return shown if self.within is not None else f"{shown}: too noisy to judge a bound of {MOST:.0%}"


def added(pairs: Iterable[tuple[float, float]]) -> Added:
    """Return the overhead of the second time over the first in `PAIRS` pairs."""
    ratios = sorted(after / before - 1 for before, after in pairs)
    assert len(ratios) == PAIRS
    return Added(median(ratios), ratios[1], ratios[-2])


def in_turn(
    first: Callable[[], _Measured], second: Callable[[], _Measured]
) -> list[tuple[_Measured, _Measured]]:
    """Measure `PAIRS` pairs in alternating order, so that neither is always first."""
    pairs = []
    for number in range(PAIRS):
        if number % 2:
            after, before = second(), first()
        else:
            before, after = first(), second()
        pairs.append((before, after))
    return pairs
