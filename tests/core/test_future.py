"""One future of running and waiting jobs on counted GPUs."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.future import HORIZON_S, Future, replayed
from jupyter_gpushare.core.model import Order, State
from tests.core.build import NOW, build, cluster, project, train


def on(id, gpus="0", **more):
    return train(id, 1000, gpus, **{"attained_at": NOW, "granted_at": NOW - 10_000} | more)


def waits(id, gpus=1, **more):
    more = {"queued_at": NOW, "waits_since_at": NOW} | more
    return train(id, 1000, device_count=gpus, **more)


def las(*leases, **more):
    return cluster(*leases, **{"order": Order.LAS, "min_run_s": 100.0} | more)


def test_a_job_that_does_not_fit_blocks_no_other():
    c = cluster(on("a"), on("b", "1"), waits("gang", 2), waits("one", queued_at=NOW + 1), gpus=2)
    found = replayed(c, NOW, {"a": 100, "b": 500, "one": 1000, "gang": 20})
    assert found.starts_at == {"one": NOW + 100, "gang": NOW + 1100}
    assert found.ends_at == {"a": NOW + 100, "b": NOW + 500, "one": NOW + 1100, "gang": NOW + 1110}


def test_a_new_job_takes_the_gpu_of_one_in_a_later_queue_after_its_minimum_run_time():
    long = on("long", attained_gpu_s=5_000.0, granted_at=NOW - 40)
    found = replayed(las(long, waits("new")), NOW, {"long": 900, "new": 300})
    assert found.starts_at == {"new": NOW + 60}
    assert found.ends_at == {"new": NOW + 360, "long": NOW + 1200}


def test_a_job_makes_way_when_it_enters_a_later_queue():
    found = replayed(las(on("long"), waits("new")), NOW, {"long": 9_000, "new": 1_000})
    assert found.starts_at == {"new": NOW + 3_250}
    assert found.ends_at["long"] == NOW + 10_000


def test_of_two_running_jobs_the_later_one_makes_way_and_goes_on_first():
    first = on("first", attained_gpu_s=5_000.0)
    second = on("second", "1", attained_gpu_s=5_000.0, granted_at=NOW - 500)
    c = las(first, second, waits("new"), waits("old", attained_gpu_s=4_000.0), gpus=2)
    found = replayed(c, NOW, {"first": 5_000, "second": 50, "new": 100, "old": 1_000})
    assert found.starts_at["new"] == NOW
    assert found.ends_at["second"] == NOW + 150


def test_victims_that_are_not_enough_are_left_alone():
    c = las(on("a", attained_gpu_s=5_000.0), on("b", "1"), waits("gang", 2), gpus=2)
    found = replayed(c, NOW, {"a": 1_000, "b": 2_000, "gang": 10})
    assert found.starts_at == {"gang": NOW + 2_000}


def test_the_project_that_is_owed_comes_first():
    projects = [project("p", 0), project("q", 1)]
    c = cluster(on("a"), waits("p1"), waits("q1", project="q", queued_at=NOW + 9), projects=projects)
    found = replayed(c, NOW, {"a": 100, "p1": 100, "q1": 100})
    assert found.starts_at == {"q1": NOW + 100, "p1": NOW + 200}


def test_the_project_of_a_job_may_be_configured_no_more():
    found = replayed(cluster(on("a"), waits("x", project="gone")), NOW, {"a": 100, "x": 10})
    assert found.starts_at == {"x": NOW + 100}


def test_a_project_below_its_share_takes_gpus_of_one_above():
    projects = [project("p", 0), project("q", 0)]
    c = las(
        on("a", attained_gpu_s=5_000.0),
        on("b", "1", attained_gpu_s=5_000.0),
        waits("x", project="q", attained_gpu_s=9_000.0),
        waits("y", project="q", attained_gpu_s=9_000.0, queued_at=NOW + 1),
        gpus=2,
        projects=projects,
        fairness_horizon_s=1_800.0,
    )
    found = replayed(c, NOW, {"a": 50_000, "b": 50_000, "x": 100, "y": 100})
    assert found.starts_at["x"] == NOW
    assert found.starts_at["y"] == NOW + 100


def test_no_job_makes_way_that_is_larger_than_what_its_project_has_above_its_share():
    projects = [project("p", 0), project("q", 0)]
    c = las(
        on("gang", "0 1 2"),
        on("own", "3", project="q"),
        waits("x", project="q", attained_gpu_s=9_000.0),
        gpus=4,
        projects=projects,
        fairness_horizon_s=1_800.0,
    )
    found = replayed(c, NOW, {"gang": 3_000, "own": 2_000, "x": 100})
    assert found.starts_at == {"x": NOW + 1_000}


def test_of_two_protected_jobs_the_one_that_has_run_for_longer_makes_way():
    young = on("young", attained_gpu_s=5_000.0, granted_at=NOW - 40)
    old = on("old", "1", attained_gpu_s=9_000.0, granted_at=NOW - 70)
    found = replayed(las(old, young, waits("new"), gpus=2), NOW, {"young": 900, "old": 900, "new": 300})
    assert found.starts_at == {"new": NOW + 30}


def test_nobody_is_above_the_share_where_one_project_has_all():
    projects = [project("p", 0), project("q", 0)]
    idle = build("nb", 1000, "0", project="q")
    c = las(idle, waits("x"), projects=projects, fairness_horizon_s=1_800.0)
    assert replayed(c, NOW, {"x": 100}) == Future(free_at=((NOW, 0.0),))


def test_an_idle_session_is_lent_when_it_may_be_and_others_stay():
    c = cluster(build("nb", 1000, "0", idle_s=0.0), build("busy", 1000, "1"), waits("x"), gpus=2)
    found = replayed(c, NOW, {"x": 100})
    assert found.starts_at == {"x": NOW + 600}
    assert found.free_at == ((NOW, 0.0),)


def test_a_suspended_session_holds_nothing():
    asleep = build("nb", 1000, "0", state=State.SUSPENDED)
    assert replayed(cluster(asleep, waits("x")), NOW, {"x": 100}).starts_at == {"x": NOW}


def test_a_gpu_that_a_suspended_session_claims_is_free_for_jobs_only():
    asleep = build("nb", 1000, "0", state=State.SUSPENDED)
    assert replayed(cluster(asleep, waits("x")), NOW, {"x": 100}).free_at == ((NOW, 0.0),)


def test_a_session_that_waits_for_its_start_holds_nothing():
    session = build("nb", 1000, waits=True)
    assert replayed(cluster(session), NOW, {}).free_at == ((NOW, 1.0),)


def test_a_cancelled_job_leaves_the_queue_and_keeps_its_gpu_until_it_has_ended():
    c = cluster(on("a", cancelled=True), waits("gone", cancelled=True), waits("x"))
    found = replayed(c, NOW, {"a": 100, "gone": 100, "x": 100})
    assert found.starts_at == {"x": NOW + 100}


def test_a_job_of_unknown_work_never_ends():
    c = cluster(on("a"), waits("x"), order=Order.FIFO)
    assert replayed(c, NOW, {"x": 100}) == Future(free_at=((NOW, 0.0),))


def test_nothing_is_said_beyond_the_horizon():
    assert not replayed(cluster(on("a")), NOW, {"a": HORIZON_S + 1}).ends_at


def test_gpus_are_counted_free_before_waiting_jobs_take_them():
    c = cluster(on("a"), on("b", "1"), waits("x"), waits("y", queued_at=NOW + 1), gpus=2)
    found = replayed(c, NOW, {"a": 100, "b": 100, "x": 50, "y": 500})
    assert found.free_at == ((NOW, 0.0), (NOW + 100, 2.0))


@pytest.mark.parametrize("order", list(Order))
def test_every_order_has_a_future(order):
    jobs = [waits(f"w{n}", queued_at=NOW + n) for n in range(10)]
    found = replayed(cluster(*jobs, gpus=3, order=order), NOW, {job.id: 100.0 for job in jobs})
    assert found.ends_at.keys() == {job.id for job in jobs}
