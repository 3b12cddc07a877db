"""The cluster at one time: one snapshot and one outlook, shared by all requests within a second."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import inf

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.engine.contract import Engine
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.usage import lent_milli
from jupyter_gpushare.core.model import Cluster, Lease, State, Why
from jupyter_gpushare.core.size import Size

# Maximum age of a view.
_FRESH_S = 1.0
# A view that takes longer to build is not rebuilt for each submitted job.
_COSTLY_S = 0.002
# Reasons to wait that free capacity does not remove.
_INDEPENDENT_OF_CAPACITY = frozenset({Why.TOO_LARGE, Why.PROJECT_LIMIT, Why.QUOTA, Why.BACKING_OFF})
# A smaller size is searched only for this number of jobs at the head of the queue.
_QUEUE_HEAD = 10


class ClusterView:
    """A snapshot with its outlook; each value is computed at most once."""

    def __init__(self, registry: Registry, engine: Engine) -> None:
        began = time.perf_counter()
        self._registry = registry
        self.seq = registry.notifications.seq
        self.at = registry.clock()
        self.cluster: Cluster = snapshot.cluster(registry, engine, self.at)
        self.outlook = engine.outlook(self.cluster, self.at)
        self._smaller: dict[str, Size | None] = {}
        self.took_s = time.perf_counter() - began

    @cached_property
    def waiting(self) -> int:
        """The number of jobs that wait for capacity."""
        return sum(
            1
            for r in self._registry.leases.values()
            if r.is_job
            and r.state in (State.PENDING, State.SUSPENDED)
            and self.outlook.why.get(r.id) not in _INDEPENDENT_OF_CAPACITY
        )

    @cached_property
    def lent_milli(self) -> Mapping[str, float]:
        """Capacity that suspended sessions lend, by project, in thousandths of a GPU."""
        bound: dict[str, list[Lease]] = {}
        for lease in self.cluster.leases:
            for device in lease.devices:
                bound.setdefault(device, []).append(lease)
        found: dict[str, float] = {}
        project = {lease.id: lease.project for lease in self.cluster.leases}
        for leases in bound.values():
            for lender, milli in lent_milli(leases).items():
                found[project[lender]] = found.get(project[lender], 0.0) + milli
        return found

    @cached_property
    def _owed(self) -> tuple[str, ...]:
        """The projects that use less than their quota."""
        return tuple(
            p.name
            for p in self.cluster.projects
            if p.quota_milli
            > self.outlook.usage[p.name].in_use_milli - self.outlook.usage[p.name].borrowed_milli
        )

    def owners(self, lease_id: str) -> set[str]:
        """Return the projects that may reclaim the capacity that a lease borrows."""
        project = {lease.id: lease.project for lease in self.cluster.leases}
        lenders = {project[x] for x, users in self.outlook.lent.items() if lease_id in users}
        return lenders or {name for name in self._owed if name != project[lease_id]}

    def smaller(self, lease_id: str) -> Size | None:
        """Return the largest smaller size with which a job at the head of the queue would start now."""
        record = self._registry.leases.get(lease_id)
        if record is None or not 1 <= self.outlook.position.get(lease_id, 0) <= _QUEUE_HEAD:
            return None
        if lease_id not in self._smaller:
            self._smaller[lease_id] = self.outlook.smaller(record.lease)
        return self._smaller[lease_id]


class ClusterViewCache:
    """Keeps the last view until the registry changes or `_FRESH_S` has passed."""

    def __init__(self, registry: Registry, engine: Engine) -> None:
        self._registry = registry
        self._engine = engine
        self._last: ClusterView | None = None

    def now(self) -> ClusterView:
        """Return a view that is at most `_FRESH_S` old and includes all changes."""
        last = self._last
        if (
            last is None
            or last.seq != self._registry.notifications.seq
            or self._registry.clock() - last.at > _FRESH_S
        ):
            self._last = last = ClusterView(self._registry, self._engine)
        return last

    def recent(self) -> ClusterView:
        """Return a view that may miss changes of the last `_FRESH_S` if a new one is costly."""
        last = self._last
        if last is None or last.took_s <= _COSTLY_S or self._registry.clock() - last.at > _FRESH_S:
            return self.now()
        return last


# ---- the order of lists of jobs: started, requeued, queued with the next to start first, ended


def listed(
    jobs: Iterable[JobRecord], registry: Registry, cluster_views: ClusterViewCache, limit: int
) -> list[JobRecord]:
    """Return at most ``limit`` of these jobs in their order.

    Ended jobs have a fifth of ``limit``, so that their owners see the results.
    """
    active, ended = ordered(jobs, registry, cluster_views)
    shown = active[: limit - min(len(ended), limit // 5)]
    return [*shown, *ended[: limit - len(shown)]]


def ordered(
    jobs: Iterable[JobRecord], registry: Registry, cluster_views: ClusterViewCache
) -> tuple[list[JobRecord], list[JobRecord]]:
    """Return all of these jobs in their order: first those that have not ended, then the ended ones."""
    oldest = sorted(jobs, key=lambda job: job.submitted_at)
    ended = sorted((j for j in oldest if j.result), key=lambda j: j.ended_at or "", reverse=True)
    started: list[JobRecord] = []
    queued: list[JobRecord] = []
    for job in (job for job in oldest if not job.result):
        record = registry.leases.get(job.lease_id)
        is_queued = record is not None and record.state is State.PENDING
        (queued if is_queued else started).append(job)
    if queued:
        position = cluster_views.now().outlook.position
        queued.sort(
            key=lambda job: (registry.leases[job.lease_id].attempt == 0, position.get(job.lease_id, inf))
        )
    return [*reversed(started), *queued], ended
