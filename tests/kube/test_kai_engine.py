"""`KaiEngine` with a model of KAI: sessions start, idle GPUs are lent and come back, faults heal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from jupyter_gpushare.backends.kubernetes.objects import EPOCH_ANNOTATION
from jupyter_gpushare.broker.engine import Explanation, JobForecast, Work
from jupyter_gpushare.core.kube.follow import Retarget
from jupyter_gpushare.core.model import (
    Action,
    CheckpointMode,
    Cluster,
    Device,
    Grant,
    Kind,
    Lease,
    Project,
    Requeue,
    Resume,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import Conflict, InvalidRequest, Superseded
from tests.kube.bed import NS, Bed, kube_bed
from tests.waiting import PATIENCE_S

GIB = 1 << 30
VISION, NLP = Project(name="vision", quota_milli=1000), Project(name="nlp", quota_milli=1000)


class Broker:
    """The least of a broker: leases that do what the engine says.

    A suspension frees the device, so that the seat of the lease may end; before that it may not.
    """

    def __init__(self, bed: Bed, *projects: Project) -> None:
        self.bed, self.engine = bed, bed.engine
        self.projects = projects or (VISION, NLP)
        self.leases: dict[str, Lease] = {}
        self.did: list[Action] = []

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def cluster(self) -> Cluster:
        devices = tuple(
            Device(uuid=uuid, memory_bytes=80 * GIB, reserve_bytes=GIB, node=node)
            for node, uuids in self.bed.nodes.gpus.items()
            for uuid in uuids
        )
        return Cluster(devices=devices, projects=self.projects, leases=tuple(self.leases.values()))

    def set(self, id: str, **changes: Any) -> None:
        self.leases[id] = replace(self.leases[id], **changes)

    async def session(self, id: str, project: str = "vision", milli: int = 1000) -> Grant | Explanation:
        lease = Lease(id=id, project=project, kind=Kind.BUILD, size=Size(milli), queued_at=self.now)
        answer = await self.engine.admit(self.cluster, lease, self.now)
        if isinstance(answer, Grant):
            held = {"devices": answer.devices, "held_milli": answer.held_milli, "borrowed": answer.borrowed}
            self.leases[id] = replace(lease, state=State.RUNNING, granted_at=self.now, used_bytes=GIB, **held)
            self._hold()
        return answer

    def job(self, id: str, project: str = "nlp", milli: int = 1000, **more: Any) -> None:
        given = {"queued_at": self.now, "waits_since_at": self.now, "survival": CheckpointMode.SIGTERM}
        self.leases[id] = Lease(id=id, project=project, kind=Kind.TRAIN, size=Size(milli), **given | more)

    async def round(self) -> None:
        cluster = self.cluster
        for action in self.engine.decide(cluster, self.now).actions:
            self._do(action)
        await self.engine.settle(self.cluster, self.now)
        self._hold()

    def _do(self, action: Action) -> None:
        self.did.append(action)
        match action:
            case Grant():
                held = {"devices": action.devices, "held_milli": action.held_milli}
                self.set(action.lease, state=State.RUNNING, granted_at=self.now, **held)
            case Suspend():
                self.set(action.lease, state=State.SUSPENDED, saved_bytes=GIB)
            case Resume():
                self.set(action.lease, state=State.RUNNING, saved_bytes=0, wanted=False, idle_since_at=None)
            case Requeue():
                self.set(action.lease, state=State.PENDING, devices=(), held_milli=0)
        self._check_devices()

    def _check_devices(self) -> None:
        """No device ever holds more than it has."""
        for node, uuids in self.bed.nodes.gpus.items():
            for uuid in uuids:
                held = [x for x in self.leases.values() if x.state is State.RUNNING and uuid in x.devices]
                assert sum(x.held_milli for x in held) <= 1000, (node, uuid, held)

    def _hold(self) -> None:
        """Seats of leases with device memory do not end: each helper sees to that."""
        running = {x.id for x in self.leases.values() if x.state is State.RUNNING}
        groups = self.bed.store.all("podgroups", NS)
        labels = {
            g["metadata"]["name"]: g["metadata"]["labels"]["gpushare.jupyter.org/lease"] for g in groups
        }
        self.bed.nodes.holds = {name for name, lease in labels.items() if lease in running}

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await self.round()
                await asyncio.sleep(0.02)

    def state(self, id: str) -> State:
        return self.leases[id].state

    def queue(self, id: str) -> str:
        return ",".join(g["spec"]["queue"] for g in self.bed.seats_of(id))


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    async with kube_bed({"n0": ("GPU-0",), "n1": ("GPU-1",)}, (VISION, NLP)) as found:
        yield found


@pytest.fixture
def broker(bed: Bed) -> Broker:
    return Broker(bed)


def objects(bed: Bed) -> list[str]:
    return [o["metadata"]["name"] for plural in ("pods", "podgroups") for o in bed.store.all(plural, NS)]


class TestStart:
    async def test_two_halves_start_and_a_third_leaves_nothing(self):
        one = Project(name="vision", quota_milli=2000)
        async with kube_bed({"n0": ("GPU-0",)}, (one,)) as bed:
            broker = Broker(bed, one)
            for id in ("a", "b"):
                granted = await broker.session(id, milli=500)
                assert granted == Grant(id, ("GPU-0",), 500, Why.FREE_CAPACITY)
            there = objects(bed)
            refused = await broker.session("c", milli=500)
            assert refused == Explanation(why=Why.NO_CAPACITY, position=None, free_milli=0)
            await bed.until(lambda: sorted(objects(bed)) == sorted(there))

    async def test_beyond_its_quota_a_session_borrows(self, broker: Broker):
        assert not (await broker.session("a")).borrowed  # type: ignore[union-attr]
        granted = await broker.session("b")
        assert isinstance(granted, Grant)
        assert granted.borrowed
        assert (broker.queue("a"), broker.queue("b")) == ("vision-build", "vision-train")

    async def test_a_second_session_in_a_quota_claimed_by_a_sleeper_is_never_guaranteed(self, broker: Broker):
        await broker.session("sleeper")
        broker.set("sleeper", state=State.SUSPENDED)
        await broker.until(lambda: not broker.bed.seats_of("sleeper"))
        granted = await broker.session("newcomer")
        assert isinstance(granted, Grant)
        assert granted.borrowed

    async def test_a_guarantee_is_only_given_where_it_fits_beside_sleepers(self, bed: Bed):
        two = Project(name="vision", quota_milli=2000)
        bed.store.patch("queues", "", "vision", {"spec": {"resources": {"gpu": {"quota": 2.01}}}})
        bed.store.patch("queues", "", "vision-build", {"spec": {"resources": {"gpu": {"quota": 2.01}}}})
        broker = Broker(bed, two, NLP)
        for id in ("a", "b"):
            await broker.session(id)
            (other,) = {"GPU-0", "GPU-1"} - set(broker.leases["a"].devices)
            broker.set(id, state=State.SUSPENDED)
            await broker.until(lambda id=id: not bed.seats_of(id))
        assert broker.leases["b"].devices == (other,)

    async def test_a_seat_that_never_connects_is_withdrawn(self, bed: Bed, broker: Broker):
        bed.nodes.connects = False
        bed.engine._seat_s = 0.3
        refused = await broker.session("a")
        assert isinstance(refused, Explanation)
        assert refused.why is Why.DEVICE_BROKEN
        await broker.until(lambda: not objects(bed))

    async def test_a_scheduler_that_is_away_refuses_a_start_in_time(self, bed: Bed, broker: Broker):
        bed.schedules = False
        bed.engine._place_s = 0.3
        assert isinstance(await broker.session("a"), Explanation)
        await broker.until(lambda: not objects(bed))

    async def test_a_refusal_of_one_cycle_is_no_refusal(self, bed: Bed, broker: Broker):
        bed.schedules = False
        bed.engine._stands_s = 60.0
        starting = asyncio.create_task(broker.session("a"))
        name = (await bed.until(lambda: bed.seats_of("a")))[0]["metadata"]["name"]
        await bed.until(lambda: len(objects(bed)) == 2)
        said = [{"type": "UnschedulableOnNodePool", "status": "True", "reasons": []}]
        body = {"status": {"schedulingConditions": said}}
        bed.store.patch("podgroups", NS, name, body, part="status")
        await bed.until(lambda: any(s.why for s in bed.seats.seats().get("a", ())))
        assert not starting.done()
        bed.schedules = True
        assert isinstance(await starting, Grant)

    async def test_a_start_that_is_given_up_leaves_nothing(self, bed: Bed, broker: Broker):
        bed.schedules = False
        starting = asyncio.create_task(broker.session("a"))
        await bed.until(lambda: len(objects(bed)) == 2)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await broker.until(lambda: not objects(bed))

    async def test_a_missing_queue_is_named(self, bed: Bed, broker: Broker):
        bed.store.delete("queues", "", "vision-train")
        await bed.until(lambda: "vision-train" not in bed.seats.queues)
        with pytest.raises(Conflict, match="no queue vision-train"):
            await broker.session("a")
        bed.engine.projects((VISION, NLP))
        assert bed.engine.trouble() == ("The cluster has no queue vision-train.",)

    async def test_a_size_or_name_that_kubernetes_has_not_is_refused_before_it_is_sent(
        self, bed: Bed, broker: Broker
    ):
        lease = Lease(id="x", project="vision", kind=Kind.TRAIN, size=Size(1000))
        bed.engine.check_request(broker.cluster, lease)
        for wrong in (
            {"project": "a.b"},
            {"size": Size(9)},
            {"size": Size(1000, profile="1g.10gb")},
            {"size": Size(1000, 3)},
        ):
            with pytest.raises(InvalidRequest):
                bed.engine.check_request(broker.cluster, replace(lease, **wrong))  # type: ignore[arg-type]


class TestLend:
    async def idle_beside_a_job(self, broker: Broker) -> str:
        """An idle session of vision on one node, a job of nlp on the other; the session's device."""
        await broker.session("owner")
        (device,) = broker.leases["owner"].devices
        broker.job("j0")
        await broker.until(lambda: broker.state("j0") is State.RUNNING)
        broker.set("owner", idle_since_at=broker.now - 10_000)
        return device

    async def test_an_idle_session_that_no_lease_waits_for_stays(self, bed: Bed, broker: Broker):
        await self.idle_beside_a_job(broker)
        await broker.until(lambda: broker.queue("owner") == "gpushare-idle-sessions")
        await bed.quiet()
        await broker.round()
        assert broker.state("owner") is State.RUNNING
        assert bed.kai.evicted == []
        broker.set("owner", idle_since_at=None)
        await broker.until(lambda: broker.queue("owner") == "vision-build")

    @pytest.mark.parametrize("survival", [CheckpointMode.SIGTERM, CheckpointMode.SUSPEND])
    async def test_an_idle_gpu_is_lent_and_returns_to_its_owner(
        self, bed: Bed, broker: Broker, survival: CheckpointMode
    ):
        device = await self.idle_beside_a_job(broker)
        for round_ in range(5):
            if not round_:
                broker.job("j1", survival=survival)
            broker.set("owner", idle_since_at=broker.now - 10_000)
            await broker.until(lambda: broker.state("j1") is State.RUNNING)
            assert broker.state("owner") is State.SUSPENDED
            assert broker.leases["j1"].devices == (device,)
            broker.set("owner", wanted=True)
            await broker.until(lambda: broker.state("owner") is State.RUNNING)
            assert broker.leases["owner"].devices == (device,)
            lost = State.SUSPENDED if survival is CheckpointMode.SUSPEND else State.PENDING
            assert broker.state("j1") is lost
            assert broker.state("j0") is State.RUNNING
        assert [a.why for a in broker.did if isinstance(a, Resume) and a.lease == "owner"] == [Why.WANTED] * 5

    async def test_memory_leaves_a_device_before_it_is_granted_again(self, bed: Bed, broker: Broker):
        await self.idle_beside_a_job(broker)
        await broker.until(lambda: broker.queue("owner") == "gpushare-idle-sessions")
        broker.job("j1")
        await broker.engine.settle(broker.cluster, broker.now)
        await bed.until(lambda: bed.kai.evicted)
        await bed.quiet()  # the seat leaves; the helper is not asked
        assert broker.engine.decide(broker.cluster, broker.now).actions == (
            Suspend("owner", Why.OVER_QUOTA, ""),
        )
        await broker.until(lambda: broker.state("j1") is State.RUNNING)

    async def test_the_outlook_says_which_leases_use_lent_capacity(self, broker: Broker):
        device = await self.idle_beside_a_job(broker)
        broker.job("j1")
        await broker.until(lambda: broker.state("j1") is State.RUNNING)
        broker.job("j2")
        outlook = broker.engine.outlook(broker.cluster, broker.now)
        assert outlook.lent == {"owner": ("j1",)}
        assert outlook.claims_milli[device] == 1000
        assert outlook.borrowed == {"j0": True, "j1": True}
        assert outlook.why == {"j2": Why.NO_CAPACITY}
        assert outlook.smaller(broker.leases["j2"]) is None
        (offer,) = outlook.offers("nlp", [Size(500)])
        assert (offer.starts, offer.borrowed, offer.free_milli) == ("no", False, 0)

    async def test_a_node_without_our_helper_lends_nothing(self, bed: Bed, broker: Broker):
        bed.sleepable = frozenset()
        await self.idle_beside_a_job(broker)
        broker.job("j1")
        await broker.round()
        await bed.quiet()
        assert broker.queue("owner") == "vision-build"
        assert bed.kai.evicted == []


class TestJobs:
    async def test_a_demotion_is_one_patch(self, bed: Bed, broker: Broker):
        broker.job("j")
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        await bed.quiet()
        before = len(bed.server.requests)
        broker.set("j", attained_gpu_s=4000.0, attained_at=broker.now)
        await broker.until(lambda: bed.seats_of("j")[0]["spec"]["priorityClassName"] == "gpushare-train-1")
        await bed.quiet()
        changes = [method for method, _ in bed.server.requests[before:] if method != "GET"]
        assert changes == ["PATCH"]

    async def test_why_jobs_wait(self, bed: Bed, broker: Broker):
        for n in range(2):
            broker.job(f"j{n}")
        await broker.until(lambda: {broker.state("j0"), broker.state("j1")} == {State.RUNNING})
        broker.job("waits")
        broker.job("later", retry_at=broker.now + 100)
        broker.job("quota", milli=500, borrow=False, project="elsewhere")
        await broker.round()
        await bed.quiet()
        outlook = broker.engine.outlook(broker.cluster, broker.now)
        assert outlook.why == {"waits": Why.NO_CAPACITY, "later": Why.BACKING_OFF, "quota": Why.QUOTA}
        assert outlook.position["waits"] == 1
        bed.store.patch("queues", "", "nlp", {"spec": {"resources": {"gpu": {"limit": 2.01}}}})
        await bed.until(
            lambda: broker.engine.outlook(broker.cluster, broker.now).why["waits"] is Why.PROJECT_LIMIT
        )

    async def test_a_seat_of_no_lease_is_deleted(self, bed: Bed, broker: Broker):
        bed.seat(Lease(id="stray", project="nlp", kind=Kind.TRAIN, size=Size(1000), devices=("GPU-1",)))
        await broker.until(lambda: not objects(bed))

    async def test_a_seat_deleted_by_hand_is_an_eviction(self, bed: Bed, broker: Broker):
        broker.job("j")
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        (old,) = bed.seats_of("j")
        bed.store.delete("pods", NS, old["metadata"]["name"])
        await broker.until(lambda: broker.did[-1:] == [Requeue("j", Why.OVER_QUOTA, "")])
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        await bed.until(lambda: len(bed.seats_of("j")) == 1)
        assert bed.seats_of("j")[0]["metadata"]["name"] != old["metadata"]["name"]

    async def test_a_change_that_is_refused_holds_no_other_up(self, bed: Bed, broker: Broker):
        broker.job("broken", milli=9)
        broker.job("j")
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        assert any("too small" in sentence for sentence in bed.engine.trouble())


class TestFaults:
    async def test_while_the_api_server_is_silent_nothing_becomes_lendable(self, bed: Bed, broker: Broker):
        await broker.session("owner")
        await bed.quiet()
        bed.server.faults.frozen.clear()
        bed.schedules = False
        await bed.until(lambda: bed.seats.age_s > 10)
        broker.set("owner", idle_since_at=broker.now - 10_000)
        await broker.round()
        assert bed.engine.trouble()[0].startswith("The Kubernetes API server does not answer")
        assert broker.state("owner") is State.RUNNING
        bed.server.faults.frozen.set()
        await broker.until(lambda: broker.queue("owner") == "gpushare-idle-sessions")
        assert bed.engine.trouble() == ()

    async def test_a_busy_api_server_and_cut_watches_heal(self, bed: Bed, broker: Broker):
        bed.server.faults.answers = [(429, {}), (500, {}), (503, {})] * 4
        broker.job("j")
        await broker.round()
        bed.server.cut_watches()
        bed.store.compact()
        bed.server.faults.lose_answers = 2
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        await bed.until(lambda: len(bed.seats_of("j")) == 1)

    async def test_a_newer_broker_ends_this_one(self):
        async with kube_bed({"n0": ("GPU-0",)}, (VISION,)) as bed:
            broker = Broker(bed, VISION)
            await broker.session("a")
            name = bed.seats_of("a")[0]["metadata"]["name"]
            bed.store.patch("podgroups", NS, name, {"metadata": {"annotations": {EPOCH_ANNOTATION: "2"}}})
            await broker.engine.settle(broker.cluster, broker.now)
            (ended,) = await asyncio.gather(bed.engine_task, return_exceptions=True)
            assert isinstance(ended, ExceptionGroup)
            assert ended.subgroup(Superseded) is not None
            with pytest.raises(Superseded):
                bed.engine.decide(broker.cluster, broker.now)
            bed.start_engine()  # for the end of the bed
            bed.epoch = 2

    async def test_a_broker_that_starts_writes_its_epoch_on_every_seat_before_it_acts(
        self, bed: Bed, broker: Broker
    ):
        await broker.session("a")
        await bed.quiet()
        name = bed.seats_of("a")[0]["metadata"]["name"]
        hung = dict(bed.seats._pods.objects), dict(bed.seats._groups.objects), bed.seats
        await bed.restart_engine()
        broker.engine = bed.engine
        asked = len(bed.server.requests)
        broker.job("j")
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        writes = [path for method, path in bed.server.requests[asked:] if method != "GET"]
        assert len([path for path in writes[:2] if path.endswith(name)]) == 2
        for plural in ("pods", "podgroups"):
            assert bed.store.get(plural, NS, name)["metadata"]["annotations"][EPOCH_ANNOTATION] == "2"
        *stale, seats = hung
        seats._pods.objects, seats._groups.objects = stale
        (seat,) = bed.seats.seats()["a"]
        await seats.apply(Retarget(name, replace(seat.terms, queue="gpushare-yield")), ())
        await seats.delete(name)
        assert "deletionTimestamp" not in bed.store.get("pods", NS, name)["metadata"]
        assert broker.queue("a") == "vision-build"

    async def test_a_change_based_on_an_older_version_is_not_made(self, bed: Bed, broker: Broker):
        """What an old broker would do that hung between reading and writing."""
        await broker.session("a")
        await bed.quiet()
        (group,) = bed.seats_of("a")
        name = group["metadata"]["name"]
        bed.server.faults.frozen.clear()
        bed.store.patch("podgroups", NS, name, {"metadata": {"annotations": {"other": "1"}}})
        bed.store.patch("pods", NS, name, {"metadata": {"annotations": {"other": "1"}}})
        stale = dict(bed.seats._pods.objects), dict(bed.seats._groups.objects)
        bed.server.faults.frozen.set()
        await bed.until(lambda: bed.seats._groups.objects[name] != stale[1][name])
        bed.seats._pods.objects, bed.seats._groups.objects = stale
        await bed.seats.delete(name)
        assert "deletionTimestamp" not in bed.store.get("pods", NS, name)["metadata"]

    @pytest.mark.parametrize("requests", range(1, 6))
    async def test_a_broker_that_ends_in_the_middle_leaves_what_the_next_one_finishes(self, requests: int):
        async with kube_bed({"n0": ("GPU-0",), "n1": ("GPU-1",)}, (VISION, NLP)) as bed:
            broker = Broker(bed)
            await broker.session("owner")
            broker.job("j0")
            await broker.until(lambda: broker.state("j0") is State.RUNNING)
            broker.set("owner", idle_since_at=broker.now - 10_000)
            broker.job("j1")
            written = len([m for m, _ in bed.server.requests if m != "GET"])
            async with asyncio.timeout(PATIENCE_S):
                while len([m for m, _ in bed.server.requests if m != "GET"]) < written + requests:
                    await broker.round()
                    await asyncio.sleep(0)
                    if broker.state("j1") is State.RUNNING:
                        break
            await bed.restart_engine()
            broker.engine = bed.engine
            await broker.until(lambda: broker.state("j1") is State.RUNNING)
            broker.set("owner", wanted=True)
            await broker.until(lambda: broker.state("owner") is State.RUNNING)
            await bed.quiet()
            assert [len(bed.seats_of(id)) for id in ("owner", "j0", "j1")] == [1, 1, 1]


class TestQueues:
    async def test_the_cluster_says_the_numbers(self, bed: Bed):
        engine = bed.engine
        assert engine.projects((VISION, NLP)) == (VISION, NLP)
        assert engine.trouble() == ()
        gpu = {"quota": 1.51, "limit": 3.01, "overQuotaWeight": 2}
        bed.store.patch("queues", "", "nlp", {"spec": {"resources": {"gpu": gpu}}})
        bigger = Project(name="nlp", quota_milli=1500, limit_milli=3000, weight=2)
        await bed.until(lambda: engine.projects((VISION, NLP))[1] == bigger)
        assert engine.trouble() == ("The numbers of project nlp differ from those of its Queue.",)
        with pytest.raises(Conflict, match="Queue nlp"):
            engine.set_project(bigger)
        assert engine.forecast(Cluster(devices=(), projects=(), leases=()), 0.0, Work()) == JobForecast()
