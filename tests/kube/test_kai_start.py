"""Starts of sessions that KAI decides about at once and that can begin only later, with a model of KAI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from jupyter_gpushare.broker.engine.contract import StartPhase
from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.core.model import Grant, Kind, Lease, Project, State, Why
from jupyter_gpushare.kube.rules.seats import Seating
from tests.kube.bed import NS, Bed, kube_bed
from tests.kube.kai_broker import Broker, objects
from tests.kube.rbac import Rights

VISION, NLP = Project(name="vision", quota_milli=1000), Project(name="nlp", quota_milli=0)
PLACE_S = 1.0  # KAI decides within 0.1 s, on a machine that does nothing else
# So long nothing may happen that would happen once `PLACE_S` has passed.
QUIET_S = 1.5 * PLACE_S


@asynccontextmanager
async def one_gpu(*projects: Project, place_s: float = PLACE_S) -> AsyncIterator[Broker]:
    async with kube_bed({"n0": ("GPU-0",)}, projects or (VISION, NLP)) as bed:
        bed.engine.starting.place_s = place_s
        yield Broker(bed, *(projects or (VISION, NLP)))


@asynccontextmanager
async def lent_to_a_job(place_s: float = PLACE_S) -> AsyncIterator[Broker]:
    """A node with its GPU lent to a job of another project, which ends only in rounds of the broker."""
    async with one_gpu(place_s=place_s) as broker:
        broker.job("j")
        await broker.until(lambda: broker.state("j") is State.RUNNING)
        yield broker


def begun(broker: Broker, id: str, milli: int = 1000) -> asyncio.Task[Grant | Explanation]:
    return asyncio.create_task(broker.session(id, milli=milli))


def phase(broker: Broker, id: str) -> StartPhase | None:
    found = broker.engine.start_progress(id)
    return None if found is None else found.phase


async def stays(condition: Callable[[], Any]) -> None:
    """Fail where a condition does not hold for `QUIET_S`."""
    until = asyncio.get_running_loop().time() + QUIET_S
    while asyncio.get_running_loop().time() < until:
        assert condition()
        await asyncio.sleep(0.02)


async def evicted(bed: Bed) -> None:
    """Return once KAI evicts the job, and the engine has heard of it."""
    await bed.until(lambda: any(s.seating is Seating.LEAVING for s in bed.seats.seats().get("j", ())))


def leaves(bed: Bed, lease: str) -> bool:
    (group,) = bed.seats_of(lease)
    return "deletionTimestamp" in bed.store.get("pods", NS, group["metadata"]["name"])["metadata"]


async def given_up(start: asyncio.Task[Any]) -> None:
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start


class TestLentGpu:
    async def test_a_start_waits_until_the_job_on_its_gpu_has_ended(self):
        async with lent_to_a_job() as broker:
            start = begun(broker, "a")
            await evicted(broker.bed)
            await stays(lambda: not start.done())
            assert phase(broker, "a") is StartPhase.FREEING
            progress = broker.engine.start_progress("a")
            assert progress is not None
            assert progress.within_s is not None
            assert 0 < progress.within_s <= broker.bed.site.grace_s + 1
            await broker.until(start.done)
            assert isinstance(start.result(), Grant)
            assert len(broker.bed.kai.evicted) == 1

    async def test_a_refused_start_keeps_its_seat_and_the_next_try_evicts_no_job_again(self):
        async with lent_to_a_job() as broker:
            broker.engine.starting.seat_s = QUIET_S
            refused = await broker.session("a")
            assert isinstance(refused, Explanation)
            await stays(lambda: broker.bed.seats_of("a") and leaves(broker.bed, "j"))
            assert refused.why is Why.AWAITING_RELEASE
            broker.engine.starting.seat_s = 20.0
            start = begun(broker, "b")
            await stays(lambda: not start.done())
            await broker.until(start.done)
            assert isinstance(start.result(), Grant)
            await broker.until(lambda: not broker.bed.seats_of("a"))
            assert len(broker.bed.kai.evicted) == 1

    async def test_a_cancelled_start_keeps_its_seat_until_the_eviction_has_ended(self):
        async with lent_to_a_job() as broker:
            start = begun(broker, "a")
            await evicted(broker.bed)
            await given_up(start)
            await broker.engine.settle(broker.cluster, broker.now)
            await stays(lambda: broker.bed.seats_of("a"))
            await broker.until(lambda: not broker.bed.seats_of("a"))
            await broker.until(lambda: broker.state("j") is State.RUNNING)  # the GPU is free again
            assert len(broker.bed.kai.evicted) == 1

    async def test_the_third_try_and_another_broker_find_what_is_there(self):
        async with lent_to_a_job() as broker:
            bed = broker.bed
            for id in ("a", "b"):
                start = begun(broker, id)
                await bed.until(lambda id=id: phase(broker, id) is StartPhase.FREEING)
                await given_up(start)
            await bed.restart_engine()
            bed.engine.starting.place_s = PLACE_S
            await bed.until(lambda: bed.seats.is_known)
            await broker.engine.settle(broker.cluster, broker.now)
            await stays(lambda: bed.seats_of("b"))
            start = begun(broker, "c")
            await broker.bed.until(lambda: phase(broker, "c") is StartPhase.FREEING)
            await stays(lambda: not start.done())
            await broker.until(start.done)
            assert isinstance(start.result(), Grant)
            assert len(bed.kai.evicted) == 1

    async def test_a_start_of_another_size_takes_nothing_over(self):
        async with lent_to_a_job() as broker:
            first = begun(broker, "a")
            await evicted(broker.bed)
            await given_up(first)
            second = begun(broker, "b", milli=500)
            await stays(lambda: broker.bed.seats_of("a") and not leaves(broker.bed, "a"))
            await given_up(second) if not second.done() else second.result()
            assert len(broker.bed.kai.evicted) == 1

    @pytest.mark.model
    async def test_a_refusal_that_kai_never_takes_back_is_none_once_it_evicts(self):
        async with lent_to_a_job(place_s=20) as broker:
            bed = broker.bed
            bed.kai.stop()
            bed.engine.starting.stands_s = 60.0
            start = begun(broker, "a")
            await bed.said_no("a")
            bed.kai.go_on()
            await bed.until(lambda: phase(broker, "a") is StartPhase.FREEING)
            await broker.until(start.done)
            assert isinstance(start.result(), Grant)

    async def test_a_start_gets_what_another_seat_leaves_behind(self):
        """KAI promises it the capacity without a word, as it evicts no seat for it."""
        async with one_gpu() as broker:
            await broker.session("old")
            del broker.leases["old"]  # its memory is still on the device
            await broker.engine.settle(broker.cluster, broker.now)
            await broker.bed.until(lambda: leaves(broker.bed, "old"))
            start = begun(broker, "new")
            await stays(lambda: not start.done())
            broker._hold()
            assert isinstance(await start, Grant)
            assert broker.bed.kai.evicted == []

    async def test_a_start_is_answered_before_the_hub_gives_it_up(self):
        async with lent_to_a_job() as broker:
            broker.engine.starting.seat_s = 3600.0
            lease = Lease(id="a", project="vision", kind=Kind.BUILD, size=broker.leases["j"].size)
            answer = await broker.engine.admit(broker.cluster, lease, broker.now, within_s=QUIET_S)
            assert isinstance(answer, Explanation)
            assert answer.why is Why.AWAITING_RELEASE


class TestBinding:
    @pytest.mark.model
    @pytest.mark.parametrize("slow", ["reservation pod", "binder"])
    async def test_the_first_part_of_a_gpu_waits_for_its_reservation(self, slow: str):
        async with one_gpu() as broker:
            bed = broker.bed
            if slow == "binder":
                bed.kai.binder.works = False
            else:
                bed.nodes.reserves = False
            start = begun(broker, "a", milli=500)
            await bed.until(lambda: list(bed.store.all("bindrequests")))
            await stays(lambda: not start.done())
            assert phase(broker, "a") is StartPhase.RESERVING
            bed.kai.binder.works = bed.nodes.reserves = True
            granted = await start
            assert isinstance(granted, Grant)
            assert granted.devices == ("GPU-0",)

    @pytest.mark.model
    async def test_a_gpu_that_is_never_reserved_refuses_the_start_and_nothing_is_left(self):
        async with one_gpu() as broker:
            broker.bed.nodes.reserves = False
            broker.engine.starting.seat_s = QUIET_S
            refused = await broker.session("a", milli=500)
            assert isinstance(refused, Explanation)
            assert refused.why is Why.DEVICE_BROKEN
            await broker.until(lambda: not objects(broker.bed))
            await broker.bed.until(lambda: not list(broker.bed.store.all("pods")))
            await broker.bed.until(lambda: not list(broker.bed.store.all("bindrequests")))

    @pytest.mark.model
    async def test_a_node_may_connect_a_seat_before_the_news_of_its_pod(self):
        async with one_gpu(place_s=20) as broker:
            bed, binder = broker.bed, broker.bed.kai.binder
            binder.works = False
            start = begun(broker, "a")
            await bed.until(lambda: phase(broker, "a") is StartPhase.RESERVING)
            bed.server.faults.frozen.clear()
            binder.works = True
            await bed.until(lambda: bed.nodes.devices)
            await asyncio.sleep(0.2)  # the engine has looked
            assert not start.done()
            bed.server.faults.frozen.set()
            assert isinstance(await start, Grant)

    @pytest.mark.model
    async def test_without_the_right_to_see_what_kai_binds_sessions_start(self):
        """As after an upgrade of the broker alone: the decision is seen when the pod is bound."""
        everywhere = [("*", "*", resource) for resource in ("pods", "podgroups", "queues", "nodes")]
        rights = Rights.granting([], everywhere, NS)
        async with kube_bed({"n0": ("GPU-0",)}, (VISION, NLP), rights=rights) as bed:
            assert isinstance(await Broker(bed).session("a", milli=500), Grant)
            assert bed.engine.trouble() == ()
        assert {ask.resource for ask in rights.refused} == {"bindrequests"}

    @pytest.mark.model
    async def test_a_seat_that_kai_writes_to_is_taken_over_all_the_same(self):
        async with lent_to_a_job(place_s=20) as broker:
            bed, first = broker.bed, begun(broker, "a")
            await evicted(bed)
            await bed.until(lambda: phase(broker, "a") is StartPhase.FREEING)
            await given_up(first)
            (group,) = bed.seats_of("a")
            second = begun(broker, "b")  # takes the present version of the pod for the newest
            change = {"metadata": {"annotations": {"other": "1"}}}
            bed.store.patch("pods", NS, group["metadata"]["name"], change)
            await bed.until(lambda: bed.seats_of("b"))
            await broker.until(second.done)
            assert isinstance(second.result(), Grant)
            assert len(bed.kai.evicted) == 1
