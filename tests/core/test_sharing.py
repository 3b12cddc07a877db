"""A job becomes a guest on what another one leaves of its GPU, and is the first to go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpushare.core.explain import uses
from jupyter_gpushare.core.model import CheckpointMode, Grant, Requeue, Resume, State, Suspend, Why
from jupyter_gpushare.core.planning.planner import IncrementalPlanner, plan
from jupyter_gpushare.core.planning.sharing import MAX_TRIED
from tests.core.build import (
    ASLEEP,
    GIB,
    NOW,
    actions,
    build,
    cluster,
    device,
    project,
    train,
)

SPARE = 40 * GIB


def host(id="h", on="0", milli=1000, **more):
    return train(id, milli, on, **{"share": True, "spare_bytes": SPARE, "pair_key": "host"} | more)


def waiting(id="g", milli=1000, **more):
    return train(id, milli, **{"share": True, "pair_key": "guest"} | more)


def guest(id="g", on="0", milli=1000, **more):
    given = {"share": True, "host": "h", "saved_bytes": SPARE, "pair_key": "guest", "movable": True}
    return train(id, milli, on, **given | more)


def joins(id="g", on=0, milli=1000, given=SPARE, host="h"):
    return Grant(id, (f"gpu{on}",), milli, Why.GUEST, borrowed=True, host=host, guest_bytes=given)


# ---- who becomes one, and where


def test_a_waiting_job_becomes_a_guest_where_there_is_no_capacity():
    assert actions(cluster(host(), waiting())) == [joins()]


def test_a_guest_gets_no_more_than_it_requested():
    assert actions(cluster(host(), waiting(milli=250))) == [joins(milli=250, given=20 * GIB)]


@pytest.mark.parametrize(
    ("of_host", "of_job"),
    [
        ({"share": False}, {}),
        ({}, {"share": False}),
        ({"spare_bytes": 0}, {}),
        ({"spare_bytes": 10 * GIB}, {}),  # a whole GPU needs a quarter of one at least
        ({"spare_bytes": 30 * GIB}, {"milli": 500}),  # half a GPU needs all of that
        ({}, {"needs_bytes": 50 * GIB}),  # as seen when it ran
        ({}, {"borrow": False}),  # it runs on what is its own only
        ({}, {"survival": CheckpointMode.SIGTERM}),
        ({}, {"suspendable": False}),
        ({"suspendable": False}, {}),
        ({"state": State.SUSPENDING}, {}),
        ({"state": State.GRANTED}, {}),
        ({"milli": 500}, {"milli": 600}),  # others may be on its device
        ({"project": "q"}, {}),
        ({}, {"avoids": (("n0", NOW + 60),)}),
        ({}, {"retry_at": NOW + 60}),
        ({}, {"device_count": 2}),
    ],
)
def test_no_other_job_becomes_a_guest(of_host, of_job):
    projects = [project("p", 1), project("q", 1)]
    c = cluster(host(**of_host), waiting(**of_job), build("s", 1000, "1"), gpus=2, projects=projects)
    assert actions(c) == []


@pytest.mark.parametrize(
    "more", [{"suspendable": False}, {"usable": False, "draining": True}, {"profile": "7g"}]
)
def test_a_guest_needs_a_device_that_can_give_it_back(more):
    assert actions(cluster(host(), waiting(), gpus=[device(0, **more)])) == []


def test_a_job_is_no_guest_on_a_device_that_is_too_small_for_it():
    gpus = [device(0), device(1, memory_bytes=160 * GIB)]
    job = waiting(milli=0, memory_bytes=100 * GIB)
    assert actions(cluster(host(), build("s", 1000, "1"), job, gpus=gpus)) == []


def test_a_session_is_neither_host_nor_guest():
    session = build("h", 1000, "0", share=True, spare_bytes=SPARE)
    assert actions(cluster(session, waiting())) == []
    assert (
        actions(cluster(host(), build("g", 1000, share=True, borrowed=True), projects=[project("p", 0)]))
        == []
    )


def test_a_job_with_free_lent_or_reclaimable_capacity_is_no_guest():
    free = cluster(host(), waiting(), gpus=2)
    assert actions(free) == [Grant("g", ("gpu1",), 1000, Why.FREE_CAPACITY)]
    idle = cluster(host(), build("s", 1000, "1", idle_s=900), waiting(), gpus=2)
    assert actions(idle) == [Suspend("s", Why.IDLE, "g")]
    owed = cluster(
        host(project="q"),
        host("k", on="1"),
        waiting(),
        gpus=2,
        projects=[project("p", 2), project("q", 0)],
        share_between_projects=True,
    )
    assert actions(owed) == [Suspend("h", Why.OVER_QUOTA, "g")]


def test_what_is_being_released_for_a_job_is_waited_for():
    c = cluster(host(), train("x", 1000, "1", state=State.STOPPING), waiting(), gpus=2)
    assert actions(c) == []


def test_a_device_has_one_guest():
    c = cluster(host(), guest("a"), waiting("b"))
    assert actions(c) == []
    both = cluster(host(), waiting("a", queued_at=1.0), waiting("b", queued_at=2.0))
    assert actions(both) == [joins("a")]


def test_the_first_in_the_order_takes_the_host_with_most_to_spare():
    c = cluster(
        host(), host("k", on="1", spare_bytes=50 * GIB),
        waiting("b", queued_at=2.0), waiting("a", queued_at=1.0), gpus=2,
    )  # fmt: skip
    assert actions(c) == [joins("a", on=1, given=50 * GIB, host="k"), joins("b")]


def test_a_large_host_has_one_guest_on_one_of_its_devices():
    c = cluster(host(on="0 1"), waiting("a"), waiting("b"), gpus=2)
    assert actions(c) == [joins("a")]
    assert actions(cluster(host(on="0 1"), guest("a"), waiting("b"), gpus=2)) == []


def test_a_guest_may_be_on_the_gpu_of_another_project_where_the_site_lets_it():
    projects = [project("p", 1), project("q", 0)]
    c = cluster(host(), waiting(project="q"), projects=projects)
    assert actions(c) == []
    assert actions(replace(c, settings=replace(c.settings, share_between_projects=True))) == [joins()]


def test_a_suspended_job_becomes_a_guest_on_its_device_or_on_one_that_it_may_move_to():
    asleep = {"state": ASLEEP, "saved_bytes": 10 * GIB, "movable": True}
    c = cluster(host(), train("g", 1000, "0", share=True, **asleep))
    assert actions(c) == [Resume("g", Why.GUEST, (), "h", SPARE)]
    gpus = [device(n, movable=True) for n in range(2)]
    other = cluster(
        train("x", 1000, "0"), host(on="1"), train("g", 1000, "0", share=True, **asleep), gpus=gpus
    )
    assert actions(other) == [Resume("g", Why.GUEST, ("gpu1",), "h", SPARE)]
    bound = replace(other, leases=(*other.leases[:2], replace(other.leases[2], movable=False)))
    assert actions(bound) == []


def test_host_memory_bounds_what_a_guest_gets():
    bounded = cluster(host(), waiting(), host_budget_bytes=30 * GIB)
    assert actions(bounded) == [joins(given=30 * GIB)]
    assert actions(cluster(host(), waiting(), host_budget_bytes=10 * GIB)) == []
    # What an awake guest has reserved is not there for a second one.
    two = cluster(host(), guest("a"), host("k", on="1"), waiting(), gpus=2, host_budget_bytes=50 * GIB)
    assert actions(two) == []


def test_a_pair_that_was_parted_is_not_tried_again():
    c = replace(cluster(host(), waiting()), parted=frozenset({("host", "guest")}))
    assert actions(c) == []


def test_jobs_without_consent_hide_none_behind_them():
    crowd = [train(f"c{n}", 1000, queued_at=float(n)) for n in range(2 * MAX_TRIED)]
    assert actions(cluster(host(), *crowd, waiting(queued_at=1e6))) == [joins()]


# ---- how a guest gets capacity of its own


def test_a_guest_moves_to_capacity_that_is_free():
    gpus = [device(n, movable=True) for n in range(2)]
    assert actions(cluster(host(), guest(), gpus=gpus)) == [Suspend("g", Why.CAPACITY_BACK, "g")]
    bound = cluster(host(), guest(movable=False), gpus=gpus)
    assert actions(bound) == []
    # Nobody else takes what it moves to, in this round or the next.
    c = cluster(host(), guest(), waiting("w", share=False, queued_at=1e6), gpus=gpus)
    assert actions(c) == [Suspend("g", Why.CAPACITY_BACK, "g")]
    asleep = guest(host="", state=ASLEEP, made_way_for="g", waits_since_at=NOW)
    later = cluster(host(), asleep, waiting("w", share=False), gpus=gpus)
    assert actions(later) == [Resume("g", Why.CAPACITY_BACK, ("gpu1",))]


def test_the_place_that_a_guest_moves_to_is_kept_while_it_is_suspended():
    gpus = [device(n, movable=True) for n in range(2)]
    moving = guest(state=State.SUSPENDING, made_way_for="g")
    c = cluster(host(), moving, waiting("w", share=False, queued_at=1e6), gpus=gpus)
    assert actions(c) == []
    # One that leaves for its host keeps none.
    c = cluster(host(), replace(moving, made_way_for=""), waiting("w", share=False), gpus=gpus)
    assert [a.lease for a in actions(c)] == ["w"]


def test_a_guest_keeps_the_device_that_its_host_has_left():
    assert actions(cluster(guest())) == [Grant("g", ("gpu0",), 1000, Why.CAPACITY_BACK)]


def test_a_guest_gets_capacity_from_others_as_if_it_waited():
    gpus = [device(n, movable=True) for n in range(2)]
    c = cluster(host(), guest(), build("s", 1000, "1", idle_s=900), gpus=gpus)
    assert actions(c) == [Suspend("s", Why.IDLE, "g")]
    on_its_way = cluster(host(), guest(), train("x", 1000, "1", state=State.STOPPING), gpus=gpus)
    assert actions(on_its_way) == []


# ---- how it leaves


def test_nobody_gets_a_device_before_the_guest_has_left_it():
    first = train("w", 1000, priority=1)
    c = cluster(first, guest())
    assert actions(c) == [Suspend("g", Why.HOST_LEFT, "")]
    leaving = cluster(first, guest(state=State.SUSPENDING))
    assert actions(leaving) == []
    gone = cluster(first, guest(host="", state=ASLEEP))
    assert actions(gone) == [Grant("w", ("gpu0",), 1000, Why.FREE_CAPACITY)]


def test_a_host_that_makes_way_takes_its_guest_along():
    owner = build("s", 1000, "0", state=ASLEEP, wanted=True)
    c = cluster(owner, host(), guest())
    assert actions(c) == [Suspend("h", Why.LENDER_RETURNED, "s"), Suspend("g", Why.HOST_LEFT, "s")]
    after = cluster(owner, host(state=ASLEEP), guest(state=State.SUSPENDING))
    assert actions(after) == []


@pytest.mark.parametrize("state", [State.SUSPENDING, State.STOPPING])
def test_a_guest_leaves_with_a_host_that_leaves_to_another_job(state):
    first = train("w", 1000, priority=1)
    assert actions(cluster(host(state=state), guest(), first)) == [Suspend("g", Why.HOST_LEFT, "")]


@pytest.mark.parametrize("state", [State.SUSPENDING, State.STOPPING])
def test_a_guest_stays_where_the_device_will_be_its_own(state):
    assert actions(cluster(host(state=state), guest())) == []


def test_a_guest_leaves_a_device_that_its_host_has_left_for_another():
    """Its project is at its limit, so it cannot keep it."""
    projects = [project("p", 1, limit_milli=1000), project("q", 1)]
    moved = cluster(host(on="1"), guest(), train("w", 1000, project="q"), gpus=2, projects=projects)
    assert actions(moved) == [Suspend("g", Why.HOST_LEFT, "")]


def test_a_guest_that_has_not_started_is_taken_back():
    assert actions(cluster(guest(state=State.GRANTED), train("w", 1000))) == [Requeue("g", Why.HOST_LEFT, "")]
    assert actions(cluster(guest(state=State.RESUMING), train("w", 1000))) == []


@pytest.mark.parametrize("of", [{"share": False}, {}])
def test_a_guest_leaves_when_consent_ends_or_the_pair_does_not_pay(of):
    parted = frozenset() if of else frozenset({("host", "guest")})
    for c in (cluster(host(**of), guest()), cluster(host(), guest(**of))):
        assert actions(replace(c, parted=parted)) == [Suspend("g", Why.PAIR_PARTED, "")]


def test_a_guest_that_cannot_be_suspended_any_more_is_stopped():
    assert actions(cluster(host(), guest(suspendable=False))) == [Requeue("g", Why.CANNOT_YIELD, "")]


def test_a_guest_whose_suspension_was_refused_is_asked_again_later():
    c = cluster(host(share=False), guest(retry_at=NOW + 5))
    assert actions(c) == []
    assert actions(c, NOW + 6) == [Suspend("g", Why.PAIR_PARTED, "")]


# ---- what it counts


def test_a_guest_holds_nothing_of_quota_limit_or_use():
    c = cluster(host(), guest(), gpus=2, projects=[project("p", 2, limit_milli=2000)])
    (use,) = uses(c)
    assert (use.in_use_milli, use.borrowed_milli) == (1000, 0)
    # Its own project's next job is within the limit.
    assert actions(replace(c, leases=(*c.leases, train("w", 1000, priority=1)))) == [
        Grant("w", ("gpu1",), 1000, Why.FREE_CAPACITY)
    ]


def test_a_guest_does_not_count_as_changed_while_it_stays():
    c, planner = cluster(host(), guest()), IncrementalPlanner()
    planner.plan(c, NOW)
    puts = []
    planner._planner.put = lambda lease: puts.append(lease.id)
    planner.plan(c, NOW + 1)
    assert puts == []


def test_a_plan_with_guests_is_the_same_from_changes_as_from_the_start():
    planner = IncrementalPlanner()
    moments = [
        cluster(host(), waiting()),
        cluster(host(), guest(state=State.GRANTED)),
        cluster(host(), guest()),
        cluster(host(state=State.STOPPING), guest()),
        cluster(guest(state=State.SUSPENDING)),
        cluster(guest(host="", state=ASLEEP)),
        cluster(host(), guest(host="", state=ASLEEP, saved_bytes=GIB)),
    ]
    for n, c in enumerate(moments):
        assert planner.plan(c, NOW + n) == plan(c, NOW + n), n
