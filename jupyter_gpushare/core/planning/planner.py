"""Plan actions: a snapshot in, a list of actions out.

The broker calls `plan` with real leases, the simulator with a trace.  Both call it
again after every change or failure, so it never assumes that an earlier action took
place.  It reads states, not history, and counts capacity that is being released.

The rules are in `scheduler`, the choice of devices in `placer`.  A `Planner` receives
only the changes, so the cost of a round depends on the changes, not on the number of
leases.  An `IncrementalPlanner` compares snapshots itself; `plan` makes a planner for
one round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import Behind, Cluster, Device, Lease, Plan, Project, Settings, State
from jupyter_gpushare.core.notice import Notices
from jupyter_gpushare.core.placer import Placer
from jupyter_gpushare.core.planning.scheduler import SchedulingRound
from jupyter_gpushare.core.planning.sharing import share_devices
from jupyter_gpushare.core.queues import JobQueues


def plan(cluster: Cluster, now: float) -> Plan:
    """Return the actions for now, most important first, and the time of the next plan.

    Actions take only capacity that is free at ``now``.  Capacity that is being released
    is reserved for the lease that it was reclaimed for; a later call grants it.
    """
    return Planner.of(cluster).plan(now)


class Planner:
    """Plans each round for the leases of `put`, as `plan` would."""

    def __init__(self, devices: Iterable[Device], projects: Iterable[Project], settings: Settings) -> None:
        self.state = ClusterState(devices, projects, settings)
        self.queues = JobQueues(settings)
        self.placer = Placer(self.state)
        self.lags_gpu_s: Mapping[str, float] = {}  # by project (`fairshare`)
        self.behind: Mapping[tuple[str, str], Behind] = {}  # by project and user (`fairshare`)
        self.parted: frozenset[tuple[str, str]] = frozenset()  # `Cluster.parted`
        self.notices = Notices()
        self._changed: dict[str, Lease] = {}

    @classmethod
    def of(cls, cluster: Cluster) -> Planner:
        """Return a planner for the leases of ``cluster``."""
        planner = cls(cluster.devices, cluster.projects, cluster.settings)
        for lease in cluster.leases:
            planner.put(lease)
        planner.lags_gpu_s, planner.behind = cluster.lags_gpu_s, cluster.behind
        planner.parted = cluster.parted
        return planner

    def put(self, lease: Lease) -> None:
        """Add a lease, or replace it after a change."""
        self.state.put(lease)
        is_moving = lease.state is State.SUSPENDING and lease.made_way_for == lease.id
        if lease.host and lease.state is not State.RUNNING and not is_moving:
            self.queues.drop(lease.id)  # a guest that starts or leaves waits for nothing
            self._changed.pop(lease.id, None)
        else:
            self._changed[lease.id] = self.state.leases[lease.id]

    def drop(self, id: str) -> None:
        """Remove a lease that has ended."""
        self.state.drop(id)
        self.queues.drop(id)
        self._changed.pop(id, None)

    def plan(self, now: float) -> Plan:
        """Return the actions for ``now``, which must not go back."""
        done = self.begin(now).run()
        share_devices(done, self.parted)
        self.state.undo()
        return self.notices.hold_back(Plan(tuple(done.actions), done.next_at), self.state, now)

    def begin(self, now: float, *, explain_all: bool = False) -> SchedulingRound:
        """Return a round at ``now`` that has not run; with ``explain_all``, it finds every job's reason."""
        self.state.settle(now)
        self.queues.set_behind(self.behind, now)
        for lease in self._changed.values():
            self.queues.put(lease, now)
        self._changed.clear()
        self.queues.refile_due(now)
        self.queues.prefer(self.placer.could_run, now)
        self.state.begin()
        return SchedulingRound(
            self.state, self.queues, self.placer, self.lags_gpu_s, now, explain_all=explain_all
        )


class IncrementalPlanner:
    """Plans each snapshot as `plan` would, at the cost of the differences from the previous one."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._built_from: tuple[object, ...] = ()
        self._notices = Notices()

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return the result of `plan`; ``now`` must not go back."""
        planner = self._updated(cluster)
        # After an error in the middle of a round, the next call makes a new planner.
        self._planner = None
        planned = planner.plan(now)
        self._planner = planner
        return planned

    def _updated(self, cluster: Cluster) -> Planner:
        built_from = cluster.devices, cluster.projects, cluster.settings
        planner = self._planner
        if planner is None or built_from != self._built_from:
            planner = Planner.of(cluster)
            planner.notices, self._built_from = self._notices, built_from
            return planner
        known = planner.state.leases
        for id in known.keys() - {lease.id for lease in cluster.leases}:
            planner.drop(id)
        for lease in cluster.leases:
            before = planner.state.guests.get(lease.id) or known.get(lease.id)
            if before is not lease and before != lease:
                planner.put(lease)
        planner.lags_gpu_s, planner.behind = cluster.lags_gpu_s, cluster.behind
        planner.parted = cluster.parted
        return planner


def dry_run(cluster: Cluster, now: float) -> SchedulingRound:
    """Return a round that has not run; once it has, it knows the reason of every waiting job."""
    return Planner.of(cluster).begin(now, explain_all=True)
