"""`KaiEngine` when the API server, a broker or a seat fails, with a model of KAI."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import pytest

from jupyter_gpushare.core.model import (
    State,
)
from jupyter_gpushare.errors import Superseded
from jupyter_gpushare.kube.cluster import seats as seats_module
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.objects import EPOCH_ANNOTATION
from jupyter_gpushare.kube.rules.follow import Retarget
from tests.kube.bed import NS, Bed, kube_bed
from tests.kube.kai_broker import NLP, VISION, Broker
from tests.waiting import PATIENCE_S

KILLS = int(os.environ.get("GPUSHARE_TEST_BROKER_KILLS", "5"))


class TestTakeOver:
    @pytest.mark.model
    async def test_a_broker_that_may_not_take_seats_over_asks_once_a_second_and_changes_nothing(
        self, bed: Bed, broker: Broker
    ):
        await broker.session("a")
        await bed.quiet()
        bed.server.faults.answers_to["PATCH"] = 403
        await bed.restart_engine()
        await bed.until(lambda: bed.seats.is_known)
        bed.server.requests.clear()
        await broker.engine.settle(broker.cluster, broker.now)
        await bed.until(lambda: bed.engine.trouble())
        began, before = broker.now, len([m for m, _ in bed.server.requests if m == "PATCH"])
        await asyncio.sleep(3)
        patches = len([m for m, _ in bed.server.requests if m == "PATCH"]) - before
        assert patches <= 2 * (2 + (broker.now - began))  # a pod and a PodGroup each second
        assert not [m for m, _ in bed.server.requests if m in ("DELETE", "POST")]
        bed.server.faults.answers_to.clear()
        await broker.until(lambda: not bed.engine.trouble())


class TestFaults:
    async def test_while_the_api_server_is_silent_nothing_becomes_lendable(self, bed: Bed, broker: Broker):
        await broker.session("owner")
        await bed.quiet()
        bed.server.freeze()
        await bed.until(lambda: bed.seats.age_s > 10)
        broker.set("owner", idle_since_at=broker.now - 10_000)
        await broker.round()
        assert bed.engine.trouble()[0].startswith("The Kubernetes API server does not answer")
        assert broker.state("owner") is State.RUNNING
        bed.server.thaw()
        await broker.until(lambda: broker.queue("owner") == "gpushare-idle-sessions")
        assert bed.engine.trouble() == ()

    @pytest.mark.model
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

    async def test_a_take_over_that_is_refused_asks_for_nothing_more(
        self, bed: Bed, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ):
        await broker.session("a")
        await bed.quiet()
        await bed.stop_engine()
        begun: list[str] = []

        async def refuse() -> None:
            raise KubeError("the API server is away")

        def stamp(*arguments: Any) -> Awaitable[None]:
            begun.append(arguments[-1].metadata.name)
            return refuse()

        with monkeypatch.context() as patched:
            patched.setattr(seats_module, "_AT_ONCE", 1)
            patched.setattr(bed.seats, "_stamp", stamp)
            patched.setattr(bed.seats, "_epoch", lambda: 9)
            with pytest.raises(KubeError, match="away"):
                await bed.seats.take_over()
        assert len(begun) == 1, "one of the two objects of the seat"
        bed.start_engine()  # for the end of the bed

    @pytest.mark.long_form
    @pytest.mark.parametrize("requests", range(1, KILLS + 1))
    async def test_a_broker_that_ends_in_the_middle_leaves_what_the_next_one_finishes(self, requests: int):
        """In the middle of loans and returns, after so many requests that change something."""
        async with kube_bed({"n0": ("GPU-0",), "n1": ("GPU-1",)}, (VISION, NLP)) as bed:
            broker = Broker(bed)
            await broker.session("owner")
            (device,) = broker.leases["owner"].devices
            broker.job("j0")
            await broker.until(lambda: broker.state("j0") is State.RUNNING)
            broker.job("j1")

            def written() -> int:
                return len([m for m, _ in bed.server.requests if m != "GET"])

            async def lend_and_return() -> None:
                while True:
                    broker.set("owner", idle_since_at=broker.now - 10_000)
                    await broker.until(lambda: broker.state("j1") is State.RUNNING)
                    broker.set("owner", wanted=True)
                    await broker.until(lambda: broker.state("owner") is State.RUNNING)

            end, lending = written() + requests, asyncio.create_task(lend_and_return())
            async with asyncio.timeout(PATIENCE_S):
                while written() < end:
                    await asyncio.sleep(0)
            lending.cancel()
            await asyncio.gather(lending, return_exceptions=True)
            await bed.restart_engine()
            if broker.leases["owner"].wanted:
                await broker.until(lambda: broker.state("owner") is State.RUNNING)
            broker.set("owner", idle_since_at=broker.now - 10_000)
            await broker.until(lambda: broker.state("j1") is State.RUNNING)
            broker.set("owner", wanted=True)
            await broker.until(lambda: broker.state("owner") is State.RUNNING)
            await bed.quiet()
            assert broker.leases["owner"].devices == (device,)
            assert broker.state("j0") is State.RUNNING
            assert [len(bed.seats_of(id)) for id in ("owner", "j0", "j1")] == [1, 1, 1]
