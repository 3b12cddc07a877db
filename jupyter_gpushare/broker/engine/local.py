"""The engine of one machine: the planner of `core`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Generic, TypeVar

from jupyter_gpushare.broker.engine.contract import Engine, NewSize, NotResized
from jupyter_gpushare.broker.engine.outlook import Explanation, Offer, Outlook
from jupyter_gpushare.core import explain, resize
from jupyter_gpushare.core.model import Action, Cluster, Grant, Kind, Lease, Plan, Project, Why
from jupyter_gpushare.core.planning.planner import IncrementalPlanner, dry_run, plan
from jupyter_gpushare.core.planning.scheduler import SchedulingRound
from jupyter_gpushare.core.planning.sharing import share_devices
from jupyter_gpushare.core.size import Size

T = TypeVar("T")
# A plan or an outlook is kept at most this long, even if nothing has changed.
KEEP_S = 10.0


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection during planning, which creates no cycles; it took 10 % of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class LocalOutlook(Outlook):
    """Answers from one dry run of the scheduling round, made when the first answer needs it."""

    @cached_property
    def _round(self) -> SchedulingRound:
        done = dry_run(self._cluster, self._now).run()
        share_devices(done, self._cluster.parted)
        return done

    def holds(self, now: float) -> bool:
        """Return whether the answers hold at ``now``; a round that has not run yet will run for ``now``."""
        if "_round" not in self.__dict__:
            self._now = now
            return True
        return self._round.next_at is None or now < self._round.next_at

    @property
    def actions(self) -> Iterable[Action]:
        return self._round.actions

    @property
    def why(self) -> Mapping[str, Why]:
        return self._round.waiting

    @cached_property
    def position(self) -> Mapping[str, int]:
        jobs = {lease.id for lease in self._cluster.leases if lease.kind is Kind.TRAIN}
        queued = (x for x, why in self.why.items() if x in jobs and why is not Why.TOO_LARGE)
        return {lease: number for number, lease in enumerate(queued, 1)}

    @property
    def free_milli(self) -> int:
        return sum(max(0, device.now()) for device in self._round.state.usable)

    @cached_property
    def borrowed(self) -> Mapping[str, bool]:
        return explain.borrowed(self._cluster)

    @cached_property
    def lent(self) -> Mapping[str, tuple[str, ...]]:
        return explain.lent(self._cluster)

    @cached_property
    def claims_milli(self) -> Mapping[str, int]:
        return explain.claims(self._cluster)

    def smaller(self, lease: Lease) -> Size | None:
        return explain.smaller(self._round, lease)

    def offers(self, project: str, sizes: Iterable[Size]) -> tuple[Offer, ...]:
        return explain.offers(self._cluster, project, sizes, self._now)


class _Kept(Generic[T]):
    """The last answer, for the snapshot to which it applies."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._until = 0.0
        self._answer: T

    def get(self, cluster: Cluster, now: float) -> T | None:
        """Return the answer if it holds for ``cluster`` at ``now``, else None."""
        if self._cluster is None or now >= self._until:
            return None
        # Lags change all the time, so they are left out; `KEEP_S` bounds the effect.
        is_same = replace(cluster, lags_gpu_s=self._cluster.lags_gpu_s) == self._cluster
        return self._answer if is_same else None

    def keep(self, cluster: Cluster, until: float, answer: T) -> T:
        self._cluster, self._until, self._answer = cluster, until, answer
        return answer


class LocalEngine(Engine):
    """Decides with `core.planning.planner`, which keeps its index of leases between decisions.

    While the snapshot stays the same, its outlook is kept, and its plan if that has no actions.
    """

    drains = True
    queues_sessions = True
    resizes = True

    def __init__(self) -> None:
        self._planner = IncrementalPlanner()
        self._plan = _Kept[Plan]()
        self._outlook = _Kept[LocalOutlook]()

    def decide(self, cluster: Cluster, now: float) -> Plan:
        if (kept := self._plan.get(cluster, now)) is not None:
            return kept
        with gc_paused():
            planned = self._planner.plan(cluster, now)
        until = now + KEEP_S if planned.next_at is None else min(planned.next_at, now + KEEP_S)
        return planned if planned.actions else self._plan.keep(cluster, until, planned)

    async def admit(
        self,
        cluster: Cluster,
        lease: Lease,
        now: float,
        *,
        not_nodes: Iterable[str] = (),
        within_s: float = inf,
    ) -> Grant | Explanation:
        considered = replace(cluster, leases=(*cluster.leases, lease))
        for action in plan(considered, now).actions:
            if isinstance(action, Grant) and action.lease == lease.id:
                return action
        return self.outlook(considered, now).explain(lease.id)

    def resize(self, cluster: Cluster, lease: Lease, size: Size, now: float) -> NewSize | NotResized:
        return resize.resized(cluster, lease, size, now)

    def check_request(self, cluster: Cluster, lease: Lease) -> None:
        explain.check_request(cluster, lease)

    def outlook(self, cluster: Cluster, now: float) -> Outlook:
        known = self._outlook.get(cluster, now)
        if known is not None and known.holds(now):
            return known
        return self._outlook.keep(cluster, now + KEEP_S, LocalOutlook(cluster, now))

    def projects(self, configured: tuple[Project, ...]) -> tuple[Project, ...]:
        return configured

    def set_project(self, project: Project) -> None:
        """Accept any numbers, because each decision takes them from its snapshot."""
