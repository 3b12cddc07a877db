"""A job that does not borrow runs on what its project is guaranteed, or waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpushare.core.explain import borrowed, check_request
from jupyter_gpushare.core.model import Grant, Order, Requeue, Resume, State, Suspend, Why
from jupyter_gpushare.core.planning.planner import plan
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from tests.core.build import (
    ASLEEP,
    GIB,
    NOW,
    CheckpointMode,
    build,
    cluster,
    device,
    project,
    quotas,
    smaller_than,
    train,
    why,
)


def steady(id: str, milli: int, on: str = "", **more: object):
    return train(id, milli, on, **{"borrow": False} | more)


def test_it_starts_within_quota_and_is_not_borrowed():
    c = cluster(steady("job", 1000), gpus=2, projects=[project("p", 1), project("q", 1)])
    assert plan(c, NOW).actions == (Grant("job", ("gpu0",), 1000, Why.FREE_CAPACITY),)


def test_it_waits_beyond_quota_though_gpus_are_free():
    c = cluster(steady("job", 1000), gpus=2, projects=[project("p", 0.5), project("q", 1)])
    assert plan(c, NOW).actions == ()
    assert why(c, "job") is Why.QUOTA
    may = cluster(train("job", 1000), gpus=2, projects=c.projects)
    assert plan(may, NOW).actions == (Grant("job", ("gpu0",), 1000, Why.FREE_CAPACITY, borrowed=True),)


def test_the_next_one_waits_until_the_first_has_ended():
    running = steady("first", 1000, "0")
    c = cluster(running, steady("job", 1000), gpus=2, projects=[project("p", 1), project("q", 1)])
    assert why(c, "job") is Why.QUOTA
    assert plan(cluster(steady("job", 1000), gpus=2, projects=c.projects), NOW).actions


def test_two_that_come_at_once_do_not_both_get_the_quota():
    c = cluster(steady("a", 500), steady("b", 1000), gpus=2, projects=[project("p", 1), project("q", 1)])
    assert [a.lease for a in plan(c, NOW).actions] == ["a"]


def test_a_claim_counts_even_while_its_session_sleeps():
    c = cluster(build("nb", 500, "0", state=ASLEEP), steady("job", 1000), gpus=2, projects=[project("p", 1)])
    assert plan(c, NOW).actions == ()


def test_it_does_not_go_where_a_session_sleeps():
    nb = build("nb", 1000, "0", state=ASLEEP, project="q")
    gpus, quotas = [device(0), device(1, usable=False)], [project("p", 1), project("q", 1)]
    c = cluster(nb, steady("job", 1000), gpus=gpus, projects=quotas)
    assert plan(c, NOW).actions == ()
    assert why(c, "job") is Why.NO_CAPACITY
    lent = cluster(nb, train("job", 1000), gpus=gpus, projects=quotas)
    assert isinstance(plan(lent, NOW).actions[0], Grant)


def test_no_session_is_put_to_sleep_for_it():
    idle = build("nb", 1000, "0", idle_s=3600, project="q")
    quotas = [project("p", 1), project("q", 1)]
    assert plan(cluster(idle, steady("job", 1000), projects=quotas), NOW).actions == ()
    assert isinstance(plan(cluster(idle, train("job", 1000), projects=quotas), NOW).actions[0], Suspend)


def test_it_does_not_preempt_for_lent_capacity():
    nb = build("nb", 1000, "0", state=ASLEEP, project="q")
    junior = train("junior", 1000, "0", survival=CheckpointMode.SIGTERM)
    quotas = [project("p", 1), project("q", 1)]
    assert plan(cluster(nb, junior, steady("job", 1000, priority=1), projects=quotas), NOW).actions == ()
    assert plan(cluster(nb, junior, train("job", 1000, priority=1), projects=quotas), NOW).actions == (
        Requeue("junior", Why.PRIORITY, "job"),
    )


def test_it_takes_back_what_others_have_beyond_their_quota():
    other = train("other", 1000, "0", project="q", survival=CheckpointMode.SIGTERM)
    c = cluster(other, steady("job", 1000), projects=[project("p", 1), project("q", 0)])
    assert plan(c, NOW).actions == (Requeue("other", Why.OVER_QUOTA, "job"),)


def test_it_waits_for_releasing_capacity_but_not_for_lent_capacity():
    leaving = train("old", 1000, "0", project="q", state=State.STOPPING)
    on = {"gpus": [device(0), device(1, usable=False)], "projects": [project("p", 1), project("q", 1)]}
    assert why(cluster(leaving, steady("job", 1000), **on), "job") is Why.AWAITING_RELEASE
    nb = build("nb", 1000, "0", state=ASLEEP, project="q")
    assert why(cluster(leaving, nb, steady("job", 1000), **on), "job") is Why.NO_CAPACITY


def test_it_is_in_quota_before_older_jobs_that_borrow():
    c = cluster(
        train("old", 1000, "0", granted_at=1),
        steady("job", 1000, "1", granted_at=2),
        projects=[project("p", 1)],
    )
    assert quotas(c).in_quota == {"job"}
    assert borrowed(c) == {"old": True, "job": False}


def test_it_need_not_wait_for_those_of_its_project_that_borrow():
    c = cluster(train("old", 1000, "0"), steady("job", 1000), gpus=2, projects=[project("p", 1)])
    assert plan(c, NOW).actions == (Grant("job", ("gpu1",), 1000, Why.FREE_CAPACITY),)


def test_one_that_sleeps_goes_on_only_within_quota():
    asleep = steady("job", 1000, "0", state=ASLEEP)
    assert plan(cluster(asleep, projects=[project("p", 1)]), NOW).actions == (
        Resume("job", Why.CAPACITY_BACK),
    )
    assert plan(cluster(asleep, projects=[project("p", 0)]), NOW).actions == ()


def test_it_gets_no_part_of_a_gpu_that_is_dearer_than_its_quota():
    """The same memory is more of a small GPU: there it would exceed what is left."""
    gpus = [device(0, memory_bytes=40 * GIB), device(1)]
    other = train("other", 1000, "1", project="q")
    quotas = [project("p", 0.3), project("q", 0)]
    job = steady("job", 0, memory_bytes=20 * GIB)
    c = cluster(job, gpus=gpus, projects=quotas)
    assert plan(c, NOW).actions == (Grant("job", ("gpu1",), 250, Why.FREE_CAPACITY),)
    c = cluster(job, other, gpus=[gpus[0], device(1)], projects=quotas)
    assert [a.lease for a in plan(c, NOW).actions] == ["other"]
    small = train("small", 1000, "0", project="q")
    c = cluster(job, small, gpus=gpus[:1], projects=quotas)
    assert plan(c, NOW).actions == ()


def test_a_job_that_waits_for_its_own_quota_keeps_no_capacity_from_others():
    waited = steady("job", 1000, waits_since_at=NOW - 1000)
    c = cluster(
        waited,
        train("small", 500, queued_at=NOW),
        gpus=1,
        projects=[project("p", 0.5)],
        order=Order.BACKFILL,
        max_bypass_s=60.0,
    )
    assert [a.lease for a in plan(c, NOW).actions] == ["small"]


def test_a_smaller_size_that_would_start_is_one_that_need_not_borrow():
    c = cluster(steady("job", 1000), gpus=1, projects=[project("p", 0.5)])
    assert smaller_than(c, "job") == Size(500)


def test_what_the_quota_can_never_cover_is_refused():
    c = cluster(gpus=4, projects=[project("p", 2)])
    check_request(c, steady("x", 1000, device_count=2))
    check_request(c, train("x", 1000, device_count=3))
    with pytest.raises(InvalidRequest, match=r"Asks for 3 GPUs without borrowing.*guaranteed 2 GPUs"):
        check_request(c, steady("x", 1000, device_count=3))


def test_no_running_job_makes_way_for_a_gang_that_would_be_on_lent_capacity():
    nb = build("nb", 1000, "0", state=ASLEEP, project="q")
    junior = train("junior", 1000, "1", survival=CheckpointMode.SIGTERM)
    gang = steady("gang", 1000, device_count=2, priority=1)
    gpus, quotas = [device(0), device(1), device(2, usable=False)], [project("p", 2), project("q", 1)]
    assert plan(cluster(nb, junior, gang, gpus=gpus, projects=quotas), NOW).actions == ()
    may = train("gang", 1000, device_count=2, priority=1)
    assert plan(cluster(nb, junior, may, gpus=gpus, projects=quotas), NOW).actions == (
        Requeue("junior", Why.PRIORITY, "gang"),
    )


def test_no_job_is_preempted_on_a_device_where_the_request_is_larger_than_the_quota_left():
    """15 GiB are 188 thousandths of 80 GiB, and 375 of 40 GiB; the quota is 250."""
    c = cluster(
        train("other", 1000, "0", project="q"),
        train("junior", 1000, "1"),
        train("job", 0, memory_bytes=15 * GIB, priority=1, borrow=False),
        gpus=[device(0), device(1, memory_bytes=40 * GIB)],
        projects=[project("p", 0.25), project("q", 1)],
    )
    assert plan(c, NOW).actions == ()


def test_a_job_that_does_not_borrow_preempts_no_one_on_a_gpu_of_which_it_needs_more_than_its_quota():
    gpus = [device(0), device(1, memory_bytes=40 * GIB)]
    c = cluster(
        train("r", 1000, "0", project="r"),
        train("q", 1000, "1", project="q"),
        train("x", 0, memory_bytes=40 * GIB, borrow=False),
        gpus=gpus,
        projects=[project("p", 0.6), project("q", 0), project("r", 1)],
    )
    assert (plan(c, NOW).actions, why(c)) == ((), Why.NO_CAPACITY)
    larger = replace(c, projects=(project("p", 1), *c.projects[1:]))
    assert plan(larger, NOW).actions == (Suspend("q", Why.OVER_QUOTA, "x"),)


def test_no_session_lends_a_gpu_that_a_job_waits_for_which_does_not_borrow():
    idle = build("nb", 500, "0", idle_s=700)
    leaving = train("leaving", 500, "0", state=State.SUSPENDING, project="q")
    jobs = [steady("first", 500, queued_at=1), train("x", 500, queued_at=2)]
    c = cluster(idle, leaving, *jobs, projects=[project("p", 1), project("q", 0)])
    assert (plan(c, NOW).actions, why(c)) == ((), Why.NO_CAPACITY)
    assert why(c, "first") is Why.AWAITING_RELEASE
