"""Unit pools on the model of KAI: two nodes of four GPUs, lent and returned in any order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.core.model import (
    CheckpointMode,
    Grant,
    Kind,
    Lease,
    Project,
    Requeue,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.kube.rules.claims import claimants
from tests.kube.bed import Bed, kube_bed
from tests.kube.kai_broker import Broker

NODES = {"n0": ("GPU-0", "GPU-1", "GPU-2", "GPU-3"), "n1": ("GPU-4", "GPU-5", "GPU-6", "GPU-7")}
UNITS = {"n0": "1", "n1": "2"}
VISION, NLP = Project(name="vision", quota_milli=8000), Project(name="nlp", quota_milli=0)


@asynccontextmanager
async def pools(
    *projects: Project, seed: int = 0, nodes: dict[str, tuple[str, ...]] = NODES, **units: str
) -> AsyncIterator[Broker]:
    """A broker that works, on unit pools."""
    async with kube_bed(nodes, projects or (VISION, NLP), seed, units=units or UNITS) as bed:
        broker = Broker(bed, *(projects or (VISION, NLP)))
        await broker.round()
        async with asyncio.TaskGroup() as group:  # a round that fails ends the test
            working = group.create_task(work(broker))
            yield broker
            working.cancel()


async def work(broker: Broker) -> None:
    while True:
        await broker.round()
        await asyncio.sleep(0.02)


def node_of(bed: Bed, seat: str) -> str:
    """The node on which a seat was, also when it is gone."""
    pods = (x.object for x in reversed(bed.store.history) if x.plural == "pods")
    return next(
        pod["spec"]["nodeName"]
        for pod in pods
        if pod["metadata"]["name"] == seat and "nodeName" in pod["spec"]
    )


def idle(broker: Broker) -> None:
    for lease in list(broker.leases.values()):
        if lease.kind is Kind.BUILD and lease.state is State.RUNNING:
            broker.set(lease.id, idle_since_at=broker.now - 10_000)


def run(broker: Broker, leases: list[str]) -> bool:
    return all(broker.state(lease) is State.RUNNING for lease in leases)


def have_no_seats(bed: Bed, leases: list[str]) -> bool:
    return not any(bed.seats_of(lease) for lease in leases)


async def start(broker: Broker, id: str, size: Size, project: str = "vision") -> Grant:
    answer = await broker.session(id, project, size.fraction_milli, size=size)
    assert isinstance(answer, Grant), answer
    return answer


@pytest.mark.timeout(900)
@pytest.mark.parametrize("turns", [4, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("order", ["sorted", "reversed", None])
async def test_every_return_gets_its_own_gpu_whatever_the_kubelet_hands_out(order: str | None, turns: int):
    """A11 of the design: two nodes of four GPUs, whole GPUs and halves."""
    rng = random.Random(f"{order} {turns}")
    async with pools(seed=7) as broker:
        bed = broker.bed
        bed.nodes.order = order
        sizes = {"a": Size(1000), "b": Size(1000), "c": Size(1000, 2)} | {
            f"h{n}": Size(500) for n in range(8)
        }
        homes = {id: (await start(broker, id, size)).devices for id, size in sizes.items()}
        assert sorted(uuid for home in homes.values() for uuid in home) == sorted(
            [*NODES["n0"], *NODES["n1"], *NODES["n1"]]
        )
        for turn in range(turns):
            idle(broker)
            jobs = [f"j{turn}-{n}" for n in range(rng.randrange(4, 9))]
            for n, job in enumerate(jobs):
                size = Size(1000 if n < 3 else 500)
                broker.job(job, size=size, survival=rng.choice(list(CheckpointMode)))
            await broker.bed.until(partial(run, broker, jobs))
            asleep = [id for id in homes if broker.state(id) is State.SUSPENDED]
            assert asleep
            rng.shuffle(asleep)
            for back in (asleep[:1], asleep[1:3]):
                began = len(bed.kai.evicted)
                for id in back:
                    broker.set(id, wanted=True)
                await broker.bed.until(partial(run, broker, back))
                assert {id: broker.leases[id].devices for id in back} == {id: homes[id] for id in back}
                theirs = {node for node, uuids in NODES.items() for id in back if homes[id][0] in uuids}
                assert {node_of(bed, seat) for seat in bed.kai.evicted[began:]} <= theirs
            check_no_claim_was_displaced(broker)
            for job in jobs:
                del broker.leases[job]
            await broker.bed.until(partial(have_no_seats, bed, jobs))


def check_no_claim_was_displaced(broker: Broker) -> None:
    claims = claimants(broker.cluster)
    for action in broker.did:
        if isinstance(action, Suspend | Requeue) and action.why is Why.LENDER_RETURNED:
            assert action.lease not in claims


async def test_a_session_that_starts_displaces_a_job_that_keeps_its_seat():
    async with pools(nodes={"n0": NODES["n0"][:2]}, n0="1") as broker:
        await start(broker, "owner", Size(1000))
        (home,) = broker.leases["owner"].devices
        idle(broker)
        for job in ("i", "j"):
            broker.job(job, survival=CheckpointMode.SIGTERM)
        await broker.bed.until(partial(run, broker, ["i", "j"]))
        assert broker.state("owner") is State.SUSPENDED
        (lodger,) = [job for job in ("i", "j") if broker.leases[job].devices == (home,)]
        other = "j" if lodger == "i" else "i"
        del broker.leases[other]  # its GPU is free: no seat has to go
        await broker.bed.until(partial(have_no_seats, broker.bed, [other]))
        (seat,) = broker.bed.seats_of(lodger)
        broker.set("owner", wanted=True)
        await broker.bed.until(partial(run, broker, ["owner", lodger]))
        assert broker.leases["owner"].devices == (home,)
        assert broker.leases[lodger].devices != (home,)
        assert [each["metadata"]["name"] for each in broker.bed.seats_of(lodger)] == [
            seat["metadata"]["name"]
        ]


async def test_sizes_that_are_no_units_are_refused_and_a_closed_pool_starts_nothing():
    async with pools(nodes={"n0": NODES["n0"]}, n0="2") as broker:
        lease = Lease(id="x", project="vision", kind=Kind.BUILD, size=Size(250))
        with pytest.raises(InvalidRequest, match="equal parts"):
            broker.engine.check_request(broker.cluster, lease)
        broker.bed.foreign = {"n0": "the pod ml/train has a GPU there"}
        assert isinstance(await broker.session("x", size=Size(500)), Explanation)
        said = "Node n0 grants and lends nothing: the pod ml/train has a GPU there."
        await broker.bed.until(lambda: said in broker.engine.trouble())
        broker.bed.foreign = {}
        await start(broker, "x", Size(500))
