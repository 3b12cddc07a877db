"""Unit pools on Kubernetes: which devices seats stand for, and what guests do when owners return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    CheckpointMode,
    Cluster,
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
from jupyter_gpushare.kube.rules.claims import claimants, immovable
from jupyter_gpushare.kube.rules.demand import demands
from jupyter_gpushare.kube.rules.follow import Delete, Seats, follow, reconcile
from jupyter_gpushare.kube.rules.pool_seats import assigned
from jupyter_gpushare.kube.rules.pools import (
    is_in_pool,
    keeps,
    marked,
    obstacles,
    pools_of,
    takes,
)
from jupyter_gpushare.kube.rules.seats import (
    Seat,
    SeatClass,
    Seating,
    Terms,
    counted_centi,
    return_is_certain,
)
from tests.core.build import ASLEEP, GIB, NOW, build, cluster, device, project, train

TERMS = Terms("p-train", "gpushare-train-0", "preemptible")
NODES = frozenset({"n0", "n1"})
WANTED: dict[str, Any] = {"state": ASLEEP, "wanted": True}
SIGTERM = CheckpointMode.SIGTERM


def pool(*leases: Lease, units: str = "1", gpus: int = 4, quota: float = 8, **more: Any) -> Cluster:
    """A node of equal GPUs with a label; ``more``: fields of its devices."""
    devices = [device(n, **more) for n in range(gpus)]
    return marked(cluster(*leases, gpus=devices, projects=[project("p", quota)]), {"n0": units}, {})


def seat(lease: str, count: int = 1, *, on: str = "n0", seating: Seating = Seating.PLACED) -> Seat:
    """A connected seat: KAI and the kubelet name GPUs as they like."""
    devices = tuple(f"kubelet{n}" for n in range(count))
    return Seat(name=f"s-{lease}", lease=lease, seating=seating, terms=TERMS, node=on, devices=devices)


def seats(*all_: Seat) -> Seats:
    return {one.lease: (one,) for one in all_}


def acts(c: Cluster, there: Seats) -> list[object]:
    """What leases do: as the engine asks for it."""
    found = assigned(c, there, NOW)
    return [*found.actions, *follow(c, found.seats, NOW).actions]


class TestPools:
    def test_a_node_without_a_label_is_none(self):
        c = cluster(build("a", 1000, "0"), gpus=2)
        assert marked(c, {}, {"n0": "x/y"}) is c
        assert marked(c, {"n9": "2"}, {}).devices == c.devices
        assert assigned(c, seats(seat("a")), NOW).seats == seats(seat("a"))
        assert not is_in_pool(c.leases[0], c.devices)
        assert takes(c, Size(300))

    def test_a_pool_takes_whole_units_only(self):
        whole, halves = pool().devices[0], pool(units="2").devices[0]
        assert (whole.demand_milli(Size(1000, 4)), whole.demand_milli(Size(500))) == (1000, 1001)
        assert (halves.demand_milli(Size(500)), halves.demand_milli(Size(1000))) == (500, 1001)
        assert halves.demand_milli(Size(memory_bytes=40 * GIB)) == 1001
        assert not takes(pool(units="2"), Size(250))
        assert takes(pool(units="4"), Size(250))
        assert counted_centi(Size(memory_bytes=40 * GIB), pool().devices) == 100

    @pytest.mark.parametrize("label", ["", "3", "02", "two"])
    def test_a_label_that_is_no_number_of_units_closes_the_node(self, label):
        c = pool(build("a", 1000, "0"), units=label)
        assert "write 1, 2, 4 or 8" in obstacles(c)["n0"]
        assert not return_is_certain(c.leases[0], c.devices)
        found = demands(pool(train("j", 1000), train("k", 1000), units=label), NODES, NOW).by_lease
        assert found["j"].not_nodes == found["k"].not_nodes == ("n0",)

    def test_unequal_gpus_odd_leases_and_foreign_pods_close_a_pool(self):
        unequal = cluster(gpus=[device(0), device(1, memory_bytes=40 * GIB)])
        assert obstacles(marked(unequal, {"n0": "1"}, {})) == {"n0": "its GPUs are not equal"}
        odd = pool(build("a", 250, "0"), units="2")
        assert "other sizes" in obstacles(odd)["n0"]
        assert obstacles(pool(train("j", 250), units="2")) == {}
        foreign = marked(cluster(), {"n0": "1"}, {"n0": "the pod x/y has GPUs"})
        assert obstacles(foreign) == {"n0": "the pod x/y has GPUs"}

    def test_a_closed_pool_starts_and_lends_nothing_and_its_sleepers_return(self):
        idle = build("idle", 1000, "0", idle_s=900)
        owner = build("owner", 1000, "1", **WANTED)
        c = cluster(idle, owner, train("j", 1000), gpus=4, projects=[project("p", 8)])
        opened, closed = (marked(c, {"n0": "1"}, foreign) for foreign in ({}, {"n0": "the pod x/y has GPUs"}))
        assert demands(opened, NODES, NOW).by_lease["idle"].seat_class is SeatClass.IDLE
        assert demands(closed, NODES, NOW).by_lease["idle"].seat_class is SeatClass.SESSION
        there = seats(seat("idle"), seat("j"), seat("owner"))
        assert [type(a) for a in acts(opened, there)] == [Resume, Grant]
        assert [type(a) for a in acts(closed, there)] == [Resume]
        found = assigned(closed, there, NOW).seats
        assert Delete("s-j") in reconcile(closed, demands(closed, NODES, NOW).by_lease, found)

    def test_the_seat_of_a_job_is_given_back_on_a_node_with_a_wrong_label(self):
        c = pool(train("j", 1000), units="x")
        assert acts(c, seats(seat("j"))) == []


class TestSeats:
    def test_a_job_gets_units_from_us_not_those_of_its_seat(self):
        c = pool(build("a", 1000, "0"), train("j", 1000, device_count=2))
        expected = Grant("j", ("gpu1", "gpu2"), 1000, Why.FREE_CAPACITY)
        assert acts(c, seats(seat("a"), seat("j", 2))) == [expected]

    def test_jobs_take_unclaimed_units_first_and_no_unit_twice(self):
        c = pool(
            build("a", 500, "0", state=ASLEEP), train("i", 500), train("j", 500), units="2", gpus=1, quota=1
        )
        found = assigned(c, seats(seat("i"), seat("j")), NOW).seats
        assert [s.devices for mine in found.values() for s in mine] == [("gpu0",), ("gpu0",)]
        full = pool(build("a", 500, "0"), train("i", 500), train("j", 500), units="2", gpus=1, quota=1)
        found = assigned(full, seats(seat("a"), seat("i"), seat("j")), NOW).seats
        assert [found[x][0].devices for x in ("i", "j")] == [("gpu0",), ()]

    def test_a_seat_that_is_not_connected_or_of_another_count_stands_for_nothing(self):
        c = pool(train("j", 1000, device_count=2), build("o", 1000, "0 1", **WANTED))
        assert acts(c, seats(seat("j", 1), seat("o", 1))) == []
        assert acts(c, seats(seat("j", 2, seating=Seating.WAITING), seat("o", 2, on="n1"))) == []
        assert acts(c, seats(seat("j", 0), seat("unknown"))) == []

    def test_an_owner_returns_to_its_units_once_they_are_free(self):
        owner = build("o", 1000, "0", **WANTED)
        assert acts(pool(owner), seats(seat("o"))) == [Resume("o", Why.WANTED)]
        leaving = train("g", 1000, "0", state=State.STOPPING)
        assert acts(pool(owner, leaving), seats(seat("o"), seat("g"))) == []

    def test_an_owner_that_is_not_wanted_any_more_stays_asleep(self):
        assert acts(pool(build("o", 1000, "0", state=ASLEEP)), seats(seat("o"))) == []


class TestReturns:
    OWNER = build("o", 1000, "0", **WANTED)

    def test_a_job_on_its_unit_restarts_elsewhere_with_its_seat_kept(self):
        job = train("j", 1000, "0", survival=SIGTERM)
        there = seats(seat("o"), seat("j"))
        assert acts(pool(self.OWNER, job), there) == [Requeue("j", Why.LENDER_RETURNED, "o")]
        stopping = pool(self.OWNER, replace(job, state=State.STOPPING))
        kept = demands(stopping, NODES, NOW, restarting={"j"}).by_lease
        assert "j" not in demands(stopping, NODES, NOW).by_lease
        assert kept["j"].seat_class is SeatClass.TRAIN
        again = pool(self.OWNER, replace(job, state=State.PENDING, devices=(), held_milli=0))
        assert acts(again, there) == [Resume("o", Why.WANTED), Grant("j", ("gpu1",), 1000, Why.FREE_CAPACITY)]

    def test_a_job_that_is_parked_gives_its_seat_up_until_its_unit_is_unused(self):
        job = train("j", 1000, "0")
        there = seats(seat("o"), seat("j"))
        assert acts(pool(self.OWNER, job), there) == [Suspend("j", Why.LENDER_RETURNED, "o")]
        parked = replace(job, state=ASLEEP)
        for owner in (self.OWNER, replace(self.OWNER, state=State.RUNNING)):
            assert "j" not in demands(pool(owner, parked), NODES, NOW).by_lease
        assert "j" in demands(pool(replace(self.OWNER, wanted=False), parked), NODES, NOW).by_lease
        busy = replace(job, state=State.SUSPENDING)
        assert "j" not in demands(pool(self.OWNER, busy), NODES, NOW).by_lease

    def test_what_is_in_the_way_yields(self):
        c = pool(self.OWNER, train("j", 1000, "0"), train("k", 1000, "1"))
        classes = {x: d.seat_class for x, d in demands(c, NODES, NOW).by_lease.items()}
        assert classes == {"o": SeatClass.RETURN, "j": SeatClass.YIELD, "k": SeatClass.TRAIN}

    def test_a_guest_that_starts_or_must_not_be_tried_yet_is_waited_for(self):
        there = seats(seat("o"), seat("g"))
        for guest in (
            build("g", 1000, "0", borrowed=True, state=State.GRANTED),
            train("g", 1000, "0", survival=SIGTERM, state=State.RESUMING),
            train("g", 1000, "0", retry_at=NOW + 1),
        ):
            assert acts(pool(self.OWNER, guest, quota=1), there) == []

    def test_a_session_beyond_its_guarantee_is_parked_and_returns_only_where_no_claim_is(self):
        guest = build("g", 1000, "0", borrowed=True)
        there = seats(seat("o"), seat("g"))
        assert acts(pool(self.OWNER, guest, quota=1), there) == [Suspend("g", Why.LENDER_RETURNED, "o")]
        parked = replace(guest, state=ASLEEP, wanted=True)
        owner = replace(self.OWNER, state=State.RUNNING)
        assert "g" not in demands(pool(owner, parked, quota=1), NODES, NOW).by_lease
        assert acts(pool(owner, parked, quota=1), there) == []
        asleep = replace(owner, state=ASLEEP, wanted=False)
        job = train("j", 1000, "0", survival=SIGTERM)
        c = pool(asleep, parked, job, quota=1)
        assert "g" in demands(c, NODES, NOW).by_lease
        assert acts(c, seats(seat("g"), seat("j"))) == [Requeue("j", Why.LENDER_RETURNED, "g")]

    def test_a_session_that_can_neither_sleep_nor_restart_counts_as_a_claim(self):
        stuck = build("s", 1000, "0", borrowed=True, suspendable=False)
        c = pool(stuck, quota=0)
        assert immovable(c) == {"s"}
        assert claimants(c) == frozenset()
        assert immovable(cluster(stuck)) == frozenset()
        later = build("later", 1000, "0", borrowed=True, granted_at=-1.0)
        assert claimants(pool(stuck, later, quota=8)) == {"s"}
        new = demands(pool(stuck, build("new", 1000), quota=1, gpus=1), NODES, NOW).by_lease["new"]
        assert (new.seat_class, new.not_nodes) == (SeatClass.SESSION, ("n0",))

    def test_on_gpus_that_cannot_suspend_what_borrows_gets_unclaimed_units(self):
        c = pool(build("o", 1000, "0 1", state=ASLEEP), build("g", 1000), gpus=2, quota=2, suspendable=False)
        demand = demands(c, NODES, NOW).by_lease["g"]
        assert (demand.seat_class, demand.not_nodes) == (SeatClass.BORROWED, ("n0",))
        assert keeps(demand, "n0", c)
        assert not keeps(demand, "n0", pool())
        assert keeps(replace(demand, seat_class=SeatClass.SESSION), "n0", pool())

    def test_one_that_cannot_leave_a_claimed_unit_any_more_loses_its_seat(self):
        stuck = build("s", 1000, "0", borrowed=True, suspendable=False)
        c = pool(self.OWNER, stuck, quota=1)
        assert "s" not in demands(c, NODES, NOW).by_lease
        assert acts(c, seats(seat("o"), seat("s"))) == []

    def test_a_start_with_a_claim_displaces_what_borrows_its_units(self):
        start = build("new", 1000, "0", state=State.GRANTED, granted_at=NOW)
        c = pool(start, train("j", 1000, "0", survival=SIGTERM), gpus=1)
        there = seats(seat("j"), seat("new"))
        found = assigned(c, there, NOW, frozenset({"new"}))
        assert found.actions == (Requeue("j", Why.LENDER_RETURNED, "new"),)

    def test_of_two_that_return_one_waits_for_the_unit_of_a_lease_that_leaves(self):
        leaving = build("out", 500, "0", state=State.SUSPENDING)
        jobs = [train(name, 500, "0", state=ASLEEP, wanted=False) for name in ("a", "b")]
        c = pool(leaving, *jobs, units="2", gpus=1, quota=0)
        assert acts(c, seats(seat("a"), seat("b"))) == [Resume("a", Why.CAPACITY_BACK)]

    def test_a_gpu_that_does_not_work_takes_nothing_new(self):
        c = pool(train("j", 1000), usable=False)
        assert pools_of(c, frozenset())["n0"].gpus == ()
        assert acts(c, seats(seat("j"))) == []


LEASES = st.builds(
    lambda kind, state, on, n, wanted, borrowed, suspendable, survival: Lease(
        id=f"x{n}",
        project="p",
        kind=kind,
        state=state,
        size=Size(500),
        held_milli=0 if state is State.PENDING else 500,
        devices=() if state is State.PENDING else (f"gpu{on}",),
        wanted=wanted,
        borrowed=borrowed,
        suspendable=suspendable,
        survival=survival,
    ),
    kind=st.sampled_from(Kind),
    state=st.sampled_from([x for x in State if x not in (State.RELEASED, State.FAILED)]),
    on=st.integers(0, 1),
    n=st.integers(0, 99),
    wanted=st.booleans(),
    borrowed=st.booleans(),
    suspendable=st.booleans(),
    survival=st.sampled_from(CheckpointMode),
)


@given(st.lists(LEASES, max_size=7, unique_by=lambda x: x.id), st.data())
def test_no_gpu_gets_more_leases_than_it_has_units(leases: list[Lease], data: st.DataObject) -> None:
    c = pool(*leases, units="2", gpus=2, quota=2)
    there = seats(*(seat(x.id) for x in leases if data.draw(st.booleans())))
    before = {
        f"gpu{n}": sum(x.state in HOLDS_CAPACITY and x.devices == (f"gpu{n}",) for x in leases)
        for n in (0, 1)
    }
    claims = claimants(c)
    taken = dict(before)
    for action in acts(c, there):
        lease = next(x for x in leases if x.id == action.lease)  # type: ignore[attr-defined]
        match action:
            case Grant():
                taken[action.devices[0]] += 1
            case Resume():
                taken[lease.devices[0]] += 1
            case Suspend() | Requeue() if action.why is Why.LENDER_RETURNED:
                assert lease.id not in claims
    for gpu, number in taken.items():
        assert number <= max(2, before[gpu])
