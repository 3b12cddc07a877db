"""Generated load in the format of the traces.

Durations are log-normal.  The median and the spread (the standard deviation of the
logarithm) define them: a percentile is ``median * exp(spread * z)`` with the normal
quantile z.  Jobs and sessions come at random times, evenly distributed.

==================  ========  ======  ========  ========  =========
seconds             median    spread  p90       p95       p99
==================  ========  ======  ========  ========  =========
job duration        600       2.0     7,785     16,103    62,928
cell duration       120       1.4     722       1,200     3,116
pause after a cell  300       1.6     2,331     4,169     12,403
==================  ========  ======  ========  ========  =========

The median session has 20 cells (spread 1.5: p90 137, p99 655).  75 % of the jobs
request 1 GPU, 10 % request 2, 9 % request 4, 6 % request 8.  60 % of the sessions
request 1 GPU, 20 % request 2, 15 % request 4, 5 % request 8.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp

from jupyter_gpushare.core.replay import Cell
from jupyter_gpushare.sim.traces import MINUTE_S, NotebookSession, TrainingJob


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution."""

    median: float
    spread: float

    @property
    def mean(self) -> float:
        """The mean of the distribution."""
        return self.median * exp(self.spread**2 / 2)

    def draw(self, rng: random.Random) -> float:
        """Return a random value."""
        return self.median * exp(rng.gauss(0.0, self.spread))


JOB_S = LogNormal(600.0, 2.0)
CELL_S = LogNormal(120.0, 1.4)
PAUSE_S = LogNormal(300.0, 1.6)
CELLS = LogNormal(20.0, 1.5)
JOB_GPUS = {1: 75, 2: 10, 4: 9, 8: 6}  # weights in per cent, by number of GPUs
SESSION_GPUS = {1: 60, 2: 20, 4: 15, 8: 5}


def make_jobs(count: int, *, gpus: int, load: float, seed: int) -> list[TrainingJob]:
    """Return ``count`` jobs that on average load the part ``load`` of ``gpus`` GPUs."""
    rng = random.Random(seed)  # noqa: S311 - a repeatable draw, no secret
    work_gpu_s = JOB_S.mean * sum(n * w for n, w in JOB_GPUS.items()) / sum(JOB_GPUS.values())
    interval_s = work_gpu_s / (gpus * load)
    jobs = []
    now = 0.0
    for _ in range(count):
        jobs.append(TrainingJob(_choose(rng, JOB_GPUS), round(now, 3), round(JOB_S.draw(rng), 3)))
        now += rng.expovariate(1 / interval_s)
    return jobs


def make_sessions(count: int, *, days: float, seed: int) -> list[NotebookSession]:
    """Return ``count`` sessions that begin within ``days``, latest first."""
    rng = random.Random(seed)  # noqa: S311 - a repeatable draw, no secret
    starts = sorted((rng.uniform(0.0, days * 86_400) for _ in range(count)), reverse=True)
    return [NotebookSession(_choose(rng, SESSION_GPUS), tuple(_cells(rng, at))) for at in starts]


def _cells(rng: random.Random, now: float) -> Iterator[Cell]:
    for _ in range(max(1, round(CELLS.draw(rng)))):
        cell = Cell(round(now, 3), round(CELL_S.draw(rng), 3))
        yield cell
        now += cell.duration_s + PAUSE_S.draw(rng)


def _choose(rng: random.Random, weights: dict[int, int]) -> int:
    return rng.choices(list(weights), weights=list(weights.values()))[0]


def jobs_csv(jobs: Sequence[TrainingJob]) -> str:
    """Return the jobs as CSV for `traces.read_jobs`."""
    rows = [f"{n},{job.gpus},{job.submit_at!r},{job.duration_s!r}" for n, job in enumerate(jobs)]
    return "\n".join(["job_id,num_gpu,submit_time,duration", *rows, ""])


def cells_csv(sessions: Sequence[NotebookSession]) -> str:
    """Return the cells as CSV in minutes for `traces.read_cells`.

    Every session begins before the session above it, so that times drop between sessions.
    """
    rows = [
        f"{session.gpus},{cell.submit_at / MINUTE_S!r},{cell.duration_s / MINUTE_S!r}"
        for session in sessions
        for cell in session.cells
    ]
    return "\n".join(["job_id,num_gpu,submit_time,duration", *(f"{n},{r}" for n, r in enumerate(rows)), ""])
