"""Decide whether a running session may become larger or smaller on its device.

* A session may give up a part of its device at any time.
* It gets more only if that is free now.  Nothing is reclaimed for it, and sessions that wait
  for their start or for their own device come first.
* A session with a claim keeps it if quota and device can guarantee the new size.  A larger
  session becomes borrowed: it may sleep when others need the device.
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
    """The new part of its device that a session may have; ``borrowed``: it may be reclaimed."""

    held_milli: int
    borrowed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NotResized:
    """Why a session gets no more, and the maximum that it could have, in thousandths of its device."""

    why: Why
    max_milli: int


def resized(cluster: Cluster, lease: Lease, size: Size, now: float) -> NewSize | NotResized:
    """Return the part of its one device that a running session may have with ``size``, or why it may not."""
    # Waiting jobs do not reduce what a session gets.
    others = tuple(x for x in cluster.leases if x.kind is Kind.BUILD or x.state is not State.PENDING)
    state = dry_run(replace(cluster, leases=others), now).run_sessions().state
    held, account, has_claim = held_by(lease), state.account(lease), state.has_claim(lease)
    capacity = state.capacities.get(lease.devices[0])
    if capacity is None:
        return NotResized(why=Why.DEVICE_BROKEN, max_milli=held)
    wanted = capacity.device.demand_milli(size)
    more = wanted - held
    if more <= 0:
        return NewSize(held_milli=wanted, borrowed=lease.borrowed)
    guaranteed = _guaranteed_more(capacity, account) if has_claim else 0
    max_more = max(guaranteed, _borrowed_more(capacity))
    if more > max_more:
        if capacity.device.draining:
            return NotResized(why=Why.DRAINING, max_milli=held)
        return NotResized(why=Why.NO_CAPACITY, max_milli=held + max(0, _allowed(account, max_more)))
    if account.over_limit(more):
        return NotResized(why=Why.PROJECT_LIMIT, max_milli=held + max(0, _allowed(account, max_more)))
    return NewSize(held_milli=wanted, borrowed=not has_claim or more > guaranteed)


def _guaranteed_more(capacity: DeviceCapacity, account: Account) -> int:
    """Return how much more of its device can be guaranteed to a session with a claim and granted at once."""
    if not capacity.device.usable:
        return 0
    return min(capacity.claimable(), capacity.now(), account.claimable - account.claimed)


def _borrowed_more(capacity: DeviceCapacity) -> int:
    """Return how much more of its device a session can get at once and give back."""
    return capacity.unclaimed() if capacity.device.usable and capacity.device.suspendable else 0


def _allowed(account: Account, more: int) -> int:
    """Return the part of ``more`` that the limit of the project allows."""
    return more - account.over_limit(more)
