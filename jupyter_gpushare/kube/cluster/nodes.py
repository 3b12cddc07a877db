"""The GPUs of several nodes, each through its own device helper.

* A node that does not answer keeps its last measurements, with their times.  Its devices are unhealthy, so
  nothing is granted, lent or resumed there.  Its leases are neither ended nor moved; they disappear when
  ``nodes`` no longer lists the node.
* A node that does not answer within `ANSWER_S` is silent.  A background task probes it, so that the other
  nodes do not wait for it and their measurements stay fresh.
* A node that has never answered may have leases that a sample would miss.  So it makes `sample` fail for
  `FIRST_S` if it was listed within `FIRST_S` of the broker's start, or if a lease was prepared on it.
* Times are those of this machine's monotonic clock.  Each helper reports its own clock with ``hello``, so
  they are wrong by at most half a round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from jupyter_gpushare.backends.base import DeviceBackend, Prepared
from jupyter_gpushare.backends.helper_client import HelperAddress, HelperClient
from jupyter_gpushare.backends.local import LocalDevices, holder_environment
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper import (
    DeviceSample,
    ErrorKind,
    Event,
    EventKind,
    Inventory,
    LeaseSample,
    MoveResult,
    Refusal,
    Sample,
    SetLimit,
)
from jupyter_gpushare.protocol.seats import CountSeats, SeatSample
from jupyter_gpushare.protocol.wire import HostMount

# ---- one node of a cluster, as its device helper last reported it ------------


class HelperNode:
    """One node, as its device helper last reported it."""

    def __init__(self, name: str, address: HelperAddress, epoch: Callable[[], int], seen_at: float) -> None:
        self.name = name
        self.address = address
        self.client = HelperClient(address, epoch)
        self.devices = LocalDevices(self.client)
        self.seen_at = seen_at
        self.offset_s = 0.0  # this machine's clock minus the node's
        self.clock_at = float("-inf")
        self.silent = ""  # the reason why it does not answer; empty while it does
        self.probe: asyncio.Task[None] | None = None  # runs while it is silent
        self.inventory: Inventory | None = None
        self.sample: Sample | None = None
        self.has_changed = False  # since the last sample was requested

    def stale(self) -> str:
        """Return the message that its helper does not answer."""
        return f"the device helper of node {self.name} does not answer"

    def leave(self) -> None:
        """Stop the probe and close the kept connection."""
        if self.probe is not None:
            self.probe.cancel()
        self.client.close()

    def shown_devices(self) -> tuple[helper.Device, ...]:
        """Return the devices of the last inventory; they are unhealthy while the helper is silent."""
        devices = self.inventory.devices if self.inventory else ()
        unhealthy = partial(replace, healthy=False, reason=self.stale(), suspendable=False)
        return tuple(map(unhealthy, devices)) if self.silent else devices

    def device_samples(self, sample: Sample) -> tuple[DeviceSample, ...]:
        """Return the devices of a sample; they are unhealthy while the helper is silent."""
        unhealthy = partial(replace, healthy=False, reason=self.stale())
        return tuple(map(unhealthy, sample.devices)) if self.silent else sample.devices

    def seat_samples(self, sample: Sample) -> tuple[SeatSample, ...]:
        """Return the seats of a sample; they are not connected while the helper is silent."""
        return tuple(replace(seat, connected=False) for seat in sample.seats) if self.silent else sample.seats


def shifted(lease: LeaseSample, offset_s: float, now: float) -> LeaseSample:
    """Return the sample of a lease with times of this machine's clock."""
    return replace(
        lease,
        measured_at=min(now, lease.measured_at + offset_s),
        active_at=min(now, lease.active_at + offset_s),
        unread_since=lease.unread_since and min(now, lease.unread_since + offset_s),
        processes=tuple(
            replace(process, started_at=min(now, process.started_at + offset_s))
            for process in lease.processes
        ),
    )


# ---- foreign pods on the GPUs of a unit pool: on their nodes, the pool grants and lends nothing
# ==============================================  =====================================
# pod or process on a GPU of the node             it is foreign
# ==============================================  =====================================
# seat, in the namespace of seats                 no
# KAI's reservation for parts of a GPU            once no seat has had that GPU for
#                                                 `UNUSED_S`: another pod has a part
# any other pod to which the kubelet gave a GPU   yes
# process without a lease                         yes: beside a seat, another pod can
#                                                 have a part of the GPU, and no list
#                                                 shows it
# kubelet or device helper does not list pods     yes
# ==============================================  =====================================

# KAI makes a reservation before the seat connects, and ends it some time after the seat.
UNUSED_S = 120.0


class ForeignPods:
    """Foreign pods of every node, from the last samples of the helpers."""

    def __init__(
        self,
        namespace: str,
        reservations: str,
        samples: Callable[[], Mapping[str, Sample | None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``namespace`` is the namespace of seats, ``reservations`` that of KAI's pods that reserve GPUs."""
        self._namespace = namespace
        self._reservations = reservations
        self._samples = samples
        self._clock = clock
        self._unused: dict[tuple[str, str], float] = {}  # reservations that no seat uses, and since when

    def by_node(self) -> dict[str, str]:
        """Return a clause that names a foreign pod or process, by node; other nodes are left out."""
        now, samples = self._clock(), self._samples()
        unused = {(node, pod) for node, sample in samples.items() if sample for pod in self._unseated(sample)}
        self._unused = {key: self._unused.get(key, now) for key in unused}
        found = {node: self._foreign(node, sample, now) for node, sample in samples.items()}
        return {node: clause for node, clause in found.items() if clause}

    def _unseated(self, sample: Sample) -> Iterator[str]:
        """Yield the names of KAI's reservations of GPUs that no seat has."""
        seated = {uuid for seat in sample.seats for uuid in seat.devices}
        for pod in sample.gpu_pods:
            if pod.namespace == self._reservations and not seated.intersection(pod.devices):
                yield pod.name

    def _foreign(self, node: str, sample: Sample | None, now: float) -> str:
        if sample is None or not sample.knows_gpu_pods:
            return "its device helper does not say which pods have GPUs"
        for pod in sample.gpu_pods:
            since = self._unused.get((node, pod.name), now)
            is_ours = pod.namespace in (self._namespace, self._reservations)
            if not is_ours or now - since >= UNUSED_S:
                return f"the pod {pod.namespace}/{pod.name} has a GPU there"
        process = next((each.name for device in sample.devices for each in device.unleased), None)
        return "" if process is None else f"a process without a lease ({process}) uses a GPU there"


# ---- all nodes ---------------------------------------------------------------

T = TypeVar("T")

FIRST_S = 60.0
# Helpers answer from memory.  This is far below the age at which a sample is too old for decisions.
ANSWER_S = 1.0
CLOCK_EVERY_S = 30.0
RETRY_S = 1.0
# Concurrent requests of a question to all nodes.
_AT_ONCE = 32
_EVENTS = 1024
_NO_NODE = "no node has a device helper"


class NodeDevices(DeviceBackend):
    """The devices of all nodes whose helpers' addresses ``nodes`` returns."""

    def __init__(
        self,
        nodes: Callable[[], Mapping[str, HelperAddress]],
        epoch: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        pools: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """``pools`` returns the nodes where a seat counts as a number of devices, not as certain ones."""
        self._listed = nodes
        self._pools = pools
        self._epoch = epoch
        self._clock = clock
        self._nodes: dict[str, HelperNode] = {}
        self._node_of_lease: dict[str, str] = {}  # by handle, from the last samples
        self._node_of_seat: dict[str, str] = {}  # by name, from the last samples
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._started_at = clock()

    # ---- for the Kubernetes engine ---------------------------------------------

    def seat_devices(self, seat: str) -> tuple[str, ...]:
        """Return the devices (UUIDs) of a seat by name; empty if it is not connected."""
        node = self._nodes.get(self._node_of_seat.get(seat, ""))
        if node is None or node.sample is None or node.silent:
            return ()
        connected = (x.devices for x in node.sample.seats if x.seat == seat and x.connected and not x.leaving)
        return next(connected, ())

    def sleepable(self) -> frozenset[str]:
        """Return the nodes that answer and have a device on which leases can be suspended."""
        return frozenset(
            node.name
            for node in self._nodes.values()
            if not node.silent and node.inventory and any(d.suspendable for d in node.inventory.devices)
        )

    def samples(self) -> dict[str, Sample | None]:
        """Return the last sample of each node, or None if it does not answer."""
        return {name: None if node.silent else node.sample for name, node in self._nodes.items()}

    # ---- the contract ---------------------------------------------------------

    async def epoch(self) -> int:
        answers = await self._request_all(lambda node: node.devices.epoch())
        return max(self._successful(answers).values())

    async def inventory(self) -> Inventory:
        """Return the devices of all nodes that have ever answered; those of a silent node are unhealthy.

        Raises:
            HelperError: no node answers.
        """
        answers = self._successful(await self._request_all(lambda node: node.devices.inventory()))
        for name, inventory in answers.items():
            if (node := self._nodes.get(name)) is not None:  # it may have left the list meanwhile
                devices = tuple(replace(device, node=name) for device in inventory.devices)
                node.inventory = replace(inventory, devices=devices, at=node.offset_s + inventory.at)
        known = [node for node in self._nodes.values() if node.inventory is not None]
        if not known:
            raise HelperError("unreachable", _NO_NODE)
        first = next(iter(answers.values()))
        return Inventory(
            host="",
            driver=first.driver,
            simulated=first.simulated,
            devices=tuple(device for node in known for device in node.shown_devices()),
            host_total_bytes=min(node.inventory.host_total_bytes for node in known if node.inventory),
            # Not a sum: the engine compares the parked bytes of each node with it.
            host_budget_bytes=min(node.inventory.host_budget_bytes for node in known if node.inventory),
            at=self._clock(),
            watchdog=first.watchdog,
            left_out=tuple(
                f"{node.name}: {reason}"
                for node in known
                for reason in (node.inventory.left_out if node.inventory else ())
            ),
        )

    async def sample(self) -> Sample:
        """Return one sample of all nodes, as old as its oldest part; a silent node has its last measurements.

        Raises:
            HelperError: no node answers, or one that may have leases has not answered yet.
        """
        return await self._sampled(self._sample_of)

    async def latest(self) -> Sample:
        """Return the same as `sample`, but request a new one only from nodes that have changed.

        Raises:
            HelperError: see `sample`.
        """

        async def newest(node: HelperNode) -> Sample:
            return await self._sample_of(node) if node.sample is None or node.has_changed else node.sample

        return await self._sampled(newest)

    async def _sampled(self, ask: Callable[[HelperNode], Coroutine[Any, Any, Sample]]) -> Sample:
        answers = self._successful(await self._request_all(ask))
        for name, sample in answers.items():
            if (found := self._nodes.get(name)) is not None:  # it may have left the list meanwhile
                found.sample = sample
                self._node_of_lease.update((lease.lease, name) for lease in sample.leases)
        for node in self._nodes.values():
            if node.sample is None and self._may_have_leases(node):
                raise HelperError("silent", f"{node.stale()}: {node.silent}")
        known = [(node, node.sample) for node in self._nodes.values() if node.sample is not None]
        present = {lease.lease for _, sample in known for lease in sample.leases}
        self._node_of_lease = {
            handle: name for handle, name in self._node_of_lease.items() if handle in present
        }
        self._node_of_seat = {seat.seat: node.name for node, sample in known for seat in sample.seats}
        return Sample(
            at=min(sample.at for sample in answers.values()),
            devices=tuple(device for node, sample in known for device in node.device_samples(sample)),
            leases=tuple(lease for _, sample in known for lease in sample.leases),
            host_available_bytes=min(sample.host_available_bytes for sample in answers.values()),
            host_saved_bytes=sum(sample.host_saved_bytes for _, sample in known),
            seats=tuple(seat for node, sample in known for seat in node.seat_samples(sample)),
        )

    def _may_have_leases(self, node: HelperNode) -> bool:
        """Return whether a node that has never answered may have leases that a sample would miss."""
        listed_at_start = node.seen_at - self._started_at < FIRST_S
        is_new = self._clock() - node.seen_at < FIRST_S
        return is_new and (listed_at_start or node.name in self._node_of_lease.values())

    async def _sample_of(self, node: HelperNode) -> Sample:
        node.has_changed = False
        sample = await node.devices.sample()
        by_number = node.name in self._pools()
        if sample.seats_by_number is not by_number:
            request = CountSeats(by_number=by_number)
            await self._request(node, node.client.ask("count_seats", request, CountSeats))
        now, offset_s = self._clock(), node.offset_s
        return replace(
            sample,
            at=min(now, sample.at + offset_s),
            leases=tuple(shifted(lease, offset_s, now) for lease in sample.leases),
        )

    async def watch(self) -> AsyncIterator[Event | None]:
        """Yield the events of all nodes, and None and a `DEVICE` event whenever a node is connected.

        A connection that ends is opened again, after a `DEVICE` event.

        Raises:
            HelperError: a newer broker is at work.
        """
        queue: asyncio.Queue[Event | HelperError | None] = asyncio.Queue(_EVENTS)
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._refresh()
                for name in [name for name in tasks if name not in self._nodes]:
                    tasks.pop(name).cancel()
                for name, node in self._nodes.items():
                    if name not in tasks or tasks[name].done():
                        tasks[name] = asyncio.create_task(self._follow(node, queue))
                with contextlib.suppress(TimeoutError):
                    while True:
                        # `wait_for` of Python 3.11 loses a cancellation that comes together with an event.
                        async with asyncio.timeout(RETRY_S):
                            event = await queue.get()
                        if isinstance(event, HelperError):
                            raise event
                        yield event
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _follow(self, node: HelperNode, queue: asyncio.Queue[Event | HelperError | None]) -> None:
        """Put the events of one node in the queue until its connection ends, then wait for `RETRY_S`."""
        connected = False
        try:
            async with contextlib.aclosing(node.client.watch()) as events:  # type: ignore[type-var]
                async for event in events:
                    if event is None:
                        connected = True
                        await queue.put(None)
                        await queue.put(
                            self._device_event(node, f"the device helper of node {node.name} answers")
                        )
                    else:
                        node.has_changed = True
                        await queue.put(replace(event, at=min(self._clock(), event.at + node.offset_s)))
        except HelperError as error:
            if error.kind == ErrorKind.STALE_EPOCH:
                await queue.put(error)
                return
        if connected:
            await queue.put(self._device_event(node, node.stale()))
        await asyncio.sleep(RETRY_S)

    def _device_event(self, node: HelperNode, reason: str) -> Event:
        return Event(
            seq=0, at=self._clock(), kind=EventKind.DEVICE, reason=reason, fields={"node": node.name}
        )

    async def prepare(self, request: SetLimit) -> Prepared:
        """Prepare a lease (`DeviceBackend.prepare`); return its node too, and the paths its processes need.

        Raises:
            HelperError: no node has its devices, its helper refused or does not answer, or has not
                installed the preload library.
        """
        self._refresh()
        node = self._with_devices(request.limits)
        files = await self._change(node, node.client.ask("set_limit", request, helper.LeaseFiles))
        if not files.library:
            raise HelperError(
                "library", f"the device helper of node {node.name} was started without --install-library"
            )
        self._node_of_lease[request.lease] = node.name
        return Prepared(
            env=holder_environment(request.lease, files.directory, request.limits, files.library),
            node=node.name,
            mounts=(
                HostMount(path=files.directory),
                HostMount(path=f"{files.directory}/account", read_only=False),
                HostMount(path=files.library),
            ),
        )

    def _with_devices(self, uuids: Iterable[str]) -> HelperNode:
        wanted = set(uuids)
        for node in self._nodes.values():
            if node.inventory and wanted <= {device.uuid for device in node.inventory.devices}:
                return node
        named = ", ".join(uuid[:60] for uuid in sorted(wanted))
        raise HelperError("unknown_device", f"no node has the devices {named}")

    async def suspend(self, handle: str, calls: str) -> MoveResult:
        return await self._move(handle, lambda node: node.devices.suspend(handle, calls))

    async def resume(
        self, handle: str, *, unrecorded: bool = False, devices: Sequence[str] = ()
    ) -> MoveResult:
        return await self._move(
            handle, lambda node: node.devices.resume(handle, unrecorded=unrecorded, devices=devices)
        )

    async def _move(
        self, handle: str, move: Callable[[HelperNode], Coroutine[Any, Any, MoveResult]]
    ) -> MoveResult:
        results = await self._request_of_lease(handle, move)
        none = MoveResult(
            done=False, refused=Refusal.NO_LEASE, reason=f"no lease {handle} on any node of the cluster"
        )
        return next((result for result in results if result.refused is not Refusal.NO_LEASE), none)

    async def signal(self, handle: str, number: int, to: str) -> int:
        return sum(await self._request_of_lease(handle, lambda node: node.devices.signal(handle, number, to)))

    async def end_process(self, device: str, process: str) -> None:
        node = self._with_devices([device])
        await self._change(node, node.devices.end_process(device, process))

    async def drop(self, handle: str) -> None:
        await self._request_of_lease(handle, lambda node: node.devices.drop(handle))
        self._node_of_lease.pop(handle, None)

    async def close(self) -> None:
        """Stop the probes of silent nodes, and close the kept connections."""
        for node in self._nodes.values():
            node.leave()
        probes = [node.probe for node in self._nodes.values() if node.probe is not None]
        await asyncio.gather(*probes, return_exceptions=True)

    # ---- nodes ----------------------------------------------------------------

    def _refresh(self) -> None:
        """Follow the current list of nodes; a helper with a new address replaces the old one."""
        listed = self._listed()
        kept = {n: node for n, node in self._nodes.items() if listed.get(n) == node.address}
        for name, address in listed.items():
            if name not in kept:
                kept[name] = HelperNode(name, address, self._epoch, self._clock())
                if (before := self._nodes.get(name)) is not None:  # the same node
                    kept[name].inventory, kept[name].sample = before.inventory, before.sample
        for name, node in self._nodes.items():
            if kept.get(name) is not node:
                node.leave()
        self._nodes = {name: kept[name] for name in sorted(kept)}

    async def _request_of_lease(
        self, handle: str, ask: Callable[[HelperNode], Coroutine[Any, Any, T]]
    ) -> list[T]:
        """Return the answer of the node of a lease, or of all nodes if that is unknown.

        Raises:
            HelperError: a node refuses, or does not answer.
        """
        self._refresh()
        name = self._node_of_lease.get(handle)
        nodes = [self._nodes[name]] if name in self._nodes else list(self._nodes.values())
        return await asyncio.gather(*(self._change(node, ask(node)) for node in nodes))

    async def _change(self, node: HelperNode, request: Awaitable[T]) -> T:
        """Return a node's answer like `_request`; the next `latest` requests a new sample of the node."""
        try:
            return await self._request(node, request)
        finally:
            node.has_changed = True

    async def _request(self, node: HelperNode, request: Awaitable[T]) -> T:
        """Return a node's answer, and note whether the node is silent.

        Raises:
            HelperError: the node refuses, or does not answer; the text names the node.
        """
        try:
            answer = await request
        except HelperError as error:
            if error.kind in ("unreachable", "silent", "garbled", "not_verified"):
                node.silent = str(error)
            raise
        if node.silent:
            node.silent, node.has_changed = "", True
        return answer

    async def _request_all(
        self, ask: Callable[[HelperNode], Coroutine[Any, Any, T]]
    ) -> dict[str, T | HelperError]:
        """Return the answer of each node, or an error; silent nodes are only probed, in the background."""
        self._refresh()

        async def one(node: HelperNode) -> T | HelperError:
            if node.silent:
                if node.probe is None or node.probe.done():
                    node.probe = asyncio.create_task(self._probe(node))
                return HelperError("silent", f"{node.stale()}: {node.silent}")
            async with self._at_once:
                try:
                    async with asyncio.timeout(ANSWER_S):
                        await self._compare_clocks(node)
                        return await self._request(node, ask(node))
                except TimeoutError:
                    node.silent = f"no answer within {ANSWER_S:g} s"
                    return HelperError("silent", f"{node.stale()}: {node.silent}")
                except HelperError as error:
                    return error

        nodes = list(self._nodes.values())
        return dict(zip((n.name for n in nodes), await asyncio.gather(*map(one, nodes)), strict=True))

    async def _probe(self, node: HelperNode) -> None:
        """Ask a silent node for its clock; if it answers, it is no longer silent."""
        with contextlib.suppress(HelperError):
            await self._compare_clocks(node)

    async def _compare_clocks(self, node: HelperNode) -> None:
        began_at = self._clock()
        if began_at - node.clock_at < CLOCK_EVERY_S and not node.silent:
            return
        hello = await self._request(node, node.client.ask("hello", None, helper.Hello))
        ended_at = self._clock()
        node.offset_s, node.clock_at = (began_at + ended_at) / 2 - hello.now, ended_at

    def _successful(self, answers: Mapping[str, T | HelperError]) -> dict[str, T]:
        """Return the answers of the nodes that gave one.

        Raises:
            HelperError: a node has seen a newer broker, or none has answered.
        """
        failures = [answer for answer in answers.values() if isinstance(answer, HelperError)]
        for failure in failures:
            if failure.kind == ErrorKind.STALE_EPOCH:
                raise failure
        found = {name: answer for name, answer in answers.items() if not isinstance(answer, HelperError)}
        if not found:
            raise failures[0] if failures else HelperError("unreachable", _NO_NODE)
        return found
