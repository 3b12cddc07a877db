"""Actions of leases because of their seats, and the changes of seats.

==================================  ====================================================
lease and its seats                 action
==================================  ====================================================
waiting job, a placed seat          `Grant` of the devices of the seat
waiting job, a placed seat on a     none: `reconcile` deletes the seat
node that it avoids
running, no seat, or one that       `Suspend`; `Requeue` for a job that cannot be
leaves                              suspended and return
suspended job, or session that is   `Resume`
wanted, a placed seat on its own
devices
suspended, a placed seat on other   none: `reconcile` deletes the seat, and the lease
devices                             retries later (`Misplaced`)
==================================  ====================================================

For these rules a seat is placed once it is connected, because only then are its devices known.
In no other case is a lease granted, suspended or resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    Action,
    Cluster,
    Grant,
    Kind,
    Lease,
    Plan,
    Requeue,
    Resume,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.kube.rules.claims import claimants
from jupyter_gpushare.kube.rules.demand import avoided_nodes
from jupyter_gpushare.kube.rules.seats import (
    YIELD_LEAF,
    Demand,
    Seat,
    Seating,
    Terms,
    counted_centi,
    return_is_certain,
    terms,
)

Seats = Mapping[str, tuple[Seat, ...]]  # by lease


@dataclass(frozen=True, slots=True)
class Create:
    """Create a seat for a demand."""

    demand: Demand


@dataclass(frozen=True, slots=True)
class Retarget:
    """Change the terms of a seat, in one patch."""

    seat: str
    terms: Terms


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a seat that no lease needs."""

    seat: str


Change = Create | Retarget | Delete
# States of leases without a process that uses a device.
_MAY_GET_SEAT = (State.PENDING, State.SUSPENDED)


def live(seats: Seats, lease_id: str) -> Seat | None:
    """Return the waiting or placed seat of a lease, the newest if there are several, or None."""
    found = [s for s in seats.get(lease_id, ()) if s.seating in (Seating.WAITING, Seating.PLACED)]
    return max(found, key=lambda s: (s.since_at, s.name), default=None)


def evicted_for(seats: Seats, seat: Seat) -> tuple[Seat, ...]:
    """Return the seats that KAI is evicting for a seat, or for earlier seats that it replaces.

    Seats that are gone are left out, because their eviction is over.
    """
    names = {seat.name, *seat.instead_of}
    found = (s for mine in seats.values() for s in mine if s.evicted_for in names)
    return tuple(s for s in found if s.seating is not Seating.GONE)


def is_awaited(seats: Seats, seat: Seat) -> bool:
    """Return whether a seat waits for an eviction.

    If the seat were deleted, KAI would finish that eviction and evict again for the next seat.
    """
    return seat.seating is Seating.WAITING and bool(evicted_for(seats, seat))


def _connected(seats: Seats, lease_id: str) -> Seat | None:
    seat = live(seats, lease_id)
    return seat if seat is not None and seat.seating is Seating.PLACED and seat.devices else None


def misplaced_seat(lease: Lease, seats: Seats) -> Seat | None:
    """Return the seat of a suspended lease if it is not on the devices that its memory returns to."""
    seat = _connected(seats, lease.id) if lease.state is State.SUSPENDED else None
    return seat if seat is not None and set(seat.devices) != set(lease.devices) else None


def follow(cluster: Cluster, seats: Seats, now: float) -> Plan:
    """Return the actions of leases because of their seats.

    ``seats`` must hold every existing seat: a lease whose seat is missing has lost it.
    """
    due = {x.id: a for x in cluster.leases if (a := _action(x, cluster, seats, now)) is not None}
    retry_at = {x.id: x.retry_at for x in cluster.leases if x.id in due and x.retry_at > now}
    actions = [action for lease_id, action in due.items() if lease_id not in retry_at]
    order = {Resume: 0, Suspend: 1, Requeue: 1, Grant: 2}  # resumes come first
    return Plan(tuple(sorted(actions, key=lambda a: order[type(a)])), min(retry_at.values(), default=None))


def _action(lease: Lease, cluster: Cluster, seats: Seats, now: float) -> Action | None:
    has_seat, seat = live(seats, lease.id) is not None, _connected(seats, lease.id)
    match lease.state:
        case State.PENDING if seat is not None and lease.kind is Kind.TRAIN and not lease.cancelled:
            return None if seat.node in avoided_nodes(lease, now) else _grant(lease, seat, cluster)
        case State.GRANTED if not has_seat and lease.kind is Kind.TRAIN:
            return Requeue(lease.id, Why.OVER_QUOTA, "")
        case State.RUNNING if not has_seat:
            return _evicted(lease, cluster)
        case State.SUSPENDED if seat is not None and set(seat.devices) == set(lease.devices):
            if lease.kind is Kind.BUILD and not lease.wanted:
                return None  # it gives its seat back
            return Resume(lease.id, Why.WANTED if lease.wanted else Why.CAPACITY_BACK)
        case _:
            return None


def _evicted(lease: Lease, cluster: Cluster) -> Action:
    if lease.kind is Kind.BUILD:
        return Suspend(lease.id, Why.OVER_QUOTA, "")
    stays = lease.survival.suspends and lease.suspendable
    if stays and return_is_certain(lease, cluster.devices):
        return Suspend(lease.id, Why.OVER_QUOTA, "")
    return Requeue(lease.id, Why.OVER_QUOTA, "")


def _grant(lease: Lease, seat: Seat, cluster: Cluster) -> Grant | None:
    known = {device.uuid: device for device in cluster.devices}
    if any(uuid not in known for uuid in seat.devices):
        return None  # the inventory is older than the seat
    held = max(known[uuid].demand_milli(lease.size) for uuid in seat.devices)
    return Grant(lease.id, seat.devices, held, Why.FREE_CAPACITY, borrowed=_is_over_quota(lease, cluster))


def _is_over_quota(lease: Lease, cluster: Cluster) -> bool:
    claiming = claimants(cluster)
    counted = sum(
        counted_centi(x.size, cluster.devices)
        for x in cluster.leases
        if x.project == lease.project and (x.id in claiming or x.id == lease.id or x.state in HOLDS_CAPACITY)
    )
    return counted > next((p.quota_milli // 10 for p in cluster.projects if p.name == lease.project), 0)


def reconcile(cluster: Cluster, needed: Mapping[str, Demand], seats: Seats) -> list[Change]:
    """Return the changes that turn the seats into the needed ones, the most urgent first.

    A yielding seat is patched before the return seat that it yields to is created, and returns come before
    all other new seats.  A running lease that lost its seat gets a new one only after its suspension or
    requeue, because its memory must leave the device before the device is granted again.  A return seat on
    other devices is always deleted, and so is the seat of a waiting job on a node that the job may not use.
    A seat for which KAI evicts stays until the eviction is over (`is_awaited`).
    """
    may_get_seat = {x.id for x in cluster.leases if x.state in _MAY_GET_SEAT}
    misplaced = {x.id for x in cluster.leases if misplaced_seat(x, seats) is not None}
    misplaced |= {x.id for x in cluster.leases if _is_elsewhere(x, needed.get(x.id), live(seats, x.id))}
    changes: list[Change] = []
    for lease_id, mine in seats.items():
        keep = live(seats, lease_id) if lease_id in needed and lease_id not in misplaced else None
        unneeded = [s for s in mine if s is not keep and s.seating is not Seating.LEAVING]
        changes += [Delete(s.name) for s in unneeded if not is_awaited(seats, s)]
        if keep is not None and keep.terms != (wanted := terms(needed[lease_id])):
            changes.append(Retarget(keep.name, wanted))
    changes += [
        Create(d) for d in needed.values() if d.lease in may_get_seat and live(seats, d.lease) is None
    ]
    return sorted(changes, key=_urgency)


def _is_elsewhere(lease: Lease, demand: Demand | None, seat: Seat | None) -> bool:
    """Return whether a waiting job's seat is on a node that the job excludes, or excludes others than it."""
    if lease.state is not State.PENDING or lease.kind is not Kind.TRAIN or demand is None or seat is None:
        return False
    if seat.seating is Seating.PLACED:
        return seat.node in demand.not_nodes
    return not set(seat.not_nodes) <= set(demand.not_nodes)


def _urgency(change: Change) -> int:
    match change:
        case Retarget():
            return 0 if change.terms.queue == YIELD_LEAF else 3
        case Create():
            return 1 if change.demand.node else 4
        case _:
            return 2


# ---- return seats that KAI placed on other devices than those of their lease -
# Device memory returns only to the devices that it came from.  On a node with several GPUs, KAI may
# place a return seat on another GPU, where it is useless and blocks other work.
# `follow.reconcile` deletes the seat, and the lease retries later, each time after twice the pause.

# Each retry holds a GPU of the node for some seconds.
FIRST_PAUSE_S = 30.0
MAX_PAUSE_S = 480.0


@dataclass(frozen=True, slots=True)
class Misplaced:
    """The last return seat of a lease that was placed on other devices."""

    seat: str
    pause_s: float
    retry_at: float  # before this time the lease gets no seat


def note_misplaced(
    cluster: Cluster, seats: Seats, known: Mapping[str, Misplaced], now: float
) -> dict[str, Misplaced]:
    """Return the misplaced seats by lease; ``known`` is the result of the last call.

    The entry of a lease is kept while the lease is suspended.
    """
    found: dict[str, Misplaced] = {}
    for lease in cluster.leases:
        seat, last = misplaced_seat(lease, seats), known.get(lease.id)
        if seat is not None and (last is None or last.seat != seat.name):
            pause_s = FIRST_PAUSE_S if last is None else min(2 * last.pause_s, MAX_PAUSE_S)
            last = Misplaced(seat.name, pause_s, now + pause_s)
        if last is not None and lease.state is State.SUSPENDED:
            found[lease.id] = last
    return found


def with_delays(cluster: Cluster, known: Mapping[str, Misplaced]) -> Cluster:
    """Return the cluster with leases that get no seat before the end of their pause."""
    if not known:
        return cluster
    leases = (
        replace(x, retry_at=max(x.retry_at, known[x.id].retry_at)) if x.id in known else x
        for x in cluster.leases
    )
    return replace(cluster, leases=tuple(leases))
