"""Each implementation of a contract against its suite: ours, and those that stand in for it in tests."""

from __future__ import annotations

import asyncio
import pkgutil
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import jupyter_gpushare
from jupyter_gpushare.backends.base import Devices, Hub, Prepared, ServerKey
from jupyter_gpushare.backends.hub import HubClient
from jupyter_gpushare.backends.local import HelperClient, LocalDevices
from jupyter_gpushare.broker.control.fenced_hub import FencedHub
from jupyter_gpushare.broker.engine import Engine
from jupyter_gpushare.broker.kai_engine import KaiEngine
from jupyter_gpushare.broker.local_engine import LocalEngine
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.core.model import Cluster
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
from tests.broker.fake_devices import SiteDevices
from tests.broker.fake_hub import SiteHub
from tests.broker.site import Site
from tests.gpu.machine import Machine, Worker, machine_in
from tests.hub.conftest import ADMIN_TOKEN, SIMPLE, running_hub
from tests.hub.conftest import Hub as HubProcess
from tests.kube.bed import Bed, kube_bed
from tests.waiting import PATIENCE_S

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


class LocalBench(DeviceBench):
    """A device helper of its own, on the simulated driver."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._workers: dict[str, Worker] = {}
        self.devices = LocalDevices(HelperClient(machine.socket, lambda: 1))

    def newer_broker(self) -> None:
        newer = self._machine.client(epoch=2)
        assert not newer.ask("drop", lease="nothing")["known"]
        newer.close()

    async def start(self, handle: str, prepared: Prepared, used_bytes: int) -> None:
        self._machine.knows(handle, prepared.env["GPUSHARE_LEASE_DIR"])
        self._workers[handle] = await asyncio.to_thread(self._machine.worker, handle, mib=used_bytes // MIB)

    async def call(self, handle: str) -> None:
        assert self._workers[handle].do("alloc 1") == "0"


class TestLocalDevices(DevicesContract):
    implementation = LocalDevices

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[DeviceBench]:
        for machine in machine_in(tmp_path):
            machine.start()
            yield LocalBench(machine)


class SiteBench(DeviceBench):
    def __init__(self, site: Site, devices: Devices) -> None:
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
        until = time.monotonic() + PATIENCE_S
        while await self.hub.has_server(key):
            assert time.monotonic() < until
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
    site = Site(folder)
    site.spawn_s = 3600.0  # the bench says when a server is ready
    site.groups = {"bo": ("nlp",)}
    broker = await site.start_broker(running=False)
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


@pytest.mark.parametrize("contract", [Engine, Devices, Hub])
def test_every_implementation_passes_its_contract(contract: type) -> None:
    for module in pkgutil.walk_packages(jupyter_gpushare.__path__, "jupyter_gpushare."):
        if re.match(r"jupyter_gpushare\.(backends|broker)\.(?!state\.migrations)", module.name):
            import_module(module.name)
    suites = [suite for suite in globals().values() if hasattr(suite, "implementation")]
    missing = implementations(contract) - {suite.implementation for suite in suites}
    assert not missing, f"no suite runs against {missing}"
