"""`plan`: which sessions lend, what host memory holds, and what happens when an owner returns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpushare.core.model import CheckpointMode, Plan, Requeue, Resume, State, Suspend, Why
from jupyter_gpushare.core.planning.planner import dry_run, plan
from tests.core.build import ASLEEP, GIB, NOW, actions, build, cluster, device, grant, project, train, why


def test_an_idle_session_is_suspended_for_a_job():
    c = cluster(build("nb", 500, "0", idle_s=3600), train("job", 1000))
    assert actions(c) == [Suspend("nb", Why.IDLE, "job")]


def test_no_session_is_suspended_when_no_job_why():
    assert plan(cluster(build("nb", 500, "0", idle_s=3600)), NOW) == Plan(())


def test_idle_begins_at_the_timeout_and_the_plan_says_when():
    c = cluster(build("nb", 500, "0", idle_s=599), train("job", 1000))
    assert plan(c, NOW) == Plan((), next_at=NOW + 1)
    assert plan(c, NOW + 1).actions == (Suspend("nb", Why.IDLE, "job"),)


def test_no_session_is_suspended_in_vain():
    c = cluster(build("idle", 250, "0", idle_s=3600), build("busy", 500, "0"), train("job", 1000))
    assert actions(c) == []


def test_the_longest_idle_session_goes_first():
    c = cluster(build("short", 500, "0", idle_s=700), build("long", 500, "0", idle_s=7000), train("job", 500))
    assert actions(c) == [Suspend("long", Why.IDLE, "job")]


def test_a_session_that_is_not_needed_stays_awake():
    c = cluster(
        build("small", 250, "0", idle_s=9000), build("large", 750, "0", idle_s=700), train("job", 750)
    )
    assert actions(c) == [Suspend("large", Why.IDLE, "job")]


def test_an_owner_may_keep_or_offer_the_capacity():
    c = cluster(build("nb", 500, "0", idle_s=3600, keep_until_at=NOW + 60), train("job", 1000))
    assert plan(c, NOW) == Plan((), next_at=NOW + 60)
    c = cluster(build("nb", 500, "0", lend_now=True), train("job", 1000))
    assert actions(c) == [Suspend("nb", Why.LEND_NOW, "job")]


def test_a_session_that_cannot_be_suspended_is_left_alone():
    assert actions(cluster(build("nb", 500, "0", idle_s=3600, suspendable=False), train("job", 1000))) == []
    nb = build("nb", 500, "0", idle_s=3600)
    assert actions(cluster(nb, train("job", 1000), gpus=[device(0, suspendable=False)])) == []


def test_a_refused_suspension_is_not_repeated_before_its_moment():
    c = cluster(build("nb", 500, "0", idle_s=3600, retry_at=NOW + 30), train("job", 1000))
    assert plan(c, NOW) == Plan((), next_at=NOW + 30)


def test_a_suspension_under_way_is_waited_for():
    c = cluster(
        build("leaving", 500, "0", state=State.SUSPENDING),
        build("idle", 500, "0", idle_s=3600),
        train("job", 500),
    )
    assert actions(c) == []


def test_two_jobs_do_not_share_one_victim():
    c = cluster(build("nb", 1000, "0", idle_s=3600), train("a", 1000), train("b", 1000))
    assert actions(c) == [Suspend("nb", Why.IDLE, "a")]


def test_capacity_made_by_a_sleeping_session_is_lent():
    c = cluster(build("nb", 500, "0", state=ASLEEP), train("job", 1000))
    assert actions(c) == [grant("job", 0, borrowed=True)]


def test_unclaimed_capacity_is_used_before_lent_capacity():
    c = cluster(build("nb", 1000, "0", state=ASLEEP), train("job", 1000), gpus=2)
    assert actions(c) == [grant("job", 1)]


def test_a_gang_that_fits_only_if_a_session_sleeps():
    c = cluster(build("ada", 500, "0", idle_s=3600), train("bo", 1000, device_count=2), gpus=2)
    assert actions(c) == [Suspend("ada", Why.IDLE, "bo")]
    c = cluster(build("ada", 500, "0", state=ASLEEP), train("bo", 1000, device_count=2), gpus=2)
    assert actions(c) == [grant("bo", 0, 1, borrowed=True)]


def test_a_session_is_suspended_only_if_host_memory_holds_its_bytes():
    nb, job = (
        build("nb", 500, "0", idle_s=3600, used_bytes=100),
        train("job", 1000, survival=CheckpointMode.NONE),
    )
    assert actions(cluster(nb, job, host_budget_bytes=104)) == []
    assert actions(cluster(nb, job, host_budget_bytes=105)) == [Suspend("nb", Why.IDLE, "job")]


def test_what_is_parked_and_being_parked_counts():
    nb, job = (
        build("nb", 500, "0", idle_s=3600, used_bytes=100),
        train("job", 1000, survival=CheckpointMode.NONE),
    )
    suspended = build("suspended", 500, "1", state=ASLEEP, saved_bytes=100)
    leaving = build("leaving", 500, "1", state=State.SUSPENDING, used_bytes=100)
    devices = [device(0), device(1, usable=False)]
    assert actions(cluster(nb, job, suspended, leaving, gpus=devices, host_budget_bytes=309)) == []
    assert actions(cluster(nb, job, suspended, leaving, gpus=devices, host_budget_bytes=310))


def test_a_suspendable_job_borrows_only_if_its_own_bytes_fit_beside_its_lenders():
    c = [build("nb", 500, "0", idle_s=3600, used_bytes=10 * GIB), train("job", 1000)]
    assert actions(cluster(*c, host_budget_bytes=90 * GIB)) == []
    assert actions(cluster(*c, host_budget_bytes=91 * GIB)) == [Suspend("nb", Why.IDLE, "job")]
    c = [build("nb", 500, "0", state=ASLEEP, saved_bytes=10 * GIB), train("job", 1000)]
    assert actions(cluster(*c, host_budget_bytes=89 * GIB)) == []
    assert actions(cluster(*c, host_budget_bytes=90 * GIB)) == [grant("job", 0, borrowed=True)]


def owner(**more: object) -> object:
    return build("ada", 500, "0", state=ASLEEP, wanted=True, **more)


def test_an_owner_that_returns_to_free_capacity_wakes_at_once():
    assert actions(cluster(owner())) == [Resume("ada", Why.WANTED)]


def test_a_sleeping_session_that_is_not_wanted_sleeps_on():
    assert actions(cluster(build("ada", 500, "0", state=ASLEEP))) == []


def test_a_returning_owner_takes_its_capacity_back_by_suspending_the_borrower():
    c = cluster(owner(), train("bo", 1000, "0 1"), gpus=2)
    assert actions(c) == [Suspend("bo", Why.LENDER_RETURNED, "ada")]


def test_a_returning_owner_waits_for_releasing_capacity():
    c = cluster(
        owner(), train("bo", 500, "0", state=State.STOPPING), train("next", 500, "0"), train("new", 500)
    )
    assert actions(c) == []


def test_a_borrower_that_cannot_be_suspended_is_requeued():
    for job in (
        train("bo", 1000, "0", survival=CheckpointMode.SIGTERM),
        train("bo", 1000, "0", suspendable=False),
        train("bo", 1000, "0", retry_at=NOW + 9),
        train("bo", 1000, "0", state=State.GRANTED),
    ):
        assert actions(cluster(owner(), job)) == [Requeue("bo", Why.LENDER_RETURNED, "ada")]


def test_a_borrower_is_requeued_when_host_memory_is_short():
    c = cluster(owner(saved_bytes=50), train("bo", 1000, "0", used_bytes=100), host_budget_bytes=154)
    assert actions(c) == [Requeue("bo", Why.LENDER_RETURNED, "ada")]


def test_suspendable_borrowers_go_before_those_that_start_again_and_the_last_in_first():
    c = cluster(
        owner(),
        train("stop", 250, "0", survival=CheckpointMode.NONE, granted_at=9),
        train("first", 250, "0", granted_at=1),
        train("last", 250, "0", granted_at=2),
        train("other", 250, "0", granted_at=0),
    )
    assert actions(c) == [
        Suspend("last", Why.LENDER_RETURNED, "ada"),
        Suspend("first", Why.LENDER_RETURNED, "ada"),
    ]


def test_one_borrower_leaves_for_two_owners_rather_than_two():
    owners = [build(f"o{n}", 250, "0", state=ASLEEP, wanted=True) for n in range(2)]
    busy, small = build("busy", 250, "0"), train("small", 250, "0", granted_at=2)
    c = cluster(*owners, busy, small, train("large", 500, "0", granted_at=1))
    assert actions(c) == [Suspend("large", Why.LENDER_RETURNED, "o1")]


def test_busy_sessions_beyond_quota_are_suspended_last():
    guest = build("guest", 500, "0", project="q", granted_at=9)
    c = cluster(owner(), guest, train("bo", 500, "0"))
    assert actions(c) == [Suspend("bo", Why.LENDER_RETURNED, "ada")]
    c = cluster(owner(), guest, build("second", 500, "0", project="q"))
    assert actions(c) == [Suspend("guest", Why.LENDER_RETURNED, "ada")]


def test_a_borrower_that_is_just_resuming_is_left_alone_until_it_runs():
    c = cluster(owner(), train("bo", 1000, "0", state=State.RESUMING))
    assert actions(c) == []


def test_an_owner_backs_off_but_keeps_its_capacity():
    c = cluster(owner(retry_at=NOW + 5), train("job", 1000), build("other", 600))
    assert plan(c, NOW) == Plan((), next_at=NOW + 5)


def test_a_session_beyond_quota_wakes_on_free_unclaimed_capacity_only():
    guest = build("guest", 500, "0", project="q", state=ASLEEP, wanted=True)
    assert actions(cluster(guest)) == [Resume("guest", Why.WANTED)]
    assert actions(cluster(guest, train("job", 600, "0"))) == []
    assert actions(cluster(guest, build("ada", 600, "0", state=ASLEEP))) == []


def test_an_idle_neighbour_sleeps_before_a_borrower_is_disturbed():
    c = cluster(owner(), build("idle", 500, "0", idle_s=9000), train("bo", 500, "0"))
    assert actions(c) == [Suspend("idle", Why.IDLE, "ada")]
    c = cluster(owner(), build("busy", 500, "0"), train("bo", 500, "0"))
    assert actions(c) == [Suspend("bo", Why.LENDER_RETURNED, "ada")]


def test_a_suspended_job_resumes_when_its_capacity_is_back():
    assert actions(cluster(train("bo", 1000, "0", state=ASLEEP))) == [Resume("bo", Why.CAPACITY_BACK)]


def test_a_suspended_job_comes_before_its_waiting_peers_but_not_before_higher_ranks():
    bo = train("bo", 1000, "0", state=ASLEEP, queued_at=9)
    assert actions(cluster(train("new", 1000, queued_at=1), bo)) == [Resume("bo", Why.CAPACITY_BACK)]
    assert actions(cluster(train("new", 1000, priority=1), bo)) == [grant("new", 0)]


def test_a_suspended_job_makes_its_idle_owner_sleep_again():
    c = cluster(build("ada", 500, "0", idle_s=3600), train("bo", 1000, "0 1", state=ASLEEP), gpus=2)
    assert actions(c) == [Suspend("ada", Why.IDLE, "bo")]


def test_a_suspended_job_does_not_return_onto_an_awake_or_waking_session():
    bo = train("bo", 1000, "0", state=ASLEEP)
    assert actions(cluster(build("ada", 500, "0"), bo)) == []
    assert actions(cluster(owner(), bo)) == [Resume("ada", Why.WANTED)]


def test_lenders_are_not_suspended_without_host_memory_for_the_borrower_but_owed_capacity_is_taken():
    c = cluster(
        build("nb", 1000, "0", idle_s=9000, project="q"),
        train("over", 1000, "1", project="q", survival=CheckpointMode.NONE),
        train("job", 1000),
        gpus=2,
        projects=[project("p", 1), project("q", 1)],
        host_budget_bytes=GIB,
    )
    assert actions(c) == [Requeue("over", Why.OVER_QUOTA, "job")]


def test_borrowers_that_host_memory_was_never_kept_for_are_stopped():
    both = [train(f"b{n}", 500, "0", used_bytes=GIB, granted_at=n, project="q") for n in range(2)]
    nb = build("ada", 1000, "0", state=ASLEEP, wanted=True)
    assert actions(cluster(nb, *both, host_budget_bytes=81 * GIB)) == [
        Suspend("b1", Why.LENDER_RETURNED, "ada"),
        Suspend("b0", Why.LENDER_RETURNED, "ada"),
    ]
    assert actions(cluster(nb, *both, host_budget_bytes=2 * GIB)) == [
        Requeue("b1", Why.LENDER_RETURNED, "ada"),
        Requeue("b0", Why.LENDER_RETURNED, "ada"),
    ]


def test_an_owner_waits_where_a_guest_cannot_be_parked_for_lack_of_host_memory():
    guests = [build(f"g{n}", 500, "0", project="q", used_bytes=GIB) for n in range(2)]
    nb = build("ada", 1000, "0", state=ASLEEP, wanted=True)
    assert actions(cluster(nb, *guests, host_budget_bytes=2 * GIB)) == []
    assert len(actions(cluster(nb, *guests, host_budget_bytes=3 * GIB))) == 2


def test_a_guest_backs_off():
    guest = build("guest", 500, "0", project="q", state=ASLEEP, wanted=True, retry_at=NOW + 3)
    assert plan(cluster(guest), NOW) == Plan((), next_at=NOW + 3)


@pytest.mark.parametrize("state", [State.RUNNING, ASLEEP])
def test_a_job_that_waits_for_host_memory_would_start_with_a_checkpoint_of_its_own(state):
    lender = build("nb", 500, "0", state=state, idle_s=9000)
    job = train("job", 1000)
    short = cluster(lender, job, host_budget_bytes=GIB)
    assert (actions(short), why(short, "job")) == ([], Why.JOB_HOST_MEMORY)
    for survival in (CheckpointMode.SIGTERM, CheckpointMode.NONE):
        done = dry_run(cluster(lender, replace(job, survival=survival), host_budget_bytes=GIB), NOW).run()
        assert done.waiting.get("job") in (None, Why.AWAITING_RELEASE)
        assert done.actions


def test_a_job_that_waits_for_host_memory_takes_another_gpu_and_holds_up_no_other_job():
    c = cluster(
        build("nb", 1000, "0", state=ASLEEP),
        train("first", 1000, queued_at=1),
        train("second", 1000, queued_at=2, survival=CheckpointMode.SIGTERM),
        host_budget_bytes=GIB,
    )
    assert actions(c) == [grant("second", 0, borrowed=True)]
    assert why(c, "first") is Why.JOB_HOST_MEMORY
    assert actions(replace(c, devices=(device(0), device(1)))) == [
        grant("first", 1),
        grant("second", 0, borrowed=True),
    ]


def test_a_job_that_cannot_be_parked_anyway_needs_no_host_memory():
    job, asleep = train("job", 1000), build("nb", 500, "0", state=ASLEEP)
    c = cluster(asleep, job, host_budget_bytes=0, gpus=[device(0, suspendable=False)])
    assert actions(c) == [grant("job", 0, borrowed=True)]


def of_two_sizes(**more):
    """A small session that is idle for longest, a large one, and a job that fits where either is."""
    return cluster(
        build("small", 250, "0", idle_s=9000, used_bytes=10 * GIB),
        build("large", 750, "0", idle_s=700, used_bytes=10 * GIB),
        train("job", 250, survival=CheckpointMode.NONE),
        **more,
    )


def test_the_longest_idle_goes_first_while_host_memory_holds_all_idle_sessions():
    assert actions(of_two_sizes(host_budget_bytes=21 * GIB)) == [Suspend("small", Why.IDLE, "job")]


def test_the_biggest_idle_goes_first_where_host_memory_holds_not_all_of_them():
    assert actions(of_two_sizes(host_budget_bytes=21 * GIB - 1)) == [Suspend("large", Why.IDLE, "job")]


def test_size_means_the_capacity_that_is_freed_not_what_has_to_be_parked_for_it():
    c = cluster(
        build("full", 250, "0", idle_s=9000, used_bytes=18 * GIB),
        build("empty", 750, "0", idle_s=700, used_bytes=GIB),
        train("job", 250, survival=CheckpointMode.NONE),
        host_budget_bytes=19 * GIB,
    )
    assert actions(c) == [Suspend("empty", Why.IDLE, "job")]


def test_of_equally_big_idle_sessions_the_longest_idle_goes_first():
    c = cluster(
        build("short", 500, "0", idle_s=700, used_bytes=GIB),
        build("long", 500, "0", idle_s=9000, used_bytes=GIB),
        train("job", 500, survival=CheckpointMode.NONE),
        host_budget_bytes=2 * GIB,
    )
    assert actions(c) == [Suspend("long", Why.IDLE, "job")]


def test_a_busy_session_or_one_that_cannot_sleep_makes_host_memory_no_scarcer():
    c = cluster(
        build("busy", 100, "0", used_bytes=50 * GIB),
        build("firm", 100, "0", idle_s=9999, suspendable=False, used_bytes=50 * GIB),
        build("small", 250, "0", idle_s=9000, used_bytes=GIB),
        build("large", 500, "0", idle_s=700, used_bytes=GIB),
        train("job", 250, survival=CheckpointMode.NONE),
        host_budget_bytes=3 * GIB,
    )
    assert actions(c) == [Suspend("small", Why.IDLE, "job")]


def test_two_idle_sessions_sleep_only_if_host_memory_holds_both():
    both = [build(f"b{n}", 500, "0", used_bytes=100, idle_s=9000) for n in range(2)]
    for survival in (CheckpointMode.NONE, CheckpointMode.SUSPEND):
        c = cluster(*both, train("job", 1000, survival=survival), host_budget_bytes=150)
        assert actions(c) == []
        assert why(c, "job") is Why.HOST_MEMORY


def test_when_host_memory_gets_short_a_smaller_session_gives_way_to_the_next_job():
    c = cluster(
        build("large", 1000, "0", used_bytes=60 * GIB, idle_s=9999),
        build("second", 1000, "1", used_bytes=60 * GIB, idle_s=9998),
        build("small", 1000, "2", used_bytes=9 * GIB, idle_s=9997),
        train("a", 1000, survival=CheckpointMode.NONE),
        train("b", 1000, survival=CheckpointMode.NONE),
        gpus=3,
        host_budget_bytes=75 * GIB,
    )
    assert actions(c) == [Suspend("large", Why.IDLE, "a"), Suspend("small", Why.IDLE, "b")]


def test_an_owner_on_two_devices_counts_a_borrower_on_both_once():
    c = cluster(
        build("ada", 500, "0 1", state=ASLEEP, wanted=True),
        build("busy0", 500, "0"),
        build("busy1", 500, "1"),
        train("both", 250, "0 1", granted_at=2),
        train("one", 250, "1", granted_at=1),
        gpus=2,
    )
    assert actions(c) == [
        Suspend("both", Why.LENDER_RETURNED, "ada"),
        Suspend("one", Why.LENDER_RETURNED, "ada"),
    ]
