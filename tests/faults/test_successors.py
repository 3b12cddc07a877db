"""Brokers on a restored database, and two brokers on one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker.app import END_S
from jupyter_gpushare.errors import HelperError, StoreError, Superseded
from tests.broker.fake_devices import SiteDevices
from tests.broker.machine import Held, Program
from tests.broker.virtual_time import until


async def test_a_broker_on_a_restored_database_acts_again_and_keeps_clear_of_what_it_forgot(site):
    database = Path(sa.make_url(site.url).database)
    backup = database.read_bytes()
    for _ in range(2):
        await (await site.start_broker()).end()
    broker = await site.start_broker()
    forgotten = await site.session("ada", "1")
    seq = broker.registry.notifications.seq
    await broker.end()
    for extra in database.parent.glob(f"{database.name}-*"):
        extra.unlink()
    database.write_bytes(backup)
    (busy,) = forgotten.limits
    broker = await site.start_broker()
    assert broker.store.epoch == 5  # the database counted to 2, the helper saw 4
    assert broker.registry.notifications.seq > seq  # waiting pages take its answers for new ones
    jobs = [await site.submit("bo", "1", program=Program(work_s=1)) for _ in range(2)]
    for job in jobs:
        await until(lambda job=job: broker.state(job) == "granted")
        assert busy not in broker.lease(job).lease.devices
        await until(lambda job=job: broker.job(job).result)
    assert any(busy in reason and forgotten.handle in reason for reason in broker.views.health().reasons)
    forgotten.alive, forgotten.used = False, {}
    await until(lambda: not broker.registry.devices.orphaned)
    assert forgotten.handle not in site.held
    assert all(device.usable for device in broker.registry.devices.for_planner())


async def test_no_part_asks_the_helper_with_the_old_epoch_of_a_restored_database(site, monkeypatch):
    """The first answer takes a moment, in which a request with that epoch would end the broker for good."""

    async def slow(self):
        await asyncio.sleep(0.1)
        return self.site.epoch

    monkeypatch.setattr(SiteDevices, "epoch", slow)
    site.epoch = 9
    site.servers[ServerKey("bo", "jabcdefghij-1")] = "ready"  # of a job that the backup has not: stopped
    broker = await site.start_broker()
    await asyncio.sleep(30)
    assert not broker.registry.journal.failed.done()
    assert broker.store.epoch == 10
    assert site.inboxes, "it watches"


@pytest.mark.parametrize("waits", ["commit", "drop", "inventory"])
async def test_a_broker_whose_measurement_waits_notices_its_successor_all_the_same(
    site, broker, monkeypatch, waits
):
    """A measurement waits for a disk that takes minutes, a lease that is being moved, or self-tests."""
    if waits == "commit":
        await site.session("ada")  # the next measurement stores that it runs
    elif waits == "drop":
        site.held["b-gone-1"] = Held("b-gone-1", 1000, {})
    else:
        broker.loop.observer._inventory_due = True

    async def minutes(*_):
        await asyncio.sleep(600)

    monkeypatch.setattr(broker.store if waits == "commit" else broker.devices, waits, minutes)
    await asyncio.sleep(2)
    site.epoch = 9  # the first sample of a newer broker
    with pytest.raises(Superseded, match="newer broker"):
        async with asyncio.timeout(5 - END_S):
            await asyncio.shield(broker.registry.journal.failed)


async def test_a_broker_that_another_one_followed_never_takes_a_higher_epoch(site, broker):
    before = broker.store.epoch
    site.epoch = 9  # another broker was at work on this machine
    with pytest.raises(HelperError, match="newer broker"):
        await broker.devices.drop("b-1")
    await asyncio.sleep(30)
    assert broker.store.epoch == before
    site.wrong.clear()  # what it tried was refused


async def test_a_broker_that_lost_its_database_to_another_ends_instead_of_taking_a_higher_epoch(site):
    broker = await site.start_broker(running=False)
    with broker.store._engine.begin() as connection:
        connection.execute(sa.text("update meta set value = '9' where key = 'epoch'"))
    site.epoch = 9
    with pytest.raises(StoreError, match="a newer broker"):
        await broker.loop.observer.measure()
    assert broker.registry.journal.failed.done()
