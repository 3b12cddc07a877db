"""A job becomes a guest on what another leaves of its GPU, is judged, and leaves: broker and database."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.state.policy import Policy, ProjectConfig
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.broker.views import history
from jupyter_gpushare.core.model import State, Why
from jupyter_gpushare.core.pairs import TRIAL_S
from jupyter_gpushare.core.planning.sharing import WATCHED_S
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.protocol import wire
from tests.broker.brokers import Broker, sent, until
from tests.broker.machine import Held, Program
from tests.broker.site import Site

POLICY = Policy(projects=(ProjectConfig(name="nlp", quota_percent=100.0, groups=("nlp",)),), share=True)
SMALL = Program(work_s=100_000, memory=0.2)
one_gpu = pytest.mark.site(gpus=1, policy=POLICY)
two_gpus = pytest.mark.site(gpus=2, policy=POLICY)


def held(site: Site, broker: Broker, job: JobRecord) -> Held:
    return site.held[broker.lease(job).handle]


async def pair(site: Site, broker: Broker, **of_guest: object) -> tuple[JobRecord, JobRecord]:
    """Return a job that runs, and one that became its guest when it had been watched."""
    host = await site.running("bo", "1", program=SMALL, share=True)
    given = {"program": Program(work_s=100_000, memory=0.3), "share": True} | of_guest
    guest = await site.submit("bo", "1", **given)
    await asyncio.sleep(WATCHED_S - 30)
    assert broker.state(guest) == "pending"
    await until(lambda: broker.state(guest) == "running", 120)
    return host, guest


def said_of(broker: Broker, timeline: object) -> list[str]:
    return [each.sentence for each in timeline.moments if each.what == "guest"]  # type: ignore[attr-defined]


async def told(broker: Broker, job: JobRecord) -> list[str]:
    return said_of(broker, sent(await history.timeline(broker.registry, broker.job(job), "bo")))


@one_gpu
async def test_a_waiting_job_becomes_a_guest_once_its_host_was_watched(site, broker):
    host, guest = await pair(site, broker)
    record, (limit,) = broker.lease(guest), broker.lease(host).limits.values()
    assert record.lease.host == host.lease_id
    asked = held(site, broker, guest).asked
    used = int(limit * 0.2)
    assert asked.guest_of == broker.lease(host).handle
    assert asked.guest_bytes == record.guest_bytes == limit - used - used // 10 - (512 << 20)
    assert asked.limits == broker.lease(host).limits
    await until(lambda: broker.seen(host).shared == "host", 5)
    assert (broker.seen(guest).shared, broker.seen(guest).shared_with) == ("guest", host.id)
    assert site.wrong == []


@one_gpu
async def test_whoever_submits_a_job_reads_that_it_would_start_as_a_guest(site, broker):
    await site.running("bo", "1", program=SMALL, share=True)
    asked = wire.JobRequest(command=["-"], gpus="1", project="nlp", share=True)
    assert (await broker.requests.outlook("bo", asked)).starts == "no"
    await asyncio.sleep(WATCHED_S + 60)
    found = sent(await broker.requests.outlook("bo", asked))
    assert (found.starts, found.sentence) == (
        "now", "Would start now as a guest on the GPU of another job, and gives way when that needs it."
    )  # fmt: skip
    alone = await broker.requests.outlook("bo", wire.replace(asked, share=False))
    assert alone.starts == "no"


@one_gpu
async def test_a_job_that_never_shares_or_is_busy_with_its_memory_has_no_guest(site, broker):
    await site.running("bo", "1", program=SMALL)
    waits = await site.submit("bo", "1", program=SMALL, share=True)
    await asyncio.sleep(2 * WATCHED_S)
    assert broker.state(waits) == "pending"


@one_gpu
async def test_a_guest_leaves_at_once_when_its_host_allocates(site, broker):
    host, guest = await pair(site, broker)
    mine = held(site, broker, host)
    await site.allocate(mine, {uuid: int(0.9 * limit) for uuid, limit in mine.limits.items()})
    await until(lambda: broker.state(guest) == "suspended", 5)
    record = broker.lease(guest)
    assert (record.lease.host, record.why, record.requeue) == ("", Why.HOST_MEMORY_WANTED, False)
    assert broker.job(guest).preemptions == 1
    await until(lambda: broker.seen(host).shared == "", 5)
    assert (await told(broker, host))[-1].endswith("left after 1.0 s: the job needed the memory.")
    assert "the job whose GPU it shared needed the memory" in broker.seen(guest).reason
    # Not even when it has given the memory back: it is watched again first.
    site.use(mine, {uuid: int(0.2 * limit) for uuid, limit in mine.limits.items()})
    await asyncio.sleep(WATCHED_S - 30)
    assert broker.state(guest) == "suspended"
    await until(lambda: broker.state(guest) == "running", 120)
    assert site.wrong == []


@one_gpu
async def test_a_guest_that_needs_more_than_its_part_waits_for_a_gpu_of_its_own(site, broker):
    host, guest = await pair(site, broker)
    mine = held(site, broker, guest)
    await site.allocate(mine, {uuid: int(0.9 * limit) for uuid, limit in mine.limits.items()})
    await until(lambda: broker.state(guest) == "suspended", 5)
    assert broker.lease(guest).why == Why.OWN_MEMORY_WANTED
    await asyncio.sleep(2 * WATCHED_S)
    assert broker.state(guest) == "suspended"
    await site.ask(lambda b: b.requests.cancel(b.job(host)))
    await until(lambda: broker.state(guest) == "running", 60)
    assert (broker.lease(guest).lease.host, mine.asked.guest_of) == ("", "")
    assert site.wrong == []


@one_gpu
async def test_a_guest_that_still_waits_for_more_does_not_come_back(site, broker):
    _, guest = await pair(site, broker)
    mine = held(site, broker, guest)
    used = dict(mine.used)
    await site.leave(mine, "own_memory")
    mine.saved, mine.wanted = used, True
    await until(lambda: broker.state(guest) == "suspended", 5)
    assert broker.lease(guest).why == Why.OWN_MEMORY_WANTED
    await asyncio.sleep(3 * WATCHED_S)
    assert broker.state(guest) == "suspended"
    assert site.wrong == []


@one_gpu
async def test_a_guest_that_left_while_no_broker_ran_is_found(site, broker):
    host, guest = await pair(site, broker)
    mine = held(site, broker, host)
    await broker.end()
    await site.allocate(mine, {uuid: int(0.9 * limit) for uuid, limit in mine.limits.items()})
    broker = await site.start_broker()
    await until(lambda: broker.state(guest) == "suspended", 10)
    assert broker.lease(guest).lease.host == ""
    assert site.wrong == []


@one_gpu
async def test_a_broker_that_starts_again_goes_on_with_the_pair(site, broker):
    host, guest = await pair(site, broker)
    await broker.end()
    broker = await site.start_broker()
    await until(lambda: broker.seen(host).shared == "host", 10)
    assert broker.lease(guest).lease.host == host.lease_id
    assert len(await told(broker, host)) == 1
    # Its speed alone is not known to this broker: the guest leaves after the trial, and may come again.
    await until(lambda: broker.state(guest) == "suspended", TRIAL_S + 10)
    assert broker.lease(guest).why == Why.PAIR_PARTED
    await until(lambda: broker.state(guest) == "running", 3 * WATCHED_S)
    assert site.wrong == []


@one_gpu
async def test_a_pair_that_hurts_is_parted_and_not_tried_again(site, broker):
    host, guest = await pair(site, broker)
    began_at = site.now
    held(site, broker, host).rate = 60.0
    await until(lambda: broker.state(guest) == "suspended", 240)
    assert TRIAL_S - 5 < site.now - began_at < 240
    assert broker.lease(guest).why == Why.PAIR_PARTED
    assert any("the job kept only 6" in line for line in await told(broker, host))
    await broker.end()
    broker = await site.start_broker()
    await asyncio.sleep(3 * WATCHED_S)
    assert broker.state(guest) == "suspended"
    pairs = snapshot.cluster(broker.registry, broker.engine, site.now).parted
    assert len(pairs) == 1


@one_gpu
async def test_a_pair_that_pays_stays_and_both_read_how_fast_they_are(site, broker):
    host, guest = await pair(site, broker)
    held(site, broker, host).rate = 95.0
    await asyncio.sleep(TRIAL_S + 30)
    assert broker.state(guest) == "running"
    assert broker.seen(host).kept_speed_percent == pytest.approx(95, abs=1)
    assert "it keeps 95 % of its speed" in broker.seen(host).reason
    await asyncio.sleep(3 * 600)
    assert broker.state(guest) == "running"


@two_gpus
async def test_a_guest_moves_to_a_gpu_that_becomes_free(site, broker):
    other = await site.running("bo", "1", program=SMALL)
    host, guest = await pair(site, broker)
    await site.ask(lambda b: b.requests.cancel(b.job(other)))
    await until(lambda: broker.lease(guest).lease.host == "" and broker.state(guest) == "running", 60)
    assert broker.lease(guest).lease.devices != broker.lease(host).lease.devices
    assert held(site, broker, guest).asked.guest_of == ""
    assert site.wrong == []


@one_gpu
async def test_a_guest_keeps_the_gpu_that_its_host_leaves(site, broker):
    host, guest = await pair(site, broker)
    mine, suspended = held(site, broker, guest), site.effects.count("suspend")
    await site.ask(lambda b: b.requests.cancel(b.job(host)))
    await until(lambda: broker.lease(guest).lease.host == "", 30)
    await until(lambda: mine.asked.guest_of == "", 5)
    assert (broker.state(guest), site.effects.count("suspend")) == ("running", suspended)
    assert broker.lease(guest).lease.attained_at is not None
    assert site.wrong == []


@one_gpu
async def test_a_guest_that_finds_no_room_has_not_failed(site, broker):
    host = await site.running("bo", "1", program=SMALL, share=True)
    guest = await site.submit("bo", "1", program=SMALL, share=True)
    await asyncio.sleep(WATCHED_S - 30)
    site.fault("prepare", *(HelperError("conflict", "its host uses the memory") for _ in range(8)))
    await asyncio.sleep(60)
    assert (broker.state(guest), broker.lease(guest).tries) == ("pending", 0)
    assert len(site.faults["prepare"]) == 7  # and its host is watched again before the next try
    site.faults.clear()
    await until(lambda: broker.state(guest) == "running", 2 * WATCHED_S)
    assert broker.lease(guest).lease.host == host.lease_id


@one_gpu
async def test_a_guest_that_was_killed_for_its_host_starts_again(site, broker):
    _, guest = await pair(site, broker)
    mine = held(site, broker, guest)
    mine.ended_as_guest = True
    (run,) = (run for run in site.runs if run.job.id == guest.id)
    run.command_killed.set()
    await until(lambda: broker.lease(guest).attempt == 2 or broker.state(guest) == "pending", 30)
    assert (broker.job(guest).result, broker.job(guest).failures) == ("", 0)
    # Not beside the same host, where it would lose its work again.
    await asyncio.sleep(2 * WATCHED_S)
    assert (broker.state(guest), broker.lease(guest).attempt) == ("pending", 1)
    assert len(broker.registry.parted.rows()) == 1


@one_gpu
async def test_a_guest_has_waited_until_it_has_a_gpu_of_its_own(site, broker):
    host, guest = await pair(site, broker)
    since_at = broker.lease(guest).lease.waits_since_at
    mine = held(site, broker, host)
    await site.allocate(mine, {uuid: int(0.9 * limit) for uuid, limit in mine.limits.items()})
    await until(lambda: broker.state(guest) == "suspended", 5)
    assert broker.lease(guest).lease.waits_since_at == since_at


@one_gpu
async def test_a_guest_that_keeps_the_gpu_has_it_from_then_on(site, broker):
    host, guest = await pair(site, broker)
    began_at = site.now
    await asyncio.sleep(100)
    await site.ask(lambda b: b.requests.cancel(b.job(host)))
    await until(lambda: broker.lease(guest).lease.host == "", 60)
    assert broker.lease(guest).state is State.RUNNING
    assert broker.lease(guest).lease.granted_at >= began_at + 100


@one_gpu
async def test_a_guest_leaves_with_a_host_that_makes_way(site, broker):
    host, guest = await pair(site, broker)
    registry = broker.registry
    record = broker.lease(host)
    await registry.edit(record, lambda r: replace(r, lease=replace(r.lease, share=False)))
    await until(lambda: broker.state(guest) == "suspended", 10)
    assert broker.lease(host).state is State.RUNNING
    assert site.wrong == []


@one_gpu
async def test_a_guest_has_attained_what_it_got(site, broker):
    host, guest = await pair(site, broker)
    held(site, broker, guest).measured_share = 0.3
    began = site.now
    await asyncio.sleep(100)
    mine = held(site, broker, host)
    await site.allocate(mine, {uuid: int(0.9 * limit) for uuid, limit in mine.limits.items()})
    await until(lambda: broker.state(guest) == "suspended", 5)
    assert broker.lease(guest).lease.attained_gpu_s == pytest.approx(0.3 * (site.now - began), rel=0.1)


@one_gpu
async def test_the_progress_of_a_guest_is_measured_against_what_it_got(site, broker):
    _, guest = await pair(site, broker)
    held(site, broker, guest).measured_share = 0.3
    for percent in range(0, 36, 5):
        report = wire.JobReport(state="progress", done=float(percent), total=100.0)
        await broker.job_reports._progress(broker.lease(guest), broker.job(guest), report)
        await asyncio.sleep(300)
    assert broker.state(guest) == "running"
    measured = broker.job(guest).measure
    # 5 % in 300 s, of which it got 0.3.
    assert measured.left_gpu_s == pytest.approx(65 * 60 * 0.3, rel=0.1)


@one_gpu
async def test_a_guest_gets_all_of_the_gpu_while_its_host_computes_nothing(site, broker, monkeypatch):
    """Its measured share is that of the time in which both computed."""
    host, guest = await pair(site, broker)
    held(site, broker, guest).measured_share = 0.1
    await asyncio.sleep(5)
    companion = broker.registry.observations[host.lease_id].companion
    assert companion.guest_part == 0.1
    at_work = snapshot.at_work
    monkeypatch.setattr(snapshot, "at_work", lambda *args: at_work(*args) - {host.lease_id})
    await asyncio.sleep(5)
    assert broker.registry.observations[host.lease_id].companion.guest_part == 1.0
