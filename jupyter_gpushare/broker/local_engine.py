"""The engine of one machine: the planner of `core`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from jupyter_gpushare.broker.engine import Engine, Estimate, Explanation, Offer, Outlook, Use
from jupyter_gpushare.core import estimate, explain
from jupyter_gpushare.core.model import Cluster, Grant, Kind, Lease, Plan, Project, Suspend, Why
from jupyter_gpushare.core.planner import IncrementalPlanner, dry_run, plan
from jupyter_gpushare.core.size import Size


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection during planning, which creates no cycles; collections took 10 % of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class LocalOutlook(Outlook):
    """Answers from one dry run of the scheduling round that decides."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self._cluster = cluster
        self._now = now
        self._round = dry_run(cluster, now).run()
        jobs = {lease.id for lease in cluster.leases if lease.kind is Kind.TRAIN}
        self.why = self._round.waiting
        queued = (x for x, why in self.why.items() if x in jobs and why is not Why.TOO_LARGE)
        self.position = {lease: number for number, lease in enumerate(queued, 1)}
        self.grants = {action.lease: action for action in self._round.actions if isinstance(action, Grant)}
        self.suspends = tuple(action for action in self._round.actions if isinstance(action, Suspend))
        self.free_milli = sum(max(0, device.now) for device in self._round.state.usable)

    @cached_property
    def borrowed(self) -> Mapping[str, bool]:
        return explain.borrowed(self._cluster)

    @cached_property
    def lent(self) -> Mapping[str, tuple[str, ...]]:
        return explain.lent(self._cluster)

    @cached_property
    def claims_milli(self) -> Mapping[str, int]:
        return explain.claims(self._cluster)

    @cached_property
    def usage(self) -> Mapping[str, Use]:
        return {use.project: use for use in explain.uses(self._cluster)}

    def smaller(self, lease: Lease) -> Size | None:
        return explain.smaller(self._round, lease)

    def offers(self, project: str, sizes: Iterable[Size]) -> tuple[Offer, ...]:
        return explain.offers(self._cluster, project, sizes, self._now)


class LocalEngine(Engine):
    """Decides with `core.planner`; keeps its index of leases between decisions."""

    def __init__(self) -> None:
        self._planner = IncrementalPlanner()

    def decide(self, cluster: Cluster, now: float) -> Plan:
        with gc_paused():
            return self._planner.plan(cluster, now)

    async def admit(self, cluster: Cluster, lease: Lease, now: float) -> Grant | Explanation:
        considered = replace(cluster, leases=(*cluster.leases, lease))
        for action in plan(considered, now).actions:
            if isinstance(action, Grant) and action.lease == lease.id:
                return action
        return self.outlook(considered, now).explain(lease.id)

    def check_request(self, cluster: Cluster, lease: Lease) -> None:
        explain.check_request(cluster, lease)

    def outlook(self, cluster: Cluster, now: float) -> Outlook:
        return LocalOutlook(cluster, now)

    def estimates(self, cluster: Cluster, now: float, durations_s: Sequence[float]) -> Mapping[str, Estimate]:
        return estimate.estimates(cluster, now, durations_s)

    def projects(self, configured: tuple[Project, ...]) -> tuple[Project, ...]:
        return configured

    def set_project(self, project: Project) -> None:
        """Accept any numbers: each decision takes them from its snapshot."""
