"""Sessions that wait for their start: places, reservations, and what ends them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.control import administration, snapshot
from jupyter_gpushare.broker.engine.local import LocalEngine
from jupyter_gpushare.broker.state.policy import Policy, ProjectConfig
from jupyter_gpushare.broker.state.session_queue import (
    ABANDONED_S,
    BARRED_S,
    MAX_PLACES,
    MAX_PLACES_PER_USER,
    RESERVED_S,
    SessionQueue,
)
from jupyter_gpushare.broker.views.views import spawn_wait, waiting_sessions
from jupyter_gpushare.core.model import State
from jupyter_gpushare.errors import Conflict, InvalidRequest, TooMany
from jupyter_gpushare.kube.engine.kai import KaiEngine
from jupyter_gpushare.protocol import wire
from tests.broker.brokers import Broker
from tests.broker.machine import Program
from tests.broker.site import spawn
from tests.broker.virtual_time import until

pytestmark = pytest.mark.site(gpus=1)


def seen(broker: Broker, user: str, server: str = "") -> wire.SpawnWait:
    place = broker.registry.session_queue.of(user, server)
    assert place is not None
    return spawn_wait(broker.views, place)


async def ask(broker: Broker, user: str, size: str | None = "1", **more: str) -> wire.SpawnWait | None:
    place = await broker.wait(spawn(user, size, **more))
    return None if place is None else spawn_wait(broker.views, place)


async def test_a_session_waits_until_its_gpu_is_reserved_and_then_starts_on_it(site, broker):
    await site.session("ada", "1")
    found = await ask(broker, "bo")
    assert (found.state, found.position) == ("waiting", 1)
    assert found.sentence == "Number 1. Needs 1 GPU; 0 are free."
    with pytest.raises(Conflict):
        await broker.start(spawn("dan", "1", groups=("nlp",)))
    await site.end_session("ada")
    await until(lambda: seen(broker, "bo").state == "ready", 10)
    assert seen(broker, "bo").sentence == "Your 1 GPU is reserved for 90 s: the server starts now."
    with pytest.raises(Conflict, match="Choose a smaller size"):
        await broker.start(spawn("dan", "1", groups=("nlp",)))
    held = await site.session("bo", "1")
    assert broker.lease(held.handle).state is State.GRANTED
    assert broker.registry.session_queue.of("bo", "") is None
    await until(lambda: broker.state(held.handle) == "running", 5)


async def test_a_place_ends_when_it_is_not_asked_for_again_or_given_up(site, broker):
    await site.session("ada", "1")
    await ask(broker, "bo")
    await asyncio.sleep(ABANDONED_S - 5)
    await ask(broker, "bo")
    await asyncio.sleep(ABANDONED_S - 5)
    assert seen(broker, "bo").position == 1
    await asyncio.sleep(10)
    assert waiting_sessions(broker.views, None) == []
    await ask(broker, "bo")
    assert await ask(broker, "bo", None) is None
    assert waiting_sessions(broker.views, None) == []
    assert await ask(broker, "bo", None) is None


async def test_a_place_is_kept_while_the_helper_is_silent_and_no_new_one_is_given(site, broker):
    await site.session("ada", "1")
    await ask(broker, "bo")
    site.helper_silent = True
    await until(lambda: site.now - broker.registry.devices.sampled_at > 6)
    for _ in range(3):  # longer than a place lasts without a request
        await asyncio.sleep(ABANDONED_S / 2)
        assert (await ask(broker, "bo")).state == "waiting"
    for other, size in (("bo", "1/2"), ("cy", "1")):
        with pytest.raises(Conflict) as refused:
            await ask(broker, other, size)
        assert refused.value.reason == "devices_unknown"
    site.helper_silent = False
    await until(lambda: site.now - broker.registry.devices.sampled_at < 2)
    await site.end_session("ada")
    await until(lambda: seen(broker, "bo").state == "ready", 10)


async def test_a_reservation_that_is_not_used_ends_and_the_next_one_starts(site, broker):
    await site.session("ada", "1")
    await ask(broker, "bo")
    await asyncio.sleep(1)
    await ask(broker, "dan", groups=("nlp",))
    assert seen(broker, "dan").position == 2
    await site.end_session("ada")
    await until(lambda: seen(broker, "bo").state == "ready", 10)
    assert seen(broker, "dan").position == 1
    begun = site.now
    for _ in range(20):
        await asyncio.sleep(5)
        place = await broker.wait(spawn("dan", "1", groups=("nlp",)))
        if place.grant is not None:
            break
        await ask(broker, "bo")  # asking again makes no reservation longer
    assert site.now - begun <= RESERVED_S + 10
    assert place.grant is not None


async def test_a_server_that_used_no_reservation_has_no_other_for_a_while(site, broker):
    await ask(broker, "bo")
    await until(lambda: seen(broker, "bo").state == "ready", 10)
    await until(lambda: broker.registry.session_queue.of("bo", "") is None, RESERVED_S + 10)
    with pytest.raises(TooMany, match="wait again in 5 min") as refused:
        await ask(broker, "bo")
    assert BARRED_S - 10 < refused.value.retry_after_s <= BARRED_S
    await ask(broker, "bo", server="second")
    await asyncio.sleep(BARRED_S)
    await until(lambda: broker.registry.devices.are_known(site.now), 10)
    assert await ask(broker, "bo") is not None


async def test_a_reservation_that_is_given_up_is_not_made_again_at_once(broker):
    for n, size in enumerate((None, "1/2")):
        await ask(broker, "bo", server=f"s{n}")
        await until(lambda name=f"s{n}": seen(broker, "bo", name).state == "ready", 10)
        if size is None:
            await ask(broker, "bo", None, server=f"s{n}")
        with pytest.raises(TooMany, match="and not used"):
            await ask(broker, "bo", size or "1", server=f"s{n}")
        assert broker.registry.session_queue.leases() == ()


async def test_servers_that_used_no_reservation_are_remembered_in_bounds(site, broker):
    await ask(broker, "bo")
    await until(lambda: seen(broker, "bo").state == "ready", 10)
    queue, place = SessionQueue(), broker.registry.session_queue.of("bo", "")
    for n in range(MAX_PLACES + 1):
        queue.join(replace(place.lease, id=f"b{n}", user=f"u{n}"), site.now)
        assert queue.reserve(replace(place.grant, lease=f"b{n}"), site.now)
        queue.leave(f"u{n}", "", site.now)
    assert queue.join(replace(place.lease, user="u0"), site.now), "the oldest is forgotten"
    with pytest.raises(TooMany):
        queue.join(replace(place.lease, user="u1"), site.now)


async def test_what_is_reserved_on_a_gpu_that_takes_nothing_new_is_not_used(broker):
    await ask(broker, "bo")
    await until(lambda: seen(broker, "bo").state == "ready", 10)
    (device,) = broker.registry.devices.listed
    await administration.drain(broker.registry, broker.engine, device.uuid, None, "root")
    with pytest.raises(Conflict, match="GPUs here take nothing new: an administrator"):
        await broker.start(spawn("bo", "1"))
    assert broker.holds_nothing


async def test_a_start_without_gpu_gives_the_place_up(site, broker):
    await site.session("ada", "1")
    await ask(broker, "bo")
    assert (await broker.start(spawn("bo", None))).lease is None
    assert broker.registry.session_queue.leases() == ()


async def test_a_job_that_its_quota_owes_comes_before_a_session_beyond_quota(site):
    site.policy = Policy(
        projects=(
            ProjectConfig(name="vision", quota_milli=1000, groups=("vision",)),
            ProjectConfig(name="nlp", quota_milli=0, groups=("nlp",)),
        )
    )
    broker = await site.start_broker()
    job = await site.submit("ada", "1", program=Program(work_s=20))
    await until(lambda: broker.state(job) == "running", 10)
    await ask(broker, "bo")
    owed = await site.submit("ada", "1", program=Program(work_s=60))
    await until(lambda: broker.job(owed).started_at, 60)
    while not broker.job(owed).result:
        assert (await ask(broker, "bo")).state == "waiting"
        await asyncio.sleep(5)
    await until(lambda: seen(broker, "bo").state == "ready", 30)


async def test_a_session_that_comes_later_does_not_take_what_one_waits_for(site):
    site.policy = Policy(projects=(ProjectConfig(name="nlp", quota_milli=0, groups=("nlp",)),))
    broker = await site.start_broker()
    await site.session("bo", "1")
    await ask(broker, "dan", groups=("nlp",))
    await site.end_session("bo")
    broker.registry.changed.clear()
    with pytest.raises(Conflict) as refused:
        await broker.start(spawn("eli", "1", groups=("nlp",)))
    assert refused.value.reason == "no_capacity"
    await until(lambda: seen(broker, "dan").state == "ready", 10)


async def test_after_a_restart_of_the_broker_a_page_that_asks_on_has_a_place(site, broker):
    await site.session("ada", "1")
    await ask(broker, "bo")
    await broker.end()
    broker = await site.start_broker()
    assert waiting_sessions(broker.views, None) == []
    assert (await ask(broker, "bo")).position == 1
    await site.end_session("ada")
    await until(lambda: seen(broker, "bo").state == "ready", 30)


async def test_another_size_is_another_place_at_the_end(site, broker):
    await site.session("ada", "1")
    await ask(broker, "bo")
    await asyncio.sleep(1)
    await ask(broker, "dan", groups=("nlp",))
    await asyncio.sleep(1)
    assert (await ask(broker, "bo")).position == 1
    assert (await ask(broker, "bo", "1/2")).position == 2
    assert [(x.user, x.size) for x in waiting_sessions(broker.views, None)] == [
        ("dan", "1 GPU"),
        ("bo", "1/2 GPU"),
    ]
    assert [x.position for x in waiting_sessions(broker.views, "bo")] == [2]


async def test_what_is_reserved_serves_no_start_of_another_size(site, broker):
    await site.session("ada", "1")
    await ask(broker, "bo")
    await site.end_session("ada")
    await until(lambda: seen(broker, "bo").state == "ready", 10)
    grant = await broker.start(spawn("bo", "1/4"))
    assert broker.lease(grant.lease).lease.held_milli == 250
    assert broker.registry.session_queue.leases() == ()


async def test_no_session_waits_on_an_engine_that_grants_only_what_starts(site, broker, monkeypatch):
    await site.session("ada", "1")
    await ask(broker, "bo")
    monkeypatch.setattr(LocalEngine, "queues_sessions", KaiEngine.queues_sessions)
    with pytest.raises(Conflict, match="sessions do not wait here"):
        await ask(broker, "dan", groups=("nlp",))
    leases = snapshot.cluster(broker.registry, broker.engine, site.now).leases
    assert {lease.user for lease in leases} == {"ada"}, "the engine hears of no place"
    assert await ask(broker, "bo", None) is None


async def test_what_can_never_start_does_not_wait(broker):
    request = wire.replace(spawn("bo", "1"), options=wire.GpuRequest(gpus=2))
    with pytest.raises(InvalidRequest, match="the largest machine has 1"):
        await broker.wait(request)
    assert broker.registry.session_queue.leases() == ()


async def test_places_are_bounded_for_each_user_and_for_all(site, broker):
    await site.session("ada", "1")
    for n in range(MAX_PLACES_PER_USER):
        await ask(broker, "bo", server=f"s{n}")
    with pytest.raises(TooMany, match="4 of your servers wait") as refused:
        await ask(broker, "bo", server="more")
    assert refused.value.reason == "queue_full"
    assert (await ask(broker, "bo", server="s0")).position == 1
    queue = broker.registry.session_queue
    lease = queue.leases()[0]
    for n in range(MAX_PLACES - MAX_PLACES_PER_USER):
        queue.join(replace(lease, id=f"b{n}", user=f"u{n}"), site.now)
    with pytest.raises(TooMany, match="1000 sessions wait") as refused:
        await ask(broker, "ada", server="more")
    assert refused.value.reason == "queue_full"


async def test_a_session_within_quota_may_start_asleep_on_what_is_lent(site):
    site.policy = Policy(
        projects=(ProjectConfig(name="nlp", quota_milli=1000, groups=("nlp",)),), idle_timeout_s=10.0
    )
    broker = await site.start_broker()
    await site.session("bo", "1")
    job = await site.submit("bo", "1", program=Program(work_s=1_000))
    await until(lambda: broker.state(job) == "running", 120)  # on the GPU of the idle session
    await ask(broker, "bo", server="second")
    await asyncio.sleep(2)
    assert seen(broker, "bo", "second").state == "waiting"
    await site.end_session("bo")
    await until(lambda: seen(broker, "bo", "second").state == "ready", 10)
    held = await site.session("bo", "1", server="second")
    assert broker.state(held.handle) == "suspended"
    assert broker.state(job) == "running"


async def test_the_status_of_a_user_has_the_own_sessions_that_wait(http):
    await http.broker.loop.observer.measure()
    for project in ("vision", "nlp"):
        await http.broker.start(spawn("cy", "1", server=project, project=project))
    assert await ask(http.broker, "bo") is not None
    (waits,) = (await http.ask("GET", "status", "bo")).json()["waiting"]
    assert (waits["server"], waits["size"], waits["position"]) == ("", "1 GPU", 1)
    assert waits["sentence"].startswith("Number 1. Needs 1 GPU")
    assert (await http.ask("GET", "status", "ada")).json()["waiting"] == []
