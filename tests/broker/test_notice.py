"""A notice: owner and waiting job read it, and the owner may keep the GPU."""

from __future__ import annotations

import asyncio

from tests.broker.machine import Program
from tests.broker.virtual_time import until


async def test_a_session_that_was_idle_for_long_is_told_before_it_sleeps(site, broker):
    ada = await site.session("ada", "1/2")
    await asyncio.sleep(600)
    job = await site.submit("bo", "2", program=Program(work_s=10_000))
    began = site.now
    await until(lambda: broker.shown(ada.handle).warned, 10)
    told = broker.shown(ada.handle)
    assert told.badge == "Lent in 20 s"
    assert "1 job is waiting. In 20 s your GPU memory" in told.sentence
    assert "the owner of an idle session was told, and it starts at" in broker.seen(job).reason
    await until(lambda: broker.lease(ada.handle).state == "suspending", 60)
    assert 19 <= site.now - began <= 23, "a third of the idle timeout"


async def test_an_owner_that_keeps_the_gpu_after_the_notice_has_it(site, broker):
    ada = await site.session("ada", "1/2")
    await asyncio.sleep(600)
    await site.submit("bo", "2", program=Program(work_s=10_000))
    await until(lambda: broker.shown(ada.handle).warned, 10)
    await broker.own_sessions.keep(broker.lease(ada.handle), 10)
    await asyncio.sleep(60)
    assert broker.lease(ada.handle).state == "running"
    assert not broker.shown(ada.handle).warned
    assert "Your GPU stays with you until" in broker.shown(ada.handle).sentence
