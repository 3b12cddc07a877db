"""Which seat each lease needs now.

=========================================  ==========================================================
lease                                      demand
=========================================  ==========================================================
job that waits or holds capacity           `TRAIN` at the level of its LAS queue; not on a node that
                                           recently could not place its server; bound to its node once
                                           it has processes on it
session with a guarantee                   `SESSION`
session without a guarantee                `BORROWED`
idle session that is due and can be        `IDLE`: KAI evicts it when another lease waits
suspended and return
suspended, wanted by its owner             `RETURN` with a guarantee, else `BORROWED`; bound to its node
holds capacity that such an owner needs    `YIELD`
suspended and not wanted, stopping, ended  none
has to wait in a unit pool (`pools`)       none
=========================================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from jupyter_gpushare.core import idle
from jupyter_gpushare.core.model import Cluster, Kind, Lease, State
from jupyter_gpushare.core.order import LeastAttained, attained_gpu_s, is_starved, order_of, queue_of, rank
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.kube.rules import pools
from jupyter_gpushare.kube.rules.claims import (
    claimants,
    claimed_milli,
    closed_pools,
    full_nodes,
    guests,
    immovable,
)
from jupyter_gpushare.kube.rules.seats import Demand, SeatClass, counted_centi, return_is_certain

_LAS = LeastAttained(preempts=True)
# States of leases whose processes run or start on their devices.
_ALIVE = (State.GRANTED, State.RUNNING, State.RESUMING)
_PARKED = (State.SUSPENDING, State.SUSPENDED)


@dataclass(frozen=True, slots=True)
class Demands:
    """Demands by lease, and the time to compute them again if nothing changes until then."""

    by_lease: dict[str, Demand]
    next_at: float | None = None


def demands(
    cluster: Cluster, sleepable: Container[str], now: float, restarting: Container[str] = ()
) -> Demands:
    """Return the seat that every lease needs at ``now``.

    ``sleepable``: nodes on which a helper can suspend a lease now.  It is empty while the state of seats
    is stale, so that no lease becomes lendable.  ``restarting``: jobs that keep their seat while they stop.
    """
    return _Round(cluster, sleepable, now, restarting).run()


def level(lease: Lease, cluster: Cluster, now: float) -> int:
    """Return the level of a job's priority class: its LAS queue if the site's order preempts, else 0."""
    if not order_of(cluster.settings).preempts or is_starved(lease, now, cluster.settings):
        return 0
    return queue_of(attained_gpu_s(lease, now), cluster.settings)


def avoided_nodes(lease: Lease, now: float) -> tuple[str, ...]:
    """Return the nodes that the server of a lease cannot run on at ``now``, sorted."""
    return tuple(sorted({node for node, until in lease.avoids if now < until}))


class _Round:
    """One computation of all demands."""

    def __init__(
        self, cluster: Cluster, sleepable: Container[str], now: float, restarting: Container[str]
    ) -> None:
        self._cluster = cluster
        self._restarting = restarting
        self._sleepable = sleepable
        self._now = now
        self._node = {device.uuid: device.node for device in cluster.devices}
        self._claimants = claimants(cluster)
        self._claimed = claimed_milli(cluster, self._claimants | immovable(cluster))
        self._closed: dict[Size, frozenset[str]] = {}
        self._times: list[float] = []
        owners = [x for x in cluster.leases if x.id in self._claimants and self._is_returning(x)]
        self._owners = [x for x in owners if not pools.is_in_pool(x, cluster.devices)]
        self._pooled = pools.returns(cluster, self._claimants, owners)

    def run(self) -> Demands:
        yielding, idling = self._yielding(), self._idling()
        found: dict[str, Demand] = {}
        for lease in self._jobs():
            seat_class = SeatClass.YIELD if lease.id in yielding else SeatClass.TRAIN
            found[lease.id] = self._demand(lease, seat_class)
        for lease in self._sessions():
            if lease.id in yielding:
                seat_class = SeatClass.YIELD
            elif lease.id in idling:
                seat_class = SeatClass.IDLE
            elif lease.id not in self._claimants:
                seat_class = SeatClass.BORROWED
            else:
                seat_class = SeatClass.RETURN if lease.state is State.SUSPENDED else SeatClass.SESSION
            found[lease.id] = self._demand(lease, seat_class)
        return Demands(found, min((at for at in self._times if at > self._now), default=None))

    def _demand(self, lease: Lease, seat_class: SeatClass) -> Demand:
        return Demand(
            lease=lease.id,
            project=lease.project,
            seat_class=seat_class,
            size=lease.size,
            level=level(lease, self._cluster, self._now) if lease.kind is Kind.TRAIN else 0,
            node=self._node.get(lease.devices[0], "") if lease.devices else "",
            not_nodes=() if lease.devices else self._not_nodes(lease, seat_class),
        )

    def _not_nodes(self, lease: Lease, seat_class: SeatClass) -> tuple[str, ...]:
        """Return the nodes that a new seat may not be placed on, sorted."""
        self._times += [until for _, until in lease.avoids]
        if lease.size not in self._closed:
            self._closed[lease.size] = closed_pools(self._cluster, lease.size)
        excluded = self._closed[lease.size] | frozenset(avoided_nodes(lease, self._now))
        if seat_class is SeatClass.SESSION:
            excluded |= frozenset(full_nodes(self._cluster, lease.size, self._claimed))
        elif seat_class is SeatClass.BORROWED:
            never = {d.node for d in self._cluster.devices if d.units and not d.suspendable}
            excluded |= never.intersection(full_nodes(self._cluster, lease.size, self._claimed))
        return tuple(sorted(excluded))

    def _sessions(self) -> Iterator[Lease]:
        for lease in self._cluster.leases:
            if lease.kind is not Kind.BUILD or lease.cancelled or lease.id in self._pooled.excluded:
                continue
            if lease.state in (State.PENDING, *_ALIVE) or self._is_returning(lease):
                yield lease

    def _is_returning(self, lease: Lease) -> bool:
        if lease.kind is not Kind.BUILD or lease.state is not State.SUSPENDED or not lease.wanted:
            return False
        self._times.append(lease.retry_at)
        return lease.retry_at <= self._now

    def _jobs(self) -> Iterator[Lease]:
        """Yield the jobs that need a seat; jobs that do not borrow need one only within quota."""
        cluster, settings = self._cluster, self._cluster.settings
        quota_left = {p.name: p.quota_milli // 10 for p in cluster.projects}
        for lease in cluster.leases:
            if lease.id in self._claimants:
                quota_left[lease.project] -= counted_centi(lease.size, cluster.devices)
        excluded = self._pooled.excluded
        jobs = [
            x for x in cluster.leases if x.kind is Kind.TRAIN and not x.cancelled and x.id not in excluded
        ]
        waiting = sorted(
            (x for x in jobs if x.state is State.PENDING), key=lambda x: rank(x, self._now, settings)
        )
        for lease in (*(x for x in jobs if self._has_or_had_capacity(x)), *waiting):
            if lease.state in (State.PENDING, *_PARKED):
                self._times.append(lease.retry_at)
                if lease.retry_at > self._now:
                    continue
            if not lease.borrow:
                counted = counted_centi(lease.size, cluster.devices)
                if lease.state is State.PENDING and counted > quota_left.get(lease.project, 0):
                    continue
                quota_left[lease.project] = quota_left.get(lease.project, 0) - counted
            at = _LAS.leaves_at(lease, self._now, settings) if order_of(settings).preempts else None
            if at is not None:
                self._times.append(at)
            yield lease

    def _has_or_had_capacity(self, job: Lease) -> bool:
        is_restarting = job.state is State.STOPPING and job.id in self._restarting
        return is_restarting or job.state in (*_ALIVE, *_PARKED)

    def _yielding(self) -> frozenset[str]:
        """Return the leases without a guarantee that hold capacity that a returning owner needs."""
        cluster, claiming = self._cluster, self._claimants
        found = (guest.id for owner in self._owners for guest in guests(owner, cluster, claiming))
        return self._pooled.displaced.union(found)

    def _idling(self) -> frozenset[str]:
        """Return the sessions that may be suspended now, the earliest due first, as host memory permits."""
        saved: dict[str, int] = {}
        for lease in self._cluster.leases:
            if lease.state in _PARKED and lease.devices:
                node = self._node.get(lease.devices[0], "")
                saved[node] = saved.get(node, 0) + max(lease.saved_bytes, lease.used_bytes)
        due: list[tuple[float, str, Lease]] = []
        for lease in self._cluster.leases:
            at = idle.eligible_at(lease, self._cluster.settings)
            if at is not None and lease.devices and return_is_certain(lease, self._cluster.devices):
                self._times.append(at)
                if at <= self._now:
                    due.append((at, lease.id, lease))
        found: set[str] = set()
        for _, _, lease in sorted(due):
            node = self._node[lease.devices[0]]
            needed = saved.get(node, 0) + lease.used_bytes
            if node in self._sleepable and needed <= self._cluster.settings.host_budget_bytes:
                saved[node] = needed
                found.add(lease.id)
        return frozenset(found)
