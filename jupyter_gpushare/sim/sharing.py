"""Simulate two jobs on one GPU: the speed of each beside the other, and the memory of both.

A trace contains neither, so each job draws them at random, with its id as the seed.  There are two models:

* `by_turns` models this project.  A host has turns of 9 to 1, and its guest gets the host's gaps.  The cost
  depends on how often the host pauses (`CYCLES`, measured).
* `side_by_side` uses measured pairs of a table, whose kernels ran at the same time.  With turns they do not,
  so the result is an upper limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.replay import Speeds
from jupyter_gpushare.sim.traces import PairRates

# For a host that computes and pauses by turns: the length of one cycle, the part of its speed that the host
# keeps, and the part of its gaps that its guest gets.  Means of five runs of ``tests.benchmarks.gaps``.
CYCLES = (
    ("50 ms", 0.844, 0.933),
    ("200 ms", 0.946, 0.945),
    ("800 ms", 0.92, 1.0),
)
# The part of a device's memory that a job uses is drawn evenly from this range.
MEMORY = 0.1, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Model of pairs of jobs."""

    speeds: Speeds
    uses: Callable[[str], float]  # the part of each device's memory that a job uses, by its id
    key: Callable[[str], str]  # owner and command of a job, by its id
    parted: Sequence[tuple[str, str, float]] = ()  # pairs that are never tried


def by_turns(gaps: float, seed: int = 0) -> Sharing:
    """Return a model of jobs that leave the part ``gaps`` of their GPU time, which their guests use.

    A guest has gaps of its own, in which it needs no GPU; the model assumes that they are independent of
    the host's gaps.  Each job has a command of its own.
    """

    def speeds(host: Lease, guest: Lease) -> tuple[float, float]:
        _, host_speed, guest_part = _draw(host.id, seed, "cycle").choice(CYCLES)
        guest_time = gaps * guest_part
        return host_speed, 1 / ((1 - gaps) / guest_time + gaps) if guest_time < 1 else 1.0

    return Sharing(
        speeds=speeds, uses=lambda id: _draw(id, seed, "memory").uniform(*MEMORY), key=lambda id: id
    )


def side_by_side(rates: Mapping[tuple[str, str], PairRates], seed: int = 0) -> Sharing:
    """Return a model of jobs with commands of the table; pairs that do not fit are never tried."""
    names = sorted({name for pair in rates for name in pair})

    def key(id: str) -> str:
        return _draw(id, seed, "command").choice(names)

    def speeds(host: Lease, guest: Lease) -> tuple[float, float]:
        return rates[host.pair_key, guest.pair_key]

    unfit = [(*pair, inf) for pair, both in rates.items() if not all(both)]
    return Sharing(speeds=speeds, uses=lambda id: 0.0, key=key, parted=unfit)


def _draw(id: str, seed: int, purpose: str) -> Random:
    return Random(f"{purpose} {seed} {id}")  # noqa: S311 - a repeatable draw, no secret
