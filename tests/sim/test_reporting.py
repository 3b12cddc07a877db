"""What simulated jobs report of their progress, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from math import log
from statistics import mean, stdev

import pytest

from jupyter_gpushare.core.model import DEFAULT_POLICY, Order
from jupyter_gpushare.sim.reporting import some, with_error
from jupyter_gpushare.sim.scenario import Fleet, replay_jobs
from jupyter_gpushare.sim.synthetic import make_jobs
from jupyter_gpushare.sim.traces import TrainingJob


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("done", [0.05, 0.5, 0.99])
def test_the_remaining_work_that_is_told_is_off_by_the_factor(factor, done):
    told = with_error(factor)(done)
    assert done * (1 - told) / told == pytest.approx(factor * (1 - done))
    assert (with_error(factor)(0.0), with_error(factor)(1.0)) == (0.0, 1.0)


def test_a_share_of_the_jobs_reports_with_a_log_normal_error():
    reports = [found for n in range(2_000) if (found := some(0.5, 0.3)(n))]
    assert 900 < len(reports) < 1_100
    assert 0.27 < stdev(log(1 / found(0.5) - 1) for found in reports) < 0.33
    assert not any(some(0.0, 0.3)(n) for n in range(100))
    assert some(1.0, 0.3, seed=7)(3)(0.5) == some(1.0, 0.3, seed=7)(3)(0.5)


LIES = {
    "it claims a half": lambda done: min(0.999, 2 * done),
    "it claims a tenth": lambda done: min(0.999, 10 * done),
    "it is almost done all the time": lambda done: 0.999 if done else 0.0,
    "it reports nothing in the first half": lambda done: done if done > 0.5 else 0.09,
    "it jumps": lambda done: done if done < 0.3 else max(done, 0.95),
    "it begins again": lambda done: 5 * done % 1.0,
    "it reports nothing": None,
}


def _completion_s(reports) -> float:
    """Completion of a job of 200,000 s, beside honest jobs of 20,000 s that load the GPU to 80 %."""
    jobs = [TrainingJob(0, 1, 0.0, 200_000.0)]
    jobs += [TrainingJob(n, 1, 25_000.0 * n, 20_000.0) for n in range(1, 60)]
    settings = replace(DEFAULT_POLICY, order=Order.PROGRESS)
    fleet, honest = Fleet(gpus=1, nodes=1), with_error(1.0)
    result = replay_jobs(jobs, fleet, settings, preempt_cost_s=30, reports=lambda n: honest if n else reports)
    return max(result.meter.completion_s)


@pytest.mark.parametrize("lie", LIES)
def test_no_job_gains_from_a_lie(lie):
    honest = _completion_s(with_error(1.0))
    assert honest > 800_000, "the short jobs come first"
    assert _completion_s(LIES[lie]) >= honest


def test_jobs_that_report_nothing_are_ordered_as_by_las():
    jobs = make_jobs(300, gpus=16, load=1.1, seed=3)
    fleet = Fleet(gpus=16, nodes=2)
    las, progress = (
        replay_jobs(jobs, fleet, replace(DEFAULT_POLICY, order=order), preempt_cost_s=30).meter.completion_s
        for order in (Order.LAS, Order.PROGRESS)
    )
    assert las == progress


def test_measured_progress_shortens_completion_however_many_report():
    jobs = make_jobs(300, gpus=16, load=1.3, seed=3)
    settings = replace(DEFAULT_POLICY, order=Order.PROGRESS)
    means = [
        mean(
            replay_jobs(
                jobs, Fleet(gpus=16, nodes=2), settings, preempt_cost_s=30, reports=some(share, 0.3)
            ).meter.completion_s
        )
        for share in (0.0, 0.5, 1.0)
    ]
    assert means == sorted(means, reverse=True)
