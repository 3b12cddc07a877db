"""Each implementation of a contract against its suite: ours, and those that stand in for it in tests."""

from __future__ import annotations

import asyncio
import os
import pkgutil
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

import pytest

import jupyter_gpushare
from jupyter_gpushare.backends.base import DeviceBackend, Hub, Prepared, ServerKey
from jupyter_gpushare.backends.helper_client import (
    Connection,
    HelperAddress,
    HelperClient,
    NodeAddress,
    SocketAddress,
)
from jupyter_gpushare.backends.hub import HubClient
from jupyter_gpushare.backends.local import LocalDevices
from jupyter_gpushare.broker.control.fenced_hub import FencedHub
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.engine.local import LocalEngine
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.core.model import Cluster
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.kube.cluster import nodes
from jupyter_gpushare.kube.cluster.nodes import NodeDevices
from jupyter_gpushare.kube.engine.kai import KaiEngine
from jupyter_gpushare.protocol.helper import (
    Hello,
    LeaseSample,
    MoveResult,
    Phase,
    Sample,
    SetLimit,
    decode,
    encode,
)
from tests.backends.contract import (
    NOW,
    DeviceBench,
    DevicesContract,
    EngineContract,
    HubBench,
    HubContract,
    implementations,
)
from tests.backends.contract import cluster as contract_cluster
from tests.broker import fake_hub
from tests.broker.fake_devices import SiteDevices
from tests.broker.fake_hub import SiteHub
from tests.broker.site import Site
from tests.certificates import broker_and_helper, helper_options
from tests.gpu.machine import Machine, Worker, machine_in
from tests.hub.conftest import ADMIN_TOKEN, SIMPLE, running_hub
from tests.hub.conftest import Hub as HubProcess
from tests.kube.bed import Bed, kube_bed
from tests.ports import free_ports
from tests.waiting import PATIENCE_S, becomes, until

MIB = 1 << 20


class TestLocalEngine(EngineContract):
    implementation = LocalEngine

    @pytest.fixture
    def engine(self) -> Engine:
        return LocalEngine()


class TestKaiEngine(EngineContract):
    """On an API server of the tests' own, with a model of KAI-Scheduler and nodes without processes."""

    implementation = KaiEngine

    @pytest.fixture
    async def bed(self) -> AsyncIterator[Bed]:
        projects = tuple(replace(p, quota_milli=1000) for p in contract_cluster().projects)
        async with kube_bed({"here": ("GPU-0", "GPU-1")}, projects) as found:
            yield found

    @pytest.fixture
    def engine(self, bed: Bed) -> Engine:
        self.bed = bed
        return bed.engine

    async def told(self, engine: Engine, snapshot: Cluster) -> None:
        for lease in snapshot.leases:
            if lease.devices:
                self.bed.seat(lease)
        await self.bed.quiet()  # the engine creates every seat itself: it would take these for missing ones
        await engine.settle(snapshot, NOW)
        await self.bed.quiet()


def next_epoch(machine: Machine) -> int:
    """The epoch of a broker that follows every earlier one of a helper."""
    return int(machine.ask("hello")["epoch"]) + 1


def drop_all(machine: Machine) -> None:
    """Drop every lease of a machine once its processes are gone."""
    client = machine.client(epoch=next_epoch(machine))

    def dropped() -> bool:
        leases = client.ask("sample")["leases"]
        for lease in leases:
            if not lease["alive"] and not any(lease["used_bytes"].values()):
                client.ask("drop", lease=lease["lease"])
        return not leases

    until(dropped, "no lease is left")
    client.close()


class LocalBench(DeviceBench):
    """A broker of its own with a device helper, on the simulated driver."""

    devices: DeviceBackend

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._workers: dict[str, Worker] = {}
        epoch = next_epoch(machine)
        self.devices = LocalDevices(HelperClient(SocketAddress(machine.socket), lambda: epoch))

    def newer_broker(self) -> None:
        newer = self._machine.client(epoch=next_epoch(self._machine))
        assert not newer.ask("drop", lease="nothing")["known"]
        newer.close()

    def end(self) -> None:
        """Leave neither processes nor leases to the next test."""
        for worker in self._workers.values():
            worker.kill()
        drop_all(self._machine)

    async def start(self, handle: str, prepared: Prepared, used_bytes: int) -> None:
        self._machine.knows(handle, prepared.env["GPUSHARE_LEASE_DIR"])
        self._workers[handle] = await asyncio.to_thread(self._machine.worker, handle, mib=used_bytes // MIB)

    async def call(self, handle: str) -> None:
        assert self._workers[handle].do("alloc 1") == "0"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with its helper, for tests one after another."""
    for machine in machine_in(tmp_path_factory.mktemp("m")):
        machine.start()
        yield machine


class TestLocalDevices(DevicesContract):
    implementation = LocalDevices

    @pytest.fixture
    async def bench(self, machine: Machine) -> AsyncIterator[DeviceBench]:
        bench = LocalBench(machine)
        yield bench
        await bench.devices.close()
        bench.end()


class NodesBench(LocalBench):
    """Two nodes with a device helper each, over TCP; the leases are on the first."""

    def __init__(self, first: Machine, second: Machine, addresses: dict[str, HelperAddress]) -> None:
        self.second = second
        self.addresses = addresses
        for name, machine in (("n1", first), ("n2", second)):
            if name not in addresses:
                self.serve(name, machine)
        super().__init__(first)
        epoch = max(map(next_epoch, (first, second)))
        self.pools: set[str] = set()
        self.devices = NodeDevices(lambda: dict(self.addresses), lambda: epoch, pools=lambda: self.pools)

    def end(self) -> None:
        """Leave neither processes nor leases to the next test, and the helpers at work."""
        for name, machine in (("n1", self._machine), ("n2", self.second)):
            if machine.helper is None:
                self.serve(name, machine)
        super().end()
        drop_all(self.second)

    def serve(self, name: str, machine: Machine) -> None:
        (broker, helper), port = broker_and_helper(machine.folder), free_ports()
        machine.start(
            *("--listen", f"127.0.0.1:{port}", *helper_options(helper), "--node", name),
            *("--install-library", str(machine.folder / "lib")),
        )
        self.addresses[name] = NodeAddress(host="127.0.0.1", port=port, node=name, tls=broker)


async def test_a_watch_ends_also_where_an_event_comes_at_that_moment(monkeypatch):
    queues = []

    class Queue(asyncio.Queue):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            queues.append(self)

    async def follow() -> None:
        async for _ in NodeDevices(dict, lambda: 1).watch():
            pass

    monkeypatch.setattr(nodes.asyncio, "Queue", Queue)
    task = asyncio.create_task(follow())
    for _ in range(5):
        await asyncio.sleep(0)
    queues[0].put_nowait(None)
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)
    assert task.cancelled()


TwoNodes = tuple[Machine, Machine, dict[str, HelperAddress]]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """Two machines for tests one after another, and the addresses of their helpers once they run."""
    for first in machine_in(tmp_path_factory.mktemp("a")):
        # UUIDs of its own
        for second in machine_in(tmp_path_factory.mktemp("b"), spec="1xA100-80GB,host=512GiB"):
            yield first, second, {}


class TestNodeDevices(DevicesContract):
    implementation = NodeDevices

    @pytest.fixture
    async def bench(self, two_nodes: TwoNodes) -> AsyncIterator[NodesBench]:
        bench = NodesBench(*two_nodes)
        yield bench
        await bench.devices.close()
        bench.end()

    async def test_devices_are_those_of_all_nodes(self, bench: NodesBench) -> None:
        inventory = await bench.devices.inventory()
        assert [device.node for device in inventory.devices] == ["n1", "n2"]
        assert len({device.uuid for device in inventory.devices}) == 2

    async def test_a_helper_is_told_whether_its_node_is_a_unit_pool(self, bench: NodesBench) -> None:
        def by_number() -> list[bool]:
            return [m.ask("sample")["seats_by_number"] for m in (bench._machine, bench.second)]

        await bench.devices.sample()
        assert by_number() == [False, False]
        for pools, told in (({"n2"}, [False, True]), (set[str](), [False, False])):
            bench.pools = pools
            await bench.devices.sample()
            assert by_number() == told

    async def test_a_holder_gets_the_paths_of_its_node(self, bench: NodesBench) -> None:
        await bench.devices.inventory()
        uuid = bench.second.uuids()[0]
        request = SetLimit(lease="b2-1", uid=os.geteuid(), limits={uuid: 1 << 30})
        prepared = await bench.devices.prepare(request)
        assert prepared.node == "n2"
        directory, account, library = prepared.mounts
        assert directory.path == prepared.env["GPUSHARE_LEASE_DIR"]
        assert [mount.read_only for mount in prepared.mounts] == [True, False, True]
        assert Path(account.path).is_file()
        assert library.path == prepared.env["LD_PRELOAD"]
        assert Path(library.path).parent == bench.second.folder / "lib"

    async def test_a_silent_node_keeps_its_leases_and_offers_nothing(self, bench: NodesBench) -> None:
        before = await self._running(bench)
        first = bench._machine
        first.stop()
        sample = await bench.devices.sample()
        lease = next(found for found in sample.leases if found.lease == "b1-1")
        assert lease.used_bytes == before.used_bytes
        later = next(found for found in (await bench.devices.sample()).leases if found.lease == "b1-1")
        assert later.measured_at == lease.measured_at, "what a silent node said does not become newer"
        assert [device.healthy for device in sample.devices] == [False, True]
        assert "node n1 does not answer" in sample.devices[0].reason
        assert [d.healthy for d in (await bench.devices.inventory()).devices] == [False, True]
        assert bench.devices.sleepable() == {"n2"}  # type: ignore[attr-defined]
        with pytest.raises(HelperError, match="n1"):
            await bench.devices.suspend("b1-1", "")
        bench.serve("n1", first)
        again = await bench.devices.sample()
        assert [device.healthy for device in again.devices] == [True, True]
        assert (await bench.devices.suspend("b1-1", "")).done

    async def test_leases_of_a_node_that_never_answered_are_not_missed(self, bench: NodesBench) -> None:
        bench._machine.stop()
        with pytest.raises(HelperError, match="n1"):
            await bench.devices.sample()
        del bench.addresses["n1"]  # the cluster says that it is gone
        assert [d.uuid for d in (await bench.devices.sample()).devices] == bench.second.uuids()

    async def test_events_of_all_nodes_come_and_a_node_that_returns_is_told(self, bench: NodesBench) -> None:
        await self._running(bench)
        heard: list[tuple[str, str]] = []

        async def listen() -> None:
            async for event in bench.devices.watch():
                if event is not None:
                    heard.append((str(event.kind), event.fields.get("node", event.lease)))

        listening = asyncio.create_task(listen())
        try:
            await becomes(lambda: ("device", "n1") in heard and ("device", "n2") in heard)
            bench.second.stop()
            await becomes(lambda: heard.count(("device", "n2")) == 2)
            bench.serve("n2", bench.second)
            await becomes(lambda: heard.count(("device", "n2")) == 3)
            await bench.devices.signal("b1-1", signal.SIGKILL, "all")
            await becomes(lambda: ("ended", "b1-1") in heard)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def test_times_are_those_of_this_machine(self, tmp_path: Path) -> None:
        started_long_after = _Switched("b1-1", lag_s=50_000.0)
        here = NodeDevices(lambda: {"n1": started_long_after}, lambda: 1)
        sample = await here.sample()
        now = time.monotonic()
        assert now - 5 < sample.at <= now
        assert now - 15 < sample.leases[0].active_at < now - 5
        assert sample.leases[0].unread_since == 0.0

    async def test_a_node_that_swallows_connections_delays_no_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nodes, "ANSWER_S", 0.2)
        off = _Switched("b2-1")
        here = NodeDevices({"n1": _Switched("b1-1"), "n2": off}.copy, lambda: 1)
        assert {lease.lease for lease in (await here.sample()).leases} == {"b1-1", "b2-1"}
        off.answers.clear()
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                before_at = time.monotonic()
                sample = await here.sample()
                assert sample.at >= before_at - nodes.ANSWER_S
                assert {lease.lease for lease in sample.leases} == {"b1-1", "b2-1"}
            assert off.waiting == 1, "one question at a time to a node that does not answer"
            off.answers.set()
            while here._nodes["n2"].silent:
                await asyncio.sleep(0.01)
            off.answers.clear()
            await here.sample()
            assert off.waiting == 0, "its request ended when its time was over"
            await here.sample()
            await asyncio.sleep(0)
        await here.close()
        assert off.waiting == 0

    async def test_a_node_that_leaves_while_it_is_asked_is_left_out(self) -> None:
        leaving = _Switched("b2-1")
        listed: dict[str, HelperAddress] = {"n1": _Switched("b1-1"), "n2": leaving}
        here = NodeDevices(lambda: dict(listed), lambda: 1)
        await here.sample()
        leaving.answers.clear()
        asked = asyncio.create_task(here.sample())
        await becomes(lambda: leaving.waiting == 1)
        del listed["n2"]
        here._refresh()
        leaving.answers.set()
        assert {lease.lease for lease in (await asked).leases} == {"b1-1"}

    async def test_a_node_that_joins_later_and_does_not_answer_stops_no_other(self) -> None:
        now = time.monotonic()
        listed: dict[str, HelperAddress] = {"n1": _Switched("b1-1")}
        here = NodeDevices(lambda: dict(listed), lambda: 1, lambda: now)
        await here.sample()
        now += nodes.FIRST_S + 1
        listed["n2"] = SocketAddress(Path("/no/helper"))
        assert {lease.lease for lease in (await here.sample()).leases} == {"b1-1"}

    async def test_moves_take_nothing_from_samples(self) -> None:
        address = _Switched("b1-1")
        here = NodeDevices({"n1": address}.copy, lambda: 1)
        await here.sample()
        address.answers.clear()
        moves = [asyncio.create_task(here.resume("b1-1")) for _ in range(64)]
        await becomes(lambda: address.waiting == 64)
        asked = asyncio.create_task(here.sample())
        await becomes(lambda: address.waiting == 65)
        for task in (*moves, asked):
            task.cancel()
        await asyncio.gather(*moves, asked, return_exceptions=True)

    async def test_news_of_a_node_asks_no_other(self) -> None:
        changed, still = _Switched("b1-1"), _Switched("b2-1")
        here = NodeDevices({"n1": changed, "n2": still}.copy, lambda: 1)
        before = await here.sample()
        still.answers.clear()
        assert (await here.latest()).leases == before.leases
        await here.resume("b1-1")
        after = await here.latest()
        assert [new == old for new, old in zip(after.leases, before.leases, strict=True)] == [False, True]
        assert after.at == after.leases[1].measured_at, "as old as the oldest answer"

    async def test_without_nodes_nothing_is_known(self) -> None:
        with pytest.raises(HelperError, match="no node"):
            await NodeDevices(dict, lambda: 1).sample()


class _Switched(HelperAddress):
    """A helper that answers, or a machine that is off: no connection to it is ever refused."""

    def __init__(self, lease: str, lag_s: float = 0.0) -> None:
        self._lease, self._lag_s = lease, lag_s
        self.answers = asyncio.Event()
        self.answers.set()
        self.waiting = 0

    async def connect(self) -> Connection:
        self.waiting += 1
        try:
            await self.answers.wait()
        finally:
            self.waiting -= 1
        return _Answers(self._lag_s, self._lease)


class _Answers:
    """A helper with a clock behind this machine's, and with one lease that worked 10 s ago."""

    is_old = True  # no second request

    def __init__(self, lag_s: float, lease: str) -> None:
        self._lag_s = lag_s
        self._lease = lease
        self._line = b""

    async def send(self, line: bytes) -> None:
        now = time.monotonic() - self._lag_s
        lease = LeaseSample(
            lease=self._lease, phase=Phase.RUNNING, measured_at=now, used_bytes={}, saved_bytes={}, calls="c",
            active_at=now - 10, suspendable=True, suspend_reason="", alive=True,
        )  # fmt: skip
        result = {
            "hello": Hello(version="", pid=1, boot_id="", epoch=1, simulated=True, now=now),
            "sample": Sample(at=now, devices=(), leases=(lease,), host_available_bytes=1, host_saved_bytes=0),
            "resume": MoveResult(done=True),
        }[decode(line)["verb"]]
        self._line = encode({"ok": True, "result": asdict(result)})

    async def receive(self) -> bytes:
        return self._line

    def close(self) -> None:
        pass


class SiteBench(DeviceBench):
    def __init__(self, site: Site, devices: DeviceBackend) -> None:
        self._site = site
        self.devices = devices

    def newer_broker(self) -> None:
        self._site.epoch += 1

    async def start(self, handle: str, prepared: Prepared, used_bytes: int) -> None:
        held = self._site.held[prepared.env["GPUSHARE_LEASE"]]
        held.alive = True
        self._site.use(held, dict.fromkeys(held.limits, used_bytes))

    async def call(self, handle: str) -> None:
        await self._site.gpu_cell(self._site.held[handle])


class TestSiteDevices(DevicesContract):
    implementation = SiteDevices

    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[DeviceBench]:
        site = Site(tmp_path)
        site.move_s = 0.01
        broker = await site.start_broker(running=False)
        yield SiteBench(site, broker.devices)
        site.wrong.clear()  # the suite acts as a stale broker on purpose
        await site.close()


class RealHubBench(HubBench):
    """A JupyterHub process with servers that only answer."""

    def __init__(self, process: HubProcess) -> None:
        self._process = process
        self.hub = HubClient(f"{process.url}/hub/api", ADMIN_TOKEN)

    async def ready(self, key: ServerKey) -> None:
        await asyncio.to_thread(self._process.wait_ready, key.user, key.server)

    async def gone(self, key: ServerKey) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.hub.has_server(key):
                await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def hub_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    extra = 'c.JupyterHub.load_groups = {"nlp": {"users": ["bo"]}}\n'
    with running_hub(SIMPLE, tmp_path_factory.mktemp("hub"), extra=extra) as process:
        yield process


class TestHubClient(HubContract):
    implementation = HubClient

    @pytest.fixture
    async def bench(self, hub_process: HubProcess) -> AsyncIterator[HubBench]:
        bench = RealHubBench(hub_process)
        yield bench
        for key in await bench.hub.servers():
            await asyncio.to_thread(hub_process.stop_server, key.user, key.server, True)
        await bench.hub.close()


async def site_hub(folder: Path) -> AsyncIterator[SiteHubBench]:
    """A Hub that answers soon that a start goes on: a real one does so after 10 s."""
    site = Site(folder)
    site.spawn_s = 3600.0  # the bench says when a server is ready
    site.groups = {"bo": ("nlp",)}
    broker = await site.start_broker(running=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_hub, "SLOW_SPAWN_S", 0.2)
        yield SiteHubBench(site, broker.hub)
    await site.close()


class SiteHubBench(HubBench):
    def __init__(self, site: Site, hub: Hub) -> None:
        self.site = site
        self.hub = hub

    async def ready(self, key: ServerKey) -> None:
        self.site.servers[key] = "ready"

    async def gone(self, key: ServerKey) -> None:
        self.site.servers.pop(key)


def store_epoch(store: Store) -> Callable[[], int]:
    return lambda: store.epoch


class TestFencedHub(HubContract):
    implementation = FencedHub

    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[HubBench]:
        async for bench in site_hub(tmp_path):
            assert bench.site.broker is not None
            store, devices = bench.site.broker.store, bench.site.broker.devices
            yield SiteHubBench(
                bench.site, FencedHub(bench.hub, devices, store_epoch(store), bench.site.broker.loop.faults)
            )


class TestSiteHub(HubContract):
    implementation = SiteHub

    @pytest.fixture
    async def bench(self, tmp_path: Path) -> AsyncIterator[HubBench]:
        async for bench in site_hub(tmp_path):
            yield bench


@pytest.mark.parametrize("contract", [Engine, DeviceBackend, Hub])
def test_every_implementation_passes_its_contract(contract: type) -> None:
    for module in pkgutil.walk_packages(jupyter_gpushare.__path__, "jupyter_gpushare."):
        if re.match(r"jupyter_gpushare\.(backends|broker)\.(?!state\.migrations)", module.name):
            import_module(module.name)
    suites = [suite for suite in globals().values() if hasattr(suite, "implementation")]
    missing = implementations(contract) - {suite.implementation for suite in suites}
    assert not missing, f"no suite runs against {missing}"
