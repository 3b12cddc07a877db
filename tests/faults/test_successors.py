"""Brokers on a restored database, and two brokers on one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import sqlalchemy as sa

from jupyter_gpushare.errors import HelperError, StoreError
from tests.broker.machine import Program
from tests.broker.site import Site
from tests.broker.virtual_time import in_virtual_time, until


@in_virtual_time
async def test_a_broker_on_a_restored_database_acts_again_and_keeps_clear_of_what_it_forgot(tmp_path):
    async with Site(tmp_path, gpus=2) as site:
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


@in_virtual_time
async def test_a_broker_that_another_one_followed_never_takes_a_higher_epoch(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        before = broker.store.epoch
        site.epoch = 9  # another broker was at work on this machine
        with pytest.raises(HelperError, match="newer broker"):
            await broker.devices.drop("b-1")
        await asyncio.sleep(30)
        assert broker.store.epoch == before
        site.wrong.clear()  # what it tried was refused


@in_virtual_time
async def test_a_broker_that_lost_its_database_to_another_ends_instead_of_taking_a_higher_epoch(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker(running=False)
        with broker.store._engine.begin() as connection:
            connection.execute(sa.text("update meta set value = '9' where key = 'epoch'"))
        site.epoch = 9
        with pytest.raises(StoreError, match="a newer broker"):
            await broker.loop.observer.measure()
        assert broker.registry.journal.failed.done()
