"""Clusters, load, and what is measured of them, in worlds small enough to reckon by hand."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from math import log
from statistics import mean, stdev

import pytest

from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import DEFAULT_POLICY, CheckpointMode, Order, Project, Requeue, Settings, Why
from jupyter_gpushare.core.replay import Cell
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.sim import report
from jupyter_gpushare.sim.metrics import Curve, percentile
from jupyter_gpushare.sim.scenario import (
    GIB,
    SRTF,
    DeviceFootprint,
    Fleet,
    TraceJob,
    replay_jobs,
    replay_notebooks,
    some,
    with_error,
)
from jupyter_gpushare.sim.synthetic import make_jobs
from jupyter_gpushare.sim.traces import NotebookSession, TrainingJob
from tests.core.build import NOW, actions, cluster, started, stops

# ---- shortest remaining service, an order of the simulator -------------------

RULES = {"order": SRTF}


def trace_job(name, on="", *, duration_s, **more):
    job = stops(name, on, **more)
    return TraceJob(**{field.name: getattr(job, field.name) for field in fields(job)}, duration_s=duration_s)


def test_the_job_with_least_left_comes_first_and_preempts():
    long, short = trace_job("long", "0", duration_s=500.0), trace_job("short", duration_s=100.0)
    assert actions(cluster(long, short, **RULES)) == [Requeue("long", Why.ORDER, "short")]
    assert (
        actions(
            cluster(trace_job("half", "0", duration_s=100.0), trace_job("long", duration_s=101.0), **RULES)
        )
        == []
    )
    assert started(cluster(stops("unknown"), trace_job("known", duration_s=9e9), **RULES)) == ["known"]


def test_of_running_jobs_the_one_with_most_left_goes():
    c = cluster(
        trace_job("a", "0", duration_s=500.0, attained_gpu_s=450.0),
        trace_job("b", "1", duration_s=300.0),
        trace_job("short", duration_s=100.0),
        gpus=2,
        **RULES,
    )
    assert actions(c) == [Requeue("b", Why.ORDER, "short")]


def test_a_short_job_must_be_worth_a_preemption():
    long, short = trace_job("long", "0", duration_s=500.0), trace_job("short", duration_s=100.0)
    assert actions(cluster(long, short, preempt_cost_s=101.0, **RULES)) == []
    assert order.gain_gpu_s(stops("x"), NOW, cluster(**RULES).settings) == 0.0


# ---- what simulated jobs report of their progress, and what comes of it ------


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
    **{
        f"it says {factor} times what it did": partial(lambda factor, done: min(0.999, factor * done), factor)
        for factor in (1.05, 1.2, 1.5, 1.9, 1.96, 3, 10)
    },
    "it says that all is done": lambda done: min(1.0, 1.96 * done),
    "it hides half of its work smoothly": with_error(0.5),
    "it reports in 2 steps": lambda done: int(2 * done) / 2,
    "it reports in 10 steps": lambda done: int(10 * done) / 10,
    "it is almost done all the time": lambda done: 0.999 if done else 0.0,
    "it reports nothing in the first half": lambda done: done if done > 0.5 else 0.09,
    "it jumps": lambda done: done if done < 0.3 else max(done, 0.95),
    "it begins again": lambda done: 5 * done % 1.0,
    "it reports nothing": None,
}


def _completion_s(reports, long_s, short_s) -> float:
    """Completion of one long job, beside honest shorter ones that load the GPU to 80 %."""
    jobs = [TrainingJob(1, 0.0, long_s)]
    jobs += [TrainingJob(1, 1.25 * short_s * n, short_s) for n in range(1, 60)]
    settings = replace(DEFAULT_POLICY, order=Order.PROGRESS)
    fleet, honest = Fleet(gpus=1, nodes=1), with_error(1.0)
    result = replay_jobs(jobs, fleet, settings, preempt_cost_s=30, reports=lambda n: honest if n else reports)
    return max(result.meter.completion_s)


@pytest.mark.parametrize(("long_s", "short_s"), [(200_000.0, 20_000.0), (1_200_000.0, 400_000.0)])
@pytest.mark.parametrize("lie", LIES)
def test_no_job_gains_from_a_lie(lie, long_s, short_s):
    honest = _completion_s(with_error(1.0), long_s, short_s)
    assert honest > 2 * long_s, "the short jobs come first"
    assert _completion_s(LIES[lie], long_s, short_s) >= 0.95 * honest


def test_jobs_that_report_nothing_are_ordered_as_by_las():
    """None has received `UNMEASURED_GPU_S`."""
    jobs = make_jobs(300, gpus=16, load=1.1, seed=3)
    fleet = Fleet(gpus=16, nodes=2)
    las, progress = (
        replay_jobs(jobs, fleet, replace(DEFAULT_POLICY, order=order), preempt_cost_s=30).meter.completion_s
        for order in (Order.LAS, Order.PROGRESS)
    )
    assert las == progress


def test_measured_progress_shortens_completion_however_many_report():
    settings = replace(DEFAULT_POLICY, order=Order.PROGRESS)
    loads = [make_jobs(300, gpus=16, load=1.3, seed=seed) for seed in range(5, 7)]
    means = [
        mean(
            mean(
                replay_jobs(
                    jobs, Fleet(gpus=16, nodes=2), settings, preempt_cost_s=30, reports=some(share, 0.3)
                ).meter.completion_s
            )
            for jobs in loads
        )
        for share in (0.0, 0.5, 1.0)
    ]
    assert max(means[1:]) < 0.95 * means[0]


# ---- test scenario -----------------------------------------------------------

FIFO = Settings(order=Order.FIFO)


def jobs(*rows):
    """(GPUs, submitted, seconds) each."""
    return [TrainingJob(*row) for row in rows]


def session(*cells, gpus=1):
    return NotebookSession(gpus, tuple(Cell(*cell) for cell in cells))


def test_gpus_are_spread_evenly_over_nodes_and_islands():
    devices = Fleet(gpus=10, nodes=3, islands=2).devices()
    assert [sum(d.node == f"n{n:04d}" for d in devices) for n in range(3)] == [4, 3, 3]
    assert [d.island for d in devices[:4]] == ["i00", "i00", "i01", "i01"]
    assert Fleet(gpus=10, nodes=3).largest_node == 4
    assert len({d.node for d in Fleet(gpus=10, nodes=None).devices()}) == 10


@pytest.mark.parametrize(("nodes", "islands"), [(11, 1), (5, 3)])
def test_no_node_and_no_island_is_empty(nodes, islands):
    with pytest.raises(InvalidRequest, match="cannot make"):
        Fleet(gpus=10, nodes=nodes, islands=islands).devices()


def test_job_numbers_by_hand():
    result = replay_jobs(jobs((2, 0, 100), (1, 0, 50), (2, 10, 40)), Fleet(gpus=2, nodes=1), FIFO)
    numbers = report.job_numbers(result)
    # 0-100 the first on both; 100-150 the second on one; 150-190 the third on both.
    assert (numbers["jobs"], numbers["unfinished"], numbers["makespan_s"]) == (3, 0, 190)
    assert numbers["avg_completion_s"] == pytest.approx((100 + 150 + 180) / 3, abs=0.001)
    assert (numbers["median_completion_s"], numbers["p99_completion_s"]) == (150, 180)
    assert numbers["avg_queue_s"] == 80
    assert numbers["p99_queue_s"] == 140
    assert numbers["allocation"] == pytest.approx((200 + 50 + 80) / 380, abs=1e-4)
    assert numbers["utilization"] == numbers["allocation"]


def test_what_a_preemption_costs_is_allocated_but_not_utilized():
    settings = Settings(order=Order.LAS, las_thresholds_gpu_s=(100.0,), preempt_cost_s=30, grace_s=5)
    result = replay_jobs(
        jobs((1, 0, 200), (1, 50, 60)), Fleet(gpus=1, nodes=None), settings, preempt_cost_s=30
    )
    numbers = report.job_numbers(result)
    # 0-100, stopped until 105; the other 105-165; a restart until 195; 195-295.
    assert numbers["makespan_s"] == 295
    assert numbers["preemptions_per_job"] == 0.5
    assert numbers["allocation"] == 1.0
    assert numbers["utilization"] == pytest.approx(260 / 295, abs=1e-4)
    assert numbers["avg_queue_s"] == (60 + 55) / 2


def test_an_owed_project_waits_for_the_grace_of_the_jobs_it_displaces():
    projects = [Project(name="p0", quota_milli=0), Project(name="p1", quota_milli=1000)]
    load = jobs((1, 0, 1000), (1, 100, 10))
    result = replay_jobs(load, Fleet(gpus=1, nodes=1), replace(FIFO, grace_s=30.0), projects=projects)
    rows = report.fairness(result.meter)
    assert [row["longest_owed_s"] for row in rows] == [0, 30]
    assert [row["gpu_hours"] for row in rows] == [
        pytest.approx(1030 / 3600, abs=1e-3),
        pytest.approx(10 / 3600, abs=1e-3),
    ]


def test_shares_are_compared_with_weights_on_days_on_which_all_wait():
    projects = [Project(name="p0", quota_milli=0), Project(name="p1", quota_milli=0, weight=3)]
    load = jobs(*[(1, 0, 7200.0)] * 400)
    result = replay_jobs(load, Fleet(gpus=4, nodes=None), Settings(order=Order.FIFO), projects=projects)
    light, heavy = report.fairness(result.meter)
    assert light["contested_days"] > 24
    assert (light["share_percent"], heavy["share_percent"]) == (25, 75)
    assert (light["entitled_percent"], heavy["entitled_percent"]) == (25, 75)
    assert light["worst_day_percent"] == heavy["worst_day_percent"] == 0


def test_idle_hours_are_available_after_the_timeout_and_used_when_a_job_comes():
    state = DeviceFootprint(bytes_per_gpu=8 * 10**9, copy_bytes_per_s=8e9)  # a copy takes 1 s
    sessions = [session((0, 100), (1100, 100), (1300, 50))]
    result = replay_notebooks(
        sessions, jobs((1, 0, 5000)), Fleet(gpus=1, nodes=1), Settings(idle_timeout_s=600), state=state
    )
    numbers = report.notebook_numbers(result)
    assert (numbers["sessions"], numbers["cells"]) == (1, 3)
    # Idle 100-1100; lent from 700, held by the job from 701 to 1100, when the owner is back.
    # The second cell waits 1 s for the job and 1 s for its copy: 1102-1202, idle until 1300.
    assert numbers["idle_gpu_hours"] == pytest.approx((1000 + 98) / 3600, abs=1e-3)
    assert numbers["idle_available_percent"] == pytest.approx(100 * 400 / 1098, abs=1e-3)
    assert numbers["idle_used_percent"] == pytest.approx(100 * 399 / 400, abs=1e-3)
    assert numbers["cells_delayed_percent"] == pytest.approx(100 / 3, abs=1e-3)
    assert (numbers["max_delay_s"], numbers["cells_waiting_for_cells"]) == (2, 0)
    job = report.job_numbers(result)
    assert (job["jobs"], job["unfinished"]) == (1, 1)


def test_a_cell_waits_for_cells_where_guarantees_do_not_fit():
    sessions = [session((0, 100), (300, 10)), session((50, 10))]
    result = replay_notebooks(sessions, [], Fleet(gpus=1, nodes=1), Settings())
    assert report.notebook_numbers(result)["cells_waiting_for_cells"] == 1


@pytest.mark.parametrize("survival", [CheckpointMode.SIGTERM, CheckpointMode.SUSPEND])
def test_saturating_jobs_come_over_and_over_until_the_last_session_ends(survival):
    sessions = [session((0, 600), (7200, 600)), session((300, 60), (9000, 300))]
    load = jobs((1, 0, 500), (2, 0, 900))
    settings = Settings(idle_timeout_s=600, min_run_s=600)
    fleet = Fleet(gpus=4, nodes=1, memory_bytes=80 * GIB)
    result = replay_notebooks(sessions, load, fleet, settings, saturate=True, survival=survival)
    numbers = report.job_numbers(result) | report.notebook_numbers(result)
    assert result.replay.now == pytest.approx(9300, abs=10)
    assert numbers["unfinished"] >= 64
    assert numbers["allocation"] > 0.99
    assert numbers["idle_used_percent"] > 98
    assert numbers["cells_waiting_for_cells"] == 0
    assert numbers["max_delay_s"] <= 10


def test_a_percentile_is_one_of_the_values():
    assert percentile([5.0, 1.0, 3.0], 50) == 3
    assert percentile([1.0, 2.0, 3.0, 4.0], 99) == 4
    assert percentile([], 50) == 0


def test_a_curve_keeps_its_integral_per_hour():
    curve = Curve()
    curve.rate = 2.0
    curve.advance(3000.0, 7300.0)
    assert curve.hours == [1200, 7200, 200]
    assert curve.total == 8600
