"""Shares of compute time: what the device helper is asked for, and what is shown of what it measures."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from traitlets import TraitError

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import ComputeShare
from tests.broker.brokers import Broker
from tests.broker.machine import Held, Program
from tests.broker.site import Site, spawn
from tests.broker.virtual_time import until

FAIR, STRICT, OFF = ComputeShare.FAIR, ComputeShare.STRICT, ComputeShare.OFF
NO_LIBRARY = "its device has no library that could hold calls"


async def started(site: Site, mode: ComputeShare) -> Broker:
    """Return a broker that starts with this value of the trait, in place of the one that ran."""
    if site.broker is not None:
        await site.broker.end()
    site.policy = replace(site.policy, compute_share=mode)
    return await site.start_broker()


async def running(site: Site, user: str = "ada", size: str = "1/4") -> Held:
    held = await site.session(user, size)
    broker = site.broker
    assert broker is not None
    await until(lambda: broker.state(held.handle) == "running", 30)
    await asyncio.sleep(2)  # measured
    return held


def prepared(site: Site, held: Held) -> int:
    return site.effects.count(f"prepare {held.handle}")


# ---- what the helper is asked for


def test_the_trait_is_off_and_takes_no_other_word():
    assert GPUShareBroker().policy().compute_share is OFF
    assert GPUShareBroker(compute_share="strict").policy().compute_share is STRICT
    with pytest.raises(TraitError, match="compute_share"):
        GPUShareBroker(compute_share="half")


async def test_no_share_is_asked_for_unless_the_site_says_so(site, broker):
    ada = await running(site)
    assert (ada.asked.compute_share, ada.asked.share) == (OFF, 0.25)
    shown = broker.shown(ada.handle)
    assert (shown.compute_share, shown.share_percent, shown.measured_share_percent) == ("off", None, None)
    assert shown.share == ""


@pytest.mark.parametrize("mode", [FAIR, STRICT])
@pytest.mark.site(gpus=3)
async def test_a_lease_has_the_part_of_the_time_that_it_has_of_each_device(site, mode):
    broker = await started(site, mode)
    ada, job = await running(site), await site.running("bo", "2", program=Program(work_s=1_000))
    by_memory = await broker.start(wire.replace(spawn("cy", "1/4"), options=wire.GpuRequest(memory="16GB")))
    of_job = site.held[broker.lease(job).handle]
    assert (ada.asked.compute_share, ada.asked.share) == (mode, 0.25)
    assert (of_job.asked.compute_share, of_job.asked.share) == (mode, 1.0)
    assert site.held[by_memory.lease].asked.share == 0.206


@pytest.mark.parametrize("size", [{"gpus": "1/2"}, {"gpus": "1/8"}, {"memory": "19500000000"}])
@pytest.mark.site(gpus=1)
async def test_a_lease_of_another_size_has_the_part_of_that_size(site, size):
    broker = await started(site, FAIR)
    ada = await running(site)
    site.use(ada, {})
    record = broker.lease(ada.handle)
    await broker.sizes.change("ada", record.id, wire.SizeRequest(**size, borrow=True))
    record = broker.lease(ada.handle)
    await until(lambda: not broker.lease(ada.handle).unprepared, 30)
    assert ada.asked.share == record.lease.held_milli / 1000


@pytest.mark.parametrize(("before", "after"), [(OFF, FAIR), (FAIR, STRICT), (STRICT, OFF)])
async def test_living_leases_follow_a_broker_that_is_configured_anew(site, before, after):
    await started(site, before)
    awake, asleep = await running(site, size="1"), await running(site, "cy", "1/2")
    await site.running("bo", "1", program=Program(work_s=10_000))
    broker = site.broker
    assert broker is not None
    await until(lambda: broker.state(asleep.handle) == "suspended", 400)
    calls = [prepared(site, held) for held in (awake, asleep)]
    now = await started(site, after)
    await until(lambda: {awake.asked.compute_share, asleep.asked.compute_share} == {after}, 30)
    await asyncio.sleep(60)
    assert [prepared(site, held) for held in (awake, asleep)] == [count + 1 for count in calls]
    assert (now.state(awake.handle), now.state(asleep.handle)) == ("running", "suspended")
    assert (asleep.phase, asleep.asked.suspended) == ("suspended", True)


async def test_living_leases_follow_a_reload(site):
    broker = await started(site, OFF)
    ada = await running(site)
    ada.share_reason = NO_LIBRARY
    for mode in (FAIR, STRICT, OFF):
        before = prepared(site, ada)
        broker.registry.policy = replace(broker.registry.policy, compute_share=mode)
        await asyncio.sleep(60)
        assert (ada.asked.compute_share, prepared(site, ada)) == (mode, before + 1)


async def test_a_broker_that_is_configured_as_before_asks_for_nothing(site):
    await started(site, FAIR)
    ada = await running(site)
    before = prepared(site, ada)
    await started(site, FAIR)
    await asyncio.sleep(60)
    assert prepared(site, ada) == before


async def test_what_the_helper_did_not_take_it_is_asked_for_again(site):
    await started(site, OFF)
    ada = await running(site)
    site.fault("prepare", HelperError("busy", "later"), HelperError("busy", "later"))
    await started(site, FAIR)
    await until(lambda: ada.asked.compute_share is FAIR, 30)


async def test_a_share_that_cannot_be_in_force_is_not_asked_for_without_end(site):
    await started(site, FAIR)
    ada = await running(site)
    ada.share_reason = NO_LIBRARY
    before = prepared(site, ada)
    await started(site, FAIR)
    await asyncio.sleep(60)
    assert prepared(site, ada) <= before + 1


# ---- what is shown of what the helper measures


@pytest.mark.parametrize(
    ("mode", "words"), [(FAIR, "25 % granted, 31 % measured"), (STRICT, "most 25 %, 31 %")]
)
async def test_the_measured_share_is_shown_beside_the_granted_one(site, mode, words):
    broker = await started(site, mode)
    ada = await running(site)
    shown = broker.shown(ada.handle)
    assert (shown.compute_share, shown.share_percent, shown.measured_share_percent) == (mode, 25.0, None)
    assert "measured" not in shown.share
    ada.measured_share = 0.312
    await asyncio.sleep(2)
    shown = broker.shown(ada.handle)
    assert (shown.share_percent, shown.measured_share_percent) == (25.0, pytest.approx(31.2))
    assert words in shown.share
    assert shown.share.endswith("a kernel of 300 ms is never cut.")


async def test_a_share_that_is_not_in_force_says_why(site):
    broker = await started(site, FAIR)
    ada = await running(site)
    ada.share_reason = NO_LIBRARY
    await asyncio.sleep(2)
    shown = broker.shown(ada.handle)
    assert (shown.compute_share, shown.share_percent, shown.measured_share_percent) == ("off", None, None)
    assert shown.share == f"Its share of the GPU's time is not in force: {NO_LIBRARY}."
    assert shown.share_texts[0].args[0].key == "reason.holds_no_calls"


async def test_a_sleeping_session_has_no_share_to_show(site):
    broker = await started(site, FAIR)
    ada, _ = await site.lent(program=Program(work_s=1_000))
    ada.measured_share = 0.5
    await until(lambda: broker.state(ada.handle) == "suspended", 400)
    assert broker.shown(ada.handle).compute_share == "off"
    assert broker.shown(ada.handle).share == ""


@pytest.mark.parametrize("reason", ["", NO_LIBRARY])
async def test_a_lease_of_whole_gpus_shares_with_nobody_and_says_nothing(site, reason):
    broker = await started(site, FAIR)
    ada = await running(site, size="1")
    ada.share_reason = reason
    await asyncio.sleep(2)
    assert broker.shown(ada.handle).share_percent == (None if reason else 100.0)
    assert broker.shown(ada.handle).share == ""
