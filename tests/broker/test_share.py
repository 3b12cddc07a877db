"""Jobs that share a GPU: the owner's consent, the site's, and what is said and counted of host and guest."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace

import pytest
from traitlets import TraitError

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.control import guests, snapshot
from jupyter_gpushare.broker.state.observations import Companion
from jupyter_gpushare.broker.state.records import JobRecord, LeaseRecord
from jupyter_gpushare.broker.state.usage import UsageSums
from jupyter_gpushare.broker.views import history
from jupyter_gpushare.core.model import Kind, Lease, State, Why
from jupyter_gpushare.core.pairs import Reading
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import ComputeShare
from tests.broker.brokers import Broker, sent
from tests.broker.machine import Program
from tests.broker.site import Site
from tests.broker.test_chargeback import TO_MIDNIGHT_S
from tests.broker.test_metrics import text_of, value

LONG = Program(work_s=10_000)
# Less than a trial takes: nothing is measured here that would show that the pair pays.
TOGETHER_S = 150
ALL = history.query("2023-12-01", by="user", since="2023-11-01")


def planned(broker: Broker) -> dict[str, Lease]:
    """What the planner is given, by id."""
    cluster = snapshot.cluster(broker.registry, broker.engine, broker.registry.clock())
    return {lease.id: lease for lease in cluster.leases}


def shares(site: Site, *, yes: bool = True) -> None:
    """Let the site's switch be on, or off, as a reload does."""
    site.policy = replace(site.policy, share=yes)
    if site.broker is not None:
        site.broker.registry.policy = site.policy


# ---- consent: of the site and of the owner


def test_the_traits_are_off_and_for_the_engine_that_plans_here():
    policy = GPUShareBroker().policy()
    assert (policy.share, policy.share_between_projects) == (False, False)
    assert GPUShareBroker(share=True).policy().share
    assert GPUShareBroker(share_between_projects=True).policy().settings().share_between_projects
    with pytest.raises(TraitError, match="share is for the engine planner"):
        GPUShareBroker(engine="kai", share=True)
    assert not GPUShareBroker(engine="kai").policy().share


@pytest.mark.site(gpus=1)
async def test_both_site_and_owner_agree_before_the_planner_sees_it(site, broker):
    runs = await site.running("bo", "1", program=LONG, share=True)
    waits, alone = await site.submit("bo", "1", share=True), await site.submit("bo", "1")
    for yes in (False, True, False):
        shares(site, yes=yes)
        seen = planned(broker)
        assert [seen[job.lease_id].share for job in (runs, waits, alone)] == [yes, yes, False]
    assert [broker.seen(job).share for job in (runs, waits, alone)] == [True, True, False]


async def test_the_consent_outlives_the_broker_and_an_attempt(site, broker):
    shares(site)
    job = await site.submit("bo", "1", share=True, retries=1, program=Program(work_s=1, exit_code=1))
    await broker.end()
    broker = await site.start_broker()
    assert broker.lease(job).lease.share
    assert await broker.ended(job) == "failed"
    again = await broker.requests.retry(broker.job(job), site.groups["bo"])
    assert broker.seen(again).share


async def test_offers_say_whether_jobs_may_share_here(site, broker):
    assert not broker.views.offers(["nlp"], "nlp").shares
    shares(site)
    assert broker.views.offers(["nlp"], "nlp").shares


async def test_a_job_that_shares_is_another_request(site, broker):
    plain = wire.JobRequest(command=["a"])
    assert wire.digest(plain) != wire.digest(wire.replace(plain, share=True))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"gpus": "1"}, "It may also run as a guest on the GPU of another job. It may share its GPU"),
        ({"gpus": "2"}, "Other jobs may run as guests on its GPUs; it is never one itself."),
        ({"gpus": "1", "borrow": False}, "Other jobs may run as guests on its GPUs"),
        ({"gpus": "1", "checkpoint": "sigterm"}, "Other jobs may run as guests on its GPUs"),
        ({"gpus": "1/2"}, "It may also run as a guest on the GPU of another job."),
        ({"gpus": "1/2", "checkpoint": "none"}, "Sharing has no effect on it: only a job with whole GPUs"),
    ],
)
@pytest.mark.site(gpus=2)
async def test_the_answer_says_what_the_consent_comes_to(site, broker, asked, said):
    shares(site)
    await site.running("bo", "2", program=LONG)
    job = await site.submit("bo", asked.pop("gpus"), share=True, **asked)
    assert said in broker.seen(job).reason
    plain = await site.submit("bo", "1")
    assert "guest" not in broker.seen(plain).reason
    shares(site, yes=False)
    assert "this site lets no jobs share a GPU" in broker.seen(job).reason


# ---- what is said of a host and its guest


async def pair(
    site: Site, broker: Broker, *, user: str = "bo", gets: float = 0.25, **of_host: object
) -> tuple[JobRecord, JobRecord]:
    """Return a job of bo that holds a GPU, and one of ``user`` that is a guest there, by the records."""
    shares(site)
    host = await site.running("bo", "1", program=LONG, share=True)
    guest = await site.running(user, "1", program=LONG, share=True, project="nlp")
    registry = broker.registry
    record = broker.lease(host)
    held = site.held[broker.lease(guest).handle]
    held.used, held.limits = {}, dict.fromkeys(record.limits, 1 << 30)
    held.measured_share = gets

    # Nothing is free, else it would have that.
    site.unhealthy |= set(site.uuids) - set(record.limits)

    def visits(guest: LeaseRecord) -> LeaseRecord:
        lease = replace(guest.lease, host=record.id, devices=record.lease.devices)
        return replace(guest, lease=lease, limits=dict(held.limits))

    # Its speed alone is known, else nothing shows after the trial that the pair pays.
    for ago_s in range(700, 0, -10):
        alone = Reading(at=site.now - ago_s, work=100 * (700 - ago_s))
        registry.observations[record.id].rates.add(alone)
    await registry.edit(broker.lease(guest), visits)
    registry.observations[record.id].companion = Companion("host", guest.lease_id, guest_part=gets, **of_host)
    registry.observations[guest.lease_id].companion = Companion("guest", record.id, guest_part=gets)
    return host, guest


async def test_both_owners_read_that_they_share_and_how_fast_they_are(site, broker):
    host, guest = await pair(site, broker)
    seen = broker.seen(host)
    assert "Shares its GPU with another job, which gives way when this one needs it." in seen.reason
    assert (seen.shared, seen.shared_with, seen.kept_speed_percent) == ("host", guest.id, None)
    observations = broker.registry.observations
    mine = observations[host.lease_id].companion
    observations[host.lease_id].companion = replace(mine, kept=0.94)
    seen = broker.seen(host)
    assert seen.reason.startswith(
        "Running on 1 GPU. Shares its GPU with another job; it keeps 94 % of its speed."
    )
    assert seen.kept_speed_percent == 94.0
    seen = broker.seen(guest)
    assert seen.reason == "Runs as a guest on the GPU of another job, and gives way when that needs it."
    assert (seen.shared, seen.shared_with) == ("guest", host.id)
    lease = sent(broker.views.lease(broker.lease(guest)))
    assert (lease.badge, lease.shared, lease.shared_with) == ("Running as a guest", "guest", host.id)
    assert sent(broker.views.lease(broker.lease(host))).badge == "Running, shared"


async def test_the_other_job_is_named_within_one_project_and_to_those_who_see_all(site, broker):
    host, guest = await pair(site, broker)

    def of_another_project(record: LeaseRecord) -> LeaseRecord:
        return replace(record, lease=replace(record.lease, project="vision"))

    await broker.registry.edit(broker.lease(guest), of_another_project)
    assert broker.seen(host).shared_with == ""
    (seen,) = (each for each in broker.views.jobs(None, limit=10) if each.id == host.id)
    assert seen.shared_with == guest.id
    assert {each.shared_with for each in broker.views.leases(None)} == {host.id, guest.id}


async def test_a_running_job_says_that_it_may_share_before_it_does(site, broker):
    shares(site)
    job = await site.running("bo", "1", program=LONG, share=True)
    alone = await site.running("bo", "1", program=LONG)
    assert broker.seen(job).reason == "Running on 1 GPU. It may share its GPU with another job."
    assert "share" not in broker.seen(alone).reason
    assert (broker.seen(job).shared, broker.seen(job).shared_with) == ("", "")


@pytest.mark.parametrize(
    ("why", "more", "said"),
    [
        (
            Why.HOST_MEMORY_WANTED,
            {"took_s": 0.31},
            "The guest of your job train.py (1 GPU) left after 0.3 s: the job needed the memory.",
        ),
        (
            Why.PAIR_PARTED,
            {"kept": 0.81},
            "The guest of your job train.py (1 GPU) left: the job kept only 81 % of its speed beside it.",
        ),
        (
            Why.PAIR_PARTED,
            {"kept": 0.95},
            "Your job train.py (1 GPU) has its GPU to itself again: its guest has left.",
        ),
        ("ended", {}, "Your job train.py (1 GPU) has its GPU to itself again: its guest has left."),
    ],
)
async def test_the_timeline_of_a_host_has_its_guests_and_why_they_left(site, broker, why, more, said):
    host, _ = await pair(site, broker)
    await guests.report_arrival(broker.registry, broker.lease(host))
    await guests.report_departure(broker.registry, broker.lease(host), why, **more)
    moments = sent(await history.timeline(broker.registry, broker.job(host), "bo")).moments
    assert [each.sentence for each in moments if each.what == "guest"] == [
        "Your job train.py (1 GPU) shares its GPU with another job from now on.",
        said,
    ]
    assert broker.registry.tally.guests_left == {str(why): 1}


# ---- what is counted


async def hours(broker: Broker, by: str) -> dict[str, wire.UsageRow]:
    asked = history.query(broker.registry.iso_now()[:10], by=by, since="2023-11-01")
    rows = (await history.usage(broker.registry, asked)).rows
    none = wire.UsageRow(held_gpu_h=0, computing_gpu_h=0, borrowed_gpu_h=0, lent_gpu_h=0)
    return defaultdict(lambda: none, {getattr(row, by): row for row in rows})


async def test_a_guest_is_charged_what_it_got_and_its_host_the_rest(site, broker):
    await pair(site, broker, user="cy", gets=0.25)
    before, began_s = await hours(broker, "user"), site.now
    await asyncio.sleep(TOGETHER_S)
    after, passed_h = await hours(broker, "user"), (site.now - began_s) / 3600
    more = {name: after[name].held_gpu_h - before[name].held_gpu_h for name in ("bo", "cy")}
    assert more["cy"] == pytest.approx(0.25 * passed_h, rel=0.06)
    assert more["bo"] == pytest.approx(0.75 * passed_h, rel=0.06)
    assert sum(more.values()) == pytest.approx(passed_h, rel=0.001)
    assert after["cy"].computing_gpu_h <= after["cy"].held_gpu_h
    # A broker that dies loses minutes of the division, and nothing of the sum.
    await broker.end()
    again = await hours(await site.start_broker(), "user")
    assert again["cy"].held_gpu_h == pytest.approx(after["cy"].held_gpu_h, abs=0.25 * 310 / 3600)
    total = sum(row.held_gpu_h for row in after.values())
    assert sum(row.held_gpu_h for row in again.values()) == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize("gets", [0.4, 7.0])
async def test_host_and_guest_together_never_exceed_the_time_of_the_device(site, broker, gets):
    """Whatever is measured, and across the midnight of the sums."""
    await asyncio.sleep(TO_MIDNIGHT_S - TOGETHER_S / 2 - site.now)
    await pair(site, broker, gets=gets)
    before, began_s = await history.usage(broker.registry, ALL), site.now
    await asyncio.sleep(TOGETHER_S)
    assert len({use.day for use in broker.registry.usage.sums.values()}) == 2
    after = (await history.usage(broker.registry, ALL)).total
    passed_h = (site.now - began_s) / 3600
    assert after.held_gpu_h - before.total.held_gpu_h == pytest.approx(passed_h, rel=0.01)
    assert after.computing_gpu_h - before.total.computing_gpu_h <= passed_h * 1.01
    assert after.borrowed_gpu_h - before.total.borrowed_gpu_h <= passed_h * 1.01


def test_a_guest_that_keeps_the_device_of_its_host_is_charged_from_then_on():
    usage = UsageSums(lambda _: "", 0.0)
    lease = Lease(id="j1", project="nlp", kind=Kind.TRAIN, size=Size(1000), user="bo", state=State.RUNNING)
    guest = LeaseRecord(lease=replace(lease, held_milli=1000, devices=("GPU-0",), host="j2"))
    (counted,), _ = usage.count_held([guest], 900.0, "2023-11-15T12:00:00.000Z")
    assert counted.counted_at == 900.0
    own = replace(counted, lease=replace(counted.lease, host=""))
    usage.count_held([own], 1_000.0, "2023-11-15T12:01:40.000Z")
    assert [use.used_gpu_s for use in usage.sums.values()] == [100.0]


async def test_metrics_count_guests_their_gpu_seconds_and_why_they_left(site, broker):
    host, _ = await pair(site, broker, gets=0.5)
    await asyncio.sleep(100)
    await guests.report_departure(broker.registry, broker.lease(host), Why.PAIR_PARTED, kept=0.8)
    text = text_of(broker.registry)
    assert value(text, 'gpushare_guests{project="nlp"}') == 1
    assert value(text, 'gpushare_guest_gpu_seconds_total{project="nlp"}') == pytest.approx(50, rel=0.2)
    assert value(text, 'gpushare_guests_left_total{why="pair_parted"}') == 1
    held = [value(text, f'gpushare_device_held_gpus{{device="{uuid}"}}') for uuid in site.uuids]
    assert sorted(held) == [0, 1]


async def test_devices_and_projects_count_no_guest_as_holding(site, broker):
    await pair(site, broker)
    held = [device.held_milli for device in broker.views.devices().devices]
    assert sorted(held) == [0, 1000]
    assert broker.views.offers(["nlp"], "nlp").free_milli == 1000
    (nlp,) = broker.views.projects(["nlp"])
    assert nlp.in_use_milli == 1000


async def test_the_share_of_time_that_is_shown_is_that_of_their_turns(site, broker):
    site.policy = replace(site.policy, compute_share=ComputeShare.FAIR)
    host, guest = await pair(site, broker, gets=0.25)
    await asyncio.sleep(10)
    shown = {job.id: sent(broker.views.lease(broker.lease(job))) for job in (host, guest)}
    assert [shown[job.id].share_percent for job in (host, guest)] == [90, 10]
    assert "10 % granted, 25 % measured" in shown[guest.id].share
    text = text_of(broker.registry)
    (device,) = broker.lease(host).lease.devices
    granted = f'gpushare_compute_share_granted_ratio{{device="{device}",project="nlp"}}'
    assert value(text, granted) <= 1
