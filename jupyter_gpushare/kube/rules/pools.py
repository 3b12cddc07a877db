"""Unit pools on Kubernetes: the seats of a node with several GPUs only count there.

A node that an administrator labels ``gpushare.jupyter.org/units: "s"`` is a pool (`core.units`): which
GPU KAI or the kubelet names is no news, and leases get GPUs from us.  A lease's GPUs are
`Lease.devices`, as everywhere, and nothing else is stored.

===============================================  =================================================
a pool                                           grants and lends
===============================================  =================================================
of equal GPUs, whose leases are whole units and  leases of s = 1: whole GPUs, else of exactly 1/s
where no other pod has a GPU
any other                                        nothing: no new seat is placed there and no session
                                                 is lent, until that is over; what was suspended
                                                 returns
===============================================  =================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    Cluster,
    Device,
    Kind,
    Lease,
    State,
)
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.core.units import Exit, Occupant, Pool, Presence
from jupyter_gpushare.kube.rules.seats import Demand, SeatClass

LABEL = "gpushare.jupyter.org/units"
UNITS = (1, 2, 4, 8)
# A session without a guarantee that returns; a job displaces no lease.
GUEST_EXITS = {Kind.BUILD: frozenset({Exit.RESTART}), Kind.TRAIN: frozenset[Exit]()}


def marked(cluster: Cluster, labels: Mapping[str, str], foreign: Mapping[str, str]) -> Cluster:
    """Return the cluster with the unit pool of each device.

    ``labels``: values of the label, by node.  ``foreign``: pods that have GPUs without being ours, by
    node, as a sentence has them.
    """
    if not labels:
        return cluster
    on: dict[str, list[Device]] = {}
    for device in cluster.devices:
        on.setdefault(device.node, []).append(device)
    said = {node: _units_of(labels[node], mine) for node, mine in on.items() if node in labels}
    devices = tuple(
        replace(d, units=said[d.node][0], pool_obstacle=said[d.node][1] or foreign.get(d.node, ""))
        if d.node in said
        else d
        for d in cluster.devices
    )
    return _with_odd_leases(replace(cluster, devices=devices))


def _units_of(label: str, devices: list[Device]) -> tuple[int, str]:
    """Return the units of each GPU and why the pool is closed."""
    units = next((n for n in UNITS if str(n) == label), 0)
    if not units:
        return 0, f"its label {LABEL} is {label!r}: write 1, 2, 4 or 8"
    if len({(d.name, d.memory_bytes, d.profile) for d in devices}) > 1:
        return units, "its GPUs are not equal"
    return units, ""


def _with_odd_leases(cluster: Cluster) -> Cluster:
    """Close the pools with leases that are not whole units."""
    device_of = {device.uuid: device for device in cluster.devices if device.units}
    placed = (x for x in cluster.leases if x.state in HOLDS_CAPACITY or x.state is State.SUSPENDED)
    odd = {
        device_of[uuid].node
        for lease in placed
        for uuid in lease.devices
        if uuid in device_of and device_of[uuid].demand_milli(lease.size) > WHOLE_GPU
    }
    said = "it has leases of other sizes: they have to end first"
    devices = (
        replace(d, pool_obstacle=d.pool_obstacle or said) if d.node in odd else d for d in cluster.devices
    )
    return replace(cluster, devices=tuple(devices)) if odd else cluster


def obstacles(cluster: Cluster) -> dict[str, str]:
    """Return the closed pools, by node, each with its reason."""
    return {d.node: d.pool_obstacle for d in cluster.devices if d.pool_obstacle}


def takes(cluster: Cluster, size: Size) -> bool:
    """Return whether any node takes leases of this size, as far as units go."""
    return any(not d.units or d.demand_milli(size) <= WHOLE_GPU for d in cluster.devices)


def is_in_pool(lease: Lease, devices: Iterable[Device]) -> bool:
    """Return whether the GPUs of a lease are in a unit pool."""
    return any(device.units and device.uuid in lease.devices for device in devices)


def keeps(demand: Demand, node: str, cluster: Cluster) -> bool:
    """Return whether a session that starts on a pool gets units that no other lease claims."""
    here = (device for device in cluster.devices if device.node == node)
    return demand.seat_class is SeatClass.SESSION or not all(device.suspendable for device in here)


def pools_of(
    cluster: Cluster, claiming: frozenset[str], arriving: frozenset[str] = frozenset()
) -> dict[str, Pool]:
    """Return the unit pools by node; ``arriving``: leases that were granted, and wait for their units."""
    device_of = {device.uuid: device for device in cluster.devices if device.units}
    found: dict[str, Pool] = {}
    for device in device_of.values():
        gpus = found[device.node].gpus if device.node in found else ()
        found[device.node] = Pool((*gpus, device.uuid) if device.usable else gpus, device.units)
    occupants: dict[str, list[Occupant]] = {node: [] for node in found}
    for lease in cluster.leases if found else ():
        first = device_of.get(lease.devices[0]) if lease.devices else None
        presence = Presence.ARRIVING if lease.id in arriving else _presence(lease)
        if first is not None and presence is not None:
            can_park = lease.suspendable and all(
                device_of[uuid].suspendable for uuid in lease.devices if uuid in device_of
            )
            occupants[first.node].append(
                Occupant(
                    lease=lease.id,
                    gpus=lease.devices,
                    presence=presence,
                    claims=lease.id in claiming,
                    exit=_exit(lease, can_park=can_park),
                )
            )
    return {node: replace(pool, occupants=tuple(occupants[node])) for node, pool in found.items()}


def _presence(lease: Lease) -> Presence | None:
    if lease.state is State.SUSPENDED:
        return Presence.ASLEEP
    if lease.state in LEAVING:
        return Presence.LEAVING
    return Presence.AWAKE if lease.state in HOLDS_CAPACITY else None


def _exit(lease: Lease, *, can_park: bool) -> Exit:
    if can_park and (lease.kind is Kind.BUILD or lease.survival.suspends):
        return Exit.PARK
    return Exit.NONE if lease.kind is Kind.BUILD else Exit.RESTART


@dataclass(frozen=True, slots=True)
class Returns:
    """What returning owners mean for the guests of unit pools.

    ``excluded``: guests that get no seat: suspended ones without free units, and ones on the units of
    an owner that can neither be suspended nor restarted.
    """

    displaced: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()


def returns(cluster: Cluster, claiming: frozenset[str], owners: Iterable[Lease]) -> Returns:
    """Return what owners that want their units back mean for guests."""
    found = pools_of(cluster, claiming, frozenset(owner.id for owner in owners))
    leases = {lease.id: lease for lease in cluster.leases} if found else {}
    displaced: set[str] = set()
    excluded: set[str] = set()
    for pool in found.values():
        left = pool
        for each in pool.occupants:
            if each.presence is Presence.ARRIVING and (placement := left.bring_back(each.lease)):
                displaced.update(placement.displaced)
                for guest in placement.displaced:
                    left = left.now(guest, Presence.LEAVING)
        excluded |= {x.lease for x in pool.occupants if x.lease in displaced and x.exit is Exit.NONE}
        excluded |= {x.lease for x in left.occupants if not x.claims and _is_blocked(leases[x.lease], left)}
    return Returns(frozenset(displaced), frozenset(excluded))


def _is_blocked(guest: Lease, pool: Pool) -> bool:
    """Return whether a guest that is parked, or is being parked, has to wait for its units."""
    if guest.state not in (State.SUSPENDED, State.SUSPENDING):
        return False
    return pool.bring_back(guest.id, GUEST_EXITS[guest.kind]) is None
