"""Decide whether a running session may become larger or smaller on its device.

* A session gives up a part of its device at any time.
* It gets more only where that is free now: nothing is reclaimed for it, and sessions that
  wait for their start or for their own device come first.
* A session with a claim keeps it, if quota and device have a claim left for the new size.
  With more it becomes borrowed: it may sleep when others need the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.model import Cluster, Kind, Lease, State, Why, held_by
from jupyter_gpushare.core.planning.planner import dry_run
from jupyter_gpushare.core.quota import Account
from jupyter_gpushare.core.size import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSize:
    """The new part of its device that a session may have; ``borrowed``: it may be reclaimed then."""

    held_milli: int
    borrowed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NotResized:
    """Why a session gets no more, and the most that it could have, in thousandths of its device."""

    why: Why
    most_milli: int


def resized(cluster: Cluster, lease: Lease, size: Size, now: float) -> NewSize | NotResized:
    """Return what a running session of ``cluster``, on one device, would hold with ``size``."""
    # Waiting jobs take nothing from a session.
    others = tuple(x for x in cluster.leases if x.kind is Kind.BUILD or x.state is not State.PENDING)
    state = dry_run(replace(cluster, leases=others), now).run_sessions().state
    held, account, has_claim = held_by(lease), state.account(lease), state.has_claim(lease)
    capacity = state.capacities.get(lease.devices[0])
    if capacity is None:
        return NotResized(why=Why.DEVICE_BROKEN, most_milli=held)
    wanted = capacity.device.demand_milli(size)
    more = wanted - held
    if more <= 0:
        return NewSize(held_milli=wanted, borrowed=lease.borrowed)
    guaranteed = _guaranteed_more(capacity, account) if has_claim else 0
    most = max(guaranteed, _borrowed_more(capacity))
    if more > most:
        if capacity.device.draining:
            return NotResized(why=Why.DRAINING, most_milli=held)
        return NotResized(why=Why.NO_CAPACITY, most_milli=held + max(0, _allowed(account, most)))
    if account.over_limit(more):
        return NotResized(why=Why.PROJECT_LIMIT, most_milli=held + max(0, _allowed(account, most)))
    return NewSize(held_milli=wanted, borrowed=not has_claim or more > guaranteed)


def _guaranteed_more(capacity: DeviceCapacity, account: Account) -> int:
    """What a session with a claim can still be guaranteed of its device, and get at once."""
    if not capacity.device.usable:
        return 0
    return min(capacity.claimable(), capacity.now(), account.claimable - account.claimed)


def _borrowed_more(capacity: DeviceCapacity) -> int:
    """What a session can get of its device at once and give back."""
    return capacity.unclaimed() if capacity.device.usable and capacity.device.suspendable else 0


def _allowed(account: Account, most: int) -> int:
    """``most``, as far as the limit of its project allows."""
    return most - account.over_limit(most)
