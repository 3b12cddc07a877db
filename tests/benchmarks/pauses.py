"""How good an idle timeout can be: from the pauses of notebook sessions alone.

337 sessions (Adobe, June 2021) and a job always waits: a cell is delayed
when the pause before it outlasted the timeout, and what of the pause is beyond
the timeout is available.  Each row is at the price at which 7.5 % of the cells
are delayed.  This is what `tests.benchmarks.notebooks` replays, without the
cluster, in seconds.

    python -m tests.benchmarks.pauses
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from jupyter_gpushare.core.idle import PauseHistory, adaptive_timeout_s
from jupyter_gpushare.sim.traces import read_cells
from tests.benchmarks.report import print_table
from tests.benchmarks.traces import trace

DELAYED = 0.075
HALF_AT_S = 15 * 86_400.0
SPLITS = 10
GRID_S = [60.0 * m for m in (*range(31), *range(35, 125, 5), *range(135, 490, 15), *range(540, 1441, 60))]
BREAKS_POWERS, CELL_POWERS = (0.2, 0.3, 0.4, 0.5, 0.6), (0.0, 0.1, 0.2, 0.3)


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause before a cell, and what was known when it began."""

    session: int
    gpus: int
    began_at: float
    length_s: float
    past: PauseHistory


Choice = Callable[[float], Sequence[float]]  # at a price: the timeout of each pause


def read() -> list[Pause]:
    """The pauses of the trace; the first cell of a session has none before it."""
    pauses = []
    for number, session in enumerate(read_cells(trace("notebooks_adobe_june2021_60s"))):
        past, end_at = PauseHistory(), session.cells[0].submit_at
        for cell in session.cells:
            length_s = max(0.0, cell.submit_at - end_at)
            if cell is not session.cells[0]:
                pauses.append(Pause(number, session.gpus, end_at, length_s, past))
            past = past.after(length_s, cell.duration_s)
            end_at = max(end_at, cell.submit_at + cell.duration_s)
    return pauses


def judge(pauses: Sequence[Pause], timeouts: Sequence[float]) -> tuple[float, float]:
    """The part of the cells that is delayed and the part of the idle GPU time that is available."""
    sessions = len({p.session for p in pauses})
    delayed = sum(p.length_s > t for p, t in zip(pauses, timeouts, strict=True))
    beyond = sum(p.gpus * max(0.0, p.length_s - t) for p, t in zip(pauses, timeouts, strict=True))
    return delayed / (len(pauses) + sessions), beyond / sum(p.gpus * p.length_s for p in pauses)


def priced(pauses: Sequence[Pause], choice: Choice) -> tuple[float, float]:
    """The lowest price at which at most `DELAYED` of the cells are delayed, and what is available then."""
    low, high = 1e3, 1e6
    for _ in range(18):
        price = (low * high) ** 0.5
        if judge(pauses, choice(price))[0] > DELAYED:
            low = price
        else:
            high = price
    return high, judge(pauses, choice(high))[1]


def hindsight(pauses: Sequence[Pause], key: Callable[[Pause], Hashable]) -> Choice:
    """The best fixed timeout of each group, knowing its pauses."""
    groups = defaultdict(list)
    for p in pauses:
        groups[key(p)].append(p)
    costs = {}
    for name, members in groups.items():
        lengths = sorted(p.length_s for p in members)
        sums = [0.0, *accumulate(lengths)]
        below = [bisect_right(lengths, t) for t in GRID_S]
        longer = [len(lengths) - b for b in below]
        waste = [members[0].gpus * (sums[b] + m * t) for b, m, t in zip(below, longer, GRID_S, strict=True)]
        costs[name] = list(zip(waste, longer, GRID_S, strict=True))

    def choice(price: float) -> list[float]:
        best = {name: min(cost, key=lambda c: c[0] + price * c[1])[2] for name, cost in costs.items()}
        return [best[key(p)] for p in pauses]

    return choice


def shuffled(pauses: Sequence[Pause], seed: int) -> list[Pause]:
    """The same pauses dealt at random to the sessions of their size: none has anything of its own."""
    chance = random.Random(seed)
    lengths = {size: [p.length_s for p in pauses if p.gpus == size] for size in {p.gpus for p in pauses}}
    for of_size in lengths.values():
        chance.shuffle(of_size)
    return [replace(p, length_s=lengths[p.gpus].pop()) for p in pauses]


def adaptive(pauses: Sequence[Pause]) -> Choice:
    return lambda price: [adaptive_timeout_s(p.past, p.gpus, price) for p in pauses]


def with_powers(pauses: Sequence[Pause], breaks_power: float, cell_power: float) -> Choice:
    """As the adaptive timeout, with these powers in place of its own; the price is in units of its own."""
    rates = [
        (1 + p.past.breaks) ** breaks_power / (1 + p.past.busy_s / 60) ** cell_power / p.gpus for p in pauses
    ]
    return lambda price: [min(14_400.0, max(600.0, price * rate)) for rate in rates]


def elsewhere(fitted: Sequence[Pause], judged: Sequence[Pause]) -> tuple[float, float, float]:
    """Fit powers and price to some pauses; delayed and available of others, and available at `DELAYED`."""
    tried = itertools.product(BREAKS_POWERS, CELL_POWERS)
    fits = [(*priced(fitted, with_powers(fitted, *powers)), powers) for powers in tried]
    price, _, powers = max(fits, key=lambda fit: fit[1])
    choice = with_powers(judged, *powers)
    return *judge(judged, choice(price)), priced(judged, choice)[1]


def bounds(pauses: Sequence[Pause]) -> list[list[str]]:
    """The adaptive timeout between what knows nothing and what knows the future."""
    most = sorted((p.gpus * p.length_s for p in pauses), reverse=True)
    cells = len(pauses) + len({p.session for p in pauses})
    dealt = [priced(d, hindsight(d, _session))[1] for d in (shuffled(pauses, n) for n in range(SPLITS))]
    price, available = priced(pauses, adaptive(pauses))
    return [
        ["every pause, in hindsight", f"{sum(most[: int(DELAYED * cells)]) / sum(most):.2%}"],
        ["fixed for each session, in hindsight", f"{priced(pauses, hindsight(pauses, _session))[1]:.2%}"],
        ["the same where pauses are dealt at random", f"{sum(dealt) / SPLITS:.2%}"],
        [f"adaptive, at {price:,.0f} GPU-s", f"{available:.2%}"],
        ["fixed for each size, in hindsight", f"{priced(pauses, hindsight(pauses, _gpus))[1]:.2%}"],
    ]


def transfers(pauses: Sequence[Pause]) -> list[list[str]]:
    """The adaptive timeout where its powers and price were not fitted."""
    halves = []
    for seed in range(SPLITS // 2):
        chance = random.Random(seed)
        chosen = [chance.random() < 0.5 for _ in range(pauses[-1].session + 1)]
        parts = [[p for p in pauses if chosen[p.session] is side] for side in (True, False)]
        halves += [parts, parts[::-1]]
    early = [p for p in pauses if p.began_at < HALF_AT_S]
    late = [p for p in pauses if p.began_at >= HALF_AT_S]
    rows = []
    for name, pairs in (
        ("half of the sessions", halves),
        ("first 15 days", [[early, late]]),
        ("last 15 days", [[late, early]]),
    ):
        found = [elsewhere(*pair) for pair in pairs]
        delayed, available, at_price = zip(*found, strict=True)
        rows.append([
            name,
            f"{sum(delayed) / len(found):.1%} ({min(delayed):.1%}-{max(delayed):.1%})",
            f"{sum(available) / len(found):.2%}",
            f"{sum(at_price) / len(found):.2%}",
        ])  # fmt: skip
    return rows


def main() -> None:
    pauses = read()
    print_table("tests.benchmarks.pauses", ["timeout", "available at 7.5 % delayed"], bounds(pauses))
    columns = ["fitted to", "delayed elsewhere", "available there", "available there at 7.5 % delayed"]
    print_table("tests.benchmarks.pauses", columns, transfers(pauses))


def _session(pause: Pause) -> int:
    return pause.session


def _gpus(pause: Pause) -> int:
    return pause.gpus


if __name__ == "__main__":
    main()
