"""News of helper, Hub and devices that is old, bad or missing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare import messages
from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker.control.loop import is_job_server
from jupyter_gpushare.broker.state.observations import STALE_S
from jupyter_gpushare.broker.state.transitions import started_as
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import EventKind
from tests.broker.machine import Program
from tests.broker.virtual_time import until


async def test_a_server_that_only_bears_a_name_like_a_jobs_is_left_alone(site):
    await site.start_broker()
    job = await site.submit("bo", "1", program=Program(work_s=1))
    await until(lambda: site.broker.job(job).result, 60)
    site.servers[ServerKey("ada", "juliaserver-1")] = "ready"
    site.servers[ServerKey("ada", f"j{job.id}-1")] = "ready"
    site.servers[ServerKey("bo", "jaaaaaaaaaa-1")] = "ready"
    site.servers[ServerKey("bo", f"j{job.id}-1")] = "ready"
    await until(lambda: f"stop_server j{job.id}-1" in site.effects, 60)
    await asyncio.sleep(60)
    assert not {"stop_server juliaserver-1", "stop_server jaaaaaaaaaa-1"} & set(site.effects)
    assert ServerKey("ada", f"j{job.id}-1") in site.servers


async def test_a_device_that_is_not_measured_any_more_takes_nothing_new(site, broker):
    site.unmeasured = {site.uuids[0]}
    await until(lambda: [d.usable for d in broker.registry.devices.for_planner()] == [False, True], 10)
    site.unmeasured = set()
    await until(lambda: all(d.usable for d in broker.registry.devices.for_planner()), 10)


async def test_without_news_from_the_helper_nothing_is_decided(site, broker):
    ada = await site.session("ada", "1/2")
    job = await site.submit("bo", "2")
    await until(lambda: broker.state(ada.handle) == "running", 5)
    site.helper_silent = True
    before = site.now
    await until(lambda: site.now - before > 500, 600)
    assert broker.state(ada.handle) == "running"
    assert broker.state(job) == "pending"
    assert broker.views.health().status == "degraded"
    assert not broker.views.status("ada", ("vision",), admin=False).devices_known
    site.helper_silent = False
    await until(lambda: broker.job(job).result, 300)
    assert site.now - before > STALE_S


async def test_a_helper_that_falls_silent_while_a_job_runs_costs_nothing(site, broker):
    job = await site.submit("bo", "1", program=Program(work_s=100))
    await until(lambda: broker.state(job) == "running", 60)
    site.helper_silent = True
    await until(lambda: broker.job(job).exit_code == 0, 200)
    site.helper_silent = False
    await until(lambda: broker.job(job).result, 60)
    assert broker.seen(job).state == "succeeded"
    assert site.started[job.id] == 1


async def test_a_session_without_server_at_the_hub_is_released(site, broker):
    ada = await site.session("ada", "1/2")
    site.servers.clear()
    ada.alive, ada.used = False, {}
    await until(lambda: not broker.registry.leases, 200)
    assert not site.held


async def test_a_session_that_lives_is_not_released_because_the_hub_forgot_it(site, broker):
    ada = await site.session("ada", "1/2")
    site.servers.clear()
    began = site.now
    await until(lambda: site.now - began > 300, 400)
    assert broker.state(ada.handle) == "running"


async def test_a_server_that_ends_frees_its_capacity_within_two_seconds(site, broker):
    await site.session("ada", "1/2")
    await site.end_session("ada")
    await until(lambda: not broker.registry.leases, 2)
    assert not site.held


async def test_processes_that_outlive_their_server_are_killed_after_the_grace(site, broker):
    ada = await site.session("ada", "1/2")
    await broker.stop(wire.SpawnStop(user="ada", server=""))
    await broker.stop(wire.SpawnStop(user="ada", server=""))
    assert broker.state(ada.handle) == "stopping"
    await until(lambda: not broker.registry.leases, 60)
    assert f"signal SIGKILL all {ada.handle}" in site.effects


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("jabcdefghij-1", True),
        ("j0123456789-12", True),
        ("jabcdefghi-1", False),
        ("jabcdefghijk-1", False),
        ("jabcdefghij-", False),
        ("jabcdefghij-x", False),
        ("jabcdefghij", False),
        ("kabcdefghij-1", False),
        ("", False),
        ("-1", False),
        ("jABCDEFGHIJ-1", False),  # to the Hub it is a session
        ("jabcdefghij-\u0662", False),
        ("jabcdefghi\u00e9-1", False),
    ],
)
def test_names_of_job_servers_are_told_from_others(name, ours):
    assert is_job_server(name) is ours


async def test_a_broken_device_takes_nothing_new(site):
    site.unhealthy = {"GPU-0"}
    broker = await site.start_broker()
    job = await site.submit("bo", "1", program=Program(work_s=1))
    pair = await site.submit("bo", "2")
    await until(lambda: broker.job(job).result, 60)
    assert broker.state(pair) == "pending"
    assert broker.views.health().status == "degraded"
    site.unhealthy = set()
    site.emit(EventKind.DEVICE)
    await until(lambda: broker.job(pair).result, 60)


async def test_the_log_says_what_changed_about_a_device(site, caplog):
    await site.start_broker()
    site.emit(EventKind.DEVICE, suspendable="true", level="preload")
    site.emit(EventKind.DEVICE, reason="XID 79", healthy="false")
    await until(lambda: "changed: XID 79" in caplog.text, 60)
    assert "changed: suspendable=true, level=preload" in caplog.text


async def test_the_owner_is_told_what_the_watchdog_and_the_device_said(site, broker):
    ada, bo = await site.session("ada", "1/2"), await site.session("bo", "1/2")
    fields = {"action": "stop", "pid": "77", "name": "python3"}
    site.emit(EventKind.OVER_LIMIT, ada.handle, "uses 9.0 GiB, its limit is 8.0 GiB", **fields)
    site.emit(EventKind.DEVICE, ada.handle, "XID 79: GPU has fallen off the bus", healthy="false")
    site.emit(EventKind.DEVICE, ada.handle, healthy="true")

    def told(user):
        return [d.sentence for d in broker.told(user, 10) if d.action in ("watchdog", "device")]

    await until(lambda: len(told("ada")) == 3, 30)
    assert sorted(told("ada")) == [
        "Your session (1/2 GPU) has its GPU back in service.",
        "Your session (1/2 GPU) lost its GPU for now: XID 79: GPU has fallen off the bus.",
        "Your session (1/2 GPU) uses 9.0 GiB, its limit is 8.0 GiB; process 77 (python3) was stopped.",
    ]
    (lost,) = (d.texts[0] for d in broker.registry.decisions.latest if "XID" in d.sentence)
    assert lost.args[1] == messages.text("reason.xid", 79, messages.text("xid.79"))
    assert told("bo") == []
    assert bo

    # Of a user without a lease here: the administrator alone is told.
    reason = "a process without a lease uses this device"
    site.emit(EventKind.UNLEASED_PROCESS, "", reason, uid="4711", action="warn", pid="78", name="miner")
    await until(lambda: len(told(None)) == 4, 30)
    assert told(None)[0] == f"This machine: process 78 (miner) of uid 4711 on GPU : {reason}."
    assert (len(told("ada")), told("bo")) == (3, [])


async def test_a_process_without_a_lease_is_told_to_its_user_and_the_administrator(site, broker):
    ada, bo = await site.session("ada", "1/2"), await site.session("bo", "1/2")

    def told(user):
        return [d.sentence for d in broker.told(user, 10) if d.action == "watchdog"]

    async def own(session, uid):
        await broker.registry.edit(broker.lease(session.handle), started_as(uid, moves=False))

    async def report(uid):
        fields = {"uid": uid, "pid": "78", "name": "miner", "action": "warn"}
        site.emit(EventKind.UNLEASED_PROCESS, "", "it has no lease", **fields)

    await own(ada, 2001)
    await own(bo, 2002)
    await report("2001")
    await until(lambda: told("ada"), 2.0)
    said = "process 78 (miner) of ada on GPU : it has no lease."
    assert told("ada") == [f"Your session (1/2 GPU) belongs to the user of {said}"]
    assert told("bo") == []
    assert f"This machine: {said}" in told(None)
    # One uid for all servers (a demo): no session is blamed.
    await own(bo, 2001)
    await report("2001")
    await until(lambda: len(told(None)) == 3, 2.0)
    assert told(None)[0] == "This machine: process 78 (miner) of uid 2001 on GPU : it has no lease."
    assert told("bo") == []


async def test_the_owner_reads_that_the_driver_ended_a_process(site, broker):
    ada = await site.session("ada", "1/2")
    site.emit(EventKind.DRIVER_KILLED, ada.handle, "process 77 ended within Lock of the driver")

    def told():
        return [d.sentence for d in broker.told("ada", 10) if d.action == "device"]

    await until(told, 30)
    assert told() == [
        "Your session (1/2 GPU) lost a process to the GPU driver: process 77 ended within Lock of the driver."
    ]


async def test_a_mistake_in_one_part_does_not_end_the_others(site, broker, monkeypatch, caplog):
    broken = replace(broker.registry.devices.sample, leases=None)
    real = broker.devices.sample
    answers = iter([broken, broken])

    async def sample():
        return next(answers, None) or await real()

    monkeypatch.setattr(broker.devices, "sample", sample)
    job = await site.submit("bo", "1", program=Program(work_s=1))
    await until(lambda: broker.job(job).result, 60)
    assert "measuring failed" in caplog.text
