"""Who comes first inside a project: each order, its price and its bounds."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import Grant, Order, Plan, Requeue, State, Survival, Suspend, Why
from jupyter_gpushare.core.plan import Planner, plan
from tests.core.build import ASLEEP, NOW, build, cluster, device, project, train

LAS = {"order": Order.LAS, "las_thresholds_gpu_s": (100.0, 200.0)}
SETTINGS = cluster(**LAS).settings


def stops(id, on="", **more):
    """A job that is stopped and starts again, wherever there is room."""
    return train(id, 1000, on, survival=Survival.SIGTERM, **more)


def actions(c, now=NOW):
    return list(plan(c, now).actions)


def started(c):
    return [a.lease for a in plan(c, NOW).actions if isinstance(a, Grant)]


# -- least attained service


def test_a_job_of_an_earlier_queue_takes_the_room_of_a_later_one():
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


def test_a_demoted_job_enters_its_queue_at_the_end():
    old = stops("old", "0", attained_gpu_s=60.0, attained_at=NOW - 40)
    waits = stops("waits", attained_gpu_s=100.0, queued_at=NOW - 9)
    assert actions(cluster(old, waits, **LAS)) == [Requeue("old", Why.ORDER, "waits")]
    assert actions(cluster(old, waits, **LAS), NOW + 2) == []


def test_jobs_that_are_demoted_at_one_moment_do_not_swap():
    runs = stops("runs", "0", attained_gpu_s=60.0, attained_at=NOW - 40)
    stopped = stops("stopped", attained_gpu_s=100.0, queued_at=NOW, waits_since_at=NOW)
    planner = Planner.of(cluster(runs, stopped, **LAS))
    assert planner.plan(NOW).actions == planner.plan(NOW + 2).actions == ()


def test_who_ran_in_a_queue_comes_before_who_came_to_it_and_the_last_to_stop_first():
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


def test_who_is_not_needed_stays_on_the_device():
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


def test_priority_under_a_limit_asks_nobody_twice():
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


def test_nobody_is_preempted_before_the_minimum_run_time():
    c = cluster(
        stops("old", "0", attained_gpu_s=150.0, granted_at=NOW - 59), stops("new"), min_run_s=60.0, **LAS
    )
    assert plan(c, NOW) == Plan((), next_at=NOW + 1)
    assert actions(c, NOW + 1) == [Requeue("old", Why.ORDER, "new")]


def test_nobody_is_preempted_to_gain_less_than_it_costs():
    old = stops("old", "0 1", attained_gpu_s=150.0)
    worth, not_worth = stops("new", attained_gpu_s=40.0), stops("new", attained_gpu_s=41.0)
    price = {"preempt_cost_s": 30.0, **LAS}
    assert actions(cluster(old, worth, gpus=2, **price)) == [Requeue("old", Why.ORDER, "new")]
    c = cluster(old, not_worth, gpus=2, **price)
    assert plan(c, NOW).actions == ()


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


# -- who has waited for long

GUARD = {"guard_s": 1000.0, "min_run_s": 60.0, **LAS}


def test_who_waits_for_long_comes_before_all_queues():
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


def test_who_came_first_by_the_guard_runs_for_the_minimum_time():
    lucky = stops("lucky", "0", attained_gpu_s=300.0, granted_at=NOW - 59)
    assert actions(cluster(lucky, stops("new"), **GUARD)) == []
    assert actions(cluster(lucky, stops("new"), **GUARD), NOW + 1) == [Requeue("lucky", Why.ORDER, "new")]


# -- first come first served


def test_in_a_strict_line_who_cannot_start_blocks_those_behind():
    c = [stops("old", "0"), stops("wide", device_count=2, queued_at=1), stops("small", queued_at=2)]
    assert started(cluster(*c, gpus=2, order=Order.FIFO)) == []
    assert started(cluster(*c, gpus=2, order=Order.BACKFILL)) == ["small"]


def test_in_a_strict_line_those_in_front_start():
    c = [stops("a", queued_at=1), stops("b", device_count=2, queued_at=2), stops("c", queued_at=3)]
    assert started(cluster(*c, gpus=4, order=Order.FIFO)) == ["a", "b", "c"]


def test_a_strict_line_is_one_projects_only():
    c = [stops("old", "0"), stops("wide", device_count=2, queued_at=1), stops("small", project="q")]
    assert started(cluster(*c, gpus=2, order=Order.FIFO)) == ["small"]


def test_a_strict_line_does_not_wait_for_what_can_never_start():
    c = [stops("huge", device_count=8, queued_at=1), stops("small", queued_at=2)]
    assert started(cluster(*c, gpus=2, order=Order.FIFO)) == ["small"]


def test_a_strict_line_waits_for_room_on_its_way():
    c = [
        stops("old", "0", state=State.STOPPING),
        stops("wide", device_count=2, queued_at=1),
        stops("b", queued_at=2),
    ]
    assert started(cluster(*c, gpus=3, order=Order.FIFO)) == ["wide"]
    c[1] = stops("wide", device_count=3, queued_at=1)
    assert started(cluster(*c, gpus=3, order=Order.FIFO)) == []


def test_what_a_strict_line_is_owed_waits_for_its_head():
    c = [stops("wide", device_count=2, queued_at=1), stops("small", queued_at=2)]
    assert started(cluster(*c, projects=[project("p", 1)], gpus=3, order=Order.FIFO)) == ["wide", "small"]


def test_who_was_overtaken_for_long_enough_is_not_overtaken_any_more():
    old, wide = stops("old", "0"), stops("wide", device_count=2, waits_since_at=NOW - 100, queued_at=1)
    c = cluster(old, wide, stops("small", queued_at=2), gpus=2, order=Order.BACKFILL, skip_wait_s=100.0)
    assert started(c) == []
    early = plan(c, NOW - 1)
    assert [a.lease for a in early.actions] == ["small"]
    assert early.next_at == NOW
    assert started(cluster(*c.leases, gpus=3, order=Order.BACKFILL, skip_wait_s=100.0)) == ["wide"]


def test_only_the_first_of_those_keeps_room():
    c = cluster(
        stops("old", "0"),
        stops("wide", device_count=2, waits_since_at=0, queued_at=1),
        stops("wider", device_count=3, waits_since_at=0, queued_at=2),
        stops("small", queued_at=3),
        gpus=[device(n, node=f"n{n // 3}") for n in range(4)],
        order=Order.BACKFILL,
        skip_wait_s=100.0,
    )
    assert started(cluster(*c.leases[:3], gpus=list(c.devices), order=Order.BACKFILL)) == ["wide"]
    busy = [stops(f"o{n}", f"{n}") for n in (0, 1)]
    c = cluster(*busy, *c.leases[1:], gpus=list(c.devices), order=Order.BACKFILL, skip_wait_s=100.0)
    assert started(c) == ["small"]  # on the device that is not kept


def test_room_is_kept_where_least_is_missing():
    """Of two nodes the one with a free device; sessions are not waited for."""
    c = cluster(
        stops("a", "0"),
        stops("b", "1"),
        stops("c", "2"),
        stops("wide", device_count=2, waits_since_at=0, queued_at=1),
        stops("small", queued_at=2),
        gpus=[device(n, node=f"n{n // 2}") for n in range(4)],
        order=Order.BACKFILL,
        skip_wait_s=100.0,
    )
    assert started(c) == []


def test_whole_nodes_are_kept_for_a_job_larger_than_one():
    c = cluster(
        stops("old", "0"),
        stops("wide", device_count=4, waits_since_at=0, queued_at=1),
        stops("small", queued_at=2),
        gpus=[device(n, node=f"n{n // 2}") for n in range(4)],
        order=Order.BACKFILL,
        skip_wait_s=100.0,
    )
    assert started(c) == []


def test_a_suspended_job_keeps_its_own_devices():
    c = cluster(
        stops("old", "0"),
        train("asleep", 1000, "0 1", state=ASLEEP, waits_since_at=0),
        stops("small"),
        gpus=2,
        order=Order.BACKFILL,
        skip_wait_s=100.0,
    )
    assert started(c) == []


def test_no_room_is_kept_where_sessions_are_in_the_way():
    c = cluster(
        build("nb", 500, "0"),
        stops("wide", device_count=2, waits_since_at=0, queued_at=1),
        stops("small", queued_at=2),
        gpus=2,
        order=Order.BACKFILL,
        skip_wait_s=100.0,
    )
    assert started(c) == ["small"]


# -- shortest remaining service

SRTF = {"order": Order.SRTF}


def test_the_job_with_least_left_comes_first_and_preempts():
    long, short = stops("long", "0", duration_s=500.0), stops("short", duration_s=100.0)
    assert actions(cluster(long, short, **SRTF)) == [Requeue("long", Why.ORDER, "short")]
    assert (
        actions(cluster(stops("half", "0", duration_s=100.0), stops("long", duration_s=101.0), **SRTF)) == []
    )
    assert started(cluster(stops("unknown"), stops("known", duration_s=9e9), **SRTF)) == ["known"]


def test_of_running_jobs_the_one_with_most_left_goes():
    c = cluster(
        stops("a", "0", duration_s=500.0, attained_gpu_s=450.0),
        stops("b", "1", duration_s=300.0),
        stops("short", duration_s=100.0),
        gpus=2,
        **SRTF,
    )
    assert actions(c) == [Requeue("b", Why.ORDER, "short")]


def test_a_short_job_must_be_worth_a_preemption():
    long, short = stops("long", "0", duration_s=500.0), stops("short", duration_s=100.0)
    assert actions(cluster(long, short, preempt_cost_s=101.0, **SRTF)) == []
    assert order.gain_gpu_s(stops("x"), NOW, cluster(**SRTF).settings) == 0.0


# -- moving


def test_a_running_job_is_moved_to_make_a_node_free_for_a_larger_one():
    nodes = [device(n, node=f"n{n // 2}") for n in range(4)]
    c = cluster(stops("a", "0"), stops("b", "2"), stops("wide", device_count=2), gpus=nodes, **LAS)
    assert actions(c) == [Requeue("a", Why.MOVED, "wide")]
    after = cluster(stops("a"), stops("b", "2"), stops("wide", device_count=2), gpus=nodes, **LAS)
    assert actions(after) == [
        Grant("a", ("gpu3",), 1000, Why.FREE_ROOM),
        Grant("wide", ("gpu0", "gpu1"), 1000, Why.FREE_ROOM),
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"order": Order.BACKFILL},  # does not preempt
        {"min_run_s": 1e6},
        {"preempt_cost_s": 1e6},
    ],
)
def test_nobody_is_moved_where_preempting_is_not_allowed(more):
    nodes = [device(n, node=f"n{n // 2}") for n in range(4)]
    c = [stops("a", "0", granted_at=1), stops("b", "2", granted_at=1), stops("wide", device_count=2)]
    assert actions(cluster(*c, gpus=nodes, **{**LAS, **more})) == []


def test_a_job_that_has_no_checkpoint_of_its_own_is_not_moved():
    nodes = [device(n, node=f"n{n // 2}") for n in range(4)]
    for survival in (Survival.SUSPEND, Survival.NONE):
        held = [train(x, 1000, on, survival=survival) for x, on in (("a", "0"), ("b", "2"))]
        assert actions(cluster(*held, stops("wide", device_count=2), gpus=nodes, **LAS)) == []


def test_nobody_is_moved_without_a_place_to_go_to():
    nodes = [device(n, node=f"n{n // 2}") for n in range(4)]
    c = [stops("a", "0"), stops("b", "2"), stops("c", "3"), stops("wide", device_count=2)]
    assert actions(cluster(*c, gpus=nodes, **LAS)) == []


def test_the_node_is_cleared_where_fewest_gpus_change_hands():
    nodes = [device(n, node=f"n{n // 4}") for n in range(8)]
    c = cluster(
        stops("a", "0"), stops("b", "1 2"), stops("c", "4 5"),
        stops("wide", device_count=3), gpus=nodes, **LAS,
    )  # fmt: skip
    assert actions(c) == [Requeue("c", Why.MOVED, "wide")] or actions(c) == [Requeue("b", Why.MOVED, "wide")]
    assert len(actions(c)) == 1


def test_whole_nodes_are_cleared_for_a_job_larger_than_one():
    nodes = [device(n, node=f"n{n // 2}") for n in range(8)]
    held = [stops("a", "0"), stops("b", "2"), stops("c", "4")]
    c = cluster(*held, stops("wide", device_count=4), gpus=nodes, **LAS)
    assert actions(c) == [Requeue("a", Why.MOVED, "wide")]
    c = cluster(*held, stops("wide", device_count=5), gpus=nodes, **LAS)
    assert actions(c) == [Requeue("a", Why.MOVED, "wide")]
    held = [stops(x, on) for x, on in (("a", "0"), ("b", "2"), ("c", "4"), ("d", "6"))]
    c = cluster(*held, stops("wide", device_count=4), gpus=nodes, **LAS)
    assert actions(c) == [Requeue("a", Why.MOVED, "wide"), Requeue("b", Why.MOVED, "wide")]


def test_jobs_that_need_not_move_stay():
    """3 and 3 make room for 5; 1 was the better start, and is not needed then."""
    nodes = [device(n, node=node) for n, node in enumerate("aaaaaaabbbbcccc")]
    held = [stops("a", "0 1 2"), stops("b", "3 4 5"), stops("c", "6"), stops("x", "7"), stops("y", "11")]
    c = cluster(*held, stops("wide", device_count=5), gpus=nodes, **LAS)
    assert {a.lease for a in actions(c)} == {"a", "b"}


def test_whole_nodes_are_not_cleared_without_a_place_to_go_to():
    """Eight GPUs are free, but no two of them together outside of the nodes that would be cleared."""
    nodes = [device(n, node=f"n{n // 4}") for n in range(24)]
    pairs = [stops("a", "0 1"), stops("b", "4 5")]
    single = [stops(f"s{n}", f"{n}") for n in range(8, 24) if n % 4 < 3]
    assert actions(cluster(*pairs, *single, stops("wide", device_count=8), gpus=nodes, **LAS)) == []
    done = actions(cluster(*pairs, *single[:-1], stops("wide", device_count=8), gpus=nodes, **LAS))
    assert done[0].lease == "a"


# -- a planner that is kept


def test_a_planner_forgets_who_ended():
    c = cluster(stops("old", "0"), stops("new"), **LAS)
    planner = Planner.of(c)
    assert planner.plan(NOW).actions == ()
    planner.drop("old")
    planner.drop("never was")
    assert planner.plan(NOW) == Plan((Grant("new", ("gpu0",), 1000, Why.FREE_ROOM),))
    planner.put(stops("new", cancelled=True))
    assert planner.plan(NOW) == Plan(())


def test_a_planner_sees_a_demotion_that_nobody_told_it_of():
    planner = Planner.of(cluster(stops("old", "0", attained_at=NOW), **LAS))
    assert planner.plan(NOW) == Plan(())
    planner.put(stops("new", queued_at=NOW + 50))
    assert planner.plan(NOW + 50) == Plan((), next_at=NOW + 100)
    assert planner.plan(NOW + 100).actions == (Requeue("old", Why.ORDER, "new"),)


def test_moments_of_leases_that_changed_are_forgotten():
    planner = Planner.of(cluster(stops("old", "0"), stops("new", retry_at=NOW + 5), **LAS))
    assert planner.plan(NOW).next_at == NOW + 5
    planner.put(stops("new", retry_at=NOW + 50))
    assert planner.plan(NOW).next_at == NOW + 50


def test_nobody_is_preempted_on_a_device_that_takes_nothing_new():
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
