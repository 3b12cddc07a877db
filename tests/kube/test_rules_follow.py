"""Seats on Kubernetes: what leases and seats do after KAI granted or took a seat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    CheckpointMode,
    Device,
    Grant,
    Kind,
    Lease,
    Requeue,
    Resume,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.kube.rules.claims import claimants
from jupyter_gpushare.kube.rules.demand import demands
from jupyter_gpushare.kube.rules.follow import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    Create,
    Delete,
    Misplaced,
    Retarget,
    follow,
    is_awaited,
    live,
    misplaced_seat,
    note_misplaced,
    reconcile,
    with_delays,
)
from jupyter_gpushare.kube.rules.seats import (
    Seat,
    SeatClass,
    Seating,
    Terms,
    counted_centi,
    return_is_certain,
    terms,
)
from tests.core.build import ASLEEP, NOW, build, cluster, device, project, train

ONE_EACH = [device(0, node="n0"), device(1, node="n1")]  # two nodes with one GPU each
NODES = frozenset({"n0", "n1"})
TRAIN_0 = Terms("p-train", "gpushare-train-0", "preemptible")


def seat(lease: str, on: str = "", seating: Seating | None = None, name: str = "", **more: Any) -> Seat:
    """``on``: as in `build`; a seat without devices waits."""
    devices = tuple(f"gpu{n}" for n in on.split())
    state = seating or (Seating.PLACED if devices else Seating.WAITING)
    given = {"name": name or f"s-{lease}", "lease": lease, "seating": state, "terms": TRAIN_0}
    return Seat(**given | {"devices": devices} | more)


def seats(*all_: Seat) -> dict[str, tuple[Seat, ...]]:
    found: dict[str, tuple[Seat, ...]] = {}
    for one in all_:
        found[one.lease] = (*found.get(one.lease, ()), one)
    return found


class TestFollow:
    def test_a_waiting_job_gets_the_devices_of_its_seat(self):
        c = cluster(train("j", 500), gpus=ONE_EACH)
        assert follow(c, seats(seat("j", "1")), NOW).actions == (
            Grant("j", ("gpu1",), 500, Why.FREE_CAPACITY),
        )

    def test_a_grant_beyond_the_quota_is_borrowed(self):
        c = cluster(build("a", 500, "0", state=ASLEEP), train("j", 750), projects=[project("p", 1)])
        (action,) = follow(c, seats(seat("j", "0")), NOW).actions
        assert action == Grant("j", ("gpu0",), 750, Why.FREE_CAPACITY, borrowed=True)
        (action,) = follow(replace(c, projects=()), seats(seat("j", "0")), NOW).actions
        assert isinstance(action, Grant)
        assert action.borrowed

    def test_no_grant_before_the_seat_is_connected(self):
        c = cluster(train("j", 500))
        for one in (
            seat("j"),
            seat("j", "", Seating.PLACED),
            seat("j", "0", Seating.LEAVING),
            seat("j", "9"),
        ):
            assert follow(c, seats(one), NOW).actions == ()

    def test_leases_that_need_nothing_do_nothing(self):
        c = cluster(
            build("s", 500), train("x", 500, cancelled=True), train("end", 500, "0", state=State.STOPPING),
            build("g", 500, "0", state=State.GRANTED),
        )  # fmt: skip
        assert follow(c, seats(seat("s", "0"), seat("x", "0")), NOW).actions == ()

    def test_an_action_waits_for_its_retry(self):
        c = cluster(train("j", 500, retry_at=NOW + 4), train("other", 500, retry_at=NOW + 2))
        plan = follow(c, seats(seat("j", "0")), NOW)
        assert (plan.actions, plan.next_at) == ((), NOW + 4)

    @pytest.mark.parametrize(
        "left", [(), (seat("a", "0", Seating.LEAVING),), (seat("a", "0", Seating.GONE),)]
    )
    def test_a_session_that_loses_its_seat_is_suspended(self, left):
        c = cluster(build("a", 500, "0"), gpus=2)
        assert follow(c, seats(*left), NOW).actions == (Suspend("a", Why.OVER_QUOTA, ""),)

    def test_a_job_that_loses_its_seat_is_suspended_where_it_can_come_back(self):
        def action(job: Lease, gpus: Any = 1) -> object:
            (found,) = follow(cluster(job, gpus=gpus), {}, NOW).actions
            return found

        requeued = Requeue("j", Why.OVER_QUOTA, "")
        assert action(train("j", 500, "0")) == Suspend("j", Why.OVER_QUOTA, "")
        assert action(train("j", 500, "0"), 2) == requeued
        assert action(train("j", 500, "0", suspendable=False)) == requeued
        assert action(train("j", 500, "0", survival=CheckpointMode.SIGTERM)) == requeued
        assert action(train("j", 500, "0", state=State.GRANTED)) == requeued

    def test_leases_with_their_seat_stay(self):
        c = cluster(build("a", 500, "0"), train("j", 500, "0"), train("g", 500, "0", state=State.GRANTED))
        held = seats(seat("a", "0"), seat("j", "", Seating.PLACED), seat("g"))
        assert follow(c, held, NOW).actions == ()

    def test_a_suspended_lease_returns_to_its_own_devices_only(self):
        c = cluster(
            build("a", 500, "0", state=ASLEEP, wanted=True), train("j", 500, "0", state=ASLEEP), gpus=2
        )
        assert follow(c, seats(seat("a", "0"), seat("j", "0")), NOW).actions == (
            Resume("a", Why.WANTED),
            Resume("j", Why.CAPACITY_BACK),
        )
        assert follow(c, seats(seat("a", "1"), seat("j")), NOW).actions == ()

    def test_a_session_that_is_not_wanted_gives_its_seat_back(self):
        c = cluster(build("a", 500, "0", state=ASLEEP))
        assert follow(c, seats(seat("a", "0")), NOW).actions == ()
        assert reconcile(c, demands(c, NODES, NOW).by_lease, seats(seat("a", "0"))) == [Delete("s-a")]

    def test_a_wake_goes_first(self):
        c = cluster(train("j", 500), build("b", 500, "0"), build("a", 500, "0", state=ASLEEP, wanted=True))
        plan = follow(c, seats(seat("j", "0"), seat("a", "0")), NOW)
        assert [type(a) for a in plan.actions] == [Resume, Suspend, Grant]


class TestReconcile:
    def test_seats_are_made_changed_and_deleted(self):
        c = cluster(train("new", 500), build("a", 500, "0"), build("idle", 500, "0", idle_s=600))
        needed = demands(c, NODES, NOW).by_lease
        there = seats(seat("a", "0"), seat("idle", "0"), seat("ended", "0"))
        assert reconcile(c, needed, there) == [
            Delete("s-ended"),
            Retarget("s-a", Terms("p-build", "gpushare-session", "non-preemptible")),
            Retarget("s-idle", Terms("gpushare-idle-sessions", "gpushare-idle", "preemptible")),
            Create(needed["new"]),
        ]

    def test_a_repeated_round_changes_nothing(self):
        c = cluster(build("a", 500, "0"))
        needed = demands(c, NODES, NOW).by_lease
        assert reconcile(c, needed, seats(seat("a", "0", terms=terms(needed["a"])))) == []

    def test_a_running_lease_asks_again_only_when_its_memory_has_left(self):
        leaving = seats(seat("j", "0", Seating.LEAVING))
        for state, asks in [(State.RUNNING, False), (State.SUSPENDING, False), (State.SUSPENDED, True)]:
            c = cluster(train("j", 500, "0", state=state))
            changes = reconcile(c, demands(c, NODES, NOW).by_lease, leaving)
            assert [type(x) for x in changes] == ([Create] if asks else [])

    def test_what_yields_is_patched_before_the_return_seat_exists(self):
        c = cluster(build("owner", 1000, "0", state=ASLEEP, wanted=True), train("j", 1000, "0"))
        changes = reconcile(c, demands(c, NODES, NOW).by_lease, seats(seat("j", "0")))
        assert [type(x) for x in changes] == [Retarget, Create]

    def test_a_seat_for_which_kai_evicts_stays_until_that_is_over(self):
        c = cluster(train("j", 500, "0"))
        needed = demands(c, NODES, NOW).by_lease
        given_up, again = seat("old"), seat("older", instead_of=("s-first", "s-old"))
        for victim, stays in [
            (seat("j", "0", evicted_for="s-old"), True),
            (seat("j", "0", Seating.LEAVING, evicted_for="s-old"), True),
            (seat("j", "0", Seating.GONE, evicted_for="s-old"), False),
            (seat("j", "0", Seating.LEAVING, evicted_for="s-other"), False),
        ]:
            for one in (given_up, again):
                assert is_awaited(seats(victim, one), one) is stays
                deleted = Delete(one.name) in reconcile(c, needed, seats(victim, one))
                assert deleted is not stays
        placed = seat("old", "1", evicted_for="")
        victim = seat("j", "0", Seating.LEAVING, evicted_for=placed.name)
        assert Delete(placed.name) in reconcile(c, needed, seats(victim, placed))

    def test_a_waiting_job_gives_up_a_seat_on_a_node_that_it_avoids(self):
        c = cluster(train("j", 500, avoids=(("n0", NOW + 5),)), gpus=ONE_EACH)

        def changes(at: float, one: Seat) -> list[Any]:
            return reconcile(c, demands(c, NODES, at).by_lease, seats(one))

        there, beside = seat("j", "0", node="n0", terms=TRAIN_0), seat("j", "1", node="n1", terms=TRAIN_0)
        assert follow(c, seats(there), NOW).actions == ()
        assert changes(NOW, there) == [Delete("s-j")]
        assert [type(a) for a in follow(c, seats(beside), NOW).actions] == [Grant]
        assert changes(NOW, beside) == []
        assert [type(a) for a in follow(c, seats(there), NOW + 5).actions] == [Grant]
        assert changes(NOW + 5, there) == []

    def test_a_waiting_seat_that_avoids_a_node_no_longer_is_made_anew(self):
        c = cluster(train("j", 500, avoids=(("n0", NOW + 5),)), gpus=ONE_EACH)
        waits = seat("j", seating=Seating.WAITING, terms=TRAIN_0, not_nodes=("n0",))
        assert reconcile(c, demands(c, NODES, NOW).by_lease, seats(waits)) == []
        later = demands(c, NODES, NOW + 5).by_lease
        assert reconcile(c, later, seats(waits)) == [Delete("s-j")]
        assert reconcile(c, later, seats(replace(waits, seating=Seating.LEAVING))) == [Create(later["j"])]

    def test_one_live_seat_stays_the_newest(self):
        c = cluster(train("j", 500))
        old, new = seat("j", name="old", since_at=1), seat("j", name="new", since_at=2)
        ended = seat("j", name="ended", seating=Seating.GONE)
        assert live(seats(old, new, ended), "j") == new
        assert reconcile(c, demands(c, NODES, NOW).by_lease, seats(old, new, ended)) == [
            Delete("old"),
            Delete("ended"),
        ]


class TestReturns:
    """Seats of suspended leases on other devices than their memory returns to."""

    def test_a_seat_on_another_device_is_deleted_and_asked_for_again_later(self):
        c = cluster(build("a", 500, "0", state=ASLEEP, wanted=True), gpus=2)
        elsewhere = seats(seat("a", "1"))
        known = note_misplaced(c, elsewhere, {}, NOW)
        assert known == {"a": Misplaced("s-a", FIRST_PAUSE_S, NOW + FIRST_PAUSE_S)}
        assert follow(c, elsewhere, NOW).actions == ()
        for at in (NOW, NOW + FIRST_PAUSE_S):  # it stays no longer where its deletion took long
            needed = demands(with_delays(c, known), NODES, at).by_lease
            assert reconcile(c, needed, elsewhere) == [Delete("s-a")]
        leaving = seats(seat("a", "1", Seating.LEAVING))
        waits = demands(with_delays(c, known), NODES, NOW)
        assert waits.next_at == NOW + FIRST_PAUSE_S
        assert reconcile(c, waits.by_lease, leaving) == []
        later = demands(with_delays(c, known), NODES, NOW + FIRST_PAUSE_S).by_lease
        assert reconcile(c, later, leaving) == [Create(later["a"])]

    def test_each_further_seat_on_another_device_doubles_the_pause(self):
        c = cluster(train("j", 500, "0", state=ASLEEP), gpus=2)
        known: dict[str, Misplaced] = {}
        pauses = []
        for n in range(8):
            for _ in range(2):  # the same seat counts once
                known = note_misplaced(c, seats(seat("j", "1", name=f"s{n}")), known, NOW)
            pauses.append(known["j"].pause_s)
        assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
        assert pauses[-1] == MAX_PAUSE_S
        assert note_misplaced(c, {}, known, NOW) == known
        back = cluster(train("j", 500, "0"), gpus=2)
        assert note_misplaced(back, seats(seat("j", "1")), known, NOW) == {}

    def test_a_later_retry_of_the_lease_stays(self):
        c = cluster(build("a", 500, "0", state=ASLEEP, retry_at=NOW + 9), build("b", 500))
        assert with_delays(c, {}) is c
        known = {"a": Misplaced("s", 5.0, NOW + 5), "ended": Misplaced("s", 5.0, NOW + 5)}
        assert [x.retry_at for x in with_delays(c, known).leases] == [NOW + 9, 0.0]


# ---- any cluster ---------------------------------------------------------------------------------

LEASES = st.builds(
    lambda n, kind, state, on, milli, wanted, idle_s, borrowed: Lease(
        id=f"l{n}",
        project="pq"[n % 2],
        kind=kind,
        size=Size(milli),
        state=state,
        devices=() if state is State.PENDING else (f"gpu{on}",),
        held_milli=0 if state is State.PENDING else milli,
        wanted=wanted,
        idle_since_at=NOW - idle_s,
        borrowed=borrowed,
    ),
    n=st.integers(0, 99),
    kind=st.sampled_from(Kind),
    state=st.sampled_from(State),
    on=st.integers(0, 2),
    milli=st.sampled_from([125, 250, 333, 500, 1000]),
    wanted=st.booleans(),
    idle_s=st.sampled_from([0.0, 900.0]),
    borrowed=st.booleans(),
)
SEATS = st.tuples(st.sampled_from(Seating), st.booleans(), st.integers(0, 2))
GPUS: list[Device] = [device(0, node="n0"), device(1, node="n1"), device(2, node="n1")]


@given(st.lists(LEASES, max_size=8, unique_by=lambda x: x.id), st.data())
def test_no_plan_without_its_seat(leases: list[Lease], data: st.DataObject) -> None:
    c = cluster(*leases, gpus=GPUS, projects=[project("p", 1), project("q", 2)])
    there: dict[str, tuple[Seat, ...]] = {}
    for lease in leases:
        drawn = data.draw(st.lists(SEATS, max_size=2))
        there[lease.id] = tuple(
            seat(lease.id, str(on) if connected else "", seating, name=f"{lease.id}-{n}")
            for n, (seating, connected, on) in enumerate(drawn)
        )
    by_id = {lease.id: lease for lease in leases}
    for action in follow(c, there, NOW).actions:
        mine = live(there, action.lease)
        if isinstance(action, Suspend | Requeue):
            assert mine is None
        else:
            assert mine is not None
            assert mine.seating is Seating.PLACED
        if isinstance(action, Resume):
            assert mine is not None
            assert set(mine.devices) == set(by_id[action.lease].devices)
    needed = demands(c, NODES, NOW).by_lease
    assert demands(replace(c, leases=tuple(reversed(leases))), NODES, NOW).by_lease == needed
    for change in reconcile(c, needed, there):
        if isinstance(change, Retarget):
            assert all(misplaced_seat(x, there) is None for x in leases if change.seat.startswith(f"{x.id}-"))
        if isinstance(change, Create):
            assert by_id[change.demand.lease].state not in HOLDS_CAPACITY
            assert live(there, change.demand.lease) is None
    claims = claimants(c)
    for name, quota in (("p", 100), ("q", 200)):
        assert (
            sum(counted_centi(x.size, GPUS) for x in leases if x.id in claims and x.project == name) <= quota
        )
    assert all(by_id[x].kind is Kind.BUILD for x in claims)
    for lease_id, demand in needed.items():
        if demand.seat_class is SeatClass.IDLE:
            assert return_is_certain(by_id[lease_id], GPUS)
            assert by_id[lease_id].state is State.RUNNING
