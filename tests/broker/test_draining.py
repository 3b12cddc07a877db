"""A GPU or the machine that an administrator empties: it takes nothing new, and that outlives the broker."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare.broker.control import administration
from jupyter_gpushare.broker.engine.local import LocalEngine
from jupyter_gpushare.broker.state.records import MACHINE
from jupyter_gpushare.core.model import State
from jupyter_gpushare.errors import RequestError
from jupyter_gpushare.kube.engine.kai import KaiEngine
from jupyter_gpushare.protocol.helper import Overuse
from tests.broker.brokers import sent
from tests.broker.site import spawn
from tests.broker.virtual_time import until


def log_of(registry) -> list[str]:
    return [entry.sentence for entry in registry.decisions.latest if entry.action == "drain"]


async def drained(http, name: str = MACHINE, by: str | None = None):
    wall = http.broker.registry.iso_now()
    until = None if by is None else f"{wall[:10]}T23:59:59+00:00"
    answer = await http.ask("PUT", f"devices/{name}/drain", "root", json={"until": until})
    assert answer.status_code == 200, answer.text
    return {device["uuid"]: device["drain"] for device in answer.json()["devices"]}


async def test_an_administrator_empties_one_gpu_and_takes_it_back(http):
    first, second = (device.uuid for device in http.broker.registry.devices.listed)
    found = await drained(http, first)
    assert found[second] is None
    assert (found[first]["by"], found[first]["machine"], found[first]["sessions"]) == ("root", False, 0)
    await drained(http, first)
    assert log_of(http.broker.registry) == [f"root empties GPU {first}: it takes nothing new."]
    usable = {device.uuid: device.usable for device in http.broker.registry.devices.for_planner()}
    assert usable == {first: False, second: True}
    answer = await http.ask("DELETE", f"devices/{first}/drain", "root")
    assert all(device["drain"] is None for device in answer.json()["devices"])
    await http.ask("DELETE", f"devices/{first}/drain", "root")
    assert log_of(http.broker.registry)[1:] == [f"root lets GPU {first} take work again."]


async def test_owners_there_are_asked_to_finish_and_no_server_starts(http):
    record = await http.session()
    (uuid,) = record.lease.devices
    found = await drained(http, by="night")
    assert {(drain["sessions"], drain["machine"]) for drain in found.values()} == {(1, True), (0, True)}
    assert found[uuid]["sessions"] == 1
    sentence = sent(http.broker.views.lease(record)).sentence
    assert "This GPU takes nothing new. The administrator asks to have your server stopped by " in sentence
    await http.broker.loop.observer.measure()  # devices count as known for a few seconds
    with pytest.raises(RequestError, match="GPUs here take nothing new: an administrator"):
        await http.broker.start(spawn("bo", "1/4"))
    await http.broker.loop.observer.measure()
    offers = (await http.ask("GET", "offers", "bo")).json()["offers"]
    assert {offer["starts"] for offer in offers} == {"no"}
    assert all("GPUs here take nothing new: an administrator" in offer["reason"] for offer in offers)
    now = http.service.overview.now()
    assert (now.broken, now.usable) == (0, 2), "it works"
    refused = await http.refused("DELETE", f"devices/{uuid}/drain", "root")
    assert "the whole machine is being emptied" in refused.message


@pytest.mark.parametrize(
    ("name", "until", "status", "says"),
    [
        ("GPU-none", None, 404, "there is no GPU"),
        (MACHINE, "18:00", 400, "a time with its zone"),
        (MACHINE, "2031-05-06T18:00:00", 400, "a time with its zone"),
        (MACHINE, "2001-05-06T18:00:00Z", 400, "in the future"),
        (MACHINE, "2999-05-06T18:00:00Z", 400, "at most a year ahead"),
    ],
)
async def test_a_wrong_device_or_time_changes_nothing(http, name, until, status, says):
    refused = await http.refused("PUT", f"devices/{name}/drain", "root", json={"until": until})
    assert (refused.status, says in refused.message) == (status, True), refused.message
    assert not http.broker.registry.devices.drains.of


async def test_a_drain_outlives_the_absence_of_its_gpu_and_another_drain(http):
    devices = http.broker.registry.devices
    first, second = (device.uuid for device in devices.listed)
    await drained(http, first)
    whole = devices.inventory
    devices.inventory = replace(whole, devices=whole.devices[1:])
    await drained(http, second)
    devices.inventory = whole
    assert {device.uuid for device in devices.for_planner() if device.draining} == {first, second}


async def test_drains_are_bounded_and_one_that_is_known_may_change(http, monkeypatch):
    monkeypatch.setattr(administration, "MAX_DRAINS", 1)
    first, second = (device.uuid for device in http.broker.registry.devices.listed)
    await drained(http, first)
    await drained(http, first, by="night")
    refused = await http.refused("PUT", f"devices/{second}/drain", "root")
    assert (refused.status, "1 GPUs are being emptied" in refused.message) == (409, True)
    assert set(http.broker.registry.devices.drains.of) == {first}


async def test_an_engine_that_cannot_keep_a_gpu_empty_refuses(http, monkeypatch):
    monkeypatch.setattr(LocalEngine, "drains", KaiEngine.drains)
    refused = await http.refused("PUT", f"devices/{MACHINE}/drain", "root")
    assert (refused.status, "kubectl cordon" in refused.message) == (409, True)
    assert not http.broker.registry.devices.drains.of


async def test_a_machine_that_is_emptied_stays_so_after_a_restart_and_its_jobs_wait(site, broker):
    await site.session("ada", "1/2")
    await administration.drain(broker.registry, broker.engine, MACHINE, None, "root")
    job = await site.submit("bo", "1/2")
    await broker.end()
    registry = (await site.start_broker()).registry
    drain = registry.devices.drains.of[MACHINE]
    assert (drain.by, drain.until) == ("root", "")
    await asyncio.sleep(30)
    assert registry.leases[job.lease_id].state is State.PENDING
    assert registry.by_server("ada", "").state is State.RUNNING
    reason = site.broker.seen(job).reason
    assert "GPUs here take nothing new: an administrator empties them" in reason
    await administration.undrain(registry, MACHINE, "root")
    await until(lambda: registry.leases[job.lease_id].state is State.RUNNING, 60)


@pytest.mark.site(gpus=1)
async def test_nothing_is_lent_on_a_gpu_whose_memory_is_used_beyond_what_was_granted(site, broker):
    """What is there goes on, sleeps and wakes."""
    ada = await site.session("ada", "1/2")
    why = "a process uses memory of it without a lease"
    site.closed["GPU-0"] = why
    await broker.loop.observer.measure()
    job = await site.submit("bo", "1/2")
    await asyncio.sleep(300)
    assert (broker.state(ada.handle), broker.registry.leases[job.lease_id].state) == (
        "running",
        State.PENDING,
    )
    assert "memory of them is used that was not granted" in broker.seen(job).reason
    (shown,) = broker.views.devices().devices
    assert (shown.closed, shown.healthy) == (why, True)
    ada.over = (Overuse(device="GPU-0", used_bytes=2, limit_bytes=1, pid=4711, name="python"),)
    await broker.loop.observer.measure()
    told = [broker.views.devices(admin=admin).devices[0].closed for admin in (False, True)]
    assert told == [why, f"{why}: process 4711 (python) of ada"]
    assert f"GPU GPU-0 takes nothing new: {why}." in broker.views.health().reasons
    await site.gpu_cell(ada)
    del site.closed["GPU-0"]
    await until(lambda: broker.registry.leases[job.lease_id].state is State.RUNNING, 60)
