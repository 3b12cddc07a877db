"""Samples of what computes and what is borrowed, for the sums of use.

What a project holds over its quota is divided among its leases that may be reclaimed, by
their sizes, so that the sums of its users are what the project borrows.
"""

from __future__ import annotations

from collections import defaultdict

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.engine import Engine
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.usage import held_gpus
from jupyter_gpushare.core.model import WHOLE_GPU, Cluster, State

# Between two samples.
SAMPLE_S = 5.0
# A longer time without a sample counts as this: what happened in it is not known.
_LONGEST_S = 60.0


class Metering:
    """Adds a sample to `Registry.usage` every `SAMPLE_S`."""

    def __init__(self, registry: Registry, engine: Engine) -> None:
        self._registry = registry
        self._engine = engine
        self._sampled_at = registry.clock()

    def sample(self, cluster: Cluster, now: float) -> None:
        """Count the time since the last sample, by what is true now; without a wait."""
        passed_s = min(_LONGEST_S, now - self._sampled_at)
        if passed_s < SAMPLE_S:
            return
        self._sampled_at = now
        registry = self._registry
        running = [r.lease for r in registry.index.placed.values() if r.state is State.RUNNING]
        if not running:
            return
        at_work, over = snapshot.at_work(registry, now), self._over_quota(cluster, now)
        until = registry.iso_now()
        for lease in running:
            held = held_gpus(lease)
            computing = held if lease.id in at_work else 0.0
            registry.usage.sample(lease, until, passed_s, computing, held * over.get(lease.id, 0.0))

    def _over_quota(self, cluster: Cluster, now: float) -> dict[str, float]:
        """Return which share of each lease that borrows is over its project's quota."""
        outlook = self._engine.outlook(cluster, now)
        may_be_reclaimed = [lease for lease in cluster.leases if outlook.borrowed.get(lease.id)]
        sizes: defaultdict[str, float] = defaultdict(float)
        for lease in may_be_reclaimed:
            sizes[lease.project] += held_gpus(lease)
        over: dict[str, float] = {}
        for lease in may_be_reclaimed:
            use = outlook.usage.get(lease.project)
            if use is not None and sizes[lease.project]:
                over[lease.id] = min(1.0, use.borrowed_milli / WHOLE_GPU / sizes[lease.project])
        return over
