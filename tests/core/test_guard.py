"""The starvation guard: a job that has waited for long comes first, and runs undisturbed for a while."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import Order, Plan, Requeue, Why
from jupyter_gpushare.core.planning.planner import plan
from tests.core.build import ASLEEP, NOW, actions, build, cluster, grant, project, started, stops, why
from tests.core.test_order import LAS

GUARD = {"starvation_guard_s": 1000.0, "min_run_s": 60.0, **LAS}


def test_a_job_that_waits_for_long_comes_before_all_queues():
    run = stops("run", "0", granted_at=NOW - 500)
    starved = stops("starved", attained_gpu_s=300.0, waits_since_at=NOW - 1000)
    assert actions(cluster(run, starved, **GUARD)) == [Requeue("run", Why.ORDER, "starved")]
    c = cluster(run, starved, **GUARD)
    assert plan(c, NOW - 5) == Plan((), next_at=NOW)
    assert actions(cluster(run, starved, **{**GUARD, "preempt_cost_s": 61.0})) == []
    assert actions(cluster(run, starved, **{**GUARD, "min_run_s": 0.0})) == []


def test_of_two_that_wait_for_long_the_longer_comes_first():
    a = stops("a", attained_gpu_s=300.0, waits_since_at=NOW - 2000)
    b = stops("b", attained_gpu_s=0.0, waits_since_at=NOW - 3000)
    assert started(cluster(a, b, stops("c", waits_since_at=NOW), **GUARD)) == ["b"]


def test_a_job_first_by_the_guard_runs_for_the_minimum_time():
    lucky = stops("lucky", "0", attained_gpu_s=300.0, granted_at=NOW - 59)
    assert actions(cluster(lucky, stops("new"), **GUARD)) == []
    assert actions(cluster(lucky, stops("new"), **GUARD), NOW + 1) == [Requeue("lucky", Why.ORDER, "new")]


def test_a_job_that_waits_for_long_comes_before_jobs_of_higher_priority():
    starved = stops("starved", attained_gpu_s=300.0, waits_since_at=NOW - 1000)
    c = cluster(starved, stops("high", priority=1, waits_since_at=NOW), **GUARD)
    assert started(c) == ["starved"]
    c = cluster(starved, stops("high", "0", priority=1), **GUARD)
    assert actions(c) == [Requeue("high", Why.ORDER, "starved")]


def test_starving_jobs_of_different_priority_give_their_own_reasons():
    running = [stops("a", "0", granted_at=NOW - 500), stops("b", "1", granted_at=NOW - 500)]
    low = stops("low", waits_since_at=NOW - 3000)
    high = stops("high", priority=1, waits_since_at=NOW - 2000)
    assert actions(cluster(*running, low, high, gpus=2, **GUARD)) == [
        Requeue("a", Why.ORDER, "low"),
        Requeue("b", Why.PRIORITY, "high"),
    ]


@pytest.mark.parametrize("rules", [Order.FIFO, Order.BACKFILL])
def test_where_the_order_does_not_preempt_a_job_that_waits_for_long_is_first_and_preempts_none(rules):
    guard = {**GUARD, "order": rules, "min_run_s": 0.0}
    starved = stops("starved", waits_since_at=NOW - 1000, queued_at=2)
    high = stops("high", priority=1, queued_at=1, waits_since_at=NOW)
    assert started(cluster(starved, high, **guard)) == ["starved"]
    assert actions(cluster(stops("run", "0"), starved, high, **guard)) == []


def test_each_further_turn_by_the_guard_is_undisturbed_for_twice_as_long():
    def after(turns: int, run_s: float, waited_s: float = 1000.0) -> list[object]:
        at = NOW - run_s
        lucky = stops(
            "lucky", "0", attained_gpu_s=300.0, granted_at=at, waits_since_at=at - waited_s, turns=turns
        )
        return actions(cluster(lucky, stops("new", waits_since_at=NOW), **GUARD))

    assert after(3, 239.0) == []
    assert after(3, 240.0) == [Requeue("lucky", Why.ORDER, "new")]
    assert after(3, 60.0, waited_s=999.0) == [Requeue("lucky", Why.ORDER, "new")]  # not by the guard


def test_a_turn_by_the_guard_bounds_no_other_project():
    at = NOW - 60
    lucky = stops("lucky", "0", granted_at=at, waits_since_at=at - 1000, turns=9)
    c = [lucky, stops("more", "1", granted_at=1), stops("other", project="q", waits_since_at=NOW)]
    two = [project("p", 0), project("q", 0)]
    assert actions(cluster(*c, gpus=2, projects=two, **GUARD)) == [Requeue("lucky", Why.OVER_QUOTA, "other")]


def test_turns_by_the_guard_are_counted():
    c = cluster(**GUARD).settings
    assert order.with_turn(stops("x", waits_since_at=NOW - 1000), NOW, c).turns == 1
    assert order.with_turn(stops("x", waits_since_at=NOW - 999), NOW, c).turns == 0


def test_capacity_kept_for_a_job_that_waits_for_long_goes_to_no_session_beyond_quota():
    wide = stops("wide", device_count=2, waits_since_at=NOW - 1000)
    held = stops("held", "0", granted_at=NOW)
    c = [held, wide, build("guest", 500)]
    two = {"gpus": 2, "projects": [project("p", 0)], **GUARD}
    assert actions(cluster(*c, **two)) == []
    assert actions(cluster(held, build("guest", 500), **two)) != []
    owed = cluster(*c, gpus=2, projects=[project("p", 0.5)], **GUARD)
    assert actions(owed) == [grant("guest", 1, milli=500, why=Why.CLAIM)]


def test_capacity_is_kept_for_a_job_that_waits_for_long_though_its_project_has_the_share_in_use():
    """p's own jobs make way for it as they end; none of them starts before."""
    held = [stops(f"p{n}", f"{n}", granted_at=NOW) for n in range(2)]
    wide = stops("wide", device_count=2, waits_since_at=NOW - 1000)
    small = [stops(f"s{n}", project=n, waits_since_at=NOW) for n in "pq"]
    other = [stops(f"q{n}", f"{n}", project="q", granted_at=NOW) for n in (2, 3)]
    two = {"gpus": 4, "projects": [project("p", 2), project("q", 2)], **GUARD}
    assert actions(cluster(*held, wide, *small, *other, **two)) == []
    assert actions(cluster(held[0], wide, *small, *other, **two)) == []
    assert started(cluster(wide, *small, *other, **two)) == ["wide"]


def test_a_job_larger_than_its_share_that_waits_for_long_holds_up_its_own_project_only():
    c = cluster(
        *(stops(f"held{n}", f"{n}", project="q", granted_at=NOW) for n in range(2)),
        stops("wide", device_count=4, waits_since_at=NOW - 1000),
        stops("small", waits_since_at=NOW),
        *(stops(f"q{n}", project="q", waits_since_at=NOW) for n in range(2)),
        gpus=4,
        projects=[project("p", 0), project("q", 0)],
        **{**GUARD, "fairness_horizon_s": 86400.0},
    )
    assert started(c) == ["q0", "q1"]
    assert (why(c, "wide"), why(c, "small")) == (Why.NO_CAPACITY, Why.IN_LINE)


@pytest.mark.parametrize(
    ("gpus_of_wide", "horizon_s"),
    [pytest.param(4, None, id="shares-are-not-caught-up"), pytest.param(3, 86400.0, id="owed-to-another")],
)
def test_a_job_that_its_share_never_holds_keeps_no_share_from_its_project(gpus_of_wide, horizon_s):
    """Its project's next job takes the share from a project above its own."""
    held = (stops(f"q{n}", f"{n}", project="q", granted_at=NOW - 86_500) for n in range(4))
    wide = stops("wide", device_count=gpus_of_wide, waits_since_at=NOW - 1000)
    c = cluster(
        *held,
        wide,
        stops("small", waits_since_at=NOW),
        gpus=4,
        projects=[project("p", 0), project("q", 2)],
        **{**GUARD, "fairness_horizon_s": horizon_s},
    )
    assert [(a.why, a.for_lease) for a in actions(c)] == [(Why.OVER_QUOTA, "small")]


def test_capacity_is_kept_for_one_job_and_the_next_of_its_size_waits_for_that():
    wide = [stops(f"wide{n}", device_count=2, waits_since_at=NOW - 1000) for n in range(2)]
    c = cluster(stops("held", "0", granted_at=NOW), *wide, gpus=2, **GUARD)
    assert [why(c, f"wide{n}") for n in range(2)] == [Why.RESERVED, Why.IN_LINE]


def test_a_job_that_others_made_way_for_gives_its_project_no_earlier_turn():
    made_way = stops("made_way", made_way_for="x", waits_since_at=NOW)
    x, later = stops("x", waits_since_at=NOW - 3000), stops("later", waits_since_at=NOW - 1000)
    first = stops("first", project="q", waits_since_at=NOW - 2000)
    projects = [project("p", 1), project("q", 1)]
    assert started(cluster(made_way, x, later, first, gpus=2, projects=projects, **GUARD)) == ["x", "first"]


def test_a_starving_job_preempts_by_its_priority_though_one_before_it_gains_too_little():
    held = stops("held", "0", granted_at=NOW - 3000)
    jobs = [
        stops("longer", waits_since_at=NOW - 3000),
        stops("higher", waits_since_at=NOW - 2000, priority=1),
    ]
    asleep = build("nb", 500, "0", state=ASLEEP)  # its claim leaves nothing to reserve
    c = cluster(held, *jobs, asleep, **{**GUARD, "preempt_cost_s": 61.0})
    assert actions(c) == [Requeue("held", Why.PRIORITY, "higher")]
