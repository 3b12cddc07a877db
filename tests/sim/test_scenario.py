"""Clusters, load, and what is measured of them, in worlds small enough to reckon by hand."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.model import CheckpointMode, Order, Project, Settings
from jupyter_gpushare.core.replay import Cell
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.sim import report
from jupyter_gpushare.sim.metrics import Curve, percentile
from jupyter_gpushare.sim.scenario import GIB, DeviceState, Fleet, replay_jobs, replay_notebooks
from jupyter_gpushare.sim.traces import NotebookSession, TrainingJob

FIFO = Settings(order=Order.FIFO)


def jobs(*rows):
    """(GPUs, submitted, seconds) each."""
    return [TrainingJob(n + 2, *row) for n, row in enumerate(rows)]


def session(*cells, gpus=1):
    return NotebookSession(2, gpus, tuple(Cell(*cell) for cell in cells))


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
    settings = Settings(order=Order.LAS, las_thresholds_gpu_s=(100.0,), preempt_cost_s=30)
    result = replay_jobs(
        jobs((1, 0, 200), (1, 50, 60)), Fleet(gpus=1, nodes=None), settings, preempt_cost_s=30, grace_s=5
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
    result = replay_jobs(load, Fleet(gpus=1, nodes=1), FIFO, projects=projects, grace_s=30)
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
    state = DeviceState(bytes_per_gpu=8 * 10**9, copy_bytes_per_s=8e9)  # a copy takes 1 s
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
