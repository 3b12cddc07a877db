"""Guarantees of sessions, asleep included: KAI counts only the seats that exist.

A session keeps its guarantee while it is suspended and has no seat, so that the broker has to keep
two sums below what KAI will give back:

* of a project: the sessions in ``<p>-build`` fit its quota, as KAI counts sizes;
* of a device: the guarantees on it fit the device.

In a unit pool (`pools`), a session without a guarantee that cannot be suspended counts beside the
guarantees on a device: no returning owner could displace it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    Cluster,
    Kind,
    Lease,
    State,
    held_by,
)
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.kube.rules.seats import counted_centi

_ENDED = (State.RELEASED, State.FAILED, State.STOPPING)


def claimants(cluster: Cluster) -> frozenset[str]:
    """Return the sessions that are guaranteed their capacity.

    Sessions that were granted as guaranteed come first, then the others, in the order of their
    grants: no later session takes a guarantee away, and no device is guaranteed twice.
    """
    on_device = dict.fromkeys((d.uuid for d in cluster.devices), WHOLE_GPU)
    fixed = immovable(cluster)
    left = {p.name: p.quota_milli // 10 for p in cluster.projects}
    sessions = [x for x in cluster.leases if x.kind is Kind.BUILD and x.state not in _ENDED]
    found: set[str] = set()
    for lease in sorted(sessions, key=lambda x: _by_grant(x, fixed)):
        counted = counted_centi(lease.size, cluster.devices)
        fits = all(held_by(lease) <= on_device.get(uuid, WHOLE_GPU) for uuid in lease.devices)
        is_claimant = fits and counted <= left.get(lease.project, 0)
        if is_claimant:
            left[lease.project] -= counted
            found.add(lease.id)
        if is_claimant or (fits and lease.id in fixed):
            on_device |= {uuid: on_device.get(uuid, WHOLE_GPU) - held_by(lease) for uuid in lease.devices}
    return frozenset(found)


def _by_grant(lease: Lease, fixed: frozenset[str]) -> tuple[bool, bool, bool, float, float, str]:
    is_late = lease.borrowed and lease.id not in fixed
    return lease.borrowed, is_late, not lease.devices, lease.granted_at, lease.queued_at, lease.id


def immovable(cluster: Cluster) -> frozenset[str]:
    """Return the sessions in unit pools that cannot be suspended."""
    suspends = {device.uuid: device.suspendable for device in cluster.devices if device.units}
    return frozenset(
        x.id
        for x in cluster.leases
        if x.kind is Kind.BUILD
        and x.state not in _ENDED
        and any(uuid in suspends for uuid in x.devices)
        and not (x.suspendable and all(suspends.get(uuid, True) for uuid in x.devices))
    )


def claimed_milli(cluster: Cluster, claiming: Iterable[str]) -> Mapping[str, int]:
    """Return the guaranteed thousandths of each device, by UUID."""
    found = {device.uuid: 0 for device in cluster.devices}
    ids = frozenset(claiming)
    for lease in cluster.leases:
        if lease.id in ids:
            for uuid in lease.devices:
                found[uuid] = found.get(uuid, 0) + held_by(lease)
    return found


def full_nodes(cluster: Cluster, size: Size, claimed: Mapping[str, int]) -> tuple[str, ...]:
    """Return the nodes on which no further guarantee of this size fits, sorted."""
    fitting: dict[str, int] = {}
    for device in cluster.devices:
        fits = device.demand_milli(size) <= WHOLE_GPU - claimed[device.uuid]
        fitting[device.node] = fitting.get(device.node, 0) + fits
    return tuple(sorted(node for node, count in fitting.items() if count < size.device_count))


def closed_pools(cluster: Cluster, size: Size) -> frozenset[str]:
    """Return the nodes whose unit pool takes no lease of this size, or none at all."""
    return frozenset(
        device.node
        for device in cluster.devices
        if device.pool_obstacle or (device.units and device.demand_milli(size) > WHOLE_GPU)
    )


def guests(lease: Lease, cluster: Cluster, claiming: frozenset[str]) -> list[Lease]:
    """Return the leases without a guarantee that stay on capacity which ``lease`` needs to return.

    None, if what is free on its devices, or is being released there, is enough.
    """
    mine, staying = set(lease.devices), HOLDS_CAPACITY - LEAVING
    there = [x for x in cluster.leases if x.id != lease.id and x.state in staying and mine & set(x.devices)]
    used = {uuid: sum(held_by(x) for x in there if uuid in x.devices) for uuid in mine}
    if all(milli + held_by(lease) <= WHOLE_GPU for milli in used.values()):
        return []
    return [x for x in there if x.id not in claiming]
