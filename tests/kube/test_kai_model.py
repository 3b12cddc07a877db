"""The model of KAI, on the queues and seats that we create: what each rule of ours rests on."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import convert

from jupyter_gpushare.core.model import Project
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.kube.cluster.objects import (
    Pod,
    PodGroup,
    SeatPod,
    pod_group,
    pod_group_patch,
    seat_pod,
)
from jupyter_gpushare.kube.cluster.queues import priority_classes, queues
from jupyter_gpushare.kube.rules.seats import Demand, SeatClass, counted_centi, request, terms
from tests.kube.kai_binder import RESERVATION_S
from tests.kube.kai_model import STUCK_S, Kai
from tests.kube.kubelet import RESERVATIONS, node_body, reserve
from tests.kube.real_engine import RealKai, running
from tests.kube.real_store import RealStore
from tests.kube.store import Store

NS = "gpushare"
HALF, WHOLE = Size(500), Size(1000)
GRACE_S = 5
MIN_RUN_S = 40


class World:
    """Nodes, queues and a scheduler, without processes: a seat runs once it is bound."""

    def __init__(
        self, *nodes: int, seed: int = 0, min_run_s: float = 0, **quotas: float | tuple[float, float]
    ) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)
        self.store: Store | RealStore
        self.kai: Kai | RealKai
        if engine := running():
            server = engine.cluster()
            self.store, self.kai = server.store, server.kai
        else:
            self.store = Store(now=lambda: self.time)
            self.kai = Kai(self.store, seed=seed, now=lambda: self.time)
        for n, gpus in enumerate(nodes):
            self.store.create("nodes", "", node_body(f"n{n}", gpus))
        projects = []
        for name, numbers in quotas.items():
            quota, limit = numbers if isinstance(numbers, tuple) else (numbers, None)
            most = None if limit is None else round(limit * 1000)
            projects.append(Project(name=name, quota_milli=round(quota * 1000), limit_milli=most))
        for queue in queues(projects, min_run_s):
            self.store.create("queues", "", queue)
        for one in priority_classes(3):
            self.store.create("priorityclasses", "", one)

    def seat(self, name: str, project: str, seat_class: SeatClass, size: Size = WHOLE, **more: Any) -> None:
        self.time += timedelta(seconds=1)
        site = SeatPod(image="seat", grace_s=GRACE_S)
        demand = Demand(lease=name, project=project, seat_class=seat_class, size=size, **more)
        self.store.create("podgroups", NS, pod_group(name, demand, 1))
        self.store.create("pods", NS, seat_pod(name, demand, request(size, []), site, 1))

    def later(self, seconds: float) -> None:
        """Let time pass: on the model at once."""
        self.time += timedelta(seconds=seconds)
        if running():
            time.sleep(seconds)

    def retarget(self, name: str, project: str, seat_class: SeatClass) -> None:
        to = terms(Demand(lease=name, project=project, seat_class=seat_class, size=WHOLE))
        self.store.patch("podgroups", NS, name, pod_group_patch(to, 1))

    def cycles(self, count: int = 3) -> dict[str, str]:
        """Let it schedule; the state of each seat: its node, ``leaving``, or why it waits."""
        found, changed_at = {"": ""}, time.monotonic()
        while count > 0 or time.monotonic() - changed_at < self.kai.idle_s:
            count -= 1
            self.kai.cycle()
            self._run_pods()
            states = {pod["metadata"]["name"]: self._state(pod) for pod in self.store.all("pods", NS)}
            if states != found:
                found, changed_at = states, time.monotonic()
            time.sleep(self.kai.idle_s / 100)
        return dict(sorted(found.items()))

    def _run_pods(self) -> None:
        for pod in self.store.all("pods"):
            meta = pod["metadata"]
            if meta["namespace"] == RESERVATIONS:
                reserve(self.store, pod, ["GPU"])
            elif pod["spec"].get("nodeName") and pod["status"]["phase"] == "Pending":
                body = {"status": {"phase": "Running"}}
                self.store.patch("pods", meta["namespace"], meta["name"], body, part="status")

    def _state(self, pod: dict[str, Any]) -> str:
        if "deletionTimestamp" in pod["metadata"]:
            return "leaving"
        group = self.store.get("podgroups", NS, pod["metadata"]["name"])
        said = group.get("status", {}).get("schedulingConditions", [])
        return pod["spec"].get("nodeName") or (said[0]["reasons"][0]["reason"] if said else "waits")

    def gone(self, name: str) -> None:
        """The seat has ended: what its node's kubelet says then."""
        self.store.delete("pods", NS, name, grace_s=0)
        self.store.delete("podgroups", NS, name)


@pytest.mark.parametrize(("size", "fitting"), [(HALF, 2), (Size(333), 3)], ids=["halves", "thirds"])
def test_as_many_parts_as_fit_share_a_gpu_and_one_more_waits(size: Size, fitting: int):
    world = World(1, vision=2)
    for n in range(fitting + 1):
        world.seat(f"s{n}", "vision", SeatClass.SESSION, size)
    assert sorted(world.cycles().values()) == ["PodSchedulingErrors", *["n0"] * fitting]


def test_a_session_beyond_the_quota_is_refused_and_a_borrower_is_not():
    world = World(2, vision=1)
    world.seat("s0", "vision", SeatClass.SESSION)
    world.cycles()
    world.seat("s1", "vision", SeatClass.SESSION)
    world.seat("b", "vision", SeatClass.BORROWED)
    assert world.cycles() == {"s0": "n0", "s1": "NonPreemptibleOverQuota", "b": "n0"}


def test_a_project_at_its_limit_gets_no_more():
    world = World(3, vision=(1, 2))
    for n in range(3):
        world.seat(f"j{n}", "vision", SeatClass.TRAIN)
    assert sorted(world.cycles().values()) == ["OverLimit", "n0", "n0"]


def test_a_missing_queue_is_said():
    world = World(1)
    world.seat("s", "unknown-project", SeatClass.TRAIN)
    assert world.cycles() == {"s": "QueueDoesNotExist"}


def test_a_pinned_seat_and_one_that_avoids_full_nodes():
    world = World(1, 1, vision=4)
    world.seat("pinned", "vision", SeatClass.SESSION, node="n1")
    world.cycles()
    world.seat("avoids", "vision", SeatClass.SESSION, not_nodes=("n0",))
    assert world.cycles() == {"pinned": "n1", "avoids": "PodSchedulingErrors"}


@pytest.mark.parametrize("milli", [125, 250, 333, 500, 100, 750])
def test_what_we_promise_of_a_quota_kai_grants(milli):
    """As many sessions as fit the quota in hundredths are placed, whatever the order of the sums."""
    size = Size(milli)
    count = 300 // counted_centi(size, [])
    for seed in range(1 if running() else 10):
        world = World(8, vision=3, seed=seed)
        for n in range(count):
            world.seat(f"s{n}", "vision", SeatClass.SESSION, size)
        assert set(world.cycles().values()) == {"n0"}


def test_eight_eighths_count_more_than_one_gpu():
    """Binary fractions are not exact for KAI: 1/8 counts 0.13."""
    world = World(2, vision=1)
    for n in range(8):
        world.seat(f"s{n}", "vision", SeatClass.SESSION, Size(125))
    assert sorted(world.cycles().values()) == ["NonPreemptibleOverQuota", *["n0"] * 7]


class TestLend:
    def lent(self, waiting: bool = True, project: str = "nlp", seed: int = 0) -> World:
        world = World(2, vision=1, nlp=1, seed=seed)
        world.seat("idle", "vision", SeatClass.SESSION)
        world.seat("j0", "nlp", SeatClass.TRAIN)
        world.cycles()
        world.retarget("idle", "vision", SeatClass.IDLE)
        if waiting:
            world.seat("j1", project, SeatClass.TRAIN)
        return world

    def test_a_working_session_within_its_quota_is_never_taken(self):
        world = self.lent()
        world.retarget("idle", "vision", SeatClass.SESSION)
        assert world.cycles(30)["idle"] == "n0"
        assert world.kai.evicted == []

    def test_an_idle_session_stays_while_no_lease_waits(self):
        world = self.lent(waiting=False)
        assert world.cycles(30) == {"idle": "n0", "j0": "n0"}
        assert world.kai.evicted == []

    @pytest.mark.parametrize("project", ["vision", "nlp"])
    def test_an_idle_session_leaves_for_a_waiting_job_of_any_project(self, project):
        world = self.lent(project=project)
        assert world.cycles(3) == {"idle": "leaving", "j0": "n0", "j1": "waits"}
        assert world.kai.evicted == ["idle"]
        world.gone("idle")
        assert world.cycles(1) == {"j0": "n0", "j1": "n0"}

    def test_below_its_own_project_an_idle_session_would_be_protected(self):
        world = self.lent()
        world.store.patch("queues", "", "gpushare-idle", {"spec": {"parentQueue": "vision"}})
        assert world.cycles(30)["idle"] == "n0"

    @pytest.mark.parametrize("seed", range(5))
    def test_a_borrower_within_its_quota_yields_to_the_returning_owner(self, seed):
        world = World(1, 1, vision=1, nlp=1, seed=seed)
        world.seat("j", "nlp", SeatClass.TRAIN, node="n0")
        world.seat("other", "vision", SeatClass.TRAIN, node="n1")
        world.cycles()
        world.seat("owner", "vision", SeatClass.RETURN, node="n0")
        assert world.cycles(10)["j"] == "n0"  # KAI never takes it: nlp is below its quota
        world.retarget("j", "nlp", SeatClass.YIELD)
        assert world.cycles(2)["j"] == "leaving"
        assert world.kai.evicted == ["j"]
        world.gone("j")
        assert world.cycles(1) == {"other": "n1", "owner": "n0"}

    def test_a_project_at_its_limit_returns_to_where_its_own_job_yields(self):
        world = World(1, 1, vision=(1, 1), nlp=1)
        world.seat("j", "vision", SeatClass.TRAIN, node="n0")
        world.cycles()
        world.seat("owner", "vision", SeatClass.RETURN, node="n0")
        world.retarget("j", "vision", SeatClass.YIELD)
        assert world.cycles(2)["j"] == "leaving"
        world.gone("j")
        assert world.cycles(1) == {"owner": "n0"}

    def test_idle_seats_of_other_nodes_stay_when_an_owner_returns(self):
        world = World(1, 1, 1, vision=2, nlp=1)
        for n, name in enumerate(("idle1", "idle2")):
            world.seat(name, "nlp", SeatClass.TRAIN, node=f"n{n + 1}")
        world.seat("j", "nlp", SeatClass.TRAIN, node="n0")
        world.cycles()
        for name in ("idle1", "idle2"):
            world.retarget(name, "nlp", SeatClass.IDLE)
        world.retarget("j", "nlp", SeatClass.YIELD)
        world.seat("owner", "vision", SeatClass.RETURN, node="n0")
        world.cycles()
        assert world.kai.evicted == ["j"]

    @pytest.mark.parametrize("seed", range(5))
    def test_a_return_is_placed_before_jobs_of_projects_within_their_quota(self, seed):
        """Its own project is beyond its quota, by a session on another node."""
        world = World(1, 1, vision=1, nlp=1, seed=seed)
        world.seat("j", "nlp", SeatClass.TRAIN, node="n0")
        world.seat("other", "vision", SeatClass.BORROWED, node="n1")
        world.cycles()
        world.seat("waits", "nlp", SeatClass.TRAIN)
        assert world.cycles()["waits"] != "n1"
        world.retarget("j", "nlp", SeatClass.YIELD)
        world.seat("owner", "vision", SeatClass.RETURN, node="n0")
        assert world.cycles()["j"] == "leaving"
        world.gone("j")
        assert world.cycles()["owner"] == "n0"
        world.retarget("owner", "vision", SeatClass.SESSION)
        found = world.cycles()
        assert found.pop("waits") not in ("n0", "n1")
        assert found == {"owner": "n0", "other": "leaving"}
        world.gone("other")
        assert world.cycles() == {"owner": "n0", "waits": "n1"}

    def test_a_return_takes_its_project_beyond_its_limit_rather_than_wait_for_it(self):
        world = World(1, 1, vision=(1, 1), nlp=1)
        world.seat("j", "nlp", SeatClass.TRAIN, node="n0")
        world.seat("own", "vision", SeatClass.TRAIN, node="n1")
        world.cycles()
        world.seat("owner", "vision", SeatClass.RETURN, node="n0")
        world.retarget("j", "nlp", SeatClass.YIELD)
        assert world.cycles()["j"] == "leaving"
        world.gone("j")
        assert world.cycles() == {"own": "n1", "owner": "n0"}


class TestPreempt:
    def test_a_job_of_an_earlier_level_preempts_after_the_minimum_run_time(self):
        world = World(1, vision=1, min_run_s=MIN_RUN_S)
        world.seat("long", "vision", SeatClass.TRAIN, level=1)
        world.cycles()
        world.seat("short", "vision", SeatClass.TRAIN)
        assert world.cycles(5)["long"] == "n0"
        world.later(MIN_RUN_S + 1)
        assert world.cycles(1)["long"] == "leaving"

    def test_jobs_of_one_level_do_not(self):
        world = World(1, vision=1)
        world.seat("one", "vision", SeatClass.TRAIN)
        world.cycles()
        world.seat("two", "vision", SeatClass.TRAIN)
        assert world.cycles(5)["one"] == "n0"


def test_a_session_takes_its_gpu_from_a_job_of_its_own_project():
    world = World(1, vision=1)
    world.seat("j", "vision", SeatClass.TRAIN)
    world.cycles()
    world.seat("s", "vision", SeatClass.SESSION)
    world.cycles(1)
    assert world.kai.evicted == ["j"]


def test_a_stuck_seat_holds_its_gpu_but_no_promise():
    world = World(1, 1, vision=2)
    world.seat("idle", "vision", SeatClass.IDLE, node="n0")
    world.seat("busy", "vision", SeatClass.SESSION, node="n1")
    world.cycles()
    world.seat("j", "vision", SeatClass.TRAIN)
    assert world.cycles()["idle"] == "leaving"
    world.later(GRACE_S + STUCK_S + 1)
    assert world.cycles() == {"idle": "leaving", "busy": "n1", "j": "PodSchedulingErrors"}


def test_a_pod_group_is_known_by_its_name_alone():
    """Why names of seats are not to be guessed: one of another namespace replaces ours.

    Which of the two counts is drawn anew in each cycle, so sooner or later it is the other one.
    """
    world = World(2, vision=1)
    world.seat("s0", "vision", SeatClass.SESSION)
    world.cycles()
    other = Demand(lease="x", project="vision", seat_class=SeatClass.IDLE, size=WHOLE)
    world.store.create("podgroups", "users", pod_group("s0", other, 1))
    world.seat("j", "vision", SeatClass.TRAIN, Size(1000, 2))
    assert any(world.cycles(1)["s0"] == "leaving" for _ in range(30))


def test_sums_of_floats_may_delay_a_reclaim_and_do_not_refuse_it():
    """0.1 + 0.2 + 0.3 depends on the order; the next cycle sums anew."""
    refused = 0
    for seed in range(3 if running() else 40):
        world = World(1, vision=1, nlp=1, seed=seed)
        for n, milli in enumerate((100, 200, 300)):
            world.seat(f"v{n}", "vision", SeatClass.TRAIN, Size(milli))
        world.seat("idle", "nlp", SeatClass.IDLE, Size(400))
        world.cycles()
        world.seat("j", "vision", SeatClass.TRAIN, Size(400))
        world.cycles(1)
        refused += not world.kai.evicted
        world.cycles(20)
        assert world.kai.evicted == ["idle"]
    assert refused or running()  # the model draws the order


@pytest.mark.model
def test_a_pod_is_bound_once_its_bind_request_is_carried_out():
    world = World(1, vision=2)
    world.kai.binder.works = False
    world.seat("s", "vision", SeatClass.SESSION, HALF)
    world.seat("t", "vision", SeatClass.SESSION, HALF)
    assert world.cycles() == {"s": "waits", "t": "waits"}
    chosen = [request["spec"] for request in world.store.all("bindrequests", NS)]
    assert [spec["selectedNode"] for spec in chosen] == ["n0", "n0"]
    assert chosen[0]["selectedGPUGroups"] == chosen[1]["selectedGPUGroups"]
    world.seat("u", "vision", SeatClass.SESSION, HALF)
    assert world.cycles()["u"] == "PodSchedulingErrors"  # what is chosen counts as placed
    world.kai.binder.works = True
    assert world.cycles() == {"s": "n0", "t": "n0", "u": "PodSchedulingErrors"}


@pytest.mark.model
def test_a_reservation_that_names_no_gpu_fails_and_is_tried_again():
    world = World(1, vision=2)
    world.seat("s", "vision", SeatClass.SESSION, HALF)
    world.kai.cycle()
    (first,) = world.store.all("bindrequests", NS)
    world.later(RESERVATION_S + 2)
    world.kai.cycle()
    (failed,) = world.store.all("bindrequests", NS)
    assert (failed["metadata"]["uid"], failed["status"]["phase"]) == (first["metadata"]["uid"], "Failed")
    assert not list(world.store.all("pods", RESERVATIONS))
    world.kai.cycle()
    (second,) = world.store.all("bindrequests", NS)
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert world.cycles() == {"s": "n0"}


@pytest.mark.parametrize("project", ["nlp", "vision"], ids=["preempt", "reclaim"])
def test_an_evicted_pod_says_for_which_group(project: str):
    world, name = World(1, vision=1, nlp=0), f"seat-{'ab' * 16}"
    world.seat("victim", "nlp", SeatClass.TRAIN, level=2)
    world.cycles()
    world.seat(name, *{"nlp": ("nlp", SeatClass.TRAIN), "vision": ("vision", SeatClass.SESSION)}[project])
    assert world.cycles()["victim"] == "leaving"
    pod = convert(world.store.get("pods", NS, "victim"), Pod)
    assert pod.evicted_for == name


def test_a_refusal_is_never_taken_back():
    world = World(1, vision=2)
    world.seat("first", "vision", SeatClass.SESSION)
    world.cycles()
    world.seat("second", "vision", SeatClass.SESSION)
    assert world.cycles()["second"] == "PodSchedulingErrors"
    world.gone("first")
    assert world.cycles() == {"second": "n0"}
    group = convert(world.store.get("podgroups", NS, "second"), PodGroup)
    assert [reason.reason for reason in group.refusals] == ["PodSchedulingErrors"]
