"""A running server without a GPU gets one: the name of its lease, refusals, repetition, crashes."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from jupyter_gpushare.errors import Conflict, HelperError, NotFound, RequestError
from jupyter_gpushare.protocol import wire
from tests.broker.brokers import Broker
from tests.broker.site import spawn
from tests.broker.virtual_time import until

pytestmark = pytest.mark.site(gpus=1)


async def started(broker: Broker, user: str = "ada") -> str:
    """Start a server without a GPU; the name of the lease that it may get."""
    grant = await broker.start(wire.replace(spawn(user, None), may_gain=True))
    assert grant.lease is None
    return grant.env["GPUSHARE_LEASE"]


async def gain(broker: Broker, lease: str, server: str = "", **asked: Any) -> wire.SpawnGrant:
    asker = spawn("ada", None, server=server)
    lease_id = lease.removesuffix("-1")
    grant = await broker.sizes.change("ada", lease_id, wire.SizeRequest(**asked), asker)
    assert grant is not None
    return grant


async def test_a_running_server_gets_the_lease_that_its_processes_name(site, broker):
    name = await started(broker)
    assert not site.held
    assert not broker.registry.leases
    grant = await gain(broker, name, gpus="1/4")
    assert (grant.lease, grant.asleep) == (name, False)
    assert list(site.held) == [name]
    record = broker.registry.by_server("ada", "")
    assert record is not None
    assert (record.handle, record.uid, record.lease.size.text) == (name, 1000, "1/4 GPU")
    site.held[name].alive = True
    await until(lambda: broker.state(name) == "running", 30)
    # The page asks again where no answer came.
    assert await gain(broker, name, gpus="1/4") == grant
    assert broker.state(name) == "running"
    await broker.stop(wire.SpawnStop(user="ada", server=""))
    site.held[name].alive = False
    await until(lambda: not site.held, 60)
    with pytest.raises(Conflict, match="had a GPU and lost it"):
        await gain(broker, name, gpus="1/4")


async def test_two_requests_at_once_are_one_lease(site, broker):
    name = await started(broker)
    found = await asyncio.gather(
        *(gain(broker, name, gpus=size) for size in ("1/4", "1/2")), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in found) == ["Conflict", "SpawnGrant"]
    assert len(broker.registry.leases) == len(site.held) == 1


async def test_one_name_at_two_servers_at_once_is_one_lease(broker):
    name = await started(broker)
    found = await asyncio.gather(
        *(gain(broker, name, server, gpus="1/4") for server in ("", "second")), return_exceptions=True
    )
    assert [type(each).__name__ for each in found] == ["SpawnGrant", "Conflict"]
    assert [record.server for record in broker.registry.leases.values()] == [""]


async def test_a_lease_that_ends_is_not_given_again(site, broker):
    name = await started(broker)
    await gain(broker, name, gpus="1/4")
    site.held[name].alive = True
    await until(lambda: broker.state(name) == "running", 30)
    await broker.stop(wire.SpawnStop(user="ada", server=""))
    assert broker.state(name) == "stopping"
    before = site.effects.count("prepare")
    with pytest.raises(Conflict, match="had a GPU and lost it"):
        await gain(broker, name, gpus="1/4")
    assert site.effects.count("prepare") == before


async def test_names_that_no_start_gave_are_refused(site, broker):
    bo = await broker.start(spawn("bo", "1/4"))
    for name in ("", "b1", "../../etc", "b0123456789-2", "j0123456789-1", "B012345678-1"):
        with pytest.raises(RequestError):
            await gain(broker, name, gpus="1/4")
    # The name of another's lease, also once that has ended.
    assert bo.lease is not None
    with pytest.raises(NotFound):
        await gain(broker, bo.lease, gpus="1/4")
    await broker.stop(wire.SpawnStop(user="bo", server=""))
    assert broker.state(bo.lease) == "stopping"
    with pytest.raises(NotFound):
        await gain(broker, bo.lease, gpus="1/4")
    await until(lambda: not site.held, 60)
    with pytest.raises(Conflict):
        await gain(broker, bo.lease, gpus="1/4")
    assert not broker.registry.leases


async def test_what_only_borrows_needs_the_owners_word(broker):
    name = await started(broker)
    with pytest.raises(Conflict, match="more than what project vision is guaranteed") as said:
        await gain(broker, name, gpus="3/4")
    assert said.value.reason == "would_borrow"
    assert not broker.registry.leases
    assert (await gain(broker, name, gpus="3/4", borrow=True)).borrowed


async def test_a_full_machine_refuses_and_the_server_may_ask_again(site, broker):
    name = await started(broker)
    bo = await site.session("bo", "1/2")
    await until(lambda: broker.state(bo.handle) == "running", 30)
    with pytest.raises(Conflict, match="Choose a smaller size, or try again later"):
        await gain(broker, name, gpus="3/4", borrow=True)
    await site.end_session("bo")
    await until(lambda: not site.held, 60)
    assert (await gain(broker, name, gpus="3/4", borrow=True)).lease == name


async def test_a_helper_that_does_not_answer_leaves_no_lease(site, broker):
    name = await started(broker)
    site.fault("prepare", HelperError("unreachable", "no answer"))
    with pytest.raises(Conflict, match="cannot be reached"):
        await gain(broker, name, gpus="1/4")
    await until(lambda: not broker.registry.leases, 60)


async def test_without_a_helper_a_server_starts_all_the_same(site, broker):
    site.fault("reserve", HelperError("unreachable", "no answer"))
    grant = await broker.start(wire.replace(spawn("ada", None), may_gain=True))
    assert (grant.lease, grant.env) == (None, {})
    # A server of another kind of spawner gets nothing either.
    assert (await broker.start(spawn("bo", None))).env == {}


async def test_a_server_asks_with_its_own_token_and_gets_the_uid_of_its_process(http):
    path, size = "leases/b0123456789/size", {"gpus": "1/4", "borrow": True}
    person, server, bo = ({"Authorization": f"token {name}"} for name in ("ada", "ada-server", "bo"))
    assert (await http.by_socket.put(path, json=size, headers=person)).status_code == 404
    answer = await http.by_socket.put(path, json=size, headers=server)
    assert answer.status_code == 200, answer.text
    (record,) = http.broker.registry.leases.values()
    assert (record.uid, record.lease.user, record.handle) == (os.geteuid(), "ada", "b0123456789-1")
    sized = answer.json()
    assert (sized["size"], sized["env"]["GPUSHARE_LEASE"]) == ("1/4 GPU", "b0123456789-1")
    again = await http.by_socket.put(path, json=size, headers=server)
    assert (again.status_code, again.json()["env"]) == (200, sized["env"])
    # Another user does not learn that this lease exists.
    known, unknown = [
        (await http.by_socket.put(each, json=size, headers=bo)).json()
        for each in (path, "leases/b9999999999/size")
    ]
    assert (known["status"], known) == (404, unknown)
