"""Notices: an owner is notified before an idle session's devices are lent.

A session within its guarantee lends its devices to a waiting job or to a project's quota.
It does so ``Settings.notice_s`` after the notice, or a third of its idle timeout if that is
less.  While a lease waits, owners are warned from `idle.warn_at` until lending turns out to
help no lease.  A session that becomes eligible under such a warning needs no further notice.
The owner of a session that has been eligible for longer is notified when a plan first needs it.

A returning owner never waits for a notice.  A session that its owner offered, or that has no
guarantee, needs none.  All other actions for the same waiting lease are held back as well:
capacity is reclaimed all at once or not at all.
"""

from __future__ import annotations

from dataclasses import replace

from jupyter_gpushare.core import idle
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import Grant, Kind, Lease, Notice, Plan, Resume, Suspend, Why

# A session that is not lent this long after it became eligible helps no lease: its owner is not warned.
OVERDUE_S = 5.0


class Notices:
    """Holds back actions until owners were notified; keeps notices while plans need them."""

    def __init__(self) -> None:
        self._given: dict[str, Notice] = {}

    def hold_back(self, plan: Plan, state: ClusterState, now: float) -> Plan:
        """Return ``plan`` with the actions that are allowed at ``now``, and the notices for the others."""
        found = [self._notice(a, state, now) for a in plan.actions if isinstance(a, Suspend)]
        self._given = {notice.lease: notice for notice in found if notice is not None}
        notices = tuple(notice for notice in self._given.values() if notice.until_at > now)
        if not notices:
            return plan
        held = {notice.for_lease for notice in notices}
        actions = tuple(a for a in plan.actions if isinstance(a, Grant | Resume) or a.for_lease not in held)
        next_at = min(notice.until_at for notice in notices)
        if plan.next_at is not None:
            next_at = min(next_at, plan.next_at)
        return replace(plan, actions=actions, next_at=next_at, notices=notices)

    def _notice(self, action: Suspend, state: ClusterState, now: float) -> Notice | None:
        if action.why is not Why.IDLE:
            return None
        lease, waiting = state.leases[action.lease], state.leases[action.for_lease]
        if waiting.kind is Kind.BUILD or not state.has_claim(lease):
            return None
        notice_s = idle.notice_s(lease, state.settings)
        if not notice_s:
            return None
        given = self._given.get(lease.id)
        until_at = _notified_at(lease, waiting, state, now) + notice_s if given is None else given.until_at
        return Notice(lease.id, waiting.id, until_at)


def _notified_at(lease: Lease, waiting: Lease, state: ClusterState, now: float) -> float:
    """Return the time since which the owner is warned for ``waiting``; ``now`` if there was no warning."""
    eligible_at, warn_at = idle.eligible_at(lease, state.settings), idle.warn_at(lease, state.settings)
    if eligible_at is None or warn_at is None or now > eligible_at + OVERDUE_S:
        return now
    return min(now, max(warn_at, waiting.waits_since_at))
