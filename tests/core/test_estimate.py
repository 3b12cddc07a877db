"""Ranges of when jobs start and end, out of one future."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpushare.core.estimate import (
    BANDS,
    OFFSET_S,
    Basis,
    Work,
    around,
    forecast,
    median_left_s,
)
from jupyter_gpushare.core.model import Order, Why
from jupyter_gpushare.core.size import Size
from tests.core.build import ASLEEP, NOW, build, cluster, device, project, started, train, why

# Median: 600.
RAN_S = [100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0]
SITE = Work(ran_s={"p": RAN_S})


def queue(*leases, **more):
    return cluster(*leases, **{"order": Order.FIFO} | more)


def running(id="on", ran_s=0.0, **more):
    return train(
        id, 1000, "0", **{"attained_gpu_s": ran_s, "attained_at": NOW, "granted_at": NOW - ran_s} | more
    )


def waiting(id="next", **more):
    return train(id, 1000, **{"queued_at": NOW, "waits_since_at": NOW} | more)


def test_fewer_than_ten_ended_jobs_say_nothing():
    found = forecast(queue(running(), waiting()), NOW, Work(ran_s={"p": RAN_S[:9]}))
    assert not found.starts
    assert not found.ends
    assert not forecast(queue(running()), NOW, SITE).starts


def test_while_a_running_job_may_end_at_any_time_only_measured_ends_are_told():
    work = Work(left_gpu_s={"on": 250.0})
    unknown = train("unknown", 1000, "1", attained_at=NOW, granted_at=NOW)
    found = forecast(queue(running(), unknown, waiting(), gpus=2), NOW, work)
    assert not found.starts
    assert found.ends.keys() == {"on"}
    assert found.free_in(1) is None


def test_a_job_starts_when_the_one_before_it_ends_at_the_median():
    found = forecast(queue(running(), waiting(), waiting("then", queued_at=NOW + 1)), NOW, SITE)
    assert found.starts == {"next": around(600, Basis.START), "then": around(1200, Basis.START)}


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("basis", Basis)
def test_a_range_is_around_its_prediction_and_within_a_factor_of_eight(basis, is_shared):
    told = 0
    for seconds in (0.0, 30.0, 90.0, 200.0, 600.0, 86_400.0):
        found = around(seconds, basis, is_shared=is_shared)
        if found is not None:
            told += 1
            assert found.low_s <= seconds <= found.high_s
            assert found.high_s <= 8 * max(found.low_s, OFFSET_S)
    assert (told > 0) is (BANDS[basis][is_shared] is not None)


@pytest.mark.parametrize("horizon_s", [1_800.0, None])
def test_where_several_projects_share_only_measured_ends_are_told(horizon_s):
    projects = [project("p", 1), project("q", 1)]
    too = train("too", 1000, "1", attained_at=NOW, project="q")
    jobs = (running(), too, waiting("one"))
    c = queue(*jobs, gpus=2, projects=projects, fairness_horizon_s=horizon_s)
    found = forecast(c, NOW, Work(left_gpu_s={x.id: 3_000.0 for x in jobs}))
    assert not found.starts
    assert found.free_in(1) is None
    assert found.ends == {
        "on": around(3_000, Basis.END_OF_RUNNING, is_shared=True),
        "too": around(3_000, Basis.END_OF_RUNNING, is_shared=True),
        "one": around(6_000, Basis.END_OF_WAITING, is_shared=True),
    }


@pytest.mark.parametrize("left_gpu_s", [{}, {"on": 5_000.0}])
def test_no_job_is_expected_to_run_for_longer_than_its_maximum(left_gpu_s):
    work = Work(ran_s=SITE.ran_s, left_gpu_s=left_gpu_s, limit_s={"on": 90.0})
    assert forecast(queue(running(), waiting()), NOW, work).starts["next"] == around(90, Basis.START)


def test_ended_jobs_of_the_project_come_before_those_of_the_site():
    projects = [project("p", 1), project("q", 0)]
    work = Work(ran_s={"p": [50.0] * 10, "q": RAN_S})
    found = forecast(queue(running(), waiting(), projects=projects), NOW, work)
    assert found.starts["next"] == around(50, Basis.START)
    few = Work(ran_s={"p": [50.0] * 9, "q": RAN_S})
    found = forecast(queue(running(), waiting(), projects=projects), NOW, few)
    assert found.starts["next"] == around(100, Basis.START)


def test_measured_progress_counts_from_the_first_job_on():
    found = forecast(queue(running(), waiting()), NOW, Work(left_gpu_s={"on": 250.0}))
    assert found.starts == {"next": around(250, Basis.START)}
    assert found.ends == {"on": around(250, Basis.END_OF_RUNNING)}


def test_the_end_of_a_paused_job_counts_its_wait():
    paused = waiting("z", attained_gpu_s=50.0)
    work = Work(left_gpu_s={"on": 250.0, "z": 100.0})
    assert forecast(queue(running(), paused), NOW, work).ends["z"] == around(350, Basis.END_OF_WAITING)


def test_the_start_of_a_gang_has_a_band_of_its_own():
    gang = train("next", 1000, device_count=2, queued_at=NOW, waits_since_at=NOW)
    work = Work(left_gpu_s={"on": 250.0})
    found = forecast(queue(running(), gang, gpus=2), NOW, work)
    assert found.starts == {"next": around(250, Basis.START_OF_GANG)}


def test_a_start_in_a_later_group_of_the_order_is_not_told():
    work = Work(left_gpu_s={"on": 250.0})
    demoted = waiting(attained_gpu_s=5_000.0)
    assert not forecast(queue(running(), demoted, order=Order.LAS), NOW, work).starts
    assert forecast(queue(running(), waiting(), order=Order.LAS), NOW, work).starts


def test_a_cancelled_job_is_not_asked_about():
    found = forecast(queue(running(), waiting(cancelled=True)), NOW, SITE)
    assert not found.starts


def test_a_session_learns_when_so_many_gpus_are_free():
    work = Work(left_gpu_s={"on": 250.0, "too": 500.0})
    too = train("too", 1000, "1", attained_at=NOW, granted_at=NOW)
    found = forecast(queue(running(), too, gpus=2), NOW, work)
    assert found.free_in(1) == around(250, Basis.START)
    assert found.free_in(2) == around(500, Basis.START)
    assert found.free_in(3) is None
    assert forecast(queue(running()), NOW, SITE).free_in(1) is None
    # Free already, and not offered: in parts of several GPUs, for instance.
    assert forecast(queue(gpus=2), NOW, work).free_in(2) is None


@pytest.mark.parametrize("memory", ["20GiB", "400GiB"])
def test_a_job_that_asks_for_memory_stops_no_estimates(memory):
    memory = waiting("memory", size=Size.of_memory(memory))
    found = forecast(queue(running(), memory, waiting("last"), gpus=2), NOW, SITE)
    assert "last" in found.starts
    assert not forecast(queue(memory, gpus=0), NOW, SITE).ends


def test_sessions_keep_what_they_hold_until_they_may_be_lent():
    idle = build("nb", 1000, "0", idle_s=0.0)
    assert forecast(queue(idle, waiting()), NOW, SITE).starts == {"next": around(600, Basis.START)}
    busy = build("nb", 1000, "0")
    assert not forecast(queue(busy, waiting()), NOW, SITE).starts


def test_a_suspended_job_goes_on_when_gpus_are_free():
    asleep = train("z", 1000, "0", state=ASLEEP, queued_at=NOW)
    assert forecast(queue(running(), asleep), NOW, SITE).starts == {"z": around(600, Basis.START)}


def test_the_forecast_is_bounded_in_work():
    jobs = [waiting(f"w{n}", queued_at=NOW + n) for n in range(50)]
    found = forecast(queue(running(), *jobs), NOW, SITE, most_events=20)
    assert 0 < len(found.starts) < 50


@pytest.mark.parametrize("ran_s", [0.0, 99.0, 950.0])
def test_the_median_is_that_of_longer_jobs(ran_s):
    longer = [x - ran_s for x in RAN_S if x > ran_s]
    assert median_left_s(ran_s, RAN_S) == longer[len(longer) // 2]


def test_a_job_that_outlasts_all_is_in_its_middle():
    assert median_left_s(1000.0, RAN_S) == 1000


def test_no_start_is_told_where_free_parts_of_gpus_add_up_but_no_gpu_is_free():
    """Sessions hold half of each GPU: as many GPUs as the job needs are free, on no device."""
    halves = build("a", 500, "0"), build("b", 500, "1")
    assert not forecast(queue(*halves, waiting(), gpus=2), NOW, SITE).starts
    assert forecast(queue(halves[0], waiting(), gpus=2), NOW, SITE).starts.keys() == {"next"}


def test_no_start_is_told_behind_a_job_that_never_starts_in_a_strict_order():
    halves = build("a", 500, "0"), build("b", 500, "1")
    small = train("small", 500, queued_at=NOW + 1, waits_since_at=NOW + 1)
    assert not forecast(queue(*halves, waiting(), small, gpus=2), NOW, SITE).starts
    assert forecast(queue(*halves, small, gpus=2), NOW, SITE).starts.keys() == {"small"}


def test_no_start_is_told_while_a_session_waits_for_its_own():
    new = build("new", 500, waits=True)
    assert not forecast(queue(running(), waiting(), new), NOW, SITE).starts


def test_a_start_is_told_behind_a_job_that_blocks_nothing_in_a_strict_order():
    drains = [device(0), replace(device(1), usable=False, draining=True)]
    gang, single = waiting("gang", device_count=2), waiting("single", queued_at=NOW + 1)
    c = queue(running(), gang, single, gpus=drains)
    assert (why(c, "gang"), started(replace(c, leases=(gang, single)))) == (Why.DRAINING, ["single"])
    assert forecast(c, NOW, SITE).starts.keys() == {"single"}
