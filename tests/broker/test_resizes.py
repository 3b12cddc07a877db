"""A running session becomes larger or smaller on its device: order of effects, refusals, crashes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from jupyter_gpushare.errors import Conflict, HelperError, InvalidRequest, RequestError
from jupyter_gpushare.protocol import wire
from tests.broker.brokers import Broker
from tests.broker.machine import Held
from tests.broker.site import Site, spawn
from tests.broker.virtual_time import until

pytestmark = pytest.mark.site(gpus=1)

WHOLE = 78_000_000_000


async def running(site: Site, size: str = "1/4", **more: Any) -> Held:
    held = await site.session("ada", size, **more)
    assert site.broker is not None
    broker = site.broker
    await until(lambda: broker.state(held.handle) == "running", 30)
    await asyncio.sleep(2)  # measured with what it uses
    return held


async def resize(broker: Broker, held: Held, **size: Any) -> None:
    record = broker.lease(held.handle)
    assert await broker.sizes.change(record.lease.user, record.id, wire.SizeRequest(**size)) is None


def limit(held: Held) -> int:
    (count,) = held.limits.values()
    return count


def half(broker: Broker) -> wire.Offer:
    (found,) = (o for o in broker.views.offers(("nlp",), "nlp").offers if o.label == "1/2 GPU")
    return found


async def test_a_session_grows_and_shrinks_on_its_device(site, broker):
    ada = await running(site)
    assert limit(ada) == WHOLE // 4
    await resize(broker, ada, gpus="1/2", borrow=True)
    record = broker.lease(ada.handle)
    assert (limit(ada), record.lease.held_milli, record.unprepared) == (WHOLE // 2, 500, False)
    lease = broker.shown(ada.handle)
    assert (lease.size, lease.memory_limit_bytes, lease.resizable) == ("1/2 GPU", WHOLE // 2, True)
    assert record.state == "running"
    await resize(broker, ada, memory="16GB")
    record = broker.lease(ada.handle)
    assert (limit(ada), record.lease.held_milli) == (16_000_000_000, 206)
    (last, first) = (d for d in broker.told("ada", 9) if d.action == "resize")
    assert first.sentence == "Your session (1/2 GPU) has a new size, before: 1/4 GPU."
    assert "before: 1/2 GPU" in last.sentence


async def test_what_a_session_gave_up_another_gets(site, broker):
    ada = await running(site, "1", use=0.2)
    assert half(broker).starts == "soon"  # asleep
    await resize(broker, ada, gpus="0.5")
    assert half(broker).starts == "now"
    grant = await broker.start(spawn("bo", "1/2"))
    assert (grant.asleep, grant.memory_limit_bytes) == (False, WHOLE // 2)


async def test_use_before_a_change_counts_with_the_size_of_then(site, broker):
    ada = await running(site)
    began = broker.lease(ada.handle).entered_at
    await asyncio.sleep(100)
    held_s = site.now - began
    await resize(broker, ada, gpus="1/2")
    (use,) = (u for u in broker.registry.usage.sums.values() if u.user == "ada")
    assert use.used_gpu_s == pytest.approx(held_s / 4, abs=0.5)


async def test_more_than_is_left_is_refused_with_the_most_that_it_may_have(site, broker):
    ada = await running(site)
    await site.session("bo", "1/2")
    with pytest.raises(Conflict, match="choose at most 1/2 GPU, or start the server on another") as said:
        await resize(broker, ada, gpus="1", borrow=True)
    assert said.value.reason == "no_capacity"
    assert limit(ada) == WHOLE // 4
    await resize(broker, ada, gpus="1/2")
    with pytest.raises(Conflict, match="stop the server, and start it on another GPU"):
        await resize(broker, ada, gpus="0.6", borrow=True)


async def test_a_guarantee_is_given_up_only_by_a_request_that_says_so(site, broker):
    ada = await running(site)
    with pytest.raises(Conflict, match="more than what project vision is guaranteed") as said:
        await resize(broker, ada, gpus="3/4")
    assert said.value.reason == "would_borrow"
    await resize(broker, ada, gpus="3/4", borrow=True)
    assert broker.lease(ada.handle).lease.borrowed
    assert ada.guaranteed == dict.fromkeys(ada.limits, 0)
    assert not ada.unattended


async def test_a_session_that_holds_more_keeps_its_size_and_is_told_how_much_to_free(site, broker):
    ada = await running(site, "1/2", use=0.8)
    before = dict(ada.limits)
    prepared = site.effects.count(f"prepare {ada.handle}")
    with pytest.raises(Conflict, match=r"use 29 GiB .* 18 GiB are left .*: free 11 GiB first") as said:
        await resize(broker, ada, gpus="1/4")
    assert said.value.reason == "in_use"
    assert ada.limits == before
    assert site.effects.count(f"prepare {ada.handle}") == prepared


async def test_memory_taken_while_it_shrinks_gives_the_old_limit_back(site, broker, monkeypatch):
    ada = await running(site, "1/2", use=0.1)
    before, prepare = dict(ada.limits), broker.devices.prepare

    async def taken_meanwhile(holder: Any) -> Any:
        if dict(holder.limits) != before:
            site.use(ada, before)
        return await prepare(holder)

    monkeypatch.setattr(broker.devices, "prepare", taken_meanwhile)
    with pytest.raises(Conflict) as said:
        await resize(broker, ada, gpus="1/4")
    assert said.value.reason == "in_use"
    await until(lambda: not broker.lease(ada.handle).unprepared, 30)
    assert (ada.limits, broker.lease(ada.handle).lease.held_milli) == (before, 500)


async def test_a_request_for_the_old_size_while_it_shrinks_sets_no_limit(site, broker):
    ada = await running(site, "1/2")
    shrinks = asyncio.create_task(resize(broker, ada, gpus="1/4"))
    await until(lambda: limit(ada) == WHOLE // 4, 10)
    old, lease_id = wire.SizeRequest(gpus="1/2"), broker.lease(ada.handle).id
    for server in (spawn("ada", "1/2"), None):
        with pytest.raises(Conflict, match="being moved"):
            await broker.sizes.change("ada", lease_id, old, server)
    await shrinks
    assert (limit(ada), broker.lease(ada.handle).lease.held_milli) == (WHOLE // 4, 250)


async def test_a_limit_that_the_helper_did_not_set_is_set_later(site, broker):
    ada = await running(site)
    site.fault("prepare", HelperError("busy", "later"), HelperError("busy", "later"))
    await resize(broker, ada, gpus="1/2")
    assert broker.lease(ada.handle).unprepared
    await until(lambda: not broker.lease(ada.handle).unprepared, 30)
    assert limit(ada) == WHOLE // 2


@pytest.mark.site(gpus=2)
async def test_only_an_awake_session_of_a_part_of_a_gpu_changes(site, broker):
    ada = await running(site)
    for wrong in ({}, {"gpus": "0.5", "memory": "4GiB"}, {"gpus": "0"}):
        with pytest.raises(InvalidRequest):
            await resize(broker, ada, **wrong)
    with pytest.raises(Conflict, match="stays in its project: vision"):
        await resize(broker, ada, gpus="0.5", project="nlp")
    with pytest.raises(Conflict, match="keeps the number of its GPUs"):
        await resize(broker, ada, gpus="2")
    job = await site.submit("bo", "1")
    with pytest.raises(Conflict, match="gpushare edit"):
        await resize(broker, Held(f"{job.lease_id}-1", 0, {}), gpus="0.5")
    await broker.own_sessions.lend(broker.lease(ada.handle))
    await site.submit("cy", "2", project="vision")
    await until(lambda: broker.state(ada.handle) == "suspended", 60)
    with pytest.raises(Conflict, match="awake"):
        await resize(broker, ada, gpus="0.5")


@pytest.mark.site(gpus=2, profile="1g.10gb")
async def test_a_mig_instance_has_the_size_that_it_has(broker):
    request = wire.GpuRequest(profile="1g.10gb")
    asked = wire.SpawnRequest(user="ada", server="", groups=["vision"], uid=1000, options=request)
    grant = await broker.start(asked)
    record = broker.lease(grant.lease)
    assert not broker.views.lease(record).resizable
    with pytest.raises(Conflict, match="only when it starts") as said:
        await broker.sizes.change("ada", record.id, wire.SizeRequest(gpus="0.5"))
    assert said.value.reason == "not_resizable"


@pytest.mark.oracle
@pytest.mark.parametrize("size", ["1/2", "1/8"])
@pytest.mark.parametrize("die_after", range(1, 9))
async def test_a_broker_that_dies_at_any_step_leaves_record_and_helper_agreed(site, broker, size, die_after):
    ada = await running(site, use=0.1)
    broker.die_at = broker.steps + die_after
    change = asyncio.create_task(resize(broker, ada, gpus=size))
    await asyncio.wait({change, asyncio.create_task(broker.dead.wait())}, timeout=10)
    # The helper never allows more than what is stored.
    change.cancel()
    with suppress(asyncio.CancelledError, RequestError):
        await change
    await broker.end()
    after = await site.start_broker()
    await until(lambda: not after.lease(ada.handle).unprepared, 30)
    record = after.lease(ada.handle)
    assert ada.limits == record.limits
    assert limit(ada) == WHOLE * record.lease.held_milli // 1000
    assert record.state == "running"
