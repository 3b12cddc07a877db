"""`KaiEngine` on an API server of the tests, with a model of KAI and nodes without processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from jupyter_gpushare.core.model import Kind, Lease, Project
from jupyter_gpushare.kube.cluster.client import ApiClient
from jupyter_gpushare.kube.cluster.objects import SeatPod, pod_group, seat_pod
from jupyter_gpushare.kube.cluster.queues import priority_classes, queues
from jupyter_gpushare.kube.cluster.seats import KubeSeats, followed_nodes
from jupyter_gpushare.kube.engine.kai import KaiEngine
from jupyter_gpushare.kube.rules.pools import LABEL
from jupyter_gpushare.kube.rules.seats import Demand, SeatClass, request
from tests.kube import real_engine
from tests.kube.apiserver import ApiServer, api_server
from tests.kube.kai_binder import GPU_GROUP
from tests.kube.kubelet import RESERVATIONS, node_body, reserve
from tests.kube.rbac import Rights
from tests.kube.real_engine import RealServer
from tests.kube.store import Json
from tests.waiting import PATIENCE_S, becomes

NS = "gpushare"
STEP_S = 0.02


class Nodes:
    """Nodes that run seats: a bound seat connects, a deleted one ends when its memory is gone.

    Whole GPUs are assigned in random order; a seat does not learn them from its environment.
    """

    def __init__(
        self,
        server: ApiServer | RealServer,
        nodes: Mapping[str, tuple[str, ...]],
        seed: int = 0,
        units: Mapping[str, str] | None = None,
    ) -> None:
        self.server = server
        self.gpus = dict(nodes)
        self.devices: dict[str, tuple[str, ...]] = {}  # of connected seats
        self.holds: set[str] = set()  # seats that may not end yet: their memory is on the device
        self.connects = True
        self.reserves = True  # KAI's reservation pods run
        self.order: str | None = None  # of the GPUs that are handed out; None: random
        self._groups: dict[str, str] = {}
        self._rng = random.Random(seed)
        for name, uuids in nodes.items():
            body = node_body(name, len(uuids))
            if units and name in units:
                body["metadata"]["labels"][LABEL] = units[name]
            server.store.create("nodes", "", body)

    def step(self) -> None:
        """Run the next step of every kubelet."""
        store = self.server.store
        pods = {pod["metadata"]["name"]: pod for pod in store.all("pods", NS) if pod["spec"].get("nodeName")}
        for name in set(self.devices) - set(pods):
            del self.devices[name]
        reserving = list(store.all("pods", RESERVATIONS))
        used_groups = {p["metadata"].get("labels", {}).get(GPU_GROUP) for p in (*pods.values(), *reserving)}
        self._groups = {group: uuid for group, uuid in self._groups.items() if group in used_groups}
        for pod in reserving if self.reserves else ():
            free = self._free(pod["spec"]["nodeName"])
            self._groups[pod["metadata"]["labels"][GPU_GROUP]] = reserve(store, pod, free)
        for name, pod in pods.items():
            if "deletionTimestamp" in pod["metadata"]:
                if name not in self.holds:
                    store.delete("pods", NS, name, grace_s=0)
            elif pod["status"]["phase"] == "Pending":
                store.patch("pods", NS, name, {"status": {"phase": "Running"}}, part="status")
            elif name not in self.devices and self.connects:
                self.devices[name] = self._pick(pod)

    def _pick(self, pod: Json) -> tuple[str, ...]:
        free = self._free(pod["spec"]["nodeName"])
        group = pod["metadata"].get("labels", {}).get(GPU_GROUP)
        if group:
            if group not in self._groups:
                self._groups[group] = free[0]
            return (self._groups[group],)
        limits = pod["spec"]["containers"][0]["resources"].get("limits", {})
        return tuple(sorted(free[: int(limits["nvidia.com/gpu"])]))

    def _free(self, node: str) -> list[str]:
        used = {uuid for mine in self.devices.values() for uuid in mine} | set(self._groups.values())
        free = [uuid for uuid in self.gpus[node] if uuid not in used]
        if self.order is None:
            self._rng.shuffle(free)
        else:
            free.sort(reverse=self.order == "reversed")
        return free

    def adopt(self, name: str, pod: Json, devices: tuple[str, ...]) -> None:
        self.devices[name] = devices
        group = pod["metadata"]["labels"].get(GPU_GROUP)
        if group:
            self._groups[group] = devices[0]


class Bed:
    """One cluster with one engine; the scheduler and the nodes make a step every few milliseconds."""

    def __init__(self, server: ApiServer | RealServer, nodes: Nodes, projects: tuple[Project, ...]) -> None:
        self.server, self.nodes, self.store = server, nodes, server.store
        self.kai = server.kai
        self.client = ApiClient(server.address())
        self.epoch = 1
        self.site = SeatPod(image="seat")
        self.sleepable = frozenset(nodes.gpus)
        self.foreign: dict[str, str] = {}  # pods with GPUs that are not ours, by node
        for body in queues(projects, 0):
            self.store.create("queues", "", body)
        for body in priority_classes(3):
            self.store.create("priorityclasses", "", body)
        self.start_engine()

    def start_engine(self) -> None:
        """Start an engine without any state."""
        nodes = followed_nodes(self.client, lambda: self.seats.notify())
        self.seats = KubeSeats(self.client, self.site, self._connected, lambda: self.epoch, nodes)
        clock = asyncio.get_running_loop().time
        self.engine = KaiEngine(
            self.seats, lambda: self.sleepable, clock, place_s=20, seat_s=20, foreign=lambda: self.foreign
        )
        self.engine_task = asyncio.create_task(self.engine.run())

    async def stop_engine(self) -> None:
        """End the engine at any point."""
        self.engine_task.cancel()
        await asyncio.gather(self.engine_task, return_exceptions=True)

    async def restart_engine(self) -> None:
        """End the engine at any point, and start another."""
        await self.stop_engine()
        self.epoch += 1
        self.start_engine()

    def _connected(self, name: str) -> tuple[str, ...]:
        return self.nodes.devices.get(name, ())

    async def run(self) -> None:
        while True:
            before = dict(self.nodes.devices)
            self.kai.cycle()
            self.nodes.step()
            if self.nodes.devices != before:
                self.seats.notify()
            await asyncio.sleep(STEP_S)

    def seat(self, lease: Lease) -> str:
        """Give a lease that holds devices its seat, as if KAI had placed it before."""
        seat_class = SeatClass.SESSION if lease.kind is Kind.BUILD else SeatClass.TRAIN
        demand = Demand(lease=lease.id, project=lease.project, seat_class=seat_class, size=lease.size)
        name = f"seat-{random.randbytes(16).hex()}"
        self.store.create("podgroups", NS, pod_group(name, demand, self.epoch))
        body = seat_pod(name, demand, request(lease.size, []), self.site, self.epoch)
        if lease.size.fraction_milli < 1000:
            body["metadata"]["labels"][GPU_GROUP] = f"group-of-{lease.devices[0]}"
        body["status"] = {"phase": "Running"}
        node = next(n for n, uuids in self.nodes.gpus.items() if lease.devices[0] in uuids)
        body["spec"]["nodeName"] = node
        pod = self.store.create("pods", NS, body)
        self.nodes.adopt(name, pod, lease.devices)
        return name

    def seats_of(self, lease: str) -> list[Json]:
        return [group for group in self.store.all("podgroups", NS) if self._lease(group) == lease]

    @staticmethod
    def _lease(found: Json) -> str:
        return str(found["metadata"]["labels"]["gpushare.jupyter.org/lease"])

    async def said_no(self, lease: str) -> None:
        """Let KAI, which must be stopped, refuse the seat of a lease; return once the engine knows this."""
        await self.until(lambda: [p for p in self.store.all("pods", NS) if self._lease(p) == lease])
        (group,) = self.seats_of(lease)
        said = [{"type": "UnschedulableOnNodePool", "status": "True", "reasons": []}]
        body = {"status": {"schedulingConditions": said}}
        self.store.patch("podgroups", NS, group["metadata"]["name"], body, part="status")
        await self.until(lambda: any(s.why for s in self.seats.seats().get(lease, ())))

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Return the first true value of ``condition``; fail when the engine fails."""

        def found() -> Any:
            if self.engine_task.done():
                self.engine_task.result()
            return condition()

        return await becomes(found)

    async def quiet(self) -> None:
        """Return when nothing has changed for a while and the engine is up to date."""
        async with asyncio.timeout(PATIENCE_S):
            since, version = 0, -1
            while since < self.kai.quiet_s / STEP_S:
                await asyncio.sleep(STEP_S)
                known = self.seats.is_known and self._is_up_to_date()
                since = since + 1 if known and version == self.store.version else 0
                version = self.store.version

    def _is_up_to_date(self) -> bool:
        there = {g["metadata"]["name"] for g in self.store.all("podgroups", NS)}
        return {s.name for mine in self.seats.seats().values() for s in mine} == there


@asynccontextmanager
async def kube_bed(
    nodes: Mapping[str, tuple[str, ...]],
    projects: Iterable[Project],
    seed: int = 0,
    rights: Rights | None = None,
    units: Mapping[str, str] | None = None,
) -> AsyncIterator[Bed]:
    """Yield a cluster with these nodes (with their GPUs) and queues for these projects.

    ``units``: labels of unit pools, by node.
    """
    async with AsyncExitStack() as stack:
        server: ApiServer | RealServer
        if engine := real_engine.running():
            assert rights is None, "the users of a real engine may do everything"
            server = engine.cluster()
        else:
            server = await stack.enter_async_context(api_server(rights))
        bed = Bed(server, Nodes(server, nodes, seed, units), tuple(projects))
        running = asyncio.create_task(bed.run())
        await bed.until(lambda: bed.seats.is_known)
        try:
            yield bed
        finally:
            tasks = running, bed.engine_task
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            await bed.client.close()
        assert not [e for e in ended if isinstance(e, Exception)], ended
