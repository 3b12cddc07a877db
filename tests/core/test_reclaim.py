"""`plan`: what projects take from each other, and jobs of one project from each other."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.model import CheckpointMode, Grant, Requeue, Resume, State, Suspend, Why
from jupyter_gpushare.core.planning.planner import plan
from tests.core.build import ASLEEP, NOW, actions, build, cluster, grant, project, train

TWO = [project("p", 2), project("q", 2)]


def test_one_project_alone_may_use_everything():
    jobs = [train(f"j{n}", 1000) for n in range(5)]
    assert actions(cluster(*jobs, gpus=4, projects=TWO)) == [
        grant("j0", 0),
        grant("j1", 1),
        grant("j2", 2, borrowed=True),
        grant("j3", 3, borrowed=True),
    ]


def test_a_project_below_quota_takes_from_the_youngest_over_quota_leases():
    held = [train(f"p{n}", 1000, f"{n}", granted_at=n) for n in range(4)]
    wait = [train(f"q{n}", 1000, project="q") for n in range(3)]
    assert actions(cluster(*held, *wait, gpus=4, projects=TWO)) == [
        Suspend("p3", Why.OVER_QUOTA, "q0"),
        Suspend("p2", Why.OVER_QUOTA, "q1"),
    ]


def test_what_left_for_a_project_is_granted_to_it_before_those_it_left():
    c = cluster(
        *[train(f"p{n}", 1000, f"{n}", granted_at=n) for n in range(2)],
        *[train(f"p{n}", 1000, f"{n}", granted_at=n, state=ASLEEP) for n in (2, 3)],
        *[train(f"q{n}", 1000, project="q") for n in range(3)],
        gpus=4,
        projects=TWO,
    )
    assert actions(c) == [grant("q0", 2), grant("q1", 3)]


def test_a_project_within_quota_loses_nothing():
    held = [train("p0", 1000, "0 1"), train("q0", 1000, "2 3", project="q")]
    assert actions(cluster(*held, train("q1", 1000, project="q"), gpus=4, projects=TWO)) == []


def test_releasing_capacity_is_not_reclaimed_twice():
    held = [train(f"p{n}", 1000, f"{n}", granted_at=n) for n in range(3)]
    leaving = train("p3", 1000, "3", state=State.SUSPENDING)
    assert actions(cluster(*held, leaving, train("q0", 1000, project="q"), gpus=4, projects=TWO)) == []


def test_a_lease_that_is_larger_than_its_quota_is_borrowed_as_a_whole():
    c = cluster(train("p0", 1000, "0 1 2 3"), train("q0", 1000, project="q"), gpus=4, projects=TWO)
    assert actions(c) == [Suspend("p0", Why.OVER_QUOTA, "q0")]


def test_idle_sessions_are_asked_before_running_jobs():
    c = cluster(
        build("nb", 1000, "0", idle_s=3600),
        *[train(f"p{n}", 1000, f"{n}", granted_at=n) for n in (1, 2, 3)],
        train("q0", 1000, project="q"),
        gpus=4,
        projects=TWO,
    )
    assert actions(c) == [Suspend("nb", Why.IDLE, "q0")]


def test_busy_sessions_beyond_quota_yield_to_a_project_below_quota():
    c = cluster(build("guest", 1000, "0", project="q"), train("job", 1000))
    assert actions(c) == [Suspend("guest", Why.OVER_QUOTA, "job")]


def test_the_rest_goes_by_weight():
    c = cluster(
        *[train(f"p{n}", 1000, queued_at=1) for n in range(8)],
        *[train(f"q{n}", 1000, project="q", queued_at=2) for n in range(8)],
        gpus=8,
        projects=[project("p", 1), project("q", 1, weight=2)],
    )
    got = [a.lease[0] for a in plan(c, NOW).actions if isinstance(a, Grant)]
    assert (got.count("p"), got.count("q")) == (3, 5)


def test_a_projects_limit_binds_free_capacity_too():
    limited = [project("p", 1, limit_milli=1000)]
    c = cluster(train("old", 600, "0"), train("a", 500), train("b", 400), gpus=2, projects=limited)
    assert actions(c) == [grant("b", 0, milli=400)]


def test_a_session_within_quota_pushes_its_own_projects_jobs_under_the_limit():
    limited = [project("p", 1, limit_milli=1000)]
    job = train("job", 1000, "1")
    c = cluster(job, build("nb", 500), gpus=2, projects=limited)
    assert actions(c) == [grant("nb", 0, milli=500, why=Why.CLAIM, asleep=True)]
    nb = build("nb", 500, "0", state=ASLEEP, wanted=True)
    assert actions(cluster(job, nb, gpus=2, projects=limited)) == [Suspend("job", Why.PRIORITY, "nb")]
    leaving = train("job", 1000, "1", state=State.SUSPENDING)
    assert actions(cluster(leaving, nb, gpus=2, projects=limited)) == []


def test_a_limit_that_no_job_is_in_the_way_of_keeps_no_owner_asleep():
    nb = build("nb", 500, "0", state=ASLEEP, wanted=True)
    c = cluster(build("other", 500, "1"), nb, gpus=2, projects=[project("p", 1, limit_milli=600)])
    assert actions(c) == [Resume("nb", Why.WANTED)]


def test_a_job_takes_capacity_from_lower_priorities_of_its_project():
    c = cluster(train("low", 1000, "0"), train("high", 1000, priority=1))
    assert actions(c) == [Suspend("low", Why.PRIORITY, "high")]
    c = cluster(train("low", 1000, "0"), train("same", 1000))
    assert actions(c) == []
    c = cluster(train("low", 1000, "0", project="q"), train("high", 1000, priority=1), projects=TWO)
    assert actions(c) == []


def test_a_job_beyond_quota_does_not_displace_what_its_project_is_guaranteed():
    low, high = train("low", 1000, "0"), train("high", 1000, priority=1, device_count=2)
    assert actions(cluster(low, high, gpus=2, projects=[project("p", 1)])) == []
    yields = [Suspend("low", Why.PRIORITY, "high")]
    assert actions(cluster(low, high, gpus=2, projects=[project("p", 2)])) == yields
    assert actions(cluster(low, high, gpus=2, projects=[project("p", 0)])) == yields


def test_a_victim_stays_if_another_one_leaves_enough_for_all():
    c = cluster(
        train("small", 250, "0", project="q", granted_at=2),
        train("large", 500, "0", project="r", survival=CheckpointMode.NONE, granted_at=1),
        build("nb", 250, "0"),
        train("owed", 250),
        train("high", 188, project="r", priority=1),
        projects=[project("p", 0.5), project("q", 0), project("r", 0)],
    )
    assert actions(c) == [Requeue("large", Why.PRIORITY, "high")]


def test_a_higher_priority_frees_the_limit_of_its_project():
    c = cluster(
        train("low", 1000, "0"),
        train("high", 1000, priority=1),
        gpus=2,
        projects=[project("p", 1, limit_milli=1000)],
    )
    assert actions(c) == [Suspend("low", Why.PRIORITY, "high")]


def test_a_project_that_just_gave_capacity_back_gets_its_turn_earlier():
    """q takes from p, which then has borrowed no more than r."""
    c = cluster(
        *[train(f"p{n}", 1000, f"{n}", granted_at=9 + n, survival=CheckpointMode.NONE) for n in range(3)],
        train("r0", 1000, "3", project="r", granted_at=1, survival=CheckpointMode.NONE),
        train("q0", 1000, project="q", device_count=2),
        *[train(f"x{x}", 500, project=x, queued_at=1) for x in "pr"],
        build("nb", 500, "4", project="q", granted_at=1),
        gpus=5,
        projects=[project("p", 0), project("q", 2.5), project("r", 0)],
    )
    assert actions(c) == [
        Requeue("p2", Why.OVER_QUOTA, "q0"),
        Requeue("p1", Why.OVER_QUOTA, "q0"),
        grant("xp", 4, milli=500, borrowed=True),
    ]


def test_a_pause_for_priority_is_a_stop_where_host_memory_holds_only_one():
    both = [train(f"b{n}", 500, "0", used_bytes=100, granted_at=n) for n in range(2)]
    c = cluster(*both, train("high", 1000, priority=1), host_budget_bytes=150)
    assert actions(c) == [Suspend("b1", Why.PRIORITY, "high"), Requeue("b0", Why.PRIORITY, "high")]


@pytest.mark.parametrize(
    ("limit", "low", "same", "high"),
    [(1000, 400, 600, 1000), (667, 333, 334, 334)],
    ids=["by_far", "by_a_thousandth"],
)
def test_a_limit_holds_where_priority_cannot_free_capacity_under_it(limit, low, same, high):
    c = cluster(
        train("low", low, "0"), train("same", same, "0", priority=1), train("high", high, priority=1),
        gpus=2, projects=[project("p", 1, limit_milli=limit)],
    )  # fmt: skip
    assert actions(c) == []


def test_only_as_many_jobs_leave_as_the_limit_asks_for():
    limited = [project("p", 1, limit_milli=1000)]
    low = [train(f"low{n}", 500, "0", granted_at=n) for n in range(2)]
    c = cluster(*low, train("high", 500, priority=1), gpus=2, projects=limited)
    assert actions(c) == [Suspend("low1", Why.PRIORITY, "high")]
