"""`plan` with a notice: an owner is told before an idle session's devices are lent."""

from __future__ import annotations

from dataclasses import replace

from jupyter_gpushare.core.model import Notice, Plan, Requeue, Suspend, Why
from jupyter_gpushare.core.planning.planner import IncrementalPlanner, plan
from tests.core.build import ASLEEP, NOW, build, cluster, device, project, stops, train

LENT = Suspend("nb", Why.IDLE, "job")


def told(c, *rounds):
    """Plans of one planner, for changes of a cluster and moments after `NOW`."""
    planner = IncrementalPlanner()
    return [planner.plan(replace(c, **change), NOW + after_s) for after_s, change in rounds]


def test_a_session_that_was_idle_for_long_is_told_first_and_lent_after_the_notice():
    c = cluster(build("nb", 500, "0", idle_s=3600), train("job", 1000), notice_s=30.0)
    notice = Notice("nb", "job", NOW + 30)
    first, again, last = told(c, (0, {}), (29.9, {}), (30, {}))
    assert first == again == Plan((), NOW + 30, (notice,))
    assert last == Plan((LENT,))


def test_a_notice_is_at_most_a_third_of_the_idle_timeout_and_zero_switches_it_off():
    nb, job = build("nb", 500, "0", idle_s=3600), train("job", 1000)
    assert plan(cluster(nb, job, notice_s=30.0, idle_timeout_s=30.0), NOW).next_at == NOW + 10
    assert plan(cluster(nb, job), NOW) == Plan((LENT,))


def test_a_session_with_a_notice_and_a_timeout_of_its_own_does_not_read_those_of_the_site():
    job = train("job", 1000)
    own = build("nb", 500, "0", idle_s=3600, notice_s=20.0, idle_timeout_s=600.0)
    assert plan(cluster(own, job, notice_s=5.0, idle_timeout_s=30.0), NOW).next_at == NOW + 20
    assert plan(cluster(replace(own, notice_s=0.0), job, notice_s=5.0), NOW) == Plan((LENT,))
    assert plan(cluster(replace(own, idle_timeout_s=30.0), job), NOW).next_at == NOW + 10


def test_an_owner_that_was_warned_before_the_timeout_is_not_told_again():
    waits = {"waits_since_at": NOW - 100, "queued_at": NOW - 100}
    c = cluster(build("nb", 500, "0", idle_s=600), train("job", 1000, **waits), notice_s=30.0)
    assert plan(c, NOW) == Plan((LENT,))
    # A job that came 10 s before the timeout is warned of since then.
    waits = {"waits_since_at": NOW - 10, "queued_at": NOW - 10}
    c = cluster(build("nb", 500, "0", idle_s=600), train("job", 1000, **waits), notice_s=30.0)
    assert plan(c, NOW).notices == (Notice("nb", "job", NOW + 20),)


def test_an_owner_that_used_the_session_meanwhile_is_told_anew():
    nb, job = build("nb", 500, "0", idle_s=3600), train("job", 1000)
    c = cluster(nb, job, notice_s=30.0)
    busy = {"leases": (replace(nb, idle_since_at=None), job)}
    first, between, later = told(c, (0, {}), (10, busy), (700, {}))
    assert first.notices
    assert between.notices == ()
    assert later == Plan((), NOW + 730, (Notice("nb", "job", NOW + 730),))


def test_a_returning_owner_never_waits_for_a_notice():
    owner = build("owner", 1000, "0", state=ASLEEP, wanted=True)
    guest = build("guest", 1000, "0", idle_s=3600, project="q")
    c = cluster(owner, guest, projects=[project("p", 1), project("q", 0)], notice_s=30.0)
    done = plan(c, NOW)
    assert [a.lease for a in done.actions] == ["guest"]
    assert not done.notices


def test_what_is_offered_or_has_no_guarantee_needs_no_notice():
    c = cluster(build("nb", 500, "0", lend_now=True), train("job", 1000), notice_s=30.0)
    assert plan(c, NOW) == Plan((Suspend("nb", Why.LEND_NOW, "job"),))
    guest = build("nb", 500, "0", idle_s=3600, project="q")
    c = cluster(guest, train("job", 1000), projects=[project("p", 1), project("q", 0)], notice_s=30.0)
    done = plan(c, NOW)
    assert [a.lease for a in done.actions] == ["nb"]
    assert not done.notices


def test_nothing_is_taken_for_a_job_before_all_of_its_notices_are_over():
    nb = build("nb", 1000, "0", idle_s=3600)
    over = stops("over", "1", project="q", granted_at=NOW - 5000)
    gang = train("job", 1000, device_count=2)
    gpus, quotas = [device(0), device(1), device(2, usable=False)], [project("p", 3), project("q", 0)]
    c = cluster(nb, over, gang, gpus=gpus, projects=quotas, notice_s=30.0)
    first, last = told(c, (0, {}), (30, {}))
    assert first == Plan((), NOW + 30, (Notice("nb", "job", NOW + 30),))
    assert {a.lease: type(a) for a in last.actions} == {"nb": Suspend, "over": Requeue}


def test_the_plan_is_asked_again_at_whatever_comes_first():
    soon = build("soon", 1000, "1", idle_s=595)
    c = cluster(
        build("nb", 1000, "0", idle_s=3600),
        soon,
        train("job", 1000),
        train("job2", 1000),
        gpus=2,
        notice_s=30.0,
    )
    done = plan(c, NOW)
    assert done.notices == (Notice("nb", "job", NOW + 30),)
    assert done.next_at == NOW + 5


def test_a_session_that_was_eligible_for_long_does_not_hide_when_the_next_one_is():
    soon = build("soon", 1000, "1", idle_s=595)
    c = cluster(build("nb", 500, "0", idle_s=3600), soon, build("on", 500, "0"), train("job", 1000), gpus=2)
    assert plan(c, NOW) == Plan((), NOW + 5)


def test_a_new_machine_in_the_middle_of_a_notice_does_not_begin_it_anew():
    c = cluster(build("nb", 500, "0", idle_s=3600), train("job", 1000), notice_s=30.0)
    broken = {"settings": replace(c.settings, min_run_s=1.0)}
    first, second = told(c, (0, {}), (20, broken))
    assert first.notices == second.notices
