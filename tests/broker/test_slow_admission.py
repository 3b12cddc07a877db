"""Sessions on an engine that answers after a while, as a cluster's scheduler does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from math import inf

import pytest

from jupyter_gpushare.broker.engine.contract import StartPhase, StartProgress
from jupyter_gpushare.broker.engine.local import LocalEngine
from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.broker.http.spawner import lacks_patience
from jupyter_gpushare.core.model import Cluster, Grant, Lease, Why
from jupyter_gpushare.errors import Conflict, InvalidRequest
from jupyter_gpushare.protocol import wire
from tests.broker.brokers import Broker
from tests.broker.site import Site, spawn
from tests.broker.virtual_time import until


class SlowAnswers:
    """Has an engine answer `ANSWER_S` after it was asked, a quarter of that for each phase."""

    ANSWER_S = 40.0

    def __init__(self, engine: LocalEngine) -> None:
        self._admit = engine.admit
        for name in ("admit", "start_progress"):
            setattr(engine, name, getattr(self, name))
        self.phases: dict[str, StartPhase] = {}
        self.asked: list[tuple[str, ...]] = []
        self.cancelled = 0

    async def admit(
        self,
        cluster: Cluster,
        lease: Lease,
        now: float,
        *,
        not_nodes: Iterable[str] = (),
        within_s: float = inf,
    ) -> Grant | Explanation:
        self.within_s = within_s
        self.asked.append(tuple(not_nodes))
        try:
            for phase in StartPhase:
                self.phases[lease.id] = phase
                await asyncio.sleep(self.ANSWER_S / len(StartPhase))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            del self.phases[lease.id]
        return await self._admit(cluster, lease, now, not_nodes=not_nodes)

    def start_progress(self, lease_id: str) -> StartProgress | None:
        phase = self.phases.get(lease_id)
        within_s = 31.0 if phase is StartPhase.FREEING else None
        return None if phase is None else StartProgress(phase, within_s)


async def slow(site: Site) -> tuple[Broker, SlowAnswers]:
    broker, engine = await site.start_broker(), LocalEngine()
    broker.sessions.engine = broker.request_policy.engine = engine
    return broker, SlowAnswers(engine)


async def test_the_page_is_told_how_far_a_start_is_and_nothing_before_and_after(site):
    broker, engine = await slow(site)

    def told() -> str:
        return broker.sessions.progress("ada", "").message

    assert told() == ""
    starting = asyncio.ensure_future(broker.start(spawn("ada", "1/2")))
    await until(lambda: told() == "Waiting for the cluster to place your GPU.", 5)
    assert broker.sessions.progress("bo", "").message == ""
    await until(lambda: told().endswith("what uses it ends or goes to sleep first, within 40 s."), 12)
    await until(lambda: "the cluster reserves it" in told(), 12)
    await until(lambda: "its node prepares it" in told(), 12)
    assert (await starting).lease
    assert told() == ""
    assert engine.asked == [()]


async def test_a_server_that_ends_before_the_answer_gets_no_lease(site):
    broker, engine = await slow(site)
    starting = asyncio.ensure_future(broker.start(spawn("ada", "1/2")))
    await until(lambda: engine.phases, 5)
    await broker.stop(wire.SpawnStop(user="ada", server=""))
    with pytest.raises(Conflict, match="given up"):
        await starting
    assert engine.cancelled == 1
    assert broker.holds_nothing
    await asyncio.sleep(2 * engine.ANSWER_S)
    assert broker.holds_nothing


async def test_a_server_that_ends_while_its_grant_is_stored_loses_it_after_the_commit(site):
    broker, _ = await slow(site)
    store, begun, goes_on, ended = broker.store.commit, asyncio.Event(), asyncio.Event(), []

    async def commit(changes):
        if not begun.is_set():
            begun.set()
            await goes_on.wait()
        await store(changes)
        ended.append(changes)

    starting = asyncio.ensure_future(broker.start(spawn("ada", "1/2")))
    await asyncio.sleep(SlowAnswers.ANSWER_S - 1)
    broker.store.commit = commit
    await begun.wait()
    stopping = asyncio.ensure_future(broker.stop(wire.SpawnStop(user="ada", server="")))
    await asyncio.sleep(1)
    assert not starting.done()
    assert not stopping.done()
    goes_on.set()
    await stopping
    assert ended
    await asyncio.gather(starting, return_exceptions=True)
    assert not isinstance(starting.exception(), Conflict) or "given up" not in str(starting.exception())
    await until(lambda: broker.holds_nothing, 30)


async def test_a_second_start_of_a_server_replaces_the_first_and_there_is_one_lease(site):
    broker, engine = await slow(site)
    first = asyncio.ensure_future(broker.start(spawn("ada", "1/2")))
    await until(lambda: engine.phases, 5)
    second = asyncio.ensure_future(broker.start(spawn("ada", "1/4")))
    with pytest.raises(Conflict, match="given up"):
        await first
    grant = await second
    assert [record.handle for record in broker.registry.leases.values()] == [grant.lease]
    assert engine.cancelled == 1


async def test_nodes_without_capacity_for_the_server_are_named_to_the_engine(site):
    broker, engine = await slow(site)
    request = wire.SpawnRequest(
        user="ada",
        server="",
        groups=["vision"],
        uid=1000,
        options=wire.GpuRequest(fraction="1/2"),
        not_nodes=["node-1", "node-2"],
    )
    await broker.start(request)
    assert engine.asked == [("node-1", "node-2")]


async def test_the_engine_answers_before_the_spawner_has_waited_too_long(site):
    broker, engine = await slow(site)
    request = wire.replace(spawn("ada", "1/2"), patience_s=150.0)
    await broker.start(request)
    assert engine.within_s == pytest.approx(148.0, abs=1.0)
    await broker.start(spawn("bo", "1/4"))
    assert engine.within_s == inf
    await broker.start(wire.replace(spawn("cy", "1/8"), patience_s=1.0))
    assert engine.within_s == 0.0


def test_a_start_timeout_that_is_too_short_is_named_with_what_to_set():
    assert lacks_patience(0.0, 30.0) == ""  # an engine that answers at once
    assert "start_timeout to at least 200, or seat_timeout to less" in lacks_patience(98.0, 30.0)
    for enough_s in (100.0, 150.0, None):
        assert lacks_patience(98.0, enough_s) == ""


async def test_a_start_for_which_a_gpu_is_being_freed_is_refused_with_advice_to_start_again(site):
    broker, engine = await slow(site)

    async def admit(*_: object, **__: object) -> Explanation:
        return Explanation(why=Why.AWAITING_RELEASE, position=None, free_milli=0)

    engine._admit = admit
    with pytest.raises(Conflict, match=r"being freed for it\. Start it again with the same size"):
        await broker.start(spawn("ada", "1/2"))


@pytest.mark.parametrize("wrong", [-1, 1e10, "long", float("inf")])
def test_a_patience_that_is_no_time_is_refused(wrong):
    body = {"user": "ada", "server": "", "groups": [], "uid": 1, "patience_s": wrong}
    with pytest.raises(InvalidRequest):
        wire.decode(json.dumps(body).encode(), wire.SpawnRequest)
