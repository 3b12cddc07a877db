"""Notices: an owner is told before an idle session's devices are lent.

A session within its guarantee lends its devices, to a waiting job or to a project's quota,
``Settings.notice_s`` after its owner was told, and at most a third of its idle timeout after.
Owners are warned while a lease waits, from `idle.warn_at` on until lending turned out to
help no lease; a session that becomes eligible under such a warning needs no further notice.
One that has been eligible for longer is told when the plan first needs it.

A returning owner never waits for a notice, and a session that its owner offered, or that has
no guarantee, needs none.  Everything else that is done for the same waiting lease is held
back as well: capacity is reclaimed all at once or not at all.
"""

from __future__ import annotations

from dataclasses import replace

from jupyter_gpushare.core import idle
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import Grant, Kind, Lease, Notice, Plan, Resume, Suspend, Why

# An eligible session that is not lent for so long is of no use to any waiting lease: its owner is not warned.
OVERDUE_S = 5.0


class Notices:
    """Holds back what owners have to be told first; keeps the notices given as long as plans need them."""

    def __init__(self) -> None:
        self._given: dict[str, Notice] = {}

    def hold_back(self, plan: Plan, state: ClusterState, now: float) -> Plan:
        """Return what may be done of ``plan`` at ``now``, with the notices for the rest."""
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
        until_at = _told_at(lease, waiting, state, now) + notice_s if given is None else given.until_at
        return Notice(lease.id, waiting.id, until_at)


def _told_at(lease: Lease, waiting: Lease, state: ClusterState, now: float) -> float:
    """Return since when the owner is warned of what is planned for ``waiting``; ``now``: not before."""
    eligible_at, warn_at = idle.eligible_at(lease, state.settings), idle.warn_at(lease, state.settings)
    if eligible_at is None or warn_at is None or now > eligible_at + OVERDUE_S:
        return now
    return min(now, max(warn_at, waiting.waits_since_at))
