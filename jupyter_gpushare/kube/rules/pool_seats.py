"""Seats of unit pools: the devices of each seat, and the actions of guests when owners return.

`assigned` gives every seat of a pool (`pools`) the devices of its lease: those it returns to, or those
chosen for it.  A seat has no devices until its units are free, so `follow` waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jupyter_gpushare.core.model import (
    WHOLE_GPU,
    Action,
    Cluster,
    Kind,
    Lease,
    Requeue,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.units import EVERY_EXIT, Exit, Occupant, Pool, Presence
from jupyter_gpushare.kube.rules.claims import claimants
from jupyter_gpushare.kube.rules.follow import Seats, live
from jupyter_gpushare.kube.rules.pools import GUEST_EXITS, obstacles, pools_of
from jupyter_gpushare.kube.rules.seats import Seat, Seating


@dataclass(frozen=True, slots=True)
class Assigned:
    """Seats with the devices of their leases, and the actions of displaced guests."""

    seats: Seats
    actions: tuple[Action, ...] = ()


def assigned(cluster: Cluster, seats: Seats, now: float, starting: frozenset[str] = frozenset()) -> Assigned:
    """Return the seats as `follow` reads them; seats outside unit pools stay unchanged.

    ``starting``: sessions in ``cluster`` that wait until their units are free.
    """
    if not any(device.units or device.pool_obstacle for device in cluster.devices):
        return Assigned(seats)
    return _Assignment(cluster, seats, now, starting).run()


class _Assignment:
    """One computation of `assigned`."""

    def __init__(self, cluster: Cluster, seats: Seats, now: float, starting: frozenset[str]) -> None:
        self._leases = {lease.id: lease for lease in cluster.leases}
        self._node = {device.uuid: device.node for device in cluster.devices}
        self._cluster = cluster
        self._seats = seats
        self._now = now
        self._claiming = claimants(cluster)
        self._pools = pools_of(cluster, self._claiming, starting)
        self._closed = obstacles(cluster)
        self._devices: dict[str, tuple[str, ...]] = {}  # devices of seats, by lease
        self._actions: dict[str, Action] = {}

    def run(self) -> Assigned:
        seated = [(x, s) for x in self._leases.values() if (s := self._seat(x)) is not None]
        returning = [
            (x, s.node) for x, s in seated if x.state is State.SUSPENDED and (x.wanted or _is_job(x))
        ]
        for node, pool in self._pools.items():
            for each in pool.occupants:
                if each.presence is Presence.ARRIVING:
                    self._arrive(self._leases[each.lease], node, EVERY_EXIT)
                    self._is_in(each.lease, node)
        for lease, node in sorted(returning, key=lambda x: (x[0].id not in self._claiming, x[0].id)):
            exits = EVERY_EXIT if lease.id in self._claiming else GUEST_EXITS[lease.kind]
            if self._arrive(lease, node, exits) and self._is_in(lease.id, node):
                self._devices[lease.id] = lease.devices
        waiting = [(s.since_at, x, s.node) for x, s in seated if x.state is State.PENDING and _is_job(x)]
        for _, lease, node in sorted(waiting, key=lambda x: (x[0], x[1].id)):
            self._place(lease, node)
        return Assigned(
            {lease: tuple(map(self._rewritten, mine)) for lease, mine in self._seats.items()},
            tuple(self._actions.values()),
        )

    def _seat(self, lease: Lease) -> Seat | None:
        """Return the connected seat of a lease on its pool, if it has as many devices as the lease."""
        seat = live(self._seats, lease.id)
        if seat is None or seat.seating is not Seating.PLACED or seat.node not in self._pools:
            return None
        needed = lease.devices or range(lease.size.device_count)
        is_on_node = all(self._node.get(uuid) == seat.node for uuid in lease.devices)
        return seat if is_on_node and len(seat.devices) == len(needed) else None

    def _arrive(self, lease: Lease, node: str, exits: frozenset[Exit]) -> bool:
        """Give a granted lease its own units and displace guests on them; return False if it must wait."""
        pool = self._pools[node]
        placement = pool.bring_back(lease.id, exits)
        if placement is None:
            return False
        pool = pool.with_presence(lease.id, Presence.ARRIVING)
        for guest in placement.displaced:
            self._displace(guest, pool, lease.id)
            pool = pool.with_presence(guest, Presence.LEAVING)
        self._pools[node] = pool
        return True

    def _is_in(self, lease: str, node: str) -> bool:
        """Return whether the units of an arriving lease are free now; if so, mark them as used."""
        is_free = self._pools[node].is_free(lease)
        if is_free:
            self._pools[node] = self._pools[node].with_presence(lease, Presence.AWAKE)
        return is_free

    def _displace(self, guest: str, pool: Pool, owner: str) -> None:
        """Add the action of a displaced guest; a guest without an exit loses its seat (`follow`)."""
        lease, occupant = self._leases[guest], pool.of(guest)
        if occupant is None or lease.retry_at > self._now:
            return
        if occupant.exit is Exit.RESTART and lease.state in (State.GRANTED, State.RUNNING):
            self._actions[guest] = Requeue(guest, Why.LENDER_RETURNED, owner)
        elif occupant.exit is Exit.PARK and lease.state is State.RUNNING:
            self._actions[guest] = Suspend(guest, Why.LENDER_RETURNED, owner)

    def _place(self, lease: Lease, node: str) -> None:
        """Give a new job units if enough are free."""
        fits = node not in self._closed and all(
            device.demand_milli(lease.size) <= WHOLE_GPU
            for device in self._cluster.devices
            if device.node == node
        )
        placement = self._pools[node].place(lease.size.device_count, keeps=False) if fits else None
        if placement is not None:
            self._devices[lease.id] = placement.gpus
            occupant = Occupant(lease=lease.id, gpus=placement.gpus, presence=Presence.AWAKE)
            self._pools[node] = self._pools[node].put(occupant)

    def _rewritten(self, seat: Seat) -> Seat:
        lease = self._leases.get(seat.lease)
        if lease is None or not seat.devices or seat.node not in (*self._pools, *self._closed):
            return seat
        if lease.state is State.PENDING or (lease.state is State.SUSPENDED and seat.node in self._pools):
            return replace(seat, devices=self._devices.get(lease.id, ()))
        return seat


def _is_job(lease: Lease) -> bool:
    return lease.kind is Kind.TRAIN and not lease.cancelled
