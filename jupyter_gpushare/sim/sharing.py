"""Two jobs on one GPU, simulated: the speed of each beside the other, and the memory that both use.

A trace tells neither, so each job draws both by a hash of its id.  Two models:

* `by_turns`: what this project does.  A host has turns of 9 to 1, and its guest gets the host's gaps.  What
  that costs depends on how often the host pauses (`CYCLES`, measured).
* `side_by_side`: measured pairs of a table, whose kernels ran at the same time.  Turns do not do that: what
  both do together is an upper limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.replay import Speeds
from jupyter_gpushare.sim.traces import PairRates

# A host that computes and pauses in turn: the length of both together, the part of its speed that it keeps,
# and the part of its gaps that its guest gets.  Means of five runs of ``tests.benchmarks.gaps``.
CYCLES = (
    ("50 ms", 0.844, 0.933),
    ("200 ms", 0.946, 0.945),
    ("800 ms", 0.92, 1.0),
)
# The part of a device's memory that a job uses is drawn evenly from this range.
MEMORY = 0.1, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How pairs of jobs run."""

    speeds: Speeds
    uses: Callable[[str], float]  # part of each device's memory, by the id of a job
    key: Callable[[str], str]  # owner and command
    parted: Sequence[tuple[str, str, float]] = ()  # pairs that are never tried


def by_turns(gaps: float, seed: int = 0) -> Sharing:
    """Jobs that leave the part ``gaps`` of their time on the GPU; the guest runs in the gaps of its host.

    A guest has gaps of its own, in which it needs no GPU; they are taken to fall beside those of the host as
    often as not.  Each job has a command of its own.
    """

    def speeds(host: Lease, guest: Lease) -> tuple[float, float]:
        _, keeps, gets = _draw(host.id, seed, "cycle").choice(CYCLES)
        got = gaps * gets
        return keeps, 1 / ((1 - gaps) / got + gaps) if got < 1 else 1.0

    return Sharing(
        speeds=speeds, uses=lambda id: _draw(id, seed, "memory").uniform(*MEMORY), key=lambda id: id
    )


def side_by_side(rates: Mapping[tuple[str, str], PairRates], seed: int = 0) -> Sharing:
    """Jobs whose command is one of the table's; pairs that do not fit there are never tried."""
    names = sorted({name for pair in rates for name in pair})

    def key(id: str) -> str:
        return _draw(id, seed, "command").choice(names)

    def speeds(host: Lease, guest: Lease) -> tuple[float, float]:
        return rates[host.pair_key, guest.pair_key]

    unfit = [(*pair, inf) for pair, both in rates.items() if not all(both)]
    return Sharing(speeds=speeds, uses=lambda id: 0.0, key=key, parted=unfit)


def _draw(id: str, seed: int, what: str) -> Random:
    return Random(f"{what} {seed} {id}")  # noqa: S311 - a repeatable draw, no secret
