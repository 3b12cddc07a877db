"""Seats in the cluster: what the API server and the helpers say about them, and changes of them.

Fencing: every seat carries the epoch of the broker that changed it last.  A change names the version
of the object that it is based on, so that it fails where another broker was faster; a seat with a
later epoch says that this broker is not the newest.  Before its first change a broker writes its
epoch on every seat (`take_over`): what an older one that hung would still change has another
version then.  Only a creation names no version: the helpers refuse a seat of an older broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from jupyter_gpushare.core.model import Device, Why
from jupyter_gpushare.errors import Superseded
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import ApiClient
from jupyter_gpushare.kube.cluster.objects import (
    BIND_REQUESTS,
    GPU_GROUP,
    LEASE_LABEL,
    NODES,
    POD_GROUPS,
    PODS,
    QUEUES,
    SELECTOR,
    BindRequest,
    Meta,
    Node,
    Object,
    Pod,
    PodGroup,
    Queue,
    Resource,
    SeatPod,
    epoch_of,
    pod_group,
    pod_group_patch,
    seat_pod,
    stamp_patch,
    unix_time,
)
from jupyter_gpushare.kube.cluster.reflector import Reflector
from jupyter_gpushare.kube.rules.follow import Change, Create, Delete, Retarget, Seats
from jupyter_gpushare.kube.rules.pools import LABEL
from jupyter_gpushare.kube.rules.seats import Demand, Seat, Seating, Terms, request

T = TypeVar("T", bound=Object)
# What a seat is read from: its objects, whether it was deleted, its devices.
_Seen = tuple[PodGroup, Pod | None, BindRequest | None, bool, tuple[str, ...]]

# Nothing becomes lendable on older news.
STALE_S = 10.0
# Requests under way together when a broker takes the seats over.
_AT_ONCE = 16
_WHY = {"NonPreemptibleOverQuota": Why.QUOTA, "OverLimit": Why.PROJECT_LIMIT}


class KubeSeats:
    """The seats of one broker.

    ``connected``: devices (UUIDs) of a seat by its name; empty until it is connected to a helper.
    ``epoch``: that of this broker.  ``nodes``: as `followed_nodes` makes them; `run` follows them too.
    """

    def __init__(
        self,
        client: ApiClient,
        site: SeatPod,
        connected: Callable[[str], tuple[str, ...]],
        epoch: Callable[[], int],
        nodes: Reflector[Node],
    ) -> None:
        self._client = client
        self._site = site
        self._connected = connected
        self._epoch = epoch
        self._news = asyncio.Event()
        self._beginning: set[str] = set()  # seats being created
        self._deleted: dict[str, str] = {}  # deleted pods, and the version that was; until the watch tells it
        # What each seat was read from last, and that seat: most stay as they are between two rounds.
        self._read: dict[str, tuple[_Seen, Seat]] = {}
        own = {"namespace": site.namespace, "selector": SELECTOR, "changed": self.notify}
        self._pods: Reflector[Pod] = Reflector(client, PODS, **own)  # type: ignore[arg-type]
        self._groups: Reflector[PodGroup] = Reflector(client, POD_GROUPS, **own)  # type: ignore[arg-type]
        self._bindings: Reflector[BindRequest] = Reflector(
            client, BIND_REQUESTS, namespace=site.namespace, changed=self.notify
        )
        self._queues: Reflector[Queue] = Reflector(client, QUEUES, changed=self.notify)
        self._nodes = nodes
        # What no decision is made without; BindRequests only tell earlier that a seat will be bound.
        self._copies: tuple[Reflector[Any], ...] = self._pods, self._groups, self._queues, self._nodes

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as group:
            for copy in self._copies:
                group.create_task(copy.run())
            group.create_task(self._bindings.run())

    def notify(self) -> None:
        """End every `wait`: a seat changed, or connected."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return after the next news, or after a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    @property
    def age_s(self) -> float:
        """Age of the oldest news; infinite until all collections are known."""
        now = time.monotonic()
        return max(copy.age_s(now) for copy in self._copies)

    @property
    def is_known(self) -> bool:
        """Whether all collections have been read, however long ago."""
        return self.age_s != float("inf")

    @property
    def queues(self) -> dict[str, Queue]:
        """The cluster's queues by name."""
        return self._queues.objects

    @property
    def units(self) -> dict[str, str]:
        """What the nodes of unit pools say in their label, by node."""
        labels = {name: node.metadata.labels for name, node in self._nodes.objects.items()}
        return {name: mine[LABEL] for name, mine in labels.items() if LABEL in mine}

    def seats(self) -> Seats:
        """Return all seats by lease.

        Raises:
            Superseded: a newer broker changed a seat.
        """
        found: dict[str, list[Seat]] = {}
        self._deleted = {n: v for n, v in self._deleted.items() if n in self._pods.objects}
        names = self._groups.objects.keys() | self._pods.objects.keys()
        self._read = {name: read for name, read in self._read.items() if name in names}
        for name in names:
            if (seat := self.seat(name)) is not None:
                found.setdefault(seat.lease, []).append(seat)
        return {lease: tuple(sorted(mine, key=lambda s: s.name)) for lease, mine in found.items()}

    def seat(self, name: str) -> Seat | None:
        """Return one seat; None: it does not exist, or is being created.

        Raises:
            Superseded: a newer broker changed it.
        """
        group, pod = self._groups.objects.get(name), self._pods.objects.get(name)
        if name in self._beginning or (group is None and pod is None):
            return None
        known = group or PodGroup(metadata=pod.metadata if pod else Meta(name=name))
        self._check_epoch(known, pod)
        return self._seat(name, known, pod)

    def _check_epoch(self, *objects: PodGroup | Pod | None) -> None:
        for found in objects:
            if found is not None and epoch_of(found) > self._epoch():
                raise Superseded("this broker ends: a newer one has changed the seats of the cluster")

    def _seat(self, name: str, group: PodGroup, pod: Pod | None) -> Seat:
        binding = self._bindings.objects.get(name)
        seen = group, pod, binding, name in self._deleted, self._connected(name)
        before = self._read.get(name)
        if before is None or before[0] != seen:
            before = self._read[name] = seen, _seat_of(name, *seen)
        return before[1]

    # ---- changes -------------------------------------------------------------

    async def take_over(self) -> None:
        """Write this broker's epoch on every seat of an older one.

        Raises:
            KubeError: the API server refused, or does not answer.
        """
        epoch = self._epoch()
        groups = [x for x in self._groups.objects.values() if epoch_of(x) < epoch]
        pods = [x for x in self._pods.objects.values() if epoch_of(x) < epoch]
        older = [partial(self._stamp, self._groups, POD_GROUPS, group) for group in groups]
        alive = [pod for pod in pods if not pod.metadata.deletion_timestamp]
        older += [partial(self._stamp, self._pods, PODS, pod) for pod in alive]
        for begun in range(0, len(older), _AT_ONCE):
            batch = (stamp() for stamp in older[begun : begun + _AT_ONCE])
            answers = await asyncio.gather(*batch, return_exceptions=True)
            for failed in (answer for answer in answers if isinstance(answer, BaseException)):
                raise failed

    async def _stamp(self, copy: Reflector[T], kind: Resource[T], found: T) -> None:
        name, body = found.metadata.name, stamp_patch(found, self._epoch())
        with _unless_changed():
            copy.put(await self._client.patch(kind, self._site.namespace, name, body))

    async def apply(self, change: Change, devices: Iterable[Device]) -> None:
        """Carry one change out; the copies know of it at once.

        Raises:
            InvalidRequest: the size cannot be requested.
            KubeError: the API server refused, or does not answer.
        """
        match change:
            case Create(demand):
                await self.create(demand, devices)
            case Delete(seat):
                await self.delete(seat)
            case Retarget(seat, to):
                await self._retarget(seat, to)

    async def _retarget(self, seat: str, to: Terms) -> None:
        group = self._groups.objects.get(seat)
        if group is None:
            return
        body = pod_group_patch(to, self._epoch())
        body["metadata"]["resourceVersion"] = group.metadata.resource_version
        with _unless_changed():
            self._groups.put(await self._client.patch(POD_GROUPS, self._site.namespace, seat, body))

    async def create(self, demand: Demand, devices: Iterable[Device]) -> str:
        """Create a seat and return its name.

        Raises:
            InvalidRequest: the size cannot be requested.
            KubeError: the API server refused, or does not answer; what was begun is deleted by a
                later round.
        """
        asks = request(demand.size, devices)
        # KAI knows PodGroups by their name alone, in all namespaces, so a name must not be guessed.
        name = f"seat-{secrets.token_hex(16)}"
        namespace, epoch = self._site.namespace, self._epoch()
        self._beginning.add(name)
        try:
            self._groups.put(await self._client.create(POD_GROUPS, namespace, pod_group(name, demand, epoch)))
            body = seat_pod(name, demand, asks, self._site, epoch)
            self._pods.put(await self._client.create(PODS, namespace, body))
        finally:
            self._beginning.discard(name)
        return name

    async def delete(self, name: str) -> None:
        """Delete the pod of a seat, within its grace; once that is gone, the PodGroup.

        KAI loses sight of a pod without its PodGroup: it stays as long as the pod holds capacity.

        Raises:
            KubeError: the API server refused, or does not answer.
        """
        namespace, pod = self._site.namespace, self._pods.objects.get(name)
        if pod is None:
            await self._client.delete(POD_GROUPS, namespace, name)
            self._groups.forget(name)
            return
        with _unless_changed():
            await self._client.delete(PODS, namespace, name, version=pod.metadata.resource_version)
            self._deleted[name] = pod.metadata.resource_version


def followed_nodes(client: ApiClient, changed: Callable[[], None]) -> Reflector[Node]:
    """Return a copy of the nodes that calls ``changed`` when a node came, left or changed its pool.

    It does not when a kubelet has renewed the status of its node.
    """
    return Reflector(client, NODES, changed=changed, part=lambda node: node.metadata.labels.get(LABEL))


@contextlib.contextmanager
def _unless_changed() -> Iterator[None]:
    """Let a change of an object that has changed or is gone come to nothing: a later round decides again."""
    try:
        yield
    except KubeError as error:
        if error.status not in (404, 409):
            raise


def _seat_of(
    name: str,
    group: PodGroup,
    pod: Pod | None,
    binding: BindRequest | None,
    is_deleted: bool,
    devices: tuple[str, ...],
) -> Seat:
    seating = Seating.LEAVING if is_deleted else _seating(group, pod)
    reasons = group.refusals if seating is Seating.WAITING else []
    return Seat(
        name=name,
        lease=group.metadata.labels.get(LEASE_LABEL, ""),
        seating=seating,
        terms=group.terms,
        node=pod.spec.node_name if pod is not None else "",
        not_nodes=pod.not_nodes if pod is not None else (),
        devices=devices,
        since_at=unix_time(group.metadata.creation_timestamp),
        why=_WHY.get(reasons[0].reason, Why.NO_CAPACITY) if reasons else None,
        asks=pod.asks if pod is not None else None,
        instead_of=pod.instead_of if pod is not None else (),
        is_binding=_is_binding(pod, binding),
        evicted_for=pod.evicted_for if pod is not None else "",
        ends_at=unix_time(pod.metadata.deletion_timestamp) if pod is not None else 0.0,
    )


def _is_binding(pod: Pod | None, binding: BindRequest | None) -> bool:
    """Return whether KAI has chosen a node for a pod: until it has reserved a shared GPU it binds no pod.

    The label of a shared GPU comes after that, right before the node (v0.16.8,
    ``pkg/binder/binding/binder.go:43-87``, ``resourcereservation/resource_reservation.go``).
    """
    if pod is None:
        return False
    return GPU_GROUP in pod.metadata.labels or (binding is not None and not binding.has_failed)


def _seating(group: PodGroup, pod: Pod | None) -> Seating:
    if pod is None or not group.spec.queue or pod.has_ended:
        return Seating.GONE
    if pod.metadata.deletion_timestamp:
        return Seating.LEAVING
    return Seating.PLACED if pod.spec.node_name else Seating.WAITING
