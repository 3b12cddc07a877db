"""KAI-Scheduler's decisions for one snapshot: why leases wait, what is free, what could start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from math import inf

from jupyter_gpushare.broker.engine.outlook import Offer, Outlook
from jupyter_gpushare.core import explain
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    Action,
    Cluster,
    Kind,
    Lease,
    Plan,
    State,
    Why,
    held_by,
)
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.kube.rules.claims import claimants, claimed_milli, guests
from jupyter_gpushare.kube.rules.demand import demands
from jupyter_gpushare.kube.rules.follow import Misplaced, Seats, follow, live, with_delays
from jupyter_gpushare.kube.rules.seats import Demand, SeatClass, Seating

_PROBE = "-"


class KaiOutlook(Outlook):
    """Answers questions from one snapshot and its seats."""

    def __init__(
        self,
        cluster: Cluster,
        seats: Seats,
        sleepable: frozenset[str],
        misplaced: Mapping[str, Misplaced],
        now: float,
    ) -> None:
        super().__init__(with_delays(cluster, misplaced), now)
        self._misplaced = misplaced
        self._seats = seats
        self._sleepable = sleepable

    @cached_property
    def _plan(self) -> Plan:
        return follow(self._cluster, self._seats, self._now)

    @property
    def actions(self) -> Iterable[Action]:
        return self._plan.actions

    @cached_property
    def _demands(self) -> Mapping[str, Demand]:
        return demands(self._cluster, self._sleepable, self._now).by_lease

    @cached_property
    def _claimants(self) -> frozenset[str]:
        return claimants(self._cluster)

    @cached_property
    def _free(self) -> Mapping[str, int]:
        free = dict.fromkeys((device.uuid for device in self._cluster.devices if device.usable), WHOLE_GPU)
        for lease in self._cluster.leases:
            for uuid in lease.devices if lease.state in HOLDS_CAPACITY else ():
                if uuid in free:
                    free[uuid] -= held_by(lease)
        return {uuid: max(0, milli) for uuid, milli in free.items()}

    @cached_property
    def why(self) -> Mapping[str, Why]:
        waiting = [x for x in self._cluster.leases if self._waits(x) and x.id not in self.grants]
        return {x.id: self._reason(x) for x in sorted(waiting, key=self._order)}

    def _waits(self, lease: Lease) -> bool:
        returns = lease.kind is Kind.TRAIN or lease.wanted
        return lease.state is State.PENDING or (lease.state is State.SUSPENDED and returns)

    def _order(self, lease: Lease) -> tuple[int, float, str]:
        demand, seat = self._demands.get(lease.id), live(self._seats, lease.id)
        return demand.level if demand else 0, seat.since_at if seat else inf, lease.id

    def _reason(self, lease: Lease) -> Why:
        if lease.retry_at > self._now:
            return Why.BACKING_OFF
        if lease.id not in self._demands:
            return Why.QUOTA
        seat = live(self._seats, lease.id)
        if seat is None or seat.why is None:
            return Why.AWAITING_RELEASE if seat and seat.seating is Seating.PLACED else Why.NO_CAPACITY
        return seat.why

    @cached_property
    def position(self) -> Mapping[str, int]:
        """The position of each waiting job in its project."""
        projects = {x.id: x.project for x in self._cluster.leases if x.kind is Kind.TRAIN}
        counts: dict[str, int] = {}
        positions: dict[str, int] = {}
        for lease_id in self.why:
            if lease_id in projects:
                counts[projects[lease_id]] = positions[lease_id] = counts.get(projects[lease_id], 0) + 1
        return positions

    @property
    def free_milli(self) -> int:
        return sum(self._free.values())

    @cached_property
    def borrowed(self) -> Mapping[str, bool]:
        return {
            x.id: x.id not in self._claimants
            for x in self._cluster.leases
            if x.state in HOLDS_CAPACITY - LEAVING and x.devices
        }

    @cached_property
    def lent(self) -> Mapping[str, tuple[str, ...]]:
        return {
            x.id: tuple(guest.id for guest in guests(x, self._cluster, self._claimants))
            for x in self._cluster.leases
            if x.state is State.SUSPENDED and x.id in self._claimants
        }

    @cached_property
    def misplaced(self) -> Mapping[str, float]:
        return {lease: x.retry_at for lease, x in self._misplaced.items() if x.retry_at > self._now}

    @cached_property
    def claims_milli(self) -> Mapping[str, int]:
        return claimed_milli(self._cluster, self._claimants)

    def smaller(self, lease: Lease) -> Size | None:
        """Return None: KAI does not say which smaller size would start."""
        return None

    def offers(self, project: str, sizes: Iterable[Size]) -> tuple[Offer, ...]:
        return tuple(self._offer(project, size) for size in sizes)

    def _offer(self, project: str, size: Size) -> Offer:
        """Return the offer by free capacity alone; KAI may also take capacity from leases over quota."""
        probe = Lease(id=_PROBE, project=project, kind=Kind.BUILD, size=size, queued_at=self._now)
        considered = replace(self._cluster, leases=(*self._cluster.leases, probe))
        demand = demands(considered, self._sleepable, self._now).by_lease[_PROBE]
        fitting: dict[str, int] = {}
        for device in self._cluster.devices:
            if device.usable and device.demand_milli(size) <= self._free[device.uuid]:
                fitting[device.node] = fitting.get(device.node, 0) + 1
        fits = any(n >= size.device_count for node, n in fitting.items() if node not in demand.not_nodes)
        return Offer(
            size=size,
            starts=explain.Starts.NOW if fits else explain.Starts.NO,
            why=Why.FREE_CAPACITY if fits else Why.NO_CAPACITY,
            borrowed=demand.seat_class is SeatClass.BORROWED,
            free_milli=self.free_milli,
        )
