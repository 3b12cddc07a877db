"""Seats on Kubernetes: their sizes and names, guarantees, and what leases need from KAI."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.core.model import (
    Cluster,
    Lease,
    Order,
    State,
)
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.kube.rules.claims import claimants, claimed_milli, full_nodes
from jupyter_gpushare.kube.rules.demand import Demands, demands
from jupyter_gpushare.kube.rules.seats import (
    Demand,
    Request,
    SeatClass,
    Terms,
    check_project,
    counted_centi,
    request,
    return_is_certain,
    terms,
)
from tests.core.build import ASLEEP, GIB, NOW, build, cluster, device, project, train

ONE_EACH = [device(0, node="n0"), device(1, node="n1")]  # two nodes with one GPU each
NODES = frozenset({"n0", "n1"})
TRAIN_0 = Terms("p-train", "gpushare-train-0", "preemptible")


def classes(c: Cluster, sleepable: frozenset[str] = NODES, now: float = NOW) -> dict[str, str]:
    return {lease: d.seat_class.value for lease, d in demands(c, sleepable, now).by_lease.items()}


class TestSize:
    def test_a_part_of_a_gpu_is_asked_for_as_it_is(self):
        assert request(Size(250), []).fraction == "0.25"
        assert request(Size(333), []) == Request(fraction_milli=333)
        assert request(Size(125), []).fraction == "0.125"

    def test_whole_gpus_are_a_number_of_gpus(self):
        assert request(Size(1000), []) == Request(gpus=1)
        assert request(Size(1000, 4), []) == Request(gpus=4)

    def test_memory_is_asked_for_with_its_part_of_the_reserve(self):
        reserving = device(0, reserve_bytes=8 * GIB)
        assert request(Size(memory_bytes=36 * GIB), [reserving]) == Request(memory_mib=40 * 1024)
        assert request(Size(memory_bytes=36 * GIB), []) == Request(memory_mib=36 * 1024)
        broken = device(1, reserve_bytes=80 * GIB)
        assert request(Size(memory_bytes=36 * GIB), [reserving, broken]) == Request(memory_mib=40 * 1024)

    @given(st.integers(1, 80 * GIB - 1), st.integers(1, 8), st.integers(0, GIB))
    def test_as_many_sizes_as_fit_the_requests_fit_what_leases_get(self, bytes_, count, reserve):
        gpu = device(0, reserve_bytes=reserve)
        asked = request(Size(memory_bytes=bytes_), [gpu]).memory_mib
        if count * asked <= gpu.memory_bytes >> 20:
            assert count * bytes_ <= gpu.grantable_bytes

    def test_what_kai_takes_for_nothing_is_refused(self):
        assert request(Size(15), []) == Request(fraction_milli=15)
        with pytest.raises(InvalidRequest, match=r"0\.014 GPU is too small"):
            request(Size(14), [])
        with pytest.raises(InvalidRequest, match="MIG"):
            request(Size(1000, profile="1g.10gb"), [])

    def test_sizes_are_counted_as_kai_counts_them_or_more(self):
        for milli in range(1, 1001):
            kai = math.floor(milli / 1000 * 100 + 0.5)  # Go's math.Round of a positive number
            assert kai <= counted_centi(Size(milli), []) <= milli / 10 + 0.5
        assert counted_centi(Size(125), []) == 13
        assert counted_centi(Size(1000, 3), []) == 300
        assert counted_centi(Size(memory_bytes=20 * GIB), [device(0)]) == 25
        assert counted_centi(Size(memory_bytes=20 * GIB), []) == 100


class TestNames:
    @pytest.mark.parametrize("name", ["a", "vision", "team-2", "a" * 57])
    def test_a_project_can_be_a_queue(self, name):
        assert check_project(name) == name

    @pytest.mark.parametrize(
        "name", ["", "Team", "a.b", "-a", "a-", "2a", "a" * 58, "gpushare-idle", "ä", "a\n"]
    )
    def test_a_name_that_is_no_queue_is_refused(self, name):
        with pytest.raises(InvalidRequest, match="name of a queue"):
            check_project(name)

    def test_terms_of_each_standing(self):
        demand = Demand(lease="x", project="p", seat_class=SeatClass.TRAIN, size=Size(1000), level=2)
        assert [terms(replace(demand, seat_class=seat_class)) for seat_class in SeatClass] == [
            Terms("p-build", "gpushare-session", "non-preemptible"),
            Terms("gpushare-return-sessions", "gpushare-session", "non-preemptible"),
            Terms("p-train", "gpushare-borrowed", "preemptible"),
            Terms("p-train", "gpushare-train-2", "preemptible"),
            Terms("gpushare-idle-sessions", "gpushare-idle", "preemptible"),
            Terms("gpushare-yield", "gpushare-yield", "preemptible"),
        ]


class TestClaims:
    def test_sessions_are_guaranteed_up_to_the_quota_asleep_included(self):
        sleeper = build("a", 500, "0", state=ASLEEP, granted_at=1)
        c = cluster(
            sleeper, build("b", 500, "0", granted_at=2), build("c", 500), gpus=2, projects=[project("p", 1)]
        )
        assert claimants(c) == {"a", "b"}

    def test_a_later_session_takes_no_guarantee_away(self):
        borrowed = build("old", 750, "0", granted_at=1, borrowed=True)
        c = cluster(borrowed, build("new", 500, "1", granted_at=2), gpus=2, projects=[project("p", 1)])
        assert claimants(c) == {"new"}

    def test_a_device_is_guaranteed_once_though_another_project_has_quota_left(self):
        sleeper = build("a", 1000, "0", state=ASLEEP, granted_at=1, project="p")
        guest = build("b", 1000, "0", granted_at=2, borrowed=True, project="q")
        projects = [project("p", 1), project("q", 1)]
        assert claimants(cluster(sleeper, guest, gpus=2, projects=projects)) == {"a"}
        beside = replace(guest, devices=("gpu1",))
        assert claimants(cluster(sleeper, beside, gpus=2, projects=projects)) == {"a", "b"}

    def test_eight_eighths_exceed_one_gpu_as_kai_counts_them(self):
        c = cluster(*(build(f"b{n}", 125, "0", granted_at=n) for n in range(8)))
        assert claimants(c) == {f"b{n}" for n in range(7)}

    def test_ended_sessions_jobs_and_unknown_projects_have_none(self):
        c = cluster(
            build("stops", 500, "0", state=State.STOPPING),
            train("job", 500, "0"),
            build("stray", 500, project="unknown"),
        )
        assert claimants(c) == frozenset()

    def test_guarantees_fill_nodes(self):
        c = cluster(build("a", 750, "0", state=ASLEEP), gpus=ONE_EACH, projects=[project("p", 2)])
        claimed = claimed_milli(c, {"a"})
        assert claimed == {"gpu0": 750, "gpu1": 0}
        assert full_nodes(c, Size(250), claimed) == ()
        assert full_nodes(c, Size(500), claimed) == ("n0",)
        assert full_nodes(c, Size(1000, 2), claimed) == ("n0", "n1")

    def test_a_guarantee_outlives_the_inventory_of_its_device(self):
        assert claimed_milli(cluster(build("a", 750, "7")), {"a"}) == {"gpu0": 0, "gpu7": 750}

    def test_which_returns_are_certain(self):
        several = [device(0), device(1)]
        assert return_is_certain(build("a", 250, "0"), [device(0)])
        assert not return_is_certain(build("a", 250, "0"), several)
        assert return_is_certain(build("a", 1000, "0 1"), several)
        assert not return_is_certain(build("a", 1000, "0 1"), ONE_EACH)
        assert not return_is_certain(build("a", 1000, "5"), several)


class TestDemands:
    def test_sessions_within_and_beyond_the_guarantee_and_jobs(self):
        borrowed = build("b", 1000, "1", borrowed=True)
        c = cluster(build("a", 1000, "0"), borrowed, train("j", 1000), gpus=2, projects=[project("p", 1)])
        assert classes(c) == {"a": "session", "b": "borrowed", "j": "train"}

    def test_a_new_session_keeps_off_nodes_that_are_full_of_guarantees(self):
        sleeper = build("a", 750, "0", state=ASLEEP)
        c = cluster(sleeper, build("new", 500), gpus=ONE_EACH, projects=[project("p", 2)])
        assert demands(c, NODES, NOW).by_lease == {
            "new": Demand(
                lease="new", project="p", seat_class=SeatClass.SESSION, size=Size(500), not_nodes=("n0",)
            )
        }

    def test_a_lease_with_processes_is_bound_to_their_node(self):
        c = cluster(build("a", 500, "1"), train("j", 1000, "0"), build("lost", 500, "9"), gpus=ONE_EACH)
        assert {x: d.node for x, d in demands(c, NODES, NOW).by_lease.items()} == {
            "a": "n1",
            "j": "n0",
            "lost": "",
        }

    @pytest.mark.parametrize("state", State)
    def test_a_job_needs_a_seat_until_it_ends_and_a_session_while_it_is_awake(self, state):
        is_over = state in (State.STOPPING, State.RELEASED, State.FAILED)
        is_asleep = state in (State.SUSPENDING, State.SUSPENDED)
        c = cluster(build("a", 500, "0", state=state), train("j", 500, "0", state=state), gpus=ONE_EACH)
        assert ("a" in classes(c), "j" in classes(c)) == (not is_over and not is_asleep, not is_over)

    def test_cancelled_leases_need_none(self):
        assert classes(cluster(train("j", 500, cancelled=True), build("b", 500, "0", cancelled=True))) == {}

    def test_an_idle_session_that_is_due_is_evictable(self):
        c = cluster(build("a", 500, "0", idle_s=600))
        assert classes(c) == {"a": "idle"}
        early = cluster(build("a", 500, "0", idle_s=599))
        assert classes(early) == {"a": "session"}
        assert demands(early, NODES, NOW).next_at == NOW + 1

    def test_nothing_is_lendable_where_no_helper_answers(self):
        assert classes(cluster(build("a", 500, "0", idle_s=600)), frozenset()) == {"a": "session"}

    def test_an_idle_session_stays_where_its_return_is_not_certain(self):
        assert classes(cluster(build("a", 500, "0", idle_s=600), gpus=2)) == {"a": "session"}
        both = cluster(build("a", 1000, "0 1", idle_s=600), gpus=2)
        assert classes(both) == {"a": "idle"}

    def test_host_memory_bounds_what_is_lendable_on_each_node(self):
        def using(id: str, on: str, idle_s: float, **more: Any) -> Lease:
            return build(id, 250, on, idle_s=idle_s, used_bytes=10 * GIB, **more)

        c = cluster(
            using("first", "0", 700), using("second", "0", 650), using("third", "1", 650),
            build("parked", 250, "0", state=ASLEEP, saved_bytes=10 * GIB),
            build("strayed", 250, "8", state=ASLEEP, saved_bytes=10 * GIB),
            gpus=ONE_EACH, host_budget_bytes=20 * GIB,
        )  # fmt: skip
        assert classes(c) == {"first": "idle", "second": "session", "third": "idle"}

    def test_a_wanted_session_returns_to_its_node(self):
        wanted = build("a", 500, "1", state=ASLEEP, wanted=True)
        c = cluster(wanted, gpus=ONE_EACH)
        assert demands(c, NODES, NOW).by_lease["a"] == Demand(
            lease="a", project="p", seat_class=SeatClass.RETURN, size=Size(500), node="n1"
        )
        back = cluster(replace(wanted, state=State.RESUMING), gpus=ONE_EACH)
        assert demands(back, NODES, NOW).by_lease["a"].seat_class is SeatClass.SESSION
        later = cluster(replace(wanted, retry_at=NOW + 5))
        assert demands(later, NODES, NOW) == Demands({}, NOW + 5)

    def test_guests_yield_to_a_returning_owner_on_its_devices_only(self):
        owner = build("owner", 1000, "0", state=ASLEEP, wanted=True)
        here, there = train("here", 500, "0"), train("there", 1000, "1")
        borrower = build("borrower", 500, "0", borrowed=True, project="q")
        quotas = [project("p", 1), project("q", 0)]
        c = cluster(owner, here, there, borrower, gpus=ONE_EACH, projects=quotas)
        assert classes(c) == {"owner": "return", "here": "yield", "there": "train", "borrower": "yield"}
        withdrawn = replace(c, leases=(replace(owner, wanted=False), here, there, borrower))
        assert classes(withdrawn) == {"here": "train", "there": "train", "borrower": "borrowed"}

    def test_nothing_yields_where_enough_is_free_or_being_released(self):
        owner = build("owner", 500, "0", state=ASLEEP, wanted=True)
        assert classes(cluster(owner, train("j", 500, "0"))) == {"owner": "return", "j": "train"}
        leaving = train("j", 1000, "0", state=State.SUSPENDING)
        assert classes(cluster(owner, leaving)) == {"owner": "return", "j": "train"}

    def test_an_owner_without_a_guarantee_makes_no_lease_yield(self):
        owner = build("owner", 1000, "0", state=ASLEEP, wanted=True, borrowed=True)
        c = cluster(owner, train("j", 1000, "0"), projects=[project("p", 0)])
        assert classes(c) == {"owner": "borrowed", "j": "train"}

    def test_a_neighbour_with_a_guarantee_does_not_yield(self):
        owner = build("owner", 500, "0", state=ASLEEP, wanted=True)
        c = cluster(owner, build("neighbour", 500, "0"), train("j", 500, "0"))
        assert classes(c) == {"owner": "return", "neighbour": "session", "j": "yield"}

    def test_a_job_has_the_class_of_its_las_queue(self):
        thresholds = {"las_thresholds_gpu_s": (100.0, 200.0)}
        running = train("j", 1000, "0", attained_gpu_s=60.0, attained_at=NOW - 10)

        def level(at: float, **more: Any) -> tuple[int, float | None]:
            found = demands(cluster(running, **thresholds | more), NODES, at)
            return found.by_lease["j"].level, found.next_at

        assert level(NOW) == (0, NOW + 30)
        assert level(NOW + 30) == (1, NOW + 130)
        assert level(NOW + 130) == (2, None)
        assert level(NOW + 130, order=Order.FIFO) == (0, None)
        starved = train("j", 1000, attained_gpu_s=150.0, waits_since_at=NOW - 50)
        guarded = cluster(starved, starvation_guard_s=50.0, min_run_s=1.0, **thresholds)
        assert demands(guarded, NODES, NOW).by_lease["j"].level == 0

    def test_a_job_waits_for_its_retry(self):
        pending, parked = (
            train("j", 1000, retry_at=NOW + 3),
            train("s", 1000, "0", state=ASLEEP, retry_at=NOW + 2),
        )
        assert demands(cluster(pending, parked), NODES, NOW) == Demands({}, NOW + 2)
        running = train("r", 1000, "0", retry_at=NOW + 3)
        assert classes(cluster(running)) == {"r": "train"}

    def test_a_job_leaves_a_node_out_that_had_no_capacity_for_its_server(self):
        job = train("j", 500, avoids=(("n1", NOW + 9), ("n0", NOW + 5), ("n2", NOW)))
        c = cluster(job, gpus=ONE_EACH)

        def asks(at: float) -> tuple[tuple[str, ...], float | None]:
            found = demands(c, NODES, at)
            return found.by_lease["j"].not_nodes, found.next_at

        assert asks(NOW) == (("n0", "n1"), NOW + 5)
        assert asks(NOW + 5) == (("n1",), NOW + 9)
        assert asks(NOW + 9) == ((), None)
        there = replace(c, leases=(replace(job, state=State.RUNNING, devices=("gpu0",), held_milli=500),))
        assert demands(there, NODES, NOW).by_lease["j"].not_nodes == ()

    def test_a_job_that_does_not_borrow_asks_within_the_quota_only(self):
        sleeper = build("a", 500, "0", state=ASLEEP)
        first = train("first", 500, borrow=False, submitted_at=1, queued_at=1)
        second = train("second", 500, borrow=False, submitted_at=2, queued_at=2)
        c = cluster(sleeper, second, first, projects=[project("p", 1)])
        assert classes(c) == {"first": "train"}
        running = replace(first, state=State.RUNNING, devices=("gpu0",), held_milli=500)
        assert classes(replace(c, leases=(sleeper, second, running))) == {"first": "train"}
        assert classes(cluster(train("j", 500, "0", borrow=False), projects=[])) == {"j": "train"}
        assert classes(cluster(train("j", 500, borrow=False), projects=[])) == {}
