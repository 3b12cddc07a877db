"""Turn KAI-Scheduler's grants into actions of leases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from jupyter_gpushare.core.model import Cluster, Grant, Lease, Plan, Requeue, Resume, State
from jupyter_gpushare.kube.cluster.seats import STALE_S, KubeSeats
from jupyter_gpushare.kube.engine.outlook import KaiOutlook
from jupyter_gpushare.kube.rules.demand import Demands, demands
from jupyter_gpushare.kube.rules.follow import Misplaced, Seats, follow, note_misplaced, with_delays
from jupyter_gpushare.kube.rules.pool_seats import assigned
from jupyter_gpushare.kube.rules.pools import marked

log = logging.getLogger("gpushare.broker")


class Following:
    """Applies the rules to the seats of a cluster, and keeps their state from one round to the next.

    ``starting`` has the leases of starts in progress, with the time until which their seats are kept.
    ``placed`` has those of them that have units of a pool.
    """

    def __init__(
        self,
        seats: KubeSeats,
        sleepable: Callable[[], frozenset[str]],
        foreign: Callable[[], Mapping[str, str]],
    ) -> None:
        """``sleepable`` and ``foreign`` are as in `KaiEngine`."""
        self._seats = seats
        self._sleepable = sleepable
        self._foreign = foreign
        self.starting: dict[str, float] = {}
        self.placed: dict[str, Lease] = {}
        self._decided: Cluster | None = None  # the cluster after the last decision is carried out
        self._restarting: set[str] = set()  # jobs that a returning owner displaced; they keep their seats
        self._misplaced: Mapping[str, Misplaced] = {}  # return seats on other devices

    def decide(self, cluster: Cluster, now: float) -> Plan:
        """Return the actions of leases that are due now; none until the cluster is known."""
        if not self._seats.is_known:
            return Plan(())
        cluster = self.with_pools(cluster)
        assignment = assigned(cluster, self._seats.seats(), now, frozenset(self.placed))
        cluster = self._with_delays(cluster, assignment.seats, now)
        plan = follow(cluster, assignment.seats, now)
        followed = {action.lease for action in plan.actions}
        displaced = tuple(action for action in assignment.actions if action.lease not in followed)
        self._restarting.update(action.lease for action in displaced if isinstance(action, Requeue))
        plan = replace(plan, actions=(*displaced, *plan.actions))
        self._decided = _after(cluster, plan)
        times = [at for at in (plan.next_at, self.demands(cluster, now).next_at) if at is not None]
        return replace(plan, next_at=min(times, default=None))

    def needed(self, cluster: Cluster, now: float) -> tuple[Cluster, Demands, Seats]:
        """Return the cluster as the rules see it, the seats that its leases need, and the existing seats."""
        cluster = self.with_pools(cluster)
        seats = assigned(cluster, self._seats.seats(), now, frozenset(self.placed)).seats
        cluster = self._with_delays(cluster, seats, now)
        return cluster, self.demands(cluster, now), seats

    def outlook(self, cluster: Cluster, now: float) -> KaiOutlook:
        """Return the outlook on a snapshot."""
        seats = self._seats.seats() if self._seats.is_known else {}
        cluster = self.with_pools(cluster)
        seats = assigned(cluster, seats, now, frozenset(self.placed)).seats
        return KaiOutlook(cluster, seats, self.sleepable(), self._misplaced, now)

    def sleepable(self) -> frozenset[str]:
        """Return the nodes on which leases can be suspended; none while the API server does not answer."""
        return self._sleepable() if self._seats.age_s <= STALE_S else frozenset()

    def with_pools(self, cluster: Cluster) -> Cluster:
        """Return the cluster with its unit pools marked and the starts that have units in them added."""
        ids = {lease.id for lease in cluster.leases}
        starts = (lease for lease in self.placed.values() if lease.id not in ids)
        known = replace(cluster, leases=(*cluster.leases, *starts)) if self.placed else cluster
        return marked(known, self._seats.units, self._foreign())

    def demands(self, cluster: Cluster, now: float) -> Demands:
        """Return the seats that leases need."""
        return demands(cluster, self.sleepable(), now, self._restarting)

    def begin(self, lease_id: str, cluster: Cluster) -> None:
        """Keep the seats of a start; ``cluster`` is used until the first decision."""
        self._decided = self._decided or cluster
        self.starting[lease_id] = float("inf")

    def end(self, lease_id: str) -> None:
        """Forget a start."""
        self.starting.pop(lease_id, None)
        self.placed.pop(lease_id, None)

    def latest(self) -> Cluster:
        """Return the cluster as it will be after the last decision is carried out."""
        assert self._decided is not None
        return self.with_pools(self._decided)

    def forget(self, cluster: Cluster, now: float) -> None:
        """Forget starts that have expired or are in the snapshot now, and displaced jobs that stopped."""
        arrived = {lease.id for lease in cluster.leases}
        self.starting = {x: at for x, at in self.starting.items() if x not in arrived and now < at}
        self.placed = {x: lease for x, lease in self.placed.items() if x in self.starting}
        active = {x.id for x in cluster.leases if x.state in (State.GRANTED, State.RUNNING, State.STOPPING)}
        self._restarting &= active

    def _with_delays(self, cluster: Cluster, seats: Seats, now: float) -> Cluster:
        """Return the cluster in which leases with a misplaced return seat wait before the next request."""
        known = note_misplaced(cluster, seats, self._misplaced, now)
        for lease, seat in known.items():
            if seat != self._misplaced.get(lease):
                log.info("lease=%s seat on other devices asks_again_in_s=%.0f", lease, seat.pause_s)
        self._misplaced = known
        return with_delays(cluster, known)


def _after(cluster: Cluster, plan: Plan) -> Cluster:
    """Return the cluster after the grants and resumes of a plan."""
    actions = {action.lease: action for action in plan.actions}

    def moved(lease: Lease) -> Lease:
        match actions.get(lease.id):
            case Grant() as grant:
                return replace(
                    lease,
                    state=State.GRANTED,
                    devices=grant.devices,
                    held_milli=grant.held_milli,
                    borrowed=grant.borrowed,
                )
            case Resume():
                return replace(lease, state=State.RESUMING)
            case _:
                return lease

    return replace(cluster, leases=tuple(moved(lease) for lease in cluster.leases))
