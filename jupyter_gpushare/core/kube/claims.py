"""Guarantees of sessions, asleep included: KAI counts only the seats that exist.

A session keeps its guarantee while it is suspended and has no seat, so that the broker has to keep
two sums below what KAI will give back:

* of a project: the sessions in ``<p>-build`` fit its quota, as KAI counts sizes;
* of a device: the guarantees on it fit the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jupyter_gpushare.core.kube.seats import counted_centi
from jupyter_gpushare.core.model import HOLDS_CAPACITY, LEAVING, WHOLE_GPU, Cluster, Kind, Lease, State
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.size import Size

_ENDED = (State.RELEASED, State.FAILED, State.STOPPING)


def claimants(cluster: Cluster) -> frozenset[str]:
    """Return the sessions that are guaranteed their capacity.

    Sessions that were granted as guaranteed come first, then the others, in the order of their
    grants: no later session takes a guarantee away, and no device is guaranteed twice.
    """
    on_device = dict.fromkeys((d.uuid for d in cluster.devices), WHOLE_GPU)
    left = {p.name: p.quota_milli // 10 for p in cluster.projects}
    sessions = [x for x in cluster.leases if x.kind is Kind.BUILD and x.state not in _ENDED]
    found: set[str] = set()
    for lease in sorted(sessions, key=lambda x: (x.borrowed, not x.devices, x.granted_at, x.queued_at, x.id)):
        counted = counted_centi(lease.size, cluster.devices)
        fits = all(held_by(lease) <= on_device.get(uuid, WHOLE_GPU) for uuid in lease.devices)
        if fits and counted <= left.get(lease.project, 0):
            left[lease.project] -= counted
            on_device |= {uuid: on_device.get(uuid, WHOLE_GPU) - held_by(lease) for uuid in lease.devices}
            found.add(lease.id)
    return frozenset(found)


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
