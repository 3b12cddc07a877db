"""The order in which jobs are listed: started, requeued, queued with the next to start first, ended."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.views.cluster_view import ClusterViewCache
from jupyter_gpushare.core.model import State


def listed(
    jobs: Iterable[JobRecord], registry: Registry, cluster_views: ClusterViewCache, limit: int
) -> list[JobRecord]:
    """Return at most ``limit`` of these jobs in their order.

    A fifth of ``limit`` is reserved for ended jobs, so that their owners see the results.
    """
    active, ended = ordered(jobs, registry, cluster_views)
    shown = active[: limit - min(len(ended), limit // 5)]
    return [*shown, *ended[: limit - len(shown)]]


def ordered(
    jobs: Iterable[JobRecord], registry: Registry, cluster_views: ClusterViewCache
) -> tuple[list[JobRecord], list[JobRecord]]:
    """Return all of these jobs in their order: those that have not ended, and the ended ones."""
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
