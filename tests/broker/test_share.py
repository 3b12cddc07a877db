"""Jobs that share a GPU: the owner's consent, the site's, and what is said and counted of host and guest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from traitlets import TraitError

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.protocol import wire
from tests.broker.brokers import Broker
from tests.broker.machine import Program
from tests.broker.site import Site

LONG = Program(work_s=10_000)


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
