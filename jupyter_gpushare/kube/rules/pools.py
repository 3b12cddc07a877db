"""Unit pools on Kubernetes: on some nodes with several GPUs, seats only count units.

An administrator makes a node a pool (`core.units`) with the label ``gpushare.jupyter.org/units: "s"``.
On a pool the broker chooses the GPUs of leases and ignores the GPU that KAI or the kubelet names.  A
lease's GPUs are `Lease.devices`, as everywhere, and nothing else is stored.

===============================================  =================================================
a pool                                           grants and lends
===============================================  =================================================
of equal GPUs, whose leases are whole units and  whole GPUs if s = 1, else exactly 1/s of a GPU
where no other pod has a GPU
any other                                        nothing: for that time no new seat is placed on it
                                                 and no session is lent; suspended leases return
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
# The exits of guests that a returning lease without a guarantee may displace; a job displaces none.
GUEST_EXITS = {Kind.BUILD: frozenset({Exit.RESTART}), Kind.TRAIN: frozenset[Exit]()}


def marked(cluster: Cluster, labels: Mapping[str, str], foreign: Mapping[str, str]) -> Cluster:
    """Return the cluster with the units and pool obstacle of each device.

    ``labels``: values of the label, by node.  ``foreign``: the sentence about GPU pods that are not ours,
    by node.
    """
    if not labels:
        return cluster
    on_node: dict[str, list[Device]] = {}
    for device in cluster.devices:
        on_node.setdefault(device.node, []).append(device)
    found = {node: _units_of(labels[node], mine) for node, mine in on_node.items() if node in labels}
    devices = tuple(
        replace(d, units=found[d.node][0], pool_obstacle=found[d.node][1] or foreign.get(d.node, ""))
        if d.node in found
        else d
        for d in cluster.devices
    )
    return _with_odd_leases(replace(cluster, devices=devices))


def _units_of(label: str, devices: list[Device]) -> tuple[int, str]:
    """Return the units of each GPU, and why the pool is closed ("" if it is open)."""
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
    reason = "it has leases of other sizes: they have to end first"
    devices = (
        replace(d, pool_obstacle=d.pool_obstacle or reason) if d.node in odd else d for d in cluster.devices
    )
    return replace(cluster, devices=tuple(devices)) if odd else cluster


def obstacles(cluster: Cluster) -> dict[str, str]:
    """Return the reason of each closed pool, by node."""
    return {d.node: d.pool_obstacle for d in cluster.devices if d.pool_obstacle}


def takes(cluster: Cluster, size: Size) -> bool:
    """Return whether the units of any node allow leases of this size."""
    return any(not d.units or d.demand_milli(size) <= WHOLE_GPU for d in cluster.devices)


def is_in_pool(lease: Lease, devices: Iterable[Device]) -> bool:
    """Return whether the GPUs of a lease are in a unit pool."""
    return any(device.units and device.uuid in lease.devices for device in devices)


def keeps(demand: Demand, node: str, cluster: Cluster) -> bool:
    """Return whether a session that starts on a pool gets units that no other lease claims."""
    devices = (device for device in cluster.devices if device.node == node)
    return demand.seat_class is SeatClass.SESSION or not all(device.suspendable for device in devices)


def pools_of(
    cluster: Cluster, claiming: frozenset[str], arriving: frozenset[str] = frozenset()
) -> dict[str, Pool]:
    """Return the unit pools by node; ``arriving``: granted leases that wait for their units."""
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
    """Effect of returning owners on the guests of unit pools.

    ``excluded``: guests that get no seat.  They are suspended and have no free units, or they are on the
    units of an owner and can be neither suspended nor restarted.
    """

    displaced: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()


def returns(cluster: Cluster, claiming: frozenset[str], owners: Iterable[Lease]) -> Returns:
    """Return the effect of owners that want their units back on guests."""
    found = pools_of(cluster, claiming, frozenset(owner.id for owner in owners))
    leases = {lease.id: lease for lease in cluster.leases} if found else {}
    displaced: set[str] = set()
    excluded: set[str] = set()
    for pool in found.values():
        rest = pool
        for each in pool.occupants:
            if each.presence is Presence.ARRIVING and (placement := rest.bring_back(each.lease)):
                displaced.update(placement.displaced)
                for guest in placement.displaced:
                    rest = rest.with_presence(guest, Presence.LEAVING)
        excluded |= {x.lease for x in pool.occupants if x.lease in displaced and x.exit is Exit.NONE}
        excluded |= {x.lease for x in rest.occupants if not x.claims and _is_blocked(leases[x.lease], rest)}
    return Returns(frozenset(displaced), frozenset(excluded))


def _is_blocked(guest: Lease, pool: Pool) -> bool:
    """Return whether a guest that is suspended or being suspended must wait for its units."""
    if guest.state not in (State.SUSPENDED, State.SUSPENDING):
        return False
    return pool.bring_back(guest.id, GUEST_EXITS[guest.kind]) is None
