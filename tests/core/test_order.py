"""Which job comes first inside a project: each order, its price and its bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import CheckpointMode, Grant, Order, Plan, Requeue, State, Suspend, Why
from jupyter_gpushare.core.planning.planner import Planner, plan
from jupyter_gpushare.core.size import Size
from tests.core.build import ASLEEP, NOW, actions, build, cluster, device, project, started, stops, train

LAS = {"order": Order.LAS, "las_thresholds_gpu_s": (100.0, 200.0)}
SETTINGS = cluster(**LAS).settings


# -- least attained service


def test_a_job_of_an_earlier_queue_takes_the_capacity_of_a_later_one():
    c = cluster(stops("old", "0", attained_gpu_s=150.0), stops("new"), **LAS)
    assert actions(c) == [Requeue("old", Why.ORDER, "new")]


def test_a_suspendable_job_is_only_suspended():
    c = cluster(train("old", 1000, "0", attained_gpu_s=150.0), stops("new"), **LAS)
    assert actions(c) == [Suspend("old", Why.ORDER, "new")]


def test_equals_do_not_swap():
    c = cluster(stops("old", "0", attained_gpu_s=190.0), stops("new", attained_gpu_s=110.0), **LAS)
    assert actions(c) == []


def test_the_job_of_the_latest_queue_goes_first_and_in_it_the_last_in():
    c = cluster(
        stops("second", "0", attained_gpu_s=150.0, granted_at=9),
        stops("first in", "1", attained_gpu_s=250.0, granted_at=1),
        stops("last in", "2", attained_gpu_s=250.0, granted_at=2),
        stops("new"),
        gpus=3,
        **LAS,
    )
    assert actions(c) == [Requeue("last in", Why.ORDER, "new")]


def test_no_more_jobs_leave_than_are_needed():
    """The last in their order first; but the large one frees enough alone."""
    c = cluster(
        stops("large", "0 1", attained_gpu_s=250.0, granted_at=1),
        stops("small", "2", attained_gpu_s=250.0, granted_at=2),
        stops("new", device_count=2, consolidate=False),
        gpus=3,
        **LAS,
    )
    assert actions(c) == [Requeue("large", Why.ORDER, "new")]


def test_an_idle_session_across_two_nodes_gives_what_a_gang_needs_of_it():
    gpus = [device(n, node=f"n{n // 2}") for n in range(4)]
    c = cluster(
        build("nb", 1000, "1 2", idle_s=700),
        stops("late", "0", attained_gpu_s=150.0),
        stops("peer", "3"),
        stops("gang", device_count=2),
        gpus=gpus,
        **LAS,
    )
    assert {a.lease for a in plan(c, NOW).actions} == {"nb", "late"}


def test_gpu_seconds_count_all_gpus_of_a_job():
    wide = stops("wide", "0 1", attained_at=NOW - 60)
    assert order.attained_gpu_s(wide, NOW) == 120.0
    assert order.attained_gpu_s(stops("x", "0", attained_gpu_s=7.0), NOW) == 7.0
    assert actions(cluster(wide, stops("new"), gpus=2, **LAS)) == [Requeue("wide", Why.ORDER, "new")]


def test_the_plan_says_when_a_running_job_falls_into_the_next_queue():
    c = cluster(stops("old", "0", attained_gpu_s=60.0, attained_at=NOW - 10), stops("new"), **LAS)
    assert plan(c, NOW) == Plan((), next_at=NOW + 30)
    assert actions(c, NOW + 30) == [Requeue("old", Why.ORDER, "new")]
    alone = cluster(stops("old", "0", attained_gpu_s=60.0, attained_at=NOW - 10), **LAS)
    assert plan(alone, NOW) == Plan(())


def test_a_job_that_enters_a_queue_keeps_its_gpu_from_the_jobs_that_wait_there():
    old = stops("old", "0", attained_gpu_s=60.0, attained_at=NOW - 40)
    waits = stops("waits", attained_gpu_s=100.0, queued_at=NOW - 9)
    assert actions(cluster(old, waits, **LAS)) == []


def test_under_las_no_capacity_is_reserved_for_a_bypassed_job_before_the_guard():
    wide = stops("wide", device_count=2, waits_since_at=0, queued_at=1)
    small = stops("small", queued_at=2, waits_since_at=NOW)
    c = cluster(stops("old", "0"), wide, small, gpus=2, max_bypass_s=100.0, **LAS)
    assert started(c) == ["small"]
    guarded = {"starvation_guard_s": 100.0, "min_run_s": 1e6}
    held = stops("old", "0", granted_at=NOW)
    c = cluster(held, wide, small, gpus=2, **guarded, **LAS)
    assert started(c) == []


def test_jobs_that_are_demoted_at_one_moment_do_not_swap():
    runs = stops("runs", "0", attained_gpu_s=60.0, attained_at=NOW - 40)
    stopped = stops("stopped", attained_gpu_s=100.0, queued_at=NOW, waits_since_at=NOW)
    planner = Planner.of(cluster(runs, stopped, **LAS))
    assert planner.plan(NOW).actions == planner.plan(NOW + 2).actions == ()


def test_jobs_that_ran_in_a_queue_come_before_new_ones_and_the_last_to_stop_first():
    c = cluster(
        stops("came", attained_gpu_s=100.0, queued_at=1),
        stops("ran long ago", attained_gpu_s=120.0, queued_at=2, waits_since_at=5),
        stops("ran", attained_gpu_s=120.0, queued_at=3, waits_since_at=6),
        gpus=3,
        **LAS,
    )
    assert started(c) == ["ran", "ran long ago", "came"]


def test_a_suspended_job_comes_first_in_its_queue():
    asleep = train("asleep", 1000, "0", attained_gpu_s=120.0, state=ASLEEP)
    c = cluster(stops("ran", attained_gpu_s=120.0, waits_since_at=9), asleep, **LAS)
    assert [a.lease for a in actions(c)] == ["asleep"]


def test_what_was_received_is_counted_when_a_job_stops():
    job = stops("x", "0 1", attained_gpu_s=60.0, attained_at=NOW - 40, queued_at=1.0)
    done = order.served(job, NOW, SETTINGS)
    assert (done.attained_gpu_s, done.attained_at, done.queued_at) == (140.0, NOW, NOW - 20)
    assert order.served(job, NOW - 30, SETTINGS).queued_at == 1.0
    assert order.served(job, NOW, cluster(order=Order.FIFO).settings).queued_at == 1.0


def test_a_job_that_is_not_needed_stays_on_the_device():
    c = cluster(
        train("large", 750, "0", attained_gpu_s=150.0, granted_at=1),
        train("small", 250, "0", attained_gpu_s=150.0, granted_at=2),
        train("new", 750),
        **LAS,
    )
    assert actions(c) == [Suspend("large", Why.ORDER, "new")]


def test_a_suspended_job_takes_its_own_devices_back_from_those_behind_it():
    held = [stops("a", "0", attained_gpu_s=150.0), stops("b", "1", attained_gpu_s=150.0)]
    c = cluster(*held, train("asleep", 1000, "0 1", state=ASLEEP), gpus=2, **LAS)
    assert {a.lease for a in actions(c)} == {"a", "b"}


def test_a_job_that_is_just_resuming_is_left_alone_until_it_runs():
    old = train("old", 1000, "0", attained_gpu_s=150.0, state=State.RESUMING)
    assert actions(cluster(old, stops("new"), **LAS)) == []


def test_priority_under_a_limit_asks_no_job_twice():
    c = cluster(
        train("a", 500, "0", granted_at=2),
        train("b", 500, "1", granted_at=1),
        build("nb", 500, "1", project="q"),
        train("high", 1000, priority=1),
        gpus=2,
        projects=[project("p", 1, limit_milli=1000), project("q", 1)],
    )
    assert {a.lease for a in actions(c)} == {"a", "b"}


# -- the price of a preemption


def test_no_job_is_preempted_before_the_minimum_run_time():
    c = cluster(
        stops("old", "0", attained_gpu_s=150.0, granted_at=NOW - 59), stops("new"), min_run_s=60.0, **LAS
    )
    assert plan(c, NOW) == Plan((), next_at=NOW + 1)
    assert actions(c, NOW + 1) == [Requeue("old", Why.ORDER, "new")]


def test_no_job_is_preempted_to_gain_less_than_it_costs():
    old = stops("old", "0 1", attained_gpu_s=150.0)
    worth, not_worth = stops("new", attained_gpu_s=40.0), stops("new", attained_gpu_s=41.0)
    price = {"preempt_cost_s": 30.0, **LAS}
    assert actions(cluster(old, worth, gpus=2, **price)) == [Requeue("old", Why.ORDER, "new")]
    c = cluster(old, not_worth, gpus=2, **price)
    assert plan(c, NOW).actions == ()


def restarts(id, on="", **more):
    """A job that is stopped and begins again."""
    return train(id, 1000, on, survival=CheckpointMode.NONE, **more)


# A junior, and the price of its preemption with 10 s a GPU and 30 s of grace.
LOSSES = {
    "suspended": (train("old", 1000, "0", attained_gpu_s=150.0, granted_at=NOW - 50), 10.0),
    "stopped": (stops("old", "0", attained_gpu_s=150.0, granted_at=NOW - 50), 40.0),
    "begins again": (restarts("old", "0", attained_gpu_s=150.0, granted_at=NOW - 50), 90.0),
    "loses so much": (restarts("old", "0", attained_gpu_s=150.0, granted_at=NOW - 99), 120.0),
}


@pytest.mark.parametrize(("old", "price_s"), LOSSES.values(), ids=LOSSES)
def test_a_preemption_costs_the_grace_and_the_work_that_is_lost(old, price_s):
    prices = {"preempt_cost_s": 10.0, "grace_s": 30.0, "min_run_s": 20.0, **LAS}
    prices["las_thresholds_gpu_s"] = (140.0, 200.0)
    worth, not_worth = (stops("new", attained_gpu_s=140 - price_s + n) for n in (0, 1))
    assert [type(a) for a in actions(cluster(old, worth, **prices))] in ([Requeue], [Suspend])
    assert actions(cluster(old, not_worth, **prices)) == []


def test_what_a_stopped_job_does_again_is_no_gain():
    old = stops("old", "0", attained_gpu_s=250.0)
    new = restarts("new", attained_gpu_s=120.0)
    assert actions(cluster(old, new, **LAS)) == [Requeue("old", Why.ORDER, "new")]
    assert actions(cluster(old, new, preempt_cost_s=1.0, **LAS)) == []
    on = replace(new, survival=CheckpointMode.SIGTERM)
    assert actions(cluster(old, on, preempt_cost_s=1.0, **LAS)) == [Requeue("old", Why.ORDER, "new")]


def test_a_job_that_lost_little_makes_way_in_place_of_one_that_may():
    early = restarts("early", "0", attained_gpu_s=250.0, granted_at=NOW - 70)
    late = restarts("late", "1", attained_gpu_s=150.0, granted_at=NOW - 10)
    bounds = {"min_run_s": 60.0, **LAS}
    new = stops("new")
    assert actions(cluster(early, late, new, gpus=2, **bounds)) == [Requeue("late", Why.ORDER, "new")]
    # A job of its size has not run for long enough, it has a checkpoint, or it starved.
    small = replace(early, size=Size(500), held_milli=500)
    beside, half = train("beside", 500, "0"), train("new", 500)
    assert actions(cluster(small, beside, late, half, gpus=2, **bounds)) == [
        Requeue("early", Why.ORDER, "new")
    ]
    for other in (replace(late, survival=CheckpointMode.SIGTERM), replace(late, turns=1)):
        assert actions(cluster(early, other, new, gpus=2, **bounds)) == [Requeue("early", Why.ORDER, "new")]
    assert actions(cluster(replace(early, granted_at=NOW - 50), late, new, gpus=2, **bounds)) == []


def test_each_job_that_has_run_is_spared_by_one_young_job_at_most():
    bounds = {"min_run_s": 60.0, "gpus": 4, **LAS}
    young = [restarts(f"y{n}", f"{n}", attained_gpu_s=150.0, granted_at=NOW - 10) for n in range(3)]
    new = [stops(f"new{n}") for n in range(4)]
    old = restarts("old", "3", attained_gpu_s=250.0, granted_at=NOW - 70)
    assert [a.lease for a in actions(cluster(*young, old, *new, **bounds))] == ["y0", "old"]
    saves = replace(old, survival=CheckpointMode.SIGTERM)
    assert [a.lease for a in actions(cluster(*young, saves, *new, **bounds))] == ["old"]


def test_a_job_of_a_later_level_may_be_worth_what_one_before_it_was_not():
    """The first may take a job that would begin again only, as a suspended one waits for the other GPU."""
    found = cluster(
        restarts("dear", "0", attained_gpu_s=4_000.0, granted_at=NOW - 5_000),
        train("cheap", 1000, "1", attained_gpu_s=9_000.0, granted_at=NOW - 5_000),
        train("asleep", 1000, "1", state=State.SUSPENDED, attained_gpu_s=9_000.0),
        stops("first", attained_gpu_s=1_500.0),
        stops("second", attained_gpu_s=6_500.0),
        gpus=2,
        order=Order.PROGRESS,
        min_run_s=600.0,
        preempt_cost_s=30.0,
        grace_s=30.0,
    )
    assert actions(found) == [Suspend("cheap", Why.ORDER, "second")]


def test_an_overdue_job_of_the_first_queue_gains_what_it_runs_there():
    c = cluster(order=Order.PROGRESS)
    late = stops("late", attained_gpu_s=1_000.0, left_gpu_s=60.0, trusted_until_gpu_s=700.0)
    assert order.gain_gpu_s(late, NOW, c.settings) == 2_250.0


def test_without_thresholds_a_measured_job_is_sorted_again_when_it_is_overdue():
    c = cluster(order=Order.PROGRESS, las_thresholds_gpu_s=())
    long = stops("long", "0", attained_gpu_s=700_000.0, attained_at=NOW)
    long = replace(long, left_gpu_s=960.0, trusted_until_gpu_s=710_000.0)
    at = order.order_of(c.settings).leaves_at(long, NOW, c.settings)
    assert at == NOW + 10_000
    before, after = (order.level(long, t, c.settings)[2] for t in (at - 1, at))
    assert (before, after) == (960.0, 491_520.0)


def test_a_quota_stops_the_job_that_loses_least():
    lost = {"project": "q", "borrowed": True}
    c = cluster(
        restarts("restarts", "0", granted_at=NOW - 50, **lost),
        restarts("restarted", "1", granted_at=NOW - 90, **lost),
        stops("first", "2", granted_at=NOW - 99, **lost),
        stops("owed"),
        gpus=3,
        projects=[project("p", 3), project("q", 0)],
        min_run_s=60.0,
    )
    assert actions(c) == [Requeue("first", Why.OVER_QUOTA, "owed")]
    without = replace(c, leases=tuple(x for x in c.leases if x.id != "first"), devices=c.devices[:2])
    assert actions(without) == [Requeue("restarts", Why.OVER_QUOTA, "owed")]


def test_a_refusal_for_its_price_does_not_stop_others_of_the_same_shape():
    c = cluster(
        stops("old", "0 1", attained_gpu_s=150.0),
        stops("nearly demoted", attained_gpu_s=99.0, queued_at=1),
        stops("new", queued_at=2),
        gpus=2,
        preempt_cost_s=30.0,
        **LAS,
    )
    assert actions(c) == [Requeue("old", Why.ORDER, "new")]


def test_reclaim_for_quota_is_bound_by_neither():
    c = cluster(
        stops("old", "0", granted_at=NOW),
        stops("owed", project="q"),
        projects=[project("p", 0), project("q", 1)],
        min_run_s=60.0,
        preempt_cost_s=1e9,
    )
    assert actions(c) == [Requeue("old", Why.OVER_QUOTA, "owed")]


# -- a planner that is kept


def test_a_planner_forgets_ended_jobs():
    c = cluster(stops("old", "0"), stops("new"), **LAS)
    planner = Planner.of(c)
    assert planner.plan(NOW).actions == ()
    planner.drop("old")
    planner.drop("never was")
    assert planner.plan(NOW) == Plan((Grant("new", ("gpu0",), 1000, Why.FREE_CAPACITY),))
    planner.put(stops("new", cancelled=True))
    assert planner.plan(NOW) == Plan(())


def test_no_job_is_preempted_on_a_device_that_takes_nothing_new():
    c = cluster(
        train("junior", 1000, "0"),
        train("equal", 1000, "1", priority=1),
        train("job", 1000, priority=1),
        gpus=[device(0, usable=False), device(1)],
    )
    assert plan(c, NOW).actions == ()


def test_nor_is_a_gang_given_devices_that_take_nothing_new():
    c = cluster(
        train("away", 1000, "0"),
        train("junior", 1000, "1"),
        train("equal", 1000, "2", priority=1),
        train("gang", 1000, device_count=2, priority=1),
        gpus=[device(0, usable=False), device(1), device(2)],
    )
    assert plan(c, NOW).actions == ()


# -- the order of one user's own jobs


def _ranked(leases):
    return [x.id for x in sorted(leases, key=lambda x: order.rank(x, NOW, SETTINGS))]


def test_a_moved_job_exchanges_times_with_those_between():
    mine = [train(f"j{n}", 1000, queued_at=n, waits_since_at=n) for n in range(4)]
    assert [x.id for x in order.moved(mine, "j3", "j1", behind=False)] == ["j3", "j1", "j2"]
    assert [x.id for x in order.moved(mine, "j0", "j1", behind=True)] == ["j1", "j0"]
    assert order.moved(mine, "j0", "j1", behind=False) == []


def test_jobs_of_one_moment_can_be_moved():
    mine = [train(name, 1000, queued_at=7.0) for name in "abc"]
    changed = {x.id: x for x in order.moved(mine, "c", "a", behind=False)}
    assert _ranked(changed.get(x.id, x) for x in mine) == ["c", "a", "b"]


@given(st.data())
def test_a_move_changes_the_place_of_no_other_job(data):
    owners = data.draw(st.lists(st.booleans(), min_size=2, max_size=12))
    since = data.draw(st.permutations(range(len(owners))))
    leases = {
        f"j{n}": train(f"j{n}", 1000, queued_at=n, waits_since_at=since[n], user="me" if mine else "you")
        for n, mine in enumerate(owners)
    }
    mine = [x for x in leases.values() if x.user == "me"]
    assume(len(mine) > 1)
    one, two = data.draw(st.permutations([x.id for x in mine]))[:2]
    behind = data.draw(st.booleans())
    changed = {x.id: x for x in order.moved(mine, one, two, behind=behind)}
    before, after = _ranked(leases.values()), _ranked((leases | changed).values())
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        assert (leases[old].user == "you") == (leases[new].user == "you"), place
        assert leases[old].user == "me" or old == new
    assert (after.index(one) > after.index(two)) is behind
    others = [id for id in before if id != one and leases[id].user == "me"]
    assert others == [id for id in after if id in others]
    assert sorted((x.queued_at, x.waits_since_at) for x in (leases | changed).values()) == sorted(
        (x.queued_at, x.waits_since_at) for x in leases.values()
    )
