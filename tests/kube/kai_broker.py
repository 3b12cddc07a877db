"""A minimal broker for `KaiEngine`: its leases follow the engine's decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.core.model import (
    Action,
    CheckpointMode,
    Cluster,
    Device,
    Grant,
    Kind,
    Lease,
    Project,
    Requeue,
    Resume,
    State,
    Suspend,
)
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.kube.engine.kai import KaiEngine
from tests.kube.bed import NS, Bed
from tests.waiting import PATIENCE_S

GIB = 1 << 30
VISION, NLP = Project(name="vision", quota_milli=1000), Project(name="nlp", quota_milli=1000)


class Broker:
    """A minimal broker whose leases follow the engine's decisions.

    A suspension frees the device; only then may the seat of the lease end.
    """

    def __init__(self, bed: Bed, *projects: Project) -> None:
        self.bed = bed
        self.projects = projects or (VISION, NLP)
        self.leases: dict[str, Lease] = {}
        self.did: list[Action] = []

    @property
    def engine(self) -> KaiEngine:
        return self.bed.engine

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def cluster(self) -> Cluster:
        devices = tuple(
            Device(uuid=uuid, memory_bytes=80 * GIB, reserve_bytes=GIB, node=node)
            for node, uuids in self.bed.nodes.gpus.items()
            for uuid in uuids
        )
        return Cluster(devices=devices, projects=self.projects, leases=tuple(self.leases.values()))

    def set(self, id: str, **changes: Any) -> None:
        self.leases[id] = replace(self.leases[id], **changes)

    async def session(
        self, id: str, project: str = "vision", milli: int = 1000, size: Size | None = None
    ) -> Grant | Explanation:
        asked = size or Size(milli)
        lease = Lease(id=id, project=project, kind=Kind.BUILD, size=asked, queued_at=self.now)
        answer = await self.engine.admit(self.cluster, lease, self.now)
        if isinstance(answer, Grant):
            held = {"devices": answer.devices, "held_milli": answer.held_milli, "borrowed": answer.borrowed}
            self.leases[id] = replace(lease, state=State.RUNNING, granted_at=self.now, used_bytes=GIB, **held)
            self._hold()
        return answer

    def job(self, id: str, project: str = "nlp", milli: int = 1000, **more: Any) -> None:
        given = {"queued_at": self.now, "waits_since_at": self.now, "survival": CheckpointMode.SIGTERM}
        given |= {"size": Size(milli)}
        self.leases[id] = Lease(id=id, project=project, kind=Kind.TRAIN, **given | more)

    async def round(self) -> None:
        cluster = self.cluster
        for action in self.engine.decide(cluster, self.now).actions:
            self._do(action)
        await self.engine.settle(self.cluster, self.now)
        self._hold()

    def _do(self, action: Action) -> None:
        self.did.append(action)
        match action:
            case Grant():
                held = {"devices": action.devices, "held_milli": action.held_milli}
                self.set(action.lease, state=State.RUNNING, granted_at=self.now, **held)
            case Suspend():
                self.set(action.lease, state=State.SUSPENDED, saved_bytes=GIB)
            case Resume():
                self.set(action.lease, state=State.RUNNING, saved_bytes=0, wanted=False, idle_since_at=None)
            case Requeue():
                self.set(action.lease, state=State.PENDING, devices=(), held_milli=0)
        self._check_devices()

    def _check_devices(self) -> None:
        """Check that no device holds more than it has."""
        for node, uuids in self.bed.nodes.gpus.items():
            for uuid in uuids:
                held = [x for x in self.leases.values() if x.state is State.RUNNING and uuid in x.devices]
                assert sum(x.held_milli for x in held) <= 1000, (node, uuid, held)

    def _hold(self) -> None:
        """Keep the seats of leases with device memory, as each helper does."""
        running = {x.id for x in self.leases.values() if x.state is State.RUNNING}
        groups = self.bed.store.all("podgroups", NS)
        labels = {
            g["metadata"]["name"]: g["metadata"]["labels"]["gpushare.jupyter.org/lease"] for g in groups
        }
        self.bed.nodes.holds = {name for name, lease in labels.items() if lease in running}

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await self.round()
                await asyncio.sleep(0.02)

    def state(self, id: str) -> State:
        return self.leases[id].state

    def queue(self, id: str) -> str:
        return ",".join(g["spec"]["queue"] for g in self.bed.seats_of(id))


def objects(bed: Bed) -> list[str]:
    return [o["metadata"]["name"] for plural in ("pods", "podgroups") for o in bed.store.all(plural, NS)]
