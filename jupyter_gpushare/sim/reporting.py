"""Progress reports of simulated jobs: by a share of them, with an error."""

from __future__ import annotations

from collections.abc import Callable
from math import exp
from random import Random

from jupyter_gpushare.core.simulated_lease import Reports


def with_error(factor: float) -> Reports:
    """Return reports that overestimate the remaining work by ``factor``."""
    return lambda done: done / (done + factor * (1.0 - done)) if done < 1.0 else 1.0


def some(share: float, sigma: float, seed: int = 0) -> Callable[[int], Reports | None]:
    """Return what job n reports: a ``share`` of the jobs, each with a log-normal error of its own."""

    def of(number: int) -> Reports | None:
        random = Random(f"{seed} {number}")  # noqa: S311 - a repeatable draw, no secret
        error = exp(random.gauss(0.0, sigma))
        return with_error(error) if random.random() < share else None

    return of
