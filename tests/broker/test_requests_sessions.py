"""Sessions and projects at the request service: starts, rights and bounds."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.control.project_numbers import overrides_text
from jupyter_gpushare.broker.state.policy import Policy, ProjectConfig
from jupyter_gpushare.broker.state.registry import keep_left
from jupyter_gpushare.core.model import State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import (
    Conflict,
    HelperError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    TooMany,
)
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import EventKind
from jupyter_gpushare.wall_clock import seconds_between
from tests.broker.machine import GB, Program
from tests.broker.site import spawn
from tests.broker.virtual_time import until

TWO_MODELS = {"H100-80GB": 80 * GB, "A100-40GB": 40 * GB}


async def test_a_project_of_others_looks_like_one_that_is_not_there(broker):
    for name in ("nosuch", "vision"):
        with pytest.raises(NotFound, match="yours: nlp") as refused:
            await broker.start(spawn("bo", "1/2", project=name))
        assert refused.value.reason == "unknown_project"
        assert str(refused.value).replace(name, "X") == "there is no project 'X' for you; yours: nlp"


async def test_a_user_without_project_gets_no_gpu_but_a_server(broker):
    with pytest.raises(NotAllowed, match="no project"):
        await broker.start(spawn("eve", "1/2"))
    grant = await broker.start(spawn("eve", None))
    assert grant.lease is None
    assert grant.env == {}


async def test_a_session_gets_its_part_and_says_which(site, broker):
    grant = await broker.start(spawn("ada", "1/2"))
    record = broker.lease(grant.lease)
    assert grant.memory_limit_bytes == 39_000_000_000
    assert grant.devices == list(record.lease.devices)
    assert record.state is State.GRANTED
    assert record.uid == 1000
    assert grant.message.startswith("Your 1/2 GPU (")
    assert grant.message.endswith(" of H100-80GB) is ready.")
    site.held[grant.lease].alive = True
    await until(lambda: broker.state(grant.lease) == "running", 5)


@pytest.mark.site(models=TWO_MODELS)
async def test_an_offer_names_the_gpu_that_a_session_gets(site, broker):
    named = set()
    for holder in ("", "bo", "cy"):
        if holder:  # the offers after it are of other GPUs
            await broker.start(spawn(holder, "1/2", project="nlp"))
        offers = broker.views.offers(["vision"], "vision").offers
        for offer in (each for each in offers if each.starts == "now"):
            request = wire.replace(spawn("ada", None), options=wire.GpuRequest(**offer.options))
            grant = await broker.start(request)
            assert (offer.memory_bytes, offer.memory_most_bytes) == (grant.memory_limit_bytes, None)
            assert f" of {offer.device}) is ready" in grant.message
            named.add(offer.device)
            await site.end_session("ada")
            await until(lambda: not any(x.lease.user == "ada" for x in broker.registry.leases.values()), 30)
    assert named == set(TWO_MODELS)


@pytest.mark.site(models=TWO_MODELS)
async def test_an_offer_that_several_models_can_serve_later_names_them_and_both_amounts(broker):
    for user in ("ada", "bo"):
        await broker.start(spawn(user, "1"))
    offers = {offer.label: offer for offer in broker.views.offers(["vision"], "vision").offers}
    half = offers["1/2 GPU"]
    assert (half.starts, half.device) == ("no", "A100-40GB or H100-80GB")
    assert (half.memory_bytes, half.memory_most_bytes) == (19 * GB, 39 * GB)


@pytest.mark.site(
    models=TWO_MODELS,
    policy=Policy(
        projects=(ProjectConfig(name="vision", groups=("vision",)),), sizes=(Size(1000, 2), Size(1000, 3))
    ),
)
async def test_several_gpus_are_all_named(broker):
    both, three = broker.views.offers(["vision"], "vision").offers
    assert (both.device, both.memory_bytes) == ("H100-80GB and A100-40GB", (38 + 78) * GB)
    assert (three.starts, three.device) == ("no", "A100-40GB or H100-80GB")
    request = wire.replace(spawn("ada", None), options=wire.GpuRequest(gpus=2))
    grant = await broker.start(request)
    assert f"of {both.device}) is ready" in grant.message


@pytest.mark.site(gpus=1)
async def test_what_a_device_no_longer_keeps_back_is_granted_without_a_restart(site):
    site.reserve_bytes = 10 * GB
    broker = await site.start_broker()
    first = await site.session("ada", "1/2")
    assert first.limits == {"GPU-0": 35 * GB}
    site.reserve_bytes = 2 * GB
    site.emit(EventKind.DEVICE, reserve_bytes=str(2 * GB))
    await until(lambda: broker.registry.devices.listed[0].reserve_bytes == 2 * GB, 10)
    second = await site.session("bo", "1/2")
    assert (first.limits, second.limits) == ({"GPU-0": 35 * GB}, {"GPU-0": 39 * GB})


async def test_what_an_ended_kernel_left_is_shown_with_who_keeps_it_and_released_by_its_owner(site, broker):
    ada = await site.session("ada", "1/2")
    await until(lambda: broker.state(ada.handle) == "running", 30)
    with pytest.raises(Conflict, match="no ended process of this session left GPU memory behind"):
        await broker.own_sessions.release(broker.lease(ada.handle))
    ada.left = {4711: 3 * GB, 4712: 0}
    await asyncio.sleep(2)
    shown = broker.shown(ada.handle).processes
    assert [(each.pid, each.used_bytes, each.keeps) for each in shown] == [
        (4711, 3 * GB, True),
        (4712, 0, True),
    ]
    site.fault("signal SIGKILL keepers", HelperError("silent", "the device helper did not answer"))
    with pytest.raises(Conflict, match="the processes were not ended: the device helper did not answer"):
        await broker.own_sessions.release(broker.lease(ada.handle))
    await broker.own_sessions.release(broker.lease(ada.handle))
    assert site.effects[-1] == f"signal SIGKILL keepers {ada.handle}"
    await asyncio.sleep(2)
    assert broker.shown(ada.handle).processes == []
    assert broker.state(ada.handle) == "running"


@pytest.mark.site(gpus=1)
async def test_two_sessions_that_start_at_once_do_not_get_the_same_capacity(broker):
    requests = (spawn("ada", "1"), spawn("bo", "1"))
    answers = await asyncio.gather(*map(broker.start, requests), return_exceptions=True)
    assert [type(answer) for answer in answers] == [wire.SpawnGrant, Conflict]


@pytest.mark.site(gpus=1)
async def test_a_session_that_does_not_fit_is_refused_with_what_to_do(site, broker):
    await site.session("ada", "1")
    with pytest.raises(Conflict, match="Choose a smaller size, or start without a GPU") as refused:
        await broker.start(spawn("bo", "1"))
    assert refused.value.reason == "no_capacity"
    assert len(broker.registry.leases) == 1


async def test_a_restarted_server_gets_a_new_lease_when_the_old_one_has_let_go(site, broker):
    old = await site.session("ada", "1/2")
    old.alive, old.used = False, {}
    new = await site.session("ada", "1/4")
    assert new.handle != old.handle
    assert [r.handle for r in broker.registry.leases.values()] == [new.handle]


async def test_a_server_that_still_lives_keeps_its_capacity_and_the_next_one_is_told(site):
    site.policy = replace(site.policy, grace_s=100.0)
    broker = await site.start_broker()
    await site.session("ada", "1/2")
    with pytest.raises(Conflict, match="try again in a few seconds"):
        await broker.start(spawn("ada", "1/4"))


async def test_without_the_helper_a_gpu_is_refused_and_a_server_without_one_starts(site, broker):
    site.helper_silent = True
    await until(lambda: site.now - broker.registry.devices.sampled_at > 6)
    for refuse in (broker.start(spawn("ada", "1/2")), site.submit("bo", "1")):
        with pytest.raises(Conflict) as refused:
            await refuse
        assert refused.value.reason == "devices_unknown"
    assert (await broker.start(spawn("ada", None))).lease is None
    assert not broker.registry.leases


async def test_an_old_measurement_judges_no_lease_and_grants_nothing(site, broker, monkeypatch):
    ada = await site.session("ada", "1/2")
    await until(lambda: broker.state(ada.handle) == "running", 30)
    # The helper answers from memory while its sampler is stuck; ada's processes are not in it.
    await asyncio.sleep(6)
    stuck = replace(broker.registry.devices.sample, leases=())

    async def from_memory():
        return stuck

    monkeypatch.setattr(broker.devices, "sample", from_memory)
    await asyncio.sleep(606)
    assert broker.state(ada.handle) == "running"
    with pytest.raises(Conflict) as refused:
        await broker.start(spawn("bo", "1/4"))
    assert refused.value.reason == "devices_unknown"
    health = broker.views.health()
    assert health.sample_age_s > 600
    assert "is 606 s old" in health.reasons[0] or "is 607 s old" in health.reasons[0]


async def test_a_lease_that_the_helper_does_not_take_is_given_back(site, broker):
    site.fault("prepare", HelperError("conflict", "no"))
    with pytest.raises(Conflict):
        await broker.start(spawn("ada", "1/2"))
    assert not broker.registry.leases
    assert (await broker.start(spawn("ada", "1/2"))).lease is not None


async def test_keeping_a_gpu_has_bounds_and_a_budget_per_day(site, broker):
    ada = await site.session("ada", "1/2")
    for minutes in (0.5, -1, 241, float("inf"), float("nan")):
        with pytest.raises(InvalidRequest, match="from 1 to 240"):
            await broker.own_sessions.keep(broker.lease(ada.handle), minutes)
    await broker.own_sessions.keep(broker.lease(ada.handle), 100)
    assert broker.lease(ada.handle).lease.keep_until_at == pytest.approx(site.now + 6000)
    await broker.own_sessions.keep(broker.lease(ada.handle), 30)  # nothing is added, and nothing lost
    assert broker.lease(ada.handle).lease.keep_until_at == pytest.approx(site.now + 6000)
    with pytest.raises(TooMany, match="20 more minutes") as refused:
        await broker.own_sessions.keep(broker.lease(ada.handle), 125)
    assert 0 < refused.value.retry_after_s <= 86_400, "the budget is new at midnight UTC"
    await broker.end()
    broker = await site.start_broker()
    assert keep_left(broker.registry, "ada") == pytest.approx(20, abs=0.01)
    with pytest.raises(TooMany, match=r"(19|20) more minutes"):
        await broker.own_sessions.keep(broker.lease(ada.handle), 125)
    await broker.own_sessions.keep(broker.lease(ada.handle), 119)
    assert keep_left(broker.registry, "ada") == pytest.approx(1, abs=0.1)


async def test_keeping_a_gpu_can_be_undone_and_counts_no_more_than_it_lasted(site, broker):
    ada = await site.session("ada", "1/2")
    assert broker.shown(ada.handle).keep_until is None
    await broker.own_sessions.keep(broker.lease(ada.handle), 0)
    assert keep_left(broker.registry, "ada") == 120
    await broker.own_sessions.keep(broker.lease(ada.handle), 30)
    told = broker.shown(ada.handle)
    assert seconds_between(broker.registry.iso_now(), told.keep_until) == pytest.approx(1800, abs=1)
    await asyncio.sleep(300)
    await broker.own_sessions.keep(broker.lease(ada.handle), 0)
    assert broker.shown(ada.handle).keep_until is None
    assert keep_left(broker.registry, "ada") == pytest.approx(115, abs=0.1)


async def test_a_kept_gpu_is_not_lent_and_a_lent_one_goes_at_once(site, broker):
    ada = await site.session("ada", "1")
    await broker.own_sessions.keep(broker.lease(ada.handle), 60)
    job = await site.submit("bo", "2", program=Program(work_s=5))
    await until(lambda: site.now - ada.active_at > 600, 700)
    assert broker.state(ada.handle) == "running"
    assert broker.state(job) == "pending"
    await broker.own_sessions.lend(broker.lease(ada.handle))
    await until(lambda: broker.state(ada.handle) == "suspended", 10)
    await until(lambda: broker.job(job).result, 60)


async def test_a_sleeping_session_is_woken_by_its_owner_and_only_then(site, broker):
    ada = await site.session("ada", "1")
    with pytest.raises(Conflict, match="only a session that is asleep"):
        await broker.own_sessions.wake(broker.lease(ada.handle))
    job = await site.running("bo", "2", program=Program(work_s=500))
    with pytest.raises(Conflict, match="only a session that is awake"):
        await broker.own_sessions.lend(broker.lease(ada.handle))
    for verb in (broker.own_sessions.wake, broker.own_sessions.lend):
        with pytest.raises(Conflict):
            await verb(broker.lease(job))
    await broker.own_sessions.wake(broker.lease(ada.handle))
    await until(lambda: broker.state(ada.handle) == "running", 30)


async def test_a_projects_numbers_can_be_changed_and_outlive_the_broker(site, broker):
    await broker.project_numbers.change("nlp", wire.ProjectChange(quota=0.5, weight=3), "root")
    await broker.project_numbers.change("nlp", wire.ProjectChange(limit=1.5), "root")
    await broker.end()
    broker = await site.start_broker()
    nlp = next(p for p in snapshot.projects(broker.registry, broker.engine) if p.name == "nlp")
    assert (nlp.quota_milli, nlp.weight, nlp.limit_milli) == (500, 3, 1500)
    (told,) = overrides_text(broker.registry)
    assert told.startswith(
        "project nlp: quota 0.5 (configured: 50%), limit 1.5 (configured: none), "
        "weight 3 (configured: 1), set by an administrator, wins over the configuration"
    )
    await broker.project_numbers.reset("nlp", "root")
    await broker.end()
    broker = await site.start_broker()
    assert broker.registry.overrides == {}
    assert overrides_text(broker.registry) == []


async def test_a_start_with_guarantees_beyond_the_machine_says_so_once(site, broker, caplog):
    assert "jobs share these by weight" not in caplog.text
    await broker.project_numbers.change("nlp", wire.ProjectChange(quota=1.5, force=True), "root")
    await broker.end()
    await site.start_broker()
    said = "The projects are guaranteed 2.5 GPUs together, and there are 2: jobs share these by weight."
    await until(lambda: said in caplog.text)
    await asyncio.sleep(120)
    assert caplog.text.count(said) == 1


async def test_hints_of_a_server_count_for_its_own_lease_only(site, broker):
    ada, cy = await site.session("ada", "1/2"), await site.session("cy", "1/4")
    busy = wire.ActivityReport(kernels=[wire.KernelActivity(id="k", busy=True, idle_s=0.0, name="a.ipynb")])
    await broker.own_sessions.activity("ada", "", busy)
    await broker.own_sessions.activity("ada", "other", busy)
    await broker.own_sessions.activity("eve", "", busy)
    live = broker.registry.observations
    assert live[broker.lease(ada.handle).id].kernel_busy
    assert not live[broker.lease(cy.handle).id].kernel_busy
