"""Sessions that the helper resumed while no broker answered: the broker reads it and follows."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.core.model import State
from jupyter_gpushare.protocol.helper import Phase
from tests.broker.brokers import Broker
from tests.broker.machine import Held, Program
from tests.broker.site import Site
from tests.broker.virtual_time import until


async def lent_and_free_again(site: Site, broker: Broker) -> Held:
    """Return a session that is suspended though its GPU is free."""
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2", program=Program(work_s=5))
    await until(lambda: broker.state(ada.handle) == "suspended", 120)
    await until(lambda: broker.job(job).result, 120)
    assert ada.phase is Phase.SUSPENDED
    return ada


async def follows(broker: Broker, ada: Held, within_s: float = 10.0) -> None:
    """Return when the broker has the session as awake, in its database too, and the helper knows that."""
    await until(lambda: broker.state(ada.handle) == "running" and not ada.unconfirmed, within_s)
    stored = {record.handle: record for record in broker.store.load().leases}
    assert stored[ada.handle].state is State.RUNNING


@pytest.mark.site(gpus=1)
async def test_only_a_session_on_capacity_of_its_own_may_be_resumed_unasked(site, broker):
    job = await site.running("bo", "1/2", program=Program(work_s=100))
    own = await site.session("ada", "1/2")
    assert own.unattended
    assert not site.held[broker.lease(job).handle].unattended


async def test_only_jobs_that_cannot_be_suspended_are_to_be_stopped_without_their_seat(site, broker):
    stops = {}
    for checkpoint in ("suspend", "suspend,sigterm", "sigterm", "none"):
        program = Program(work_s=100)
        job = await site.submit("bo", "1/2", program=program, checkpoint=checkpoint)
        await until(lambda job=job: broker.state(job) == "running", 60)
        stops[checkpoint] = site.held[broker.lease(job).handle].stops
    assert stops == {"suspend": False, "suspend,sigterm": False, "sigterm": True, "none": True}
    assert not (await site.session("ada", "1/2")).stops


async def test_a_borrowing_session_is_left_to_the_broker(site, broker):
    await site.session("ada", "1")
    over_quota = await site.session("ada", "1/2", server="more")
    assert broker.lease(over_quota.handle).lease.borrowed
    assert not over_quota.unattended


async def test_a_broker_that_was_away_reads_what_the_helper_resumed(site, broker):
    ada = await lent_and_free_again(site, broker)
    site.helper_silent = True
    await asyncio.sleep(10)
    site.resume_unattended(ada)
    site.helper_silent = False
    await follows(broker, ada)
    assert "wanted" in [each.why for each in broker.registry.leases.values()]


async def test_the_next_broker_reads_what_the_helper_resumed(site, broker):
    ada = await lent_and_free_again(site, broker)
    await broker.end()
    site.resume_unattended(ada)
    broker = await site.start_broker()
    await follows(broker, ada)


async def test_a_broker_that_has_it_as_running_confirms_too(site, broker):
    ada = await site.session("ada", "1/2")
    await until(lambda: broker.state(ada.handle) == "running", 10)
    ada.unconfirmed = True
    await until(lambda: not ada.unconfirmed, 10)


async def granted(site: Site, broker: Broker) -> JobRecord:
    """Return a job that was granted both GPUs, before the Hub has started its server."""
    site.spawn_s = 20.0
    job = await site.submit("bo", "2", program=Program(work_s=10))
    await until(lambda: broker.state(job) == "granted", 30)
    assert broker.lease(job).handle not in site.held
    return job


async def test_a_job_that_was_granted_meanwhile_waits_and_runs_later(site, broker):
    ada = await lent_and_free_again(site, broker)
    job = await granted(site, broker)
    site.helper_silent = True
    await asyncio.sleep(6)
    site.resume_unattended(ada)
    site.helper_silent = False
    await asyncio.sleep(3)
    assert ada.unconfirmed  # the job has the capacity in the books, until its start is refused
    site.spawn_s = 0.2
    await follows(broker, ada, 60)
    assert site.started[job.id] == 0
    await until(lambda: broker.job(job).result, 600)
    assert (broker.job(job).result, site.started[job.id]) == ("succeeded", 1)
    assert ada.phase is Phase.SUSPENDED


async def test_nothing_is_granted_on_what_the_helper_resumed_before_the_books_say_so(site, broker):
    ada = await lent_and_free_again(site, broker)
    site.move_s = 30.0  # the confirmation takes long
    site.resume_unattended(ada)
    job = await site.submit("bo", "2", program=Program(work_s=10))
    await asyncio.sleep(20)
    assert broker.state(job) == "pending"
    assert ada.unconfirmed


async def test_what_the_driver_lost_in_a_resume_without_the_broker_is_told(site, broker):
    ada = await lent_and_free_again(site, broker)
    site.resume_unattended(ada)
    ada.phase = Phase.LOST
    ada.used = {}
    await until(lambda: broker.lease(ada.handle).lost, 30)
