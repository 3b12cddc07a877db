"""A machine with a GPU divided into MIG instances: asked for by profile, or by memory."""

from __future__ import annotations

import pytest

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire
from tests.broker.machine import Program

PROFILE = "1g.10gb"
pytestmark = pytest.mark.site(profile=PROFILE)


def asks(user: str, **options: object) -> wire.SpawnRequest:
    groups = {"ada": ["vision"], "bo": ["nlp"]}[user]
    return wire.SpawnRequest(
        user=user, server="", groups=groups, uid=1000, options=wire.GpuRequest(**options)
    )


async def test_a_job_gets_an_instance_of_its_profile_and_keeps_it_over_a_restart(site, broker):
    job = await site.running("bo", profile=PROFILE, program=Program(work_s=100))
    assert broker.seen(job).size == "MIG 1g.10gb"
    await broker.end()
    broker = await site.start_broker()
    lease = broker.registry.leases[job.lease_id].lease
    assert (lease.size.profile, lease.held_milli, len(lease.devices)) == (PROFILE, 1000, 1)


async def test_a_session_gets_an_instance_too(broker):
    grant = await broker.start(asks("ada", profile=PROFILE))
    assert len(grant.devices) == 1
    assert "MIG 1g.10gb" in grant.message


async def test_the_instances_are_what_is_offered(broker):
    offers = broker.views.offers(["vision"], "vision")
    assert not offers.idle_timeout_s, "nothing is lent"
    (offer,) = offers.offers
    assert (offer.label, offer.options, offer.starts) == ("MIG 1g.10gb", {"profile": PROFILE}, "now")


async def test_what_is_not_there_is_refused_with_what_is(site, broker):
    for wrong in ({"profile": "7g.80gb"}, {"gpus": "0.5"}):
        with pytest.raises(InvalidRequest, match=r"there are MIG instances of profile 1g\.10gb\."):
            await site.submit("bo", **wrong)
    with pytest.raises(InvalidRequest, match=r"there are MIG instances of profile 1g\.10gb\."):
        await broker.start(asks("ada", fraction="0.5"))
    assert not broker.registry.leases


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"profile": "largest"}, "not a MIG profile"),
        ({"profile": "1G.10GB"}, "not a MIG profile"),
        ({"profile": PROFILE, "gpus": "2"}, "one instance"),
        ({"profile": PROFILE, "memory": "5GiB"}, "one instance"),
    ],
)
async def test_a_profile_that_is_none_is_refused(site, wrong, says):
    await site.start_broker()
    with pytest.raises(InvalidRequest, match=says):
        await site.submit("bo", **wrong)
