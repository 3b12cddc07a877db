"""`KaiEngine` with a model of KAI: sessions start, idle GPUs are lent and come back."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.core.model import (
    CheckpointMode,
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
from jupyter_gpushare.errors import Conflict, InvalidRequest
from jupyter_gpushare.kube.rules import follow
from tests.kube.bed import NS, Bed, kube_bed
from tests.kube.kai_broker import NLP, VISION, Broker, objects

RETURNS = int(os.environ.get("GPUSHARE_TEST_RETURNS", "5"))


class TestStart:
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
        bed.engine.starting.seat_s = 0.3
        refused = await broker.session("a")
        assert isinstance(refused, Explanation)
        assert refused.why is Why.DEVICE_BROKEN
        await broker.until(lambda: not objects(bed))

    async def test_a_scheduler_that_is_away_refuses_a_start_in_time(self, bed: Bed, broker: Broker):
        bed.kai.stop()
        bed.engine.starting.place_s = 0.3
        assert isinstance(await broker.session("a"), Explanation)
        await broker.until(lambda: not objects(bed))

    async def test_a_refusal_of_one_cycle_is_no_refusal(self, bed: Bed, broker: Broker):
        bed.kai.stop()
        bed.engine.starting.stands_s = 60.0
        starting = asyncio.create_task(broker.session("a"))
        await bed.said_no("a")
        assert not starting.done()
        bed.kai.go_on()
        assert isinstance(await starting, Grant)

    async def test_a_start_that_is_given_up_leaves_nothing(self, bed: Bed, broker: Broker):
        bed.kai.stop()
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

    @pytest.mark.long_form
    @pytest.mark.timeout(1800)
    @pytest.mark.parametrize("survival", [CheckpointMode.SIGTERM, CheckpointMode.SUSPEND])
    async def test_an_idle_gpu_is_lent_and_returns_to_its_owner(
        self, bed: Bed, broker: Broker, survival: CheckpointMode
    ):
        device = await self.idle_beside_a_job(broker)
        for round_ in range(RETURNS):
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
        assert [a.why for a in broker.did if isinstance(a, Resume) and a.lease == "owner"] == [
            Why.WANTED
        ] * RETURNS

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

    async def test_watched_lending_says_what_would_be_lent_to_which_job(self, bed: Bed, broker: Broker):
        await self.idle_beside_a_job(broker)
        broker.set("owner", suspendable=False)
        broker.job("j1")
        await broker.round()
        await bed.quiet()
        assert (broker.queue("owner"), bed.kai.evicted) == ("vision-build", [])
        assert broker.engine.would_suspend(broker.cluster, broker.now) == ()
        broker.set("owner", suspendable=True)  # as in the snapshot that the mode watch makes
        found = broker.engine.would_suspend(broker.cluster, broker.now)
        assert [(action.lease, action.for_lease) for action in found] == [("owner", "j1")]
        bed.sleepable = frozenset()
        assert broker.engine.would_suspend(broker.cluster, broker.now) == ()

    async def test_a_node_without_our_helper_lends_nothing(self, bed: Bed, broker: Broker):
        bed.sleepable = frozenset()
        await self.idle_beside_a_job(broker)
        broker.job("j1")
        await broker.round()
        await bed.quiet()
        assert broker.queue("owner") == "vision-build"
        assert bed.kai.evicted == []


class TestReturns:
    async def test_a_return_on_another_gpu_of_the_node_is_given_up_and_tried_again(
        self, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(follow, "FIRST_PAUSE_S", 1.0)
        guest, owner = Project(name="vision", quota_milli=0), Project(name="nlp", quota_milli=2000)
        async with kube_bed({"n0": ("GPU-0", "GPU-1")}, (guest, owner)) as bed:
            broker = Broker(bed, guest, owner)
            await broker.session("guest")
            (mine,) = broker.leases["guest"].devices
            broker.job("both", size=Size(1000, 2))
            await broker.until(lambda: broker.state("both") is State.RUNNING)
            assert broker.state("guest") is State.SUSPENDED
            del broker.leases["both"]
            await broker.until(lambda: not objects(bed))
            broker.job("there", state=State.RUNNING, devices=(mine,), held_milli=1000)
            bed.seat(broker.leases["there"])
            broker.set("guest", wanted=True)
            await broker.until(lambda: broker.engine.outlook(broker.cluster, broker.now).misplaced)
            assert broker.engine.outlook(broker.cluster, broker.now).why == {"guest": Why.BACKING_OFF}
            broker.job("waits")
            await broker.until(lambda: broker.state("waits") is State.RUNNING)  # the GPU is not blocked
            assert broker.leases["waits"].devices != (mine,)
            assert broker.state("guest") is State.SUSPENDED
            del broker.leases["there"]
            await broker.until(lambda: broker.state("guest") is State.RUNNING)
            assert broker.leases["guest"].devices == (mine,)
            assert broker.engine.outlook(broker.cluster, broker.now).misplaced == {}

    @pytest.mark.parametrize("waiting", [0, 3])
    async def test_no_job_within_its_quota_overtakes_a_return(self, bed: Bed, broker: Broker, waiting: int):
        """What yields asks again at once, and its project has its quota free: the return is placed first."""
        await broker.session("owner")
        (device,) = broker.leases["owner"].devices
        await broker.session("other")  # beyond the quota: KAI compares projects by all that they have
        broker.set("owner", idle_since_at=broker.now - 10_000)
        broker.job("j")
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        for n in range(waiting):
            broker.job(f"waits{n}")
        await broker.until(lambda: len(objects(bed)) == 2 * (2 + waiting))
        broker.set("owner", wanted=True)
        await broker.until(lambda: broker.state("owner") is State.RUNNING)
        await broker.until(lambda: broker.queue("owner") == "vision-build")
        assert broker.leases["owner"].devices == (device,)
        assert [x.lease for x in broker.did if isinstance(x, Grant)] == ["j"]
        # What is left of the quota of its project is beside it: the session beyond quota goes.
        await broker.until(lambda: broker.state("other") is State.SUSPENDED)
        jobs = ["j", *(f"waits{n}" for n in range(waiting))]
        await broker.until(lambda: [broker.state(id) for id in jobs].count(State.RUNNING) == 1)
        assert broker.state("owner") is State.RUNNING

    @pytest.mark.parametrize(
        ("of", "quota", "limit"), [("nlp", 4000, None), ("vision", 3000, 1000)], ids=["quota", "limit"]
    )
    async def test_of_four_nodes_only_the_guest_on_the_owners_gpu_makes_way(
        self, of: str, quota: int, limit: int | None
    ):
        """The guest is within its project's quota, or of the owner's project, which is at its limit."""
        owners = Project(name="vision", quota_milli=1000, limit_milli=limit)
        others = Project(name="nlp", quota_milli=quota)
        async with kube_bed({f"n{n}": (f"GPU-{n}",) for n in range(4)}, (owners, others)) as bed:
            broker = Broker(bed, owners, others)
            await broker.session("owner")
            (device,) = broker.leases["owner"].devices
            beside = [f"j{n}" for n in range(3)]
            for id in beside:
                broker.job(id)
            await broker.until(lambda: {broker.state(id) for id in beside} == {State.RUNNING})
            broker.set("owner", idle_since_at=broker.now - 10_000)
            broker.job("guest", project=of)
            await broker.until(lambda: broker.state("guest") is State.RUNNING)
            assert broker.leases["guest"].devices == (device,)
            (seat,) = (group["metadata"]["name"] for group in bed.seats_of("guest"))
            before = len(bed.kai.evicted)
            broker.set("owner", wanted=True)
            await broker.until(lambda: broker.queue("owner") == "vision-build")
            await bed.quiet()
            assert broker.leases["owner"].devices == (device,)
            assert bed.kai.evicted[before:] == [seat]
            assert {broker.state(id) for id in beside} == {State.RUNNING}


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

    async def test_a_job_whose_server_did_not_fit_starts_on_another_node(self, bed: Bed, broker: Broker):
        broker.job("j")
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        (first,) = {n for n, uuids in bed.nodes.gpus.items() if uuids == broker.leases["j"].devices}
        broker.set("j", state=State.PENDING, devices=(), held_milli=0, avoids=((first, broker.now + 600),))
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        assert broker.leases["j"].devices != bed.nodes.gpus[first]
        await bed.until(lambda: len(bed.seats_of("j")) == 1)

    async def test_a_job_that_avoids_all_nodes_waits_until_it_may_use_one_again(
        self, bed: Bed, broker: Broker
    ):
        until = broker.now + 600
        broker.job("j", avoids=(("n0", until), ("n1", until)))
        await broker.round()
        await bed.until(lambda: bed.seats_of("j"))
        await bed.quiet()
        await broker.round()
        assert broker.state("j") is State.PENDING
        (waits,) = bed.seats_of("j")
        broker.set("j", avoids=(("n0", until), ("n1", broker.now)))
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        assert broker.leases["j"].devices == bed.nodes.gpus["n1"]
        assert bed.seats_of("j") != [waits]

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
