"""Starts that fail, or with an unknown result."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import HubError, ServerKey
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.fenced_hub import StartTickets
from jupyter_gpushare.core.model import Lease, State
from jupyter_gpushare.errors import Conflict
from jupyter_gpushare.protocol import wire
from tests.broker.machine import Program
from tests.broker.site import spawn
from tests.broker.virtual_time import until


async def test_a_start_that_fails_is_tried_again_with_longer_pauses_then_given_up(site, broker):
    site.fault("start_server", *[HubError("the Hub did not start b1: it ended")] * 5)
    job = await site.submit("bo", "1")
    began = site.now
    assert await broker.ended(job, 300) == "failed"
    assert broker.seen(job).reason == "It could not be started: the Hub did not start b1: it ended"
    (started,) = broker.seen(job).reason_texts
    assert started.args == [messages.text("reason.hub_start", "b1", "it ended")]
    assert site.now - began >= 2 + 4 + 8 + 16


async def test_a_hub_that_starts_nothing_costs_no_job_its_tries(site, broker, monkeypatch):
    real, asked = broker.hub.start_server, []

    async def refuse(key, shown, ticket):
        asked.append(site.now)
        raise HubError("Missing or invalid credentials.", not_now=True)

    monkeypatch.setattr(broker.hub, "start_server", refuse)
    jobs = [await site.submit("bo", "1", program=Program(work_s=1)) for _ in range(8)]
    began = site.now
    await asyncio.sleep(1800)
    assert [broker.job(job).result for job in jobs] == [""] * 8
    assert "Missing or invalid credentials" in broker.lease(jobs[0]).note
    # The pauses grow to a minute; a round asks once for each GPU.
    assert len(asked) <= 2 * (6 + 1800 / 60)
    assert all(at - began < 60 or b - a <= 62 for at, a, b in zip(asked, asked, asked[1:], strict=False))
    monkeypatch.setattr(broker.hub, "start_server", real)
    await until(lambda: all(broker.job(job).result == "succeeded" for job in jobs), 300)


async def test_a_start_that_the_hub_gave_up_is_not_tried_again_beside_what_came_of_it(site):
    """Its spawn timed out, but processes of it are there: they go first (the fake tells of two at once)."""
    site.spawn_s = 5.0
    broker = await site.start_broker()
    job = await site.submit("bo", "1", retries=1, program=Program(work_s=10))
    await until(lambda: f"prepare j{job.id}-1" in site.effects, 30)
    for task in list(site._tasks):
        task.cancel()  # the Hub kills the runner ...
    site.servers.clear()
    held = site.held[f"j{job.id}-1"]
    held.alive = True  # ... and not what it had started
    site.use(held, dict(held.limits))
    await broker.stop(wire.SpawnStop(user="bo", server=f"j{job.id}-1"))
    assert broker.state(job) == "stopping"
    site.spawn_s = 0.2
    await asyncio.sleep(5)
    assert site.started[job.id] == 0
    held.alive, held.used = False, {}
    assert await broker.ended(job, 200) == "succeeded"
    assert broker.job(job).attempts == 2


async def test_a_server_that_never_comes_is_a_failed_start(site, broker):
    job = await site.submit("bo", "1")
    await until(lambda: broker.state(job) == "granted", 10)
    key = ServerKey("bo", f"j{job.id}-1")
    site.spawn_s = 1e5  # this one hangs for ever
    await until(lambda: key in site.servers, 10)
    for task in list(site._tasks):
        task.cancel()
    site.servers.pop(key)
    await until(lambda: broker.state(job) == "pending", 120)
    site.spawn_s = 0.2
    assert await broker.ended(job, 120) == "succeeded"


async def test_a_node_without_capacity_for_its_server_is_left_out_of_the_next_tries(site):
    site.spawn_s = 1e5
    broker = await site.start_broker()
    job = await site.submit("bo", "1")
    server = f"j{job.id}-1"
    await until(lambda: ServerKey("bo", server) in site.servers, 10)
    node = next(broker.registry.devices.for_planner()).node

    def lease() -> Lease:
        leases = snapshot.cluster(broker.registry, broker.engine, site.now).leases
        return next(x for x in leases if x.id == "j" + job.id)

    assert lease().avoids == ()
    for task in list(site._tasks):
        task.cancel()
    site.servers.clear()
    await broker.stop(wire.SpawnStop(user="bo", server=server, not_nodes=[node, "another"]))
    assert (lease().state, [name for name, _ in lease().avoids]) == (State.PENDING, [node])
    assert lease().avoids[0][1] > site.now + 60
    site.spawn_s = 0.2
    await until(lambda: broker.state(job) == "running", 60)
    assert [name for name, _ in lease().avoids] == [node]


async def test_a_start_with_a_lost_answer_is_not_started_a_second_time(site, broker, monkeypatch):
    real = broker.hub.start_server

    async def answer_lost(key, shown, ticket):
        await real(key, shown, ticket)
        raise HubError("the Hub does not answer (ReadTimeout)")

    monkeypatch.setattr(broker.hub, "start_server", answer_lost)
    job = await site.submit("bo", "1", program=Program(work_s=20))
    assert await broker.ended(job, 120) == "succeeded"
    assert site.started[job.id] == 1
    assert broker.seen(job).attempt == 1


async def test_a_runner_is_told_which_attempts_were_counted(site):
    """An attempt that the Hub gave up may have run unseen; one that failed is over."""
    await site.start_broker()
    site.fault("start_server", HubError("the Hub is busy"))
    job = await site.submit("bo", "1", retries=1, program=Program(work_s=5, exit_code=9))
    seen: set[tuple[int, int]] = set()

    def second_run() -> bool:
        seen.update((run.job.attempt, run.job.settled) for run in site.runs)
        return site.started[job.id] == 2 and len(seen) == 2

    await until(second_run, 120)
    assert seen == {(2, 0), (3, 2)}


async def test_a_start_that_an_earlier_broker_asked_for_does_not_run(site, caplog):
    site.spawn_s = 30.0  # it waits at the Hub
    broker = await site.start_broker()
    job = await site.submit("bo", "1", program=Program(work_s=1))
    await until(lambda: ServerKey("bo", f"j{job.id}-1") in site.servers, 30)
    await broker.end()
    before, broker = broker, await site.start_broker()
    assert broker.store.epoch > before.store.epoch
    assert broker.state(job) == "granted"
    refused = f"lease=j{job.id}-1 refused: its start is of a broker with epoch {before.store.epoch}"
    await until(lambda: refused in caplog.text, 60)
    assert not site.held, "it ran nothing"
    refused_at, site.spawn_s = site.now, 0.2
    assert await broker.ended(job, 120) == "succeeded"
    assert site.now - refused_at < 10, "the Hub is asked again at once"
    assert site.started[job.id] == 1
    assert broker.seen(job).attempt == 1, "it counts as no failed start"
    assert caplog.text.count("its start is of a broker") == 1
    await until(lambda: not site.servers, 60)


async def test_only_a_start_that_this_broker_asked_for_runs(site, broker, monkeypatch):
    asked: dict[str, str] = {}

    async def asked_only(key, shown, ticket):
        asked[key.server] = ticket

    monkeypatch.setattr(broker.hub, "start_server", asked_only)
    job = await site.submit("bo", "1")
    handle = f"j{job.id}-1"
    await until(lambda: handle in asked, 30)
    tickets, key = broker.loop.effects.tickets, ServerKey("bo", handle)
    epoch, _, mac = asked[handle].partition(".")
    assert tickets.epoch_of(key, asked[handle]) == int(epoch) == broker.store.epoch
    newer = StartTickets(lambda: 9, tickets.tokens).issue(key)
    for ticket, reason in (
        ("", "not_expected"),
        (epoch, "not_expected"),
        (f"9.{mac}", "not_expected"),
        (f"{'9' * 5_000}.{mac}", "not_expected"),
        (f"{epoch}.\u00e9", "not_expected"),
        (tickets.issue(ServerKey("ada", handle)), "not_expected"),
        (tickets.issue(ServerKey("bo", f"j{job.id}-2")), "not_expected"),
        (StartTickets(lambda: 1, ["guessed"]).issue(key), "not_expected"),
        (newer, "outdated_start"),  # this broker is the stale one
    ):
        request = wire.replace(spawn("bo", None, server=handle), ticket=ticket)
        with pytest.raises(Conflict) as refused:
            await broker.start(request)
        assert refused.value.reason == reason, ticket[:80]
    assert broker.state(job) == "granted"
    assert broker.lease(job).attempt == 1
    assert not site.held
    request = wire.replace(spawn("bo", None, server=handle), ticket=asked[handle])
    assert (await broker.start(request)).lease == handle


def test_a_new_token_of_the_spawner_does_not_refuse_a_start_that_is_under_way():
    tickets, key = StartTickets(lambda: 4, ["old"]), ServerKey("bo", "jabcdefghij-1")
    ticket = tickets.issue(key)
    tickets.tokens = ("new", "old")
    assert tickets.epoch_of(key, ticket) == 4
    assert tickets.issue(key) != ticket
    tickets.tokens = ("new",)
    assert tickets.epoch_of(key, ticket) is None
