"""Sessions with programs that call the driver and do not compute: owner and administrator read so."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.state.observations import LowUse
from tests.broker.brokers import Broker
from tests.broker.machine import Held
from tests.broker.site import Site
from tests.broker.test_overview import overview
from tests.broker.virtual_time import until

AFTER_MIN = 20


async def started(site: Site, after_min: float = AFTER_MIN) -> Broker:
    site.policy = replace(site.policy, fake_busy_after_s=60.0 * after_min)
    return await site.start_broker()


async def poll(site: Site, held: Held, minutes: int) -> None:
    """Enter the driver once a minute, as a program does that waits for work."""
    for _ in range(minutes):
        held.active_at = site.now
        await asyncio.sleep(60)


def told(broker: Broker) -> list[str]:
    return [d.sentence for d in broker.registry.decisions.latest if d.action == "low-use"]


async def test_a_session_that_only_polls_the_driver_is_told_once_and_needs_a_look(site):
    broker = await started(site)
    ada = await site.session("ada", "1/2")
    await poll(site, ada, AFTER_MIN - 1)
    assert not told(broker)
    assert not overview(broker).alerts()
    await poll(site, ada, 3)
    said = "ada's session (1/2 GPU) has kept its GPU busy for 21 min without computing"
    assert told(broker) == [f"{said}: utilization stayed below 2 %."]
    await poll(site, ada, 9)
    assert len(told(broker)) == 1
    (alert,) = overview(broker).alerts()
    assert alert.sentence == (
        "ada's session (1/2 GPU) has kept its GPU busy for 30 min without computing: "
        "utilization stayed below 2 %; it held 0.2 GPU-hours meanwhile."
    )
    assert not alert.lend  # its own calls would take the GPU back at once
    site.utilization["GPU-0"] = site.utilization["GPU-1"] = 2
    await until(lambda: not overview(broker).alerts(), 30)


async def test_work_and_idleness_begin_it_anew(site):
    broker = await started(site)
    ada = await site.session("ada", "1/2")
    await poll(site, ada, AFTER_MIN - 1)
    site.utilization["GPU-0"] = site.utilization["GPU-1"] = 60
    await poll(site, ada, 1)
    site.utilization.clear()
    await poll(site, ada, AFTER_MIN - 1)
    await asyncio.sleep(900)  # it enters the driver no more: idle
    await poll(site, ada, AFTER_MIN - 1)
    assert not told(broker)
    await poll(site, ada, 3)
    assert len(told(broker)) == 1


def test_a_time_without_measurements_counts_for_nothing():
    low = LowUse()
    for now in (0.0, 30.0, 60.0):
        low.saw(now, 0, now)
    assert low.lasted_s == 60.0
    low.saw(5_000.0, 0, 5_000.0)
    assert low.lasted_s == 0.0


@pytest.mark.site(profile="3g.40gb")
async def test_the_utilization_of_a_mig_instance_is_not_known(site, broker):
    devices = broker.registry.devices
    assert devices.utilization_percent(site.uuids) == 0
    assert devices.max_utilization_percent(site.uuids) is None


@pytest.mark.parametrize("after_min", [0, 60])
async def test_nothing_is_said_before_its_time_nor_where_it_is_switched_off(site, after_min):
    broker = await started(site, after_min)
    ada = await site.session("ada", "1/2")
    await poll(site, ada, AFTER_MIN + 5)
    assert not told(broker)
    assert not overview(broker).alerts()
