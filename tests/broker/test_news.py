"""News of helper, Hub and devices that is old, bad or missing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from jupyter_gpushare import wire
from jupyter_gpushare.backends.base import ServerKey
from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.loop import STALE_S, is_job_server
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.verbs import EventKind
from tests.broker.machine import Program
from tests.broker.site import Site
from tests.broker.virtual_time import in_virtual_time, until


@in_virtual_time
async def test_a_server_that_only_bears_a_name_like_a_jobs_is_left_alone(tmp_path):
    async with Site(tmp_path) as site:
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


@in_virtual_time
async def test_a_device_that_is_not_measured_any_more_takes_nothing_new(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        site.unmeasured = {site.uuids[0]}
        await until(lambda: [d.usable for d in snapshot.devices(broker.book)] == [False, True], 10)
        site.unmeasured = set()
        await until(lambda: all(d.usable for d in snapshot.devices(broker.book)), 10)


@in_virtual_time
async def test_without_news_from_the_helper_nothing_is_decided(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
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


@in_virtual_time
async def test_a_helper_that_falls_silent_while_a_job_runs_costs_nothing(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=100))
        await until(lambda: broker.state(job) == "running", 60)
        site.helper_silent = True
        await until(lambda: broker.job(job).exit_code == 0, 200)
        site.helper_silent = False
        await until(lambda: broker.job(job).result, 60)
        assert broker.seen(job).state == "succeeded"
        assert site.started[job.id] == 1


@in_virtual_time
async def test_a_session_whose_server_the_hub_no_longer_knows_is_released(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        site.servers.clear()
        ada.alive, ada.used = False, {}
        await until(lambda: not broker.book.leases, 200)
        assert not site.held


@in_virtual_time
async def test_a_session_that_lives_is_not_released_because_the_hub_forgot_it(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        site.servers.clear()
        began = site.now
        await until(lambda: site.now - began > 300, 400)
        assert broker.state(ada.handle) == "running"


@in_virtual_time
async def test_a_server_that_ends_frees_its_room_within_two_seconds(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        await site.session("ada", "1/2")
        await site.end_session("ada")
        await until(lambda: not broker.book.leases, 2)
        assert not site.held


@in_virtual_time
async def test_processes_that_outlive_their_server_are_killed_after_the_grace(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada = await site.session("ada", "1/2")
        await broker.spawning.stop(wire.SpawnStop(user="ada", server=""))
        await broker.spawning.stop(wire.SpawnStop(user="ada", server=""))
        assert broker.state(ada.handle) == "stopping"
        await until(lambda: not broker.book.leases, 60)
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
    ],
)
def test_names_of_job_servers_are_told_from_others(name, ours):
    assert is_job_server(name) is ours


@in_virtual_time
async def test_a_broken_device_takes_nothing_new(tmp_path):
    async with Site(tmp_path) as site:
        site.unhealthy = {"GPU-0"}
        broker = await site.start_broker()
        job = await site.submit("bo", "1", program=Program(work_s=1))
        pair = await site.submit("bo", "2")
        await until(lambda: broker.job(job).result, 60)
        assert broker.state(pair) == "pending"
        assert broker.views.health().status == "degraded"
        site.unhealthy = set()
        site.tell(EventKind.DEVICE)
        await until(lambda: broker.job(pair).result, 60)


@in_virtual_time
async def test_the_owner_is_told_what_the_watchdog_and_the_device_said(tmp_path):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        ada, bo = await site.session("ada", "1/2"), await site.session("bo", "1/2")
        fields = {"action": "stop", "pid": "77", "name": "python3"}
        site.tell(EventKind.OVER_LIMIT, ada.handle, "uses 9 bytes, 8 are granted", **fields)
        site.tell(EventKind.DEVICE, ada.handle, "XID 79: GPU has fallen off the bus", healthy="false")
        site.tell(EventKind.DEVICE, ada.handle, healthy="true")

        def told(user):
            return [
                d.sentence for d in broker.views.decisions(user, 10) if d.action in ("watchdog", "device")
            ]

        await until(lambda: len(told("ada")) == 3, 30)
        assert sorted(told("ada")) == [
            "ada's session (1/2 GPU) has its GPU back in service.",
            "ada's session (1/2 GPU) lost its GPU for now: XID 79: GPU has fallen off the bus.",
            "ada's session (1/2 GPU) uses 9 bytes, 8 are granted; process 77 (python3) was stopped.",
        ]
        assert told("bo") == []
        assert bo

        # Whose it is nobody knows: the administrator is told.
        reason = "a process without a lease uses this device"
        site.tell(EventKind.STRANGER, "", reason, action="warn", pid="78", name="miner")
        await until(lambda: len(told(None)) == 4, 30)
        assert told(None)[0] == f"This machine: {reason}; process 78 (miner) should be stopped."
        assert (len(told("ada")), told("bo")) == (3, [])


@in_virtual_time
async def test_a_trouble_that_lasts_is_logged_once_a_minute(tmp_path, monkeypatch, caplog):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()

        async def sample():
            raise HelperError("gone", "no device helper")

        monkeypatch.setattr(broker.backend, "sample", sample)
        await asyncio.sleep(150)
        assert caplog.text.count("measuring: gone: no device helper") + caplog.text.count(
            "measuring: no device helper"
        ) in (3, 4)


@in_virtual_time
async def test_a_mistake_in_one_part_does_not_end_the_others(tmp_path, monkeypatch, caplog):
    async with Site(tmp_path) as site:
        broker = await site.start_broker()
        broken = replace(broker.book.sample, leases=None)
        real = broker.backend.sample
        answers = iter([broken, broken])

        async def sample():
            return next(answers, None) or await real()

        monkeypatch.setattr(broker.backend, "sample", sample)
        job = await site.submit("bo", "1", program=Program(work_s=1))
        await until(lambda: broker.job(job).result, 60)
        assert "measuring failed" in caplog.text
