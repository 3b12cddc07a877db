"""`plan`: one line per lease, one behaviour per test."""

from __future__ import annotations

from jupyter_gpushare.core.model import Cluster, Grant, Plan, Requeue, Resume, State, Survival, Suspend, Why
from jupyter_gpushare.core.plan import plan
from tests.core.build import ASLEEP, GIB, NOW, build, cluster, device, project, train

TWO = [project("p", 2), project("q", 2)]


def actions(c: Cluster) -> list[object]:
    return list(plan(c, NOW).actions)


def grant(lease: str, *on: int, milli: int = 1000, why: Why = Why.FREE_ROOM, **more: bool) -> Grant:
    return Grant(lease, tuple(f"gpu{n}" for n in on), milli, why, **more)


# -- free room


def test_nothing_to_do_is_an_empty_plan():
    assert plan(cluster(), NOW) == Plan(())


def test_free_room_is_granted():
    assert actions(cluster(train("job", 1000))) == [grant("job", 0)]


def test_best_fit_keeps_whole_devices_whole():
    c = cluster(train("old", 500, "1"), train("job", 500), gpus=2)
    assert actions(c) == [grant("job", 1, milli=500)]


def test_first_come_first_served_inside_a_priority():
    c = cluster(train("late", 1000, queued_at=2), train("early", 1000, queued_at=1))
    assert actions(c) == [grant("early", 0)]


def test_priority_comes_before_age():
    c = cluster(train("early", 1000, queued_at=1), train("urgent", 1000, queued_at=2, priority=5))
    assert actions(c) == [grant("urgent", 0)]


def test_a_job_that_does_not_fit_blocks_nobody():
    c = cluster(train("old", 500, "0"), train("large", 1000, queued_at=1), train("small", 500, queued_at=2))
    assert actions(c) == [grant("small", 0, milli=500)]


def test_a_cancelled_job_is_not_started():
    assert actions(cluster(train("job", 1000, cancelled=True))) == []


def test_a_job_that_failed_to_start_is_tried_again_at_its_moment():
    c = cluster(train("job", 1000, retry_at=NOW + 30))
    assert plan(c, NOW) == Plan((), next_at=NOW + 30)
    assert plan(c, NOW + 30).actions == (grant("job", 0),)


def test_an_unusable_device_takes_nothing_new():
    assert actions(cluster(train("job", 500), build("nb", 500), gpus=[device(0, usable=False)])) == []


def test_a_gang_gets_all_devices_or_none():
    old = train("old", 500, "0")
    assert actions(cluster(old, train("gang", 1000, device_count=2), gpus=2)) == []
    assert actions(cluster(old, train("gang", 1000, device_count=2), gpus=3)) == [grant("gang", 1, 2)]


# -- build sessions


def test_a_session_within_quota_gets_its_claim():
    assert actions(cluster(build("nb", 500))) == [grant("nb", 0, milli=500, why=Why.CLAIM)]


def test_sessions_come_before_jobs():
    c = cluster(train("job", 1000, queued_at=1, priority=9), build("nb", 500, queued_at=2))
    assert actions(c) == [grant("nb", 0, milli=500, why=Why.CLAIM)]


def test_a_session_whose_room_is_lent_starts_asleep():
    c = cluster(train("job", 1000, "0"), build("nb", 500))
    assert actions(c) == [grant("nb", 0, milli=500, why=Why.CLAIM, asleep=True)]


def test_claims_on_a_device_never_exceed_it():
    c = cluster(build("a", 600, "0"), build("nb", 500), projects=[project("p", 9)])
    assert actions(c) == []


def test_a_sleeping_session_keeps_its_claim():
    c = cluster(build("a", 600, "0", state=ASLEEP), build("nb", 500), projects=[project("p", 9)])
    assert actions(c) == []


def test_a_session_beyond_quota_borrows_free_unclaimed_room():
    c = cluster(build("a", 500, "0"), build("nb", 500), projects=[project("p", 0.5)])
    assert actions(c) == [grant("nb", 0, milli=500, borrowed=True)]


def test_a_session_beyond_quota_is_not_put_on_lent_room():
    c = cluster(build("a", 600, "0", state=ASLEEP), build("nb", 500), projects=[project("p", 0.6)])
    assert actions(c) == []


def test_a_session_beyond_quota_does_not_start_where_it_could_not_be_suspended():
    c = cluster(build("nb", 500), projects=[], gpus=[device(0, suspendable=False)])
    assert actions(c) == []


def test_a_session_is_not_promised_room_that_cannot_be_taken_back():
    guest = build("guest", 600, "0", project="q", suspendable=False)
    assert actions(cluster(guest, build("nb", 500))) == []
    guest = build("guest", 600, "0", project="q")
    assert actions(cluster(guest, build("nb", 500))) == [
        grant("nb", 0, milli=500, why=Why.CLAIM, asleep=True)
    ]


def test_a_borrowing_session_does_not_take_a_claim_that_was_granted_as_one():
    old = build("old", 600, "0", queued_at=1, borrowed=True)
    new = build("new", 600, "0", queued_at=2, state=ASLEEP, wanted=True, project="q")
    c = cluster(old, new, projects=[project("p", 1), project("q", 1)])
    assert actions(c) == [Suspend("old", Why.LENDER_RETURNED, "new")]


# -- lending


def test_an_idle_session_is_suspended_for_a_job():
    c = cluster(build("nb", 500, "0", idle_s=3600), train("job", 1000))
    assert actions(c) == [Suspend("nb", Why.IDLE, "job")]


def test_nobody_is_suspended_when_nobody_waits():
    assert plan(cluster(build("nb", 500, "0", idle_s=3600)), NOW) == Plan(())


def test_idle_begins_at_the_timeout_and_the_plan_says_when():
    c = cluster(build("nb", 500, "0", idle_s=599), train("job", 1000))
    assert plan(c, NOW) == Plan((), next_at=NOW + 1)
    assert plan(c, NOW + 1).actions == (Suspend("nb", Why.IDLE, "job"),)


def test_nobody_is_suspended_in_vain():
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


def test_an_owner_may_keep_or_offer_the_room():
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


def test_room_made_by_a_sleeping_session_is_lent():
    c = cluster(build("nb", 500, "0", state=ASLEEP), train("job", 1000))
    assert actions(c) == [grant("job", 0, borrowed=True)]


def test_unclaimed_room_is_used_before_lent_room():
    c = cluster(build("nb", 1000, "0", state=ASLEEP), train("job", 1000), gpus=2)
    assert actions(c) == [grant("job", 1)]


def test_a_gang_that_fits_only_if_a_session_sleeps():
    c = cluster(build("ada", 500, "0", idle_s=3600), train("bo", 1000, device_count=2), gpus=2)
    assert actions(c) == [Suspend("ada", Why.IDLE, "bo")]
    c = cluster(build("ada", 500, "0", state=ASLEEP), train("bo", 1000, device_count=2), gpus=2)
    assert actions(c) == [grant("bo", 0, 1, borrowed=True)]


# -- host memory


def test_a_session_is_suspended_only_if_host_memory_holds_its_bytes():
    nb, job = build("nb", 500, "0", idle_s=3600, used_bytes=100), train("job", 1000, survival=Survival.NONE)
    assert actions(cluster(nb, job, host_budget_bytes=104)) == []
    assert actions(cluster(nb, job, host_budget_bytes=105)) == [Suspend("nb", Why.IDLE, "job")]


def test_what_is_parked_and_being_parked_counts():
    nb, job = build("nb", 500, "0", idle_s=3600, used_bytes=100), train("job", 1000, survival=Survival.NONE)
    parked = build("parked", 500, "1", state=ASLEEP, saved_bytes=100)
    leaving = build("leaving", 500, "1", state=State.SUSPENDING, used_bytes=100)
    devices = [device(0), device(1, usable=False)]
    assert actions(cluster(nb, job, parked, leaving, gpus=devices, host_budget_bytes=309)) == []
    assert actions(cluster(nb, job, parked, leaving, gpus=devices, host_budget_bytes=310))


def test_a_suspendable_job_borrows_only_if_its_own_bytes_fit_beside_its_lenders():
    c = [build("nb", 500, "0", idle_s=3600, used_bytes=10 * GIB), train("job", 1000)]
    assert actions(cluster(*c, host_budget_bytes=90 * GIB)) == []
    assert actions(cluster(*c, host_budget_bytes=91 * GIB)) == [Suspend("nb", Why.IDLE, "job")]
    c = [build("nb", 500, "0", state=ASLEEP, saved_bytes=10 * GIB), train("job", 1000)]
    assert actions(cluster(*c, host_budget_bytes=89 * GIB)) == []
    assert actions(cluster(*c, host_budget_bytes=90 * GIB)) == [grant("job", 0, borrowed=True)]


# -- the owner returns


def owner(**more: object) -> object:
    return build("ada", 500, "0", state=ASLEEP, wanted=True, **more)


def test_an_owner_who_returns_to_free_room_wakes_at_once():
    assert actions(cluster(owner())) == [Resume("ada", Why.WANTED)]


def test_a_sleeping_session_that_nobody_wants_sleeps_on():
    assert actions(cluster(build("ada", 500, "0", state=ASLEEP))) == []


def test_a_returning_owner_takes_the_room_back_by_suspending_the_borrower():
    c = cluster(owner(), train("bo", 1000, "0 1"), gpus=2)
    assert actions(c) == [Suspend("bo", Why.LENDER_RETURNED, "ada")]


def test_a_returning_owner_waits_for_room_on_its_way_out():
    c = cluster(
        owner(), train("bo", 500, "0", state=State.STOPPING), train("next", 500, "0"), train("new", 500)
    )
    assert actions(c) == []


def test_a_borrower_that_cannot_be_suspended_is_requeued():
    for job in (
        train("bo", 1000, "0", survival=Survival.SIGTERM),
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
        train("stop", 250, "0", survival=Survival.NONE, granted_at=9),
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


def test_an_owner_backs_off_but_keeps_its_room():
    c = cluster(owner(retry_at=NOW + 5), train("job", 1000), build("other", 600))
    assert plan(c, NOW) == Plan((), next_at=NOW + 5)


def test_an_owner_whose_device_is_gone_waits():
    assert actions(cluster(owner(), gpus=0)) == []


def test_a_session_beyond_quota_wakes_on_free_unclaimed_room_only():
    guest = build("guest", 500, "0", project="q", state=ASLEEP, wanted=True)
    assert actions(cluster(guest)) == [Resume("guest", Why.WANTED)]
    assert actions(cluster(guest, train("job", 600, "0"))) == []
    assert actions(cluster(guest, build("ada", 600, "0", state=ASLEEP))) == []


def test_an_idle_neighbour_sleeps_before_a_borrower_is_disturbed():
    c = cluster(owner(), build("idle", 500, "0", idle_s=9000), train("bo", 500, "0"))
    assert actions(c) == [Suspend("idle", Why.IDLE, "ada")]
    c = cluster(owner(), build("busy", 500, "0"), train("bo", 500, "0"))
    assert actions(c) == [Suspend("bo", Why.LENDER_RETURNED, "ada")]


# -- suspended jobs


def test_a_suspended_job_resumes_when_its_room_is_back():
    assert actions(cluster(train("bo", 1000, "0", state=ASLEEP))) == [Resume("bo", Why.ROOM_BACK)]


def test_a_suspended_job_comes_before_its_waiting_peers_but_not_before_higher_ranks():
    bo = train("bo", 1000, "0", state=ASLEEP, queued_at=9)
    assert actions(cluster(train("new", 1000, queued_at=1), bo)) == [Resume("bo", Why.ROOM_BACK)]
    assert actions(cluster(train("new", 1000, priority=1), bo)) == [grant("new", 0)]


def test_a_suspended_job_makes_its_idle_owner_sleep_again():
    c = cluster(build("ada", 500, "0", idle_s=3600), train("bo", 1000, "0 1", state=ASLEEP), gpus=2)
    assert actions(c) == [Suspend("ada", Why.IDLE, "bo")]


def test_a_suspended_job_does_not_return_onto_an_awake_or_waking_session():
    bo = train("bo", 1000, "0", state=ASLEEP)
    assert actions(cluster(build("ada", 500, "0"), bo)) == []
    assert actions(cluster(owner(), bo)) == [Resume("ada", Why.WANTED)]


# -- quota


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


def test_room_on_its_way_is_not_asked_for_twice():
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


def test_a_projects_limit_binds_free_room_too():
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


# -- priority inside a project


def test_a_job_takes_room_from_lower_priorities_of_its_project():
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
        train("large", 500, "0", project="r", survival=Survival.NONE, granted_at=1),
        build("nb", 250, "0"),
        train("owed", 250),
        train("high", 188, project="r", priority=1),
        projects=[project("p", 0.5), project("q", 0), project("r", 0)],
    )
    assert actions(c) == [Requeue("large", Why.PRIORITY, "high")]


def test_no_job_is_preempted_before_its_minimum_run_time():
    c = cluster(train("low", 1000, "0", granted_at=NOW - 59), train("high", 1000, priority=1), min_run_s=60)
    assert plan(c, NOW) == Plan((), next_at=NOW + 1)
    assert plan(c, NOW + 1).actions == (Suspend("low", Why.PRIORITY, "high"),)


def test_a_higher_priority_frees_the_limit_of_its_project():
    c = cluster(
        train("low", 1000, "0"),
        train("high", 1000, priority=1),
        gpus=2,
        projects=[project("p", 1, limit_milli=1000)],
    )
    assert actions(c) == [Suspend("low", Why.PRIORITY, "high")]


# -- corners


def test_lending_sessions_are_not_asked_where_host_memory_cannot_hold_the_borrower_but_owed_room_is_taken():
    c = cluster(
        build("nb", 1000, "0", idle_s=9000, project="q"),
        train("over", 1000, "1", project="q", survival=Survival.NONE),
        train("job", 1000),
        gpus=2,
        projects=[project("p", 1), project("q", 1)],
        host_budget_bytes=GIB,
    )
    assert actions(c) == [Requeue("over", Why.OVER_QUOTA, "job")]


def test_jobs_for_which_nothing_can_be_done_are_all_told_why():
    c = cluster(train("old", 1000, "0"), *[train(f"j{n}", 500) for n in range(3)])
    assert actions(c) == []


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


def test_a_job_that_cannot_be_parked_anyway_needs_no_host_memory():
    job, asleep = train("job", 1000), build("nb", 500, "0", state=ASLEEP)
    c = cluster(asleep, job, host_budget_bytes=0, gpus=[device(0, suspendable=False)])
    assert actions(c) == [grant("job", 0, borrowed=True)]


def test_a_project_that_just_gave_room_away_gets_its_turn_earlier():
    """q takes from p, which then has borrowed no more than r."""
    c = cluster(
        *[train(f"p{n}", 1000, f"{n}", granted_at=9 + n, survival=Survival.NONE) for n in range(3)],
        train("r0", 1000, "3", project="r", granted_at=1, survival=Survival.NONE),
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


def test_two_idle_sessions_sleep_only_if_host_memory_holds_both():
    both = [build(f"b{n}", 500, "0", used_bytes=100, idle_s=9000) for n in range(2)]
    c = cluster(*both, train("job", 1000, survival=Survival.NONE), host_budget_bytes=150)
    assert actions(c) == []


def test_when_host_memory_gets_short_the_next_job_is_made_room_by_a_smaller_session():
    c = cluster(
        build("large", 1000, "0", used_bytes=60 * GIB, idle_s=9999),
        build("second", 1000, "1", used_bytes=60 * GIB, idle_s=9998),
        build("small", 1000, "2", used_bytes=9 * GIB, idle_s=9997),
        train("a", 1000, survival=Survival.NONE),
        train("b", 1000, survival=Survival.NONE),
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


def test_a_limit_that_priority_cannot_make_room_under_holds():
    limited = [project("p", 1, limit_milli=1000)]
    c = cluster(
        train("low", 400, "0"), train("same", 600, "0", priority=1), train("high", 1000, priority=1),
        gpus=2, projects=limited,
    )  # fmt: skip
    assert actions(c) == []


def test_only_as_many_jobs_leave_as_the_limit_asks_for():
    limited = [project("p", 1, limit_milli=1000)]
    low = [train(f"low{n}", 500, "0", granted_at=n) for n in range(2)]
    c = cluster(*low, train("high", 500, priority=1), gpus=2, projects=limited)
    assert actions(c) == [Suspend("low1", Why.PRIORITY, "high")]
