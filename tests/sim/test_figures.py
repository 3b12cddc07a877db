"""The public traces give the published figures; what costs something stays near the ideal.

Tiresias' own simulator (free preemption, GPUs only counted) gives these
averages of the time to completion, in seconds.
"""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.model import Order, Settings
from jupyter_gpushare.sim import report, run
from jupyter_gpushare.sim.scenario import Fleet, replay_jobs
from jupyter_gpushare.sim.traces import read_jobs

PUBLISHED = {
    ("training_philly_0e4a51", 40): {"las": 543_794, "fifo": 2_112_492, "backfill": 1_054_334},
    ("training_philly_first5000", 256): {"las": 6_583, "fifo": 27_413, "backfill": 16_636},
}
CASES = [(*where, order, figure) for where, figures in PUBLISHED.items() for order, figure in figures.items()]


@pytest.mark.parametrize(("name", "gpus", "order", "published"), CASES)
def test_average_completion_is_within_one_per_cent_of_the_published_simulator(
    trace, name, gpus, order, published
):
    jobs = read_jobs(trace(name))
    result = replay_jobs(jobs, Fleet(gpus=gpus, nodes=None), Settings(order=Order(order)))
    numbers = report.job_numbers(result)
    assert numbers["unfinished"] == 0
    assert numbers["avg_completion_s"] == pytest.approx(published, rel=0.01)


def real(order: str) -> Settings:
    on = {"min_run_s": run.MIN_RUN_S, "guard_s": run.GUARD_S, "skip_wait_s": run.SKIP_WAIT_S}
    return Settings(order=Order(order), preempt_cost_s=30, **on)


def test_nodes_and_the_price_of_preemption_cost_little(trace):
    """8-GPU nodes and 30 s a preemption; the 5,000 jobs are a benchmark (tests/benchmarks/philly.py)."""
    jobs, fleet = read_jobs(trace("training_philly_0e4a51")), Fleet(gpus=40, nodes=5)
    las = report.job_numbers(replay_jobs(jobs, fleet, real("las"), preempt_cost_s=30))
    backfill = report.job_numbers(replay_jobs(jobs, fleet, real("backfill"), preempt_cost_s=30))
    assert las["avg_completion_s"] <= 1.02 * 543_794
    assert las["avg_completion_s"] * 1.3 <= backfill["avg_completion_s"]
    assert las["preemptions_per_job"] <= 2
    assert las["p99_queue_s"] <= 1.1 * backfill["p99_queue_s"]
