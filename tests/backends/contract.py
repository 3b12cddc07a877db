"""The contracts of engines, devices and Hubs, with one test suite each.

An implementation runs a suite through a subclass that has a fixture for it; an engine without a
subclass fails `test_contracts.test_every_implementation_passes_its_contract`.  The suites use only
the contract, and a bench that starts and ends processes or servers.
"""

from __future__ import annotations

import abc
import asyncio
import inspect
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from jupyter_gpushare.backends.base import DeviceBackend, Hub, Prepared, ServerKey
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.core.model import Cluster, Device, Grant, Kind, Lease, Project, State, Why
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import HelperError, InvalidRequest
from jupyter_gpushare.protocol.helper import LeaseSample, Phase, Refusal, SetLimit
from tests.waiting import PATIENCE_S

GIB = 1 << 30
NOW = 1_000.0


def job(id: str, project: str, gpus: int = 1, **more: object) -> Lease:
    lease = Lease(
        id=id,
        project=project,
        kind=Kind.TRAIN,
        size=Size(1000, gpus),
        submitted_at=NOW,
        queued_at=NOW,
        waits_since_at=NOW,
    )
    return replace(lease, **more)  # type: ignore[arg-type]


def session(id: str, project: str, fraction_milli: int = 1000, **more: object) -> Lease:
    return job(id, project, kind=Kind.BUILD, size=Size(fraction_milli), **more)


def cluster(*leases: Lease, gpus: int = 2) -> Cluster:
    """Return a cluster with two projects, each guaranteed half of the GPUs."""
    devices = tuple(
        Device(uuid=f"GPU-{n}", memory_bytes=80 * GIB, reserve_bytes=GIB, node="here") for n in range(gpus)
    )
    quotas = (Project(name=name, quota_milli=500 * gpus) for name in ("vision", "nlp"))
    return Cluster(devices=devices, projects=tuple(quotas), leases=leases)


class EngineContract:
    """The contract of `Engine`; ``engine`` is a fixture of the subclass."""

    async def told(self, engine: Engine, snapshot: Cluster) -> None:
        """Return when the scheduler has seen a snapshot; an engine that plans sees it with the call."""

    async def test_a_waiting_job_is_granted_free_devices_and_no_more(self, engine: Engine) -> None:
        granted: dict[str, str] = {}
        snapshot = cluster(*(job(f"j{n}", "vision") for n in range(3)))
        await self.told(engine, snapshot)
        plan = engine.decide(snapshot, NOW)
        for action in plan.actions:
            assert isinstance(action, Grant)
            granted.update(dict.fromkeys(action.devices, action.lease))
        assert sorted(granted) == ["GPU-0", "GPU-1"]
        assert len(set(granted.values())) == 2

    async def test_what_was_decided_and_not_carried_out_is_decided_again(self, engine: Engine) -> None:
        snapshot = cluster(job("j1", "vision"))
        await self.told(engine, snapshot)
        first, again = engine.decide(snapshot, NOW), engine.decide(snapshot, NOW + 1)
        assert [action.lease for action in first.actions] == ["j1"]
        assert [action.lease for action in again.actions] == ["j1"]

    async def test_an_admitted_session_holds_devices_of_the_snapshot(self, engine: Engine) -> None:
        grant = await engine.admit(cluster(), session("b1", "vision"), NOW)
        assert isinstance(grant, Grant)
        assert grant.lease == "b1"
        assert set(grant.devices) <= {"GPU-0", "GPU-1"}
        assert grant.held_milli == 1000

    async def test_it_says_whether_it_places_nothing_on_a_gpu_that_is_emptied(self, engine: Engine) -> None:
        whole = cluster(job("j1", "vision"), job("j2", "nlp"))
        first, *rest = whole.devices
        snapshot = replace(whole, devices=(replace(first, usable=False, draining=True), *rest))
        await self.told(engine, snapshot)
        actions = engine.decide(snapshot, NOW).actions
        used = {uuid for action in actions if isinstance(action, Grant) for uuid in action.devices}
        assert used == ({"GPU-1"} if engine.drains else {"GPU-0", "GPU-1"})

    async def test_it_says_whether_it_grants_sessions_that_wait(self, engine: Engine) -> None:
        snapshot = cluster(session("b1", "vision", waits=True))
        await self.told(engine, snapshot)
        granted = [action.lease for action in engine.decide(snapshot, NOW).actions]
        assert granted == (["b1"] if engine.queues_sessions else [])

    async def test_a_refused_session_is_told_why_and_leaves_no_trace(self, engine: Engine) -> None:
        running = [
            session(f"b{n}", project, state=State.RUNNING, devices=(f"GPU-{n}",), held_milli=1000)
            for n, project in enumerate(("vision", "nlp"))
        ]
        full = cluster(*running)
        await self.told(engine, full)
        refused = await engine.admit(full, session("b9", "nlp"), NOW)
        assert isinstance(refused, Explanation)
        assert refused.why in set(Why) - {Why.NOT_WAITING}
        assert refused.position is None
        assert refused.free_milli == 0
        assert engine.decide(full, NOW).actions == ()

    async def test_the_outlook_agrees_with_the_decision(self, engine: Engine) -> None:
        snapshot = cluster(*(job(f"j{n}", "vision") for n in range(4)))
        await self.told(engine, snapshot)
        outlook, plan = engine.outlook(snapshot, NOW), engine.decide(snapshot, NOW)
        granted = {action.lease for action in plan.actions if isinstance(action, Grant)}
        assert set(outlook.grants) == granted
        assert set(outlook.why) == {lease.id for lease in snapshot.leases} - granted
        assert sorted(outlook.position.values()) == [1, 2]
        for lease_id, number in outlook.position.items():
            assert outlook.explain(lease_id).position == number
        assert outlook.explain("no such lease").why is Why.NOT_WAITING

    async def test_usage_covers_every_project_and_counts_what_is_held(self, engine: Engine) -> None:
        held = session("b1", "vision", 500, state=State.RUNNING, devices=("GPU-0",), held_milli=500)
        outlook = engine.outlook(cluster(held), NOW)
        assert set(outlook.usage) == {"vision", "nlp"}
        assert outlook.usage["vision"].in_use_milli == 500
        assert outlook.usage["nlp"].in_use_milli == 0
        assert set(outlook.borrowed) == {"b1"}
        assert set(outlook.claims_milli) == {"GPU-0", "GPU-1"}
        assert outlook.free_milli == 1500

    async def test_there_is_one_offer_for_each_size_in_order(self, engine: Engine) -> None:
        sizes = [Size(250), Size(1000, 1), Size(1000, 2)]
        offers = engine.outlook(cluster(), NOW).offers("vision", sizes)
        assert [o.size for o in offers] == [Size(250), Size(1000), Size(1000, 2)]
        assert offers[0].starts == "now"
        assert not offers[0].borrowed

    async def test_a_size_that_can_never_run_is_refused_with_the_largest_that_can(
        self, engine: Engine
    ) -> None:
        engine.check_request(cluster(), job("j1", "vision", gpus=2))
        with pytest.raises(InvalidRequest, match="2"):
            engine.check_request(cluster(), job("j1", "vision", gpus=3))

    async def test_projects_in_force_have_the_configured_names(self, engine: Engine) -> None:
        configured = cluster().projects
        assert [p.name for p in engine.projects(configured)] == [p.name for p in configured]

    async def test_settling_twice_changes_no_decision(self, engine: Engine) -> None:
        snapshot = cluster(job("j1", "vision"))
        await self.told(engine, snapshot)
        before = engine.decide(snapshot, NOW).actions
        for _ in range(2):
            await engine.settle(snapshot, NOW)
        assert engine.decide(snapshot, NOW).actions == before
        assert all(sentence.endswith(".") for sentence in engine.trouble())


class DeviceBench(abc.ABC):
    """The devices under test, and the processes on them."""

    devices: DeviceBackend

    @abc.abstractmethod
    def newer_broker(self) -> None:
        """Let a broker with a higher epoch act once."""

    @abc.abstractmethod
    async def start(self, handle: str, prepared: Prepared, used_bytes: int) -> None:
        """Start a process of a prepared lease that uses device memory."""

    @abc.abstractmethod
    async def call(self, handle: str) -> None:
        """Enter a CUDA call in the process of a lease that is not suspended."""

    async def sampled(self, handle: str, fits: Callable[[LeaseSample], bool]) -> LeaseSample:
        """Return the first sample of a lease that fits."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            sample = await self.devices.sample()
            found = next((s for s in sample.leases if s.lease == handle), None)
            if found is not None and fits(found):
                return found
            await asyncio.sleep(0.05)
        raise AssertionError(f"no such sample of {handle}")


class DevicesContract:
    """The contract of `DeviceBackend`; ``bench`` is a fixture of the subclass."""

    async def _holder(self, bench: DeviceBench, handle: str = "b1-1", *, asleep: bool = False) -> SetLimit:
        limits = {(await bench.devices.inventory()).devices[0].uuid: 8 * GIB}
        return SetLimit(lease=handle, uid=os.geteuid(), limits=limits, guaranteed=limits, suspended=asleep)

    async def _running(self, bench: DeviceBench, handle: str = "b1-1") -> LeaseSample:
        prepared = await bench.devices.prepare(await self._holder(bench, handle))
        assert prepared.env["GPUSHARE_LEASE"] == handle
        await bench.start(handle, prepared, GIB)
        return await bench.sampled(handle, lambda s: s.alive and sum(s.used_bytes.values()) >= GIB)

    async def test_devices_of_the_sample_are_those_of_the_inventory(self, bench: DeviceBench) -> None:
        inventory, sample = await bench.devices.inventory(), await bench.devices.sample()
        assert {d.uuid for d in sample.devices} == {d.uuid for d in inventory.devices}
        assert all(0 <= d.reserve_bytes < d.memory_bytes for d in inventory.devices)

    async def test_preparing_twice_is_preparing_once(self, bench: DeviceBench) -> None:
        holder = await self._holder(bench)
        assert await bench.devices.prepare(holder) == await bench.devices.prepare(holder)
        found = await bench.sampled("b1-1", lambda s: True)
        assert found.devices == tuple(holder.limits)
        assert found.phase is Phase.RUNNING
        assert not found.alive

    async def test_a_reserved_lease_is_none_until_it_is_prepared(self, bench: DeviceBench) -> None:
        before = await bench.devices.sample()
        named = await bench.devices.reserve("b1-1")
        assert named == await bench.devices.reserve("b1-1")
        assert named.get("GPUSHARE_LEASE", "b1-1") == "b1-1"
        assert (await bench.devices.sample()).leases == before.leases
        prepared = await bench.devices.prepare(await self._holder(bench))
        assert {name: prepared.env[name] for name in named} == named
        await bench.sampled("b1-1", lambda s: s.phase is Phase.RUNNING)

    async def test_a_holder_that_starts_asleep_is_suspended(self, bench: DeviceBench) -> None:
        await bench.devices.prepare(await self._holder(bench, asleep=True))
        assert (await bench.sampled("b1-1", lambda s: True)).phase is Phase.SUSPENDED

    async def test_suspended_memory_leaves_the_device_and_comes_back(self, bench: DeviceBench) -> None:
        await self._running(bench)
        moved = await bench.devices.suspend("b1-1", "")
        assert moved.done
        assert moved.bytes >= GIB
        asleep = await bench.sampled("b1-1", lambda s: s.phase is Phase.SUSPENDED)
        assert sum(asleep.saved_bytes.values()) >= GIB
        assert not sum(asleep.used_bytes.values())
        assert (await bench.devices.suspend("b1-1", "")).done, "a suspended lease answers done"
        assert (await bench.devices.resume("b1-1")).done
        awake = await bench.sampled("b1-1", lambda s: s.phase is Phase.RUNNING)
        assert sum(awake.used_bytes.values()) >= GIB
        assert (await bench.devices.resume("b1-1")).done, "a running lease answers done"

    async def test_a_cuda_call_since_the_sample_refuses_the_suspension(self, bench: DeviceBench) -> None:
        idle = await self._running(bench)
        await bench.call("b1-1")
        moved = await bench.devices.suspend("b1-1", idle.calls)
        assert (moved.done, moved.refused) == (False, Refusal.WANTED)
        assert (await bench.sampled("b1-1", lambda s: True)).phase is Phase.RUNNING

    async def test_an_unknown_lease_is_refused_and_may_be_signalled_or_dropped(
        self, bench: DeviceBench
    ) -> None:
        for moved in (await bench.devices.suspend("b9-1", ""), await bench.devices.resume("b9-1")):
            assert (moved.done, moved.refused) == (False, Refusal.NO_LEASE)
        await bench.devices.signal("b9-1", signal.SIGTERM, "leader")
        await bench.devices.drop("b9-1")

    async def test_only_a_process_that_the_sample_shows_without_a_lease_can_be_ended(
        self, bench: DeviceBench
    ) -> None:
        lease = await self._running(bench)
        (uuid, *_) = lease.devices
        for process in (f"{each.pid}-1" for each in lease.processes):
            with pytest.raises(HelperError):
                await bench.devices.end_process(uuid, process)
        with pytest.raises(HelperError):
            await bench.devices.end_process("GPU-none", "1-1")
        assert (await bench.sampled("b1-1", lambda s: True)).alive

    async def test_killing_all_processes_frees_the_device_and_the_lease_can_be_dropped(
        self, bench: DeviceBench
    ) -> None:
        await self._running(bench)
        await bench.devices.signal("b1-1", signal.SIGKILL, "all")
        await bench.sampled("b1-1", lambda s: not s.alive and not any(s.used_bytes.values()))
        for _ in range(2):
            await bench.devices.drop("b1-1")
        assert all(s.lease != "b1-1" for s in (await bench.devices.sample()).leases)

    async def test_a_broker_with_a_successor_is_refused_whatever_it_asks(self, bench: DeviceBench) -> None:
        await self._running(bench)
        before, holder = await bench.devices.epoch(), await self._holder(bench, "b2-1")
        bench.newer_broker()
        assert await bench.devices.epoch() > before
        for asked in (
            bench.devices.inventory(),
            bench.devices.sample(),
            bench.devices.prepare(holder),
            bench.devices.suspend("b1-1", ""),
            bench.devices.resume("b1-1"),
            bench.devices.signal("b1-1", signal.SIGKILL, "all"),
            bench.devices.drop("b1-1"),
        ):
            with pytest.raises(HelperError) as refused:
                await asked
            assert refused.value.kind == "stale_epoch"


class HubBench(abc.ABC):
    """A Hub under test with the user ``bo`` in the group ``nlp``."""

    hub: Hub

    @abc.abstractmethod
    async def ready(self, key: ServerKey) -> None:
        """Return when a requested server has started."""

    @abc.abstractmethod
    async def gone(self, key: ServerKey) -> None:
        """Return when a server that has to stop has stopped."""


class HubContract:
    """The contract of `Hub`; ``bench`` is a fixture of the subclass."""

    KEY = ServerKey("bo", "jabcdefghij-1")

    async def test_a_server_is_listed_from_its_start_to_its_stop(self, bench: HubBench) -> None:
        assert not await bench.hub.has_server(self.KEY)
        await bench.hub.start_server(self.KEY, "train.py (job abcdefghij)", "7.mac")
        assert await bench.hub.has_server(self.KEY)
        await bench.ready(self.KEY)
        assert self.KEY in await bench.hub.servers()
        assert (await bench.hub.server_url(self.KEY)).endswith("/bo/jabcdefghij-1/")
        await bench.hub.stop_server(self.KEY)
        await bench.gone(self.KEY)
        assert not await bench.hub.has_server(self.KEY)
        assert self.KEY not in await bench.hub.servers()
        assert await bench.hub.server_url(self.KEY) == ""

    @pytest.mark.parametrize("server", ["", "own"])
    async def test_a_users_server_is_stopped_and_may_start_again(self, bench: HubBench, server: str) -> None:
        key = ServerKey(self.KEY.user, server)
        for _ in range(2):
            await bench.hub.start_server(key, "", "")
            await bench.ready(key)
            await bench.hub.stop_server(key, forget=False)
            await bench.gone(key)
            assert not await bench.hub.has_server(key)

    async def test_starting_twice_is_starting_once(self, bench: HubBench) -> None:
        await bench.hub.start_server(self.KEY, "train.py (job abcdefghij)", "7.mac")
        await bench.hub.start_server(self.KEY, "train.py (job abcdefghij)", "7.mac")
        await bench.ready(self.KEY)
        await bench.hub.start_server(self.KEY, "train.py (job abcdefghij)", "7.mac")
        assert [key for key in await bench.hub.servers() if key == self.KEY] == [self.KEY]

    async def test_stopping_an_unknown_server_changes_nothing(self, bench: HubBench) -> None:
        await bench.hub.stop_server(self.KEY)
        assert not await bench.hub.servers()

    async def test_a_user_has_groups_and_a_moment_and_an_unknown_one_is_none(self, bench: HubBench) -> None:
        user = await bench.hub.user("bo")
        assert user is not None
        assert user.groups == ("nlp",)
        assert datetime.fromisoformat(user.created) < datetime.now(UTC)
        assert user in await bench.hub.users()
        assert await bench.hub.user("nobody-knows") is None
        assert not await bench.hub.has_server(ServerKey("nobody-knows", ""))


def implementations(contract: type) -> set[type]:
    """Return all loaded concrete subclasses of a contract."""
    found: set[type] = set()
    for kind in contract.__subclasses__():
        found |= implementations(kind) | (set() if inspect.isabstract(kind) else {kind})
    return found
