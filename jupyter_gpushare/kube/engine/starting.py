"""A session's start on a cluster: its seat, from creation until it is connected.

=====================================  ============  =====================  ==============================
KAI and the node say                   phase         the start waits        then it is refused
=====================================  ============  =====================  ==============================
nothing                                `PLACING`     ``place_s``            there is no capacity
KAI cannot place it                    `PLACING`     ``stands_s``           with KAI's reason
KAI evicts others for it, or promised  `FREEING`     ``seat_s`` from the    its capacity is being freed;
it capacity that is being freed                      decision, in total     its seat stays until then
KAI has chosen its node and reserves   `RESERVING`                          a GPU is out of order
a GPU that will be shared
it is bound to a node                  `CONNECTING`                         a GPU is out of order
it is connected, its units are in use  `FREEING`                            there is no capacity
=====================================  ============  =====================  ==============================

At the end of a cycle KAI writes a refusal to every seat that still waits; by then it has also tried to evict.
A seat with promised capacity does not wait (v0.16.8, ``pkg/scheduler/framework/session.go:473-482``,
``pkg/scheduler/api/podgroup_info/job_info.go:388-390``).  So a refusal comes within a cycle, earlier than
``place_s``.  A start does not accept it at once: minimum run times end, and KAI adds fractions in random
order, so the next cycle may evict where this one did not.  KAI never withdraws a refusal
(`PodGroup.refusals`), so it means nothing after the decision.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from jupyter_gpushare.broker.engine.contract import StartPhase, StartProgress
from jupyter_gpushare.broker.engine.outlook import Explanation
from jupyter_gpushare.core.model import Cluster, Device, Grant, Lease, State, Why
from jupyter_gpushare.errors import Conflict
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.queues import missing
from jupyter_gpushare.kube.cluster.seats import KubeSeats
from jupyter_gpushare.kube.engine.following import Following
from jupyter_gpushare.kube.rules.claims import claimants
from jupyter_gpushare.kube.rules.follow import evicted_for, is_awaited
from jupyter_gpushare.kube.rules.pools import keeps, obstacles, pools_of
from jupyter_gpushare.kube.rules.seats import Demand, Seat, SeatClass, Seating, request, terms

log = logging.getLogger("gpushare.broker")

# Maximum time between two checks, because not every change wakes `KubeSeats.wait`.
ROUND_S = 5.0
# A refusal counts after it has stood this long: KAI sums fractions as floats in random order, so that a seat
# may fail in one cycle and succeed in the next.
STANDS_S = 2.0
# A seat remembers the names of this many abandoned seats: those of the last attempts.
_MAX_ATTEMPTS = 8


class Start:
    """One start.  ``until`` is when it is refused, in the event loop's time."""

    def __init__(
        self, seats: KubeSeats, *, place_s: float, seat_s: float, stands_s: float, within_s: float
    ) -> None:
        now = asyncio.get_running_loop().time()
        self._seats = seats
        self._seat_s, self._stands_s = seat_s, stands_s
        self._latest = now + within_s
        self.until = min(now + place_s, self._latest)
        self._name = ""
        self._is_decided = False

    async def place(self, demand: Demand, devices: Iterable[Device]) -> Seat | Why:
        """Create the seat; return it once it is connected, or why the start is refused."""
        try:
            async with asyncio.timeout_at(self.until):
                self._name = await self._seats.create(demand, devices)
                seat = await self._answered()
        except TimeoutError:
            if (late := self._seats.seat(self._name)) is None or not self._is_promised(late):
                return Why.NO_CAPACITY
            seat = late
        except KubeError as error:
            log.warning("lease=%s has no seat: %s", demand.lease, error)
            return Why.NO_CAPACITY
        if not self._is_answered(seat) and seat.why is not None:
            return seat.why
        self._is_decided = True
        self.until = min(asyncio.get_running_loop().time() + self._seat_s, self._latest)
        try:
            async with asyncio.timeout_at(self.until):
                return await self._wait_for(_is_settled)
        except TimeoutError:
            return self._too_late()

    def progress(self) -> StartProgress:
        """Return the phase of the start and the seconds until it ends, if known."""
        seat = self._seats.seat(self._name)
        if seat is None or not (self._is_decided or self._is_answered(seat)):
            return StartProgress(StartPhase.PLACING)
        if seat.seating is not Seating.WAITING:
            return StartProgress(StartPhase.FREEING if seat.devices else StartPhase.CONNECTING)
        if seat.is_binding:
            return StartProgress(StartPhase.RESERVING)
        ends_at = max((s.ends_at for s in evicted_for(self._seats.seats(), seat)), default=0.0)
        return StartProgress(StartPhase.FREEING, max(0.0, ends_at - time.time()) if ends_at else None)

    async def _answered(self) -> Seat:
        """Return the seat once KAI has accepted it, or once its refusal has stood for ``stands_s``."""
        while True:
            seat = await self._wait_for(lambda s: self._is_answered(s) or s.why)
            if self._is_answered(seat):
                return seat
            try:
                async with asyncio.timeout(self._stands_s):
                    return await self._wait_for(self._is_answered)
            except TimeoutError:
                if (seat := self._seats.seat(self._name) or seat).why:
                    return seat

    def _is_answered(self, seat: Seat) -> bool:
        """Return whether KAI has chosen a node for the seat or evicts others for it."""
        is_chosen = seat.seating is not Seating.WAITING or seat.is_binding
        return is_chosen or bool(evicted_for(self._seats.seats(), seat))

    def _is_promised(self, seat: Seat) -> bool:
        """Return whether KAI has accepted the seat, or probably promised it the capacity of leaving seats."""
        return self._is_answered(seat) or (seat.why is None and self._do_others_leave())

    def _do_others_leave(self) -> bool:
        seats = (s for mine in self._seats.seats().values() for s in mine)
        return any(s.seating is Seating.LEAVING and s.node for s in seats)

    def _too_late(self) -> Why:
        seat = self._seats.seat(self._name)
        if seat is None or seat.seating is not Seating.WAITING or seat.is_binding:
            return Why.DEVICE_BROKEN
        return Why.AWAITING_RELEASE if self._do_others_leave() else Why.NO_CAPACITY

    async def _wait_for(self, until: Callable[[Seat], object]) -> Seat:
        while True:
            seat = self._seats.seat(self._name)
            if seat is not None and until(seat):
                return seat
            await self._seats.wait(ROUND_S)


class Starting:
    """Starts sessions; ``place_s`` and ``seat_s`` are as in `KaiEngine`, ``stands_s`` as in `Start`."""

    def __init__(
        self,
        seats: KubeSeats,
        following: Following,
        clock: Callable[[], float],
        *,
        place_s: float,
        seat_s: float,
    ) -> None:
        self._seats = seats
        self._following = following
        self._clock = clock
        self.place_s, self.seat_s, self.stands_s = place_s, seat_s, STANDS_S
        self._under_way: dict[str, Start] = {}

    async def admit(
        self,
        cluster: Cluster,
        lease: Lease,
        now: float,
        *,
        not_nodes: Iterable[str] = (),
        within_s: float = inf,
    ) -> Grant | Explanation:
        """Implement `Engine.admit`.

        Raises:
            Conflict: the cluster has no queue for the project.
        """
        if names := missing((p for p in cluster.projects if p.name == lease.project), self._seats.queues):
            raise Conflict("the cluster has no queue %1: an administrator creates it", names[0])
        cluster = self._following.with_pools(cluster)
        considered = replace(cluster, leases=(*cluster.leases, lease))
        demand = self._following.demands(considered, now).by_lease[lease.id]
        demand = replace(demand, not_nodes=tuple(sorted({*demand.not_nodes, *not_nodes})))
        self._following.begin(lease.id, cluster)
        start = self._under_way[lease.id] = Start(
            self._seats,
            place_s=self.place_s,
            seat_s=self.seat_s,
            stands_s=self.stands_s,
            within_s=within_s,
        )
        try:
            placed = await start.place(await self._take_over_abandoned(demand, cluster), cluster.devices)
            if not isinstance(placed, Why):
                placed = await self._take_units(lease, demand, placed, start.until)
        except BaseException:
            await asyncio.shield(self._withdraw(lease.id))
            raise
        finally:
            self._under_way.pop(lease.id, None)
        if isinstance(placed, Why):
            await self._withdraw(lease.id)
            free_milli = self._following.outlook(cluster, now).free_milli
            return Explanation(why=placed, position=None, free_milli=free_milli)
        # Keep the seat until the lease is in a snapshot, right after its grant is committed.
        self._following.starting[lease.id] = self._clock() + ROUND_S
        held = {d.uuid: d.demand_milli(lease.size) for d in cluster.devices}
        return Grant(
            lease.id,
            placed.devices,
            max(held[uuid] for uuid in placed.devices),
            Why.FREE_CAPACITY,
            borrowed=demand.seat_class is SeatClass.BORROWED,
        )

    def progress(self, lease_id: str) -> StartProgress | None:
        """Return the progress of a lease's start; None if it has none."""
        start = self._under_way.get(lease_id)
        return None if start is None else start.progress()

    async def _take_over_abandoned(self, demand: Demand, cluster: Cluster) -> Demand:
        """Return the demand, changed to take over the capacity that KAI frees for an abandoned start.

        The abandoned seat is deleted first: KAI would evict again for a second seat beside it.
        """
        seats, requested = self._seats.seats(), request(demand.size, cluster.devices)
        known = {*self._following.starting, *(lease.id for lease in cluster.leases)}
        for seat in (s for lease, mine in seats.items() if lease not in known for s in mine):
            fits = seat.terms == terms(demand) and seat.requested == requested
            if fits and set(demand.not_nodes) <= set(seat.not_nodes) and is_awaited(seats, seat):
                self._following.starting[seat.lease] = self._clock() + ROUND_S  # no other start takes it over
                if not await self._delete_waiting(seat.name):
                    continue
                return replace(demand, instead_of=(seat.name, *seat.instead_of)[:_MAX_ATTEMPTS])
        return demand

    async def _delete_waiting(self, name: str) -> bool:
        """Delete a waiting seat and return whether it is gone; KAI may be writing to it meanwhile."""
        try:
            for _ in range(3):
                await self._seats.delete(name)
                seat = self._seats.seat(name)
                if seat is None or seat.seating is not Seating.WAITING:
                    return True
                await self._seats.wait(1.0)
        except KubeError as error:
            log.warning("seat=%s is not taken over: %s", name, error)
        return False

    async def _take_units(self, lease: Lease, demand: Demand, seat: Seat, until: float) -> Seat | Why:
        """Return a connected seat with its units once they are free; unchanged on a node without units."""
        if seat.seating is not Seating.PLACED or not set(seat.devices) <= {
            device.uuid for device in self._following.latest().devices
        }:
            return Why.DEVICE_BROKEN
        try:
            async with asyncio.timeout_at(until):
                while not isinstance(gpus := self._choose(demand, seat), tuple):
                    if gpus is not None:
                        return gpus
                    await self._seats.wait(ROUND_S)
                if not gpus:
                    return seat
                self._following.placed[lease.id] = replace(
                    lease,
                    state=State.GRANTED,
                    devices=gpus,
                    held_milli=lease.size.fraction_milli,
                    granted_at=self._clock(),
                    borrowed=demand.seat_class is SeatClass.BORROWED,
                )
                while not self._is_free(lease.id, seat.node):
                    await self._seats.wait(ROUND_S)
        except TimeoutError:
            return Why.NO_CAPACITY
        return replace(seat, devices=gpus)

    def _choose(self, demand: Demand, seat: Seat) -> tuple[str, ...] | Why | None:
        """Return GPUs for a start; () on a node without units, None while too few are free."""
        cluster = self._following.latest()
        pool = pools_of(cluster, claimants(cluster), frozenset(self._following.placed)).get(seat.node)
        if seat.node in obstacles(cluster):
            return Why.NO_CAPACITY
        if pool is None:
            return ()
        is_kept = keeps(demand, seat.node, cluster)
        placement = pool.place(demand.size.device_count, keeps=is_kept)
        if placement is None:
            return Why.NO_CAPACITY if is_kept else None
        return placement.gpus

    def _is_free(self, lease: str, node: str) -> bool:
        cluster = self._following.latest()
        pool = pools_of(cluster, claimants(cluster), frozenset(self._following.placed)).get(node)
        return pool is not None and pool.is_free(lease)

    async def _withdraw(self, lease_id: str) -> None:
        """Delete the seats of a refused start; a later round deletes awaited ones and those that fail."""
        try:
            for _ in range(2):  # the pod, then its PodGroup
                seats = self._seats.seats()
                for seat in seats.get(lease_id, ()):
                    if seat.seating is not Seating.LEAVING and not is_awaited(seats, seat):
                        await self._seats.delete(seat.name)
                await self._seats.wait(1.0)
        except KubeError as error:
            log.warning("lease=%s its seat is not deleted yet: %s", lease_id, error)
        finally:
            self._following.end(lease_id)


def _is_settled(seat: Seat) -> bool:
    """Return whether a seat is connected or never will be; a node may connect before its pod is reported."""
    if seat.seating is Seating.PLACED:
        return bool(seat.devices)
    return seat.seating is not Seating.WAITING
