"""Guarantees of sessions, including suspended ones, because KAI counts only existing seats.

A session keeps its guarantee while it is suspended and has no seat.  So the broker must keep two sums
within the capacity that KAI will give back:

* per project: the sessions in ``<p>-build`` fit its quota, as KAI counts sizes;
* per device: the guarantees on it fit the device.

In a unit pool (`pools`), a session without a guarantee that cannot be suspended counts like a
guarantee on its devices, because no returning owner could displace it.
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
    """Return the sessions whose capacity is guaranteed.

    Sessions with a guaranteed grant come first, then the others, in the order of their grants.  So no
    later session takes a guarantee away, and no device is guaranteed twice.
    """
    on_device = dict.fromkeys((d.uuid for d in cluster.devices), WHOLE_GPU)
    fixed = immovable(cluster)
    quota_left = {p.name: p.quota_milli // 10 for p in cluster.projects}
    sessions = [x for x in cluster.leases if x.kind is Kind.BUILD and x.state not in _ENDED]
    found: set[str] = set()
    for lease in sorted(sessions, key=lambda x: _by_grant(x, fixed)):
        counted = counted_centi(lease.size, cluster.devices)
        fits = all(held_by(lease) <= on_device.get(uuid, WHOLE_GPU) for uuid in lease.devices)
        is_claimant = fits and counted <= quota_left.get(lease.project, 0)
        if is_claimant:
            quota_left[lease.project] -= counted
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
    """Return the nodes whose unit pool takes no lease of this size."""
    return frozenset(
        device.node
        for device in cluster.devices
        if device.pool_obstacle or (device.units and device.demand_milli(size) > WHOLE_GPU)
    )


def guests(lease: Lease, cluster: Cluster, claiming: frozenset[str]) -> list[Lease]:
    """Return the leases without a guarantee on capacity that ``lease`` needs to return.

    The list is empty if the free or leaving capacity on its devices is enough.
    """
    mine, staying = set(lease.devices), HOLDS_CAPACITY - LEAVING
    others = [x for x in cluster.leases if x.id != lease.id and x.state in staying and mine & set(x.devices)]
    used = {uuid: sum(held_by(x) for x in others if uuid in x.devices) for uuid in mine}
    if all(milli + held_by(lease) <= WHOLE_GPU for milli in used.values()):
        return []
    return [x for x in others if x.id not in claiming]
