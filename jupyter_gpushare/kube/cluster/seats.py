"""Seats in the cluster: their state, from the API server and the helpers, and changes to them.

Fencing: every seat carries the epoch of the broker that changed it last.  A change names the version of the
object that it is based on, so it fails if another broker changed the object first.  A seat with a later
epoch means that a newer broker is at work.  Before its first change, a broker writes its epoch on every seat
(`take_over`).  This changes their versions, so a late change by an older broker that hung fails.  Only a
creation names no version, but the helpers refuse a seat of an older broker.
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
# Input of `_seat_of`: the objects of a seat, whether it was deleted, its devices.
_Input = tuple[PodGroup, Pod | None, BindRequest | None, bool, tuple[str, ...]]

# If the copies are older, nothing becomes lendable.
STALE_S = 10.0
# Concurrent requests of `KubeSeats.take_over`.
_AT_ONCE = 16
_WHY = {"NonPreemptibleOverQuota": Why.QUOTA, "OverLimit": Why.PROJECT_LIMIT}


class KubeSeats:
    """The seats of one broker.

    ``connected`` returns the devices (UUIDs) of a seat by name, none until a helper has connected it.
    ``epoch`` returns the epoch of this broker.  ``nodes`` comes from `followed_nodes`; `run` follows it too.
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
        self._change = asyncio.Event()
        self._creating: set[str] = set()
        self._deleted: dict[str, str] = {}  # deleted pods that the watch still shows, and their versions
        # Each seat with the input that it was made from; most do not change between two rounds.
        self._made: dict[str, tuple[_Input, Seat]] = {}
        own = {"namespace": site.namespace, "selector": SELECTOR, "changed": self.notify}
        self._pods: Reflector[Pod] = Reflector(client, PODS, **own)  # type: ignore[arg-type]
        self._groups: Reflector[PodGroup] = Reflector(client, POD_GROUPS, **own)  # type: ignore[arg-type]
        self._bindings: Reflector[BindRequest] = Reflector(
            client, BIND_REQUESTS, namespace=site.namespace, changed=self.notify
        )
        self._queues: Reflector[Queue] = Reflector(client, QUEUES, changed=self.notify)
        self._nodes = nodes
        # All decisions need these.  BindRequests only show earlier that a seat will be bound.
        self._copies: tuple[Reflector[Any], ...] = self._pods, self._groups, self._queues, self._nodes

    async def run(self) -> None:
        """Follow the cluster until cancelled."""
        async with asyncio.TaskGroup() as group:
            for copy in self._copies:
                group.create_task(copy.run())
            group.create_task(self._bindings.run())

    def notify(self) -> None:
        """End every `wait`, because a seat has changed or has been connected."""
        self._change.set()
        self._change = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next call of `notify`, or after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change.wait()

    @property
    def age_s(self) -> float:
        """Age of the oldest copy, in seconds; infinite until all collections have been read."""
        now = time.monotonic()
        return max(copy.age_s(now) for copy in self._copies)

    @property
    def is_known(self) -> bool:
        """Whether all collections have been read at least once."""
        return self.age_s != float("inf")

    @property
    def queues(self) -> dict[str, Queue]:
        """The cluster's queues by name."""
        return self._queues.objects

    @property
    def units(self) -> dict[str, str]:
        """Values of the pool label, by the name of each node in a unit pool."""
        labels = {name: node.metadata.labels for name, node in self._nodes.objects.items()}
        return {name: its[LABEL] for name, its in labels.items() if LABEL in its}

    def seats(self) -> Seats:
        """Return all seats by lease.

        Raises:
            Superseded: a newer broker changed a seat.
        """
        found: dict[str, list[Seat]] = {}
        self._deleted = {n: v for n, v in self._deleted.items() if n in self._pods.objects}
        names = self._groups.objects.keys() | self._pods.objects.keys()
        self._made = {name: made for name, made in self._made.items() if name in names}
        for name in names:
            if (seat := self.seat(name)) is not None:
                found.setdefault(seat.lease, []).append(seat)
        return {lease: tuple(sorted(mine, key=lambda s: s.name)) for lease, mine in found.items()}

    def seat(self, name: str) -> Seat | None:
        """Return one seat, or None if it does not exist or is being created.

        Raises:
            Superseded: a newer broker changed it.
        """
        group, pod = self._groups.objects.get(name), self._pods.objects.get(name)
        if name in self._creating or (group is None and pod is None):
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
        current = group, pod, binding, name in self._deleted, self._connected(name)
        made = self._made.get(name)
        if made is None or made[0] != current:
            made = self._made[name] = current, _seat_of(name, *current)
        return made[1]

    # ---- changes -------------------------------------------------------------

    async def take_over(self) -> None:
        """Write this broker's epoch on every seat of an older one.

        Raises:
            KubeError: the API server refused, or does not answer.
        """
        epoch = self._epoch()
        groups = [x for x in self._groups.objects.values() if epoch_of(x) < epoch]
        pods = [x for x in self._pods.objects.values() if epoch_of(x) < epoch]
        stamps = [partial(self._stamp, self._groups, POD_GROUPS, group) for group in groups]
        running = [pod for pod in pods if not pod.metadata.deletion_timestamp]
        stamps += [partial(self._stamp, self._pods, PODS, pod) for pod in running]
        for start in range(0, len(stamps), _AT_ONCE):
            batch = (stamp() for stamp in stamps[start : start + _AT_ONCE])
            answers = await asyncio.gather(*batch, return_exceptions=True)
            for failed in (answer for answer in answers if isinstance(answer, BaseException)):
                raise failed

    async def _stamp(self, copy: Reflector[T], kind: Resource[T], found: T) -> None:
        name, body = found.metadata.name, stamp_patch(found, self._epoch())
        with _unless_changed():
            copy.put(await self._client.patch(kind, self._site.namespace, name, body))

    async def apply(self, change: Change, devices: Iterable[Device]) -> None:
        """Carry out one change; the copies show it at once.

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
            KubeError: the API server refused, or does not answer; a later round deletes an incomplete seat.
        """
        requested = request(demand.size, devices)
        # KAI knows PodGroups by name alone, in all namespaces, so nobody must be able to guess a name.
        name = f"seat-{secrets.token_hex(16)}"
        namespace, epoch = self._site.namespace, self._epoch()
        self._creating.add(name)
        try:
            self._groups.put(await self._client.create(POD_GROUPS, namespace, pod_group(name, demand, epoch)))
            body = seat_pod(name, demand, requested, self._site, epoch)
            self._pods.put(await self._client.create(PODS, namespace, body))
        finally:
            self._creating.discard(name)
        return name

    async def delete(self, name: str) -> None:
        """Delete the pod of a seat, with its grace period; if the pod is gone, delete the PodGroup.

        KAI does not see a pod without its PodGroup, so that stays as long as the pod holds capacity.

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
    """Return a copy of the nodes that calls ``changed`` when a node is added, is removed or changes its pool.

    It ignores the status that each kubelet renews.
    """
    return Reflector(client, NODES, changed=changed, part=lambda node: node.metadata.labels.get(LABEL))


@contextlib.contextmanager
def _unless_changed() -> Iterator[None]:
    """Ignore the failure of a change whose object has changed or is gone; a later round decides again."""
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
        requested=pod.requested if pod is not None else None,
        instead_of=pod.instead_of if pod is not None else (),
        is_binding=_is_binding(pod, binding),
        evicted_for=pod.evicted_for if pod is not None else "",
        ends_at=unix_time(pod.metadata.deletion_timestamp) if pod is not None else 0.0,
    )


def _is_binding(pod: Pod | None, binding: BindRequest | None) -> bool:
    """Return whether KAI has chosen a node for a pod, which it binds only after it has reserved a shared GPU.

    KAI sets the label of a shared GPU after the reservation, right before the node (v0.16.8,
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
