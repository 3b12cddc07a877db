"""The public traces give the published figures; what costs something stays near the ideal.

Tiresias' own simulator (free preemption, GPUs only counted) gives these
averages of the time to completion, in seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import pytest

from jupyter_gpushare.core.model import DEFAULT_POLICY, Order, Settings
from jupyter_gpushare.sim import report
from jupyter_gpushare.sim.scenario import Fleet, replay_jobs
from jupyter_gpushare.sim.traces import TrainingJob, read_jobs
from tests import traces

PUBLISHED = {
    ("training_philly_0e4a51", 40): {"fifo": 2_112_492, "backfill": 1_054_334},
    ("training_philly_first5000", 256): {"fifo": 27_413, "backfill": 16_636},
}
PUBLISHED_LAS = {("training_philly_0e4a51", 40): 543_794, ("training_philly_first5000", 256): 6_583}
MADE_UP = {("training", traces.JOB_GPUS): {"fifo": None, "backfill": None}}
CASES = [
    (*where, order, figure)
    for where, figures in (PUBLISHED if traces.FOLDER else MADE_UP).items()
    for order, figure in figures.items()
]


def strict_fifo(jobs: Sequence[TrainingJob], gpus: int) -> float:
    """Average time to completion when each job waits for all before it, by an independent count."""
    free, running, at, total = gpus, [], 0.0, 0.0
    for job in jobs:
        at = max(at, job.submit_at)
        while free < job.gpus or (running and running[0][0] <= at):
            end, held = heapq.heappop(running)
            at, free = max(at, end), free + held
        free -= job.gpus
        heapq.heappush(running, (at + job.duration_s, job.gpus))
        total += at + job.duration_s - job.submit_at
    return total / len(jobs)


@pytest.mark.parametrize(("name", "gpus", "order", "published"), CASES)
def test_average_completion_is_within_one_per_cent_of_the_published_simulator(
    trace, name, gpus, order, published
):
    """On a made-up trace, strict FIFO is counted independently, and no other order is slower."""
    jobs = read_jobs(trace(name))
    result = replay_jobs(jobs, Fleet(gpus=gpus, nodes=None), Settings(order=Order(order)))
    numbers = report.job_numbers(result)
    assert numbers["unfinished"] == 0
    if published is not None or order == "fifo":
        expected = published if published is not None else strict_fifo(jobs, gpus)
        assert numbers["avg_completion_s"] == pytest.approx(expected, rel=0.01)
    else:
        assert numbers["avg_completion_s"] < strict_fifo(jobs, gpus)


LAS_CASES = PUBLISHED_LAS if traces.FOLDER else {("training", traces.JOB_GPUS): None}


@pytest.mark.parametrize(("where", "published"), LAS_CASES.items())
def test_las_is_at_least_as_good_as_in_the_published_simulator(trace, where, published):
    """There a running job that enters a queue makes way for the jobs that wait in it; here it does not.

    On a made-up trace: it is better than strict FIFO.
    """
    name, gpus = where
    jobs = read_jobs(trace(name))
    result = replay_jobs(jobs, Fleet(gpus=gpus, nodes=None), Settings(order=Order.LAS))
    numbers = report.job_numbers(result)
    assert numbers["unfinished"] == 0
    assert numbers["avg_completion_s"] <= (strict_fifo(jobs, gpus) if published is None else 1.01 * published)


def test_nodes_and_the_price_of_preemption_cost_little(trace):
    """8-GPU nodes and 30 s a preemption; the 5,000 jobs are a benchmark (tests/benchmarks/philly.py)."""
    gpus = 40 if traces.FOLDER else traces.JOB_GPUS
    jobs, fleet = read_jobs(trace("training_philly_0e4a51")), Fleet(gpus=gpus, nodes=gpus // 8)
    las, backfill = (
        report.job_numbers(replay_jobs(jobs, fleet, replace(DEFAULT_POLICY, order=order), preempt_cost_s=30))
        for order in (Order.LAS, Order.BACKFILL)
    )
    ideal = replay_jobs(jobs, Fleet(gpus=gpus, nodes=None), Settings(order=Order.LAS))
    published = 543_794 if traces.FOLDER else report.job_numbers(ideal)["avg_completion_s"]
    assert las["avg_completion_s"] <= (1.02 if traces.FOLDER else 1.1) * published
    assert las["avg_completion_s"] * 1.3 <= backfill["avg_completion_s"]
    assert las["preemptions_per_job"] <= 2
    assert las["p99_queue_s"] <= 1.1 * backfill["p99_queue_s"]
