"""The engine of a Kubernetes cluster: KAI-Scheduler decides, and this engine follows the seats it grants.

`kube.rules` has the rules.  `following` applies them, `changing` and `starting` carry them out, and
`outlook` explains the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf

from jupyter_gpushare.broker.engine.contract import Engine, StartProgress
from jupyter_gpushare.broker.engine.outlook import Explanation, Outlook
from jupyter_gpushare.core import explain
from jupyter_gpushare.core.model import Cluster, Grant, Lease, Plan, Project, Suspend
from jupyter_gpushare.core.planning.planner import dry_run
from jupyter_gpushare.errors import Conflict, InvalidRequest
from jupyter_gpushare.kube.cluster.queues import in_force, missing
from jupyter_gpushare.kube.cluster.seats import STALE_S, KubeSeats
from jupyter_gpushare.kube.engine.changing import Changing
from jupyter_gpushare.kube.engine.following import Following
from jupyter_gpushare.kube.engine.starting import Starting
from jupyter_gpushare.kube.rules.pools import obstacles, takes
from jupyter_gpushare.kube.rules.seats import check_project, request

PLACE_S = 8.0
SEAT_S = 90.0


class KaiEngine(Engine):
    """Follows the decisions of KAI-Scheduler.

    ``sleepable`` returns the nodes on which a helper can suspend leases now.
    """

    drains = False
    queues_sessions = False

    def __init__(
        self,
        seats: KubeSeats,
        sleepable: Callable[[], frozenset[str]],
        clock: Callable[[], float],
        *,
        place_s: float = PLACE_S,
        seat_s: float = SEAT_S,
        foreign: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """``foreign`` returns the pods of others that have GPUs, by node, as text for sentences."""
        self._seats = seats
        self._following = Following(seats, sleepable, foreign)
        self._changing = Changing(seats, self._following, clock)
        self.starting = Starting(seats, self._following, clock, place_s=place_s, seat_s=seat_s)
        self.start_s = place_s + seat_s
        self._configured: tuple[Project, ...] = ()

    async def run(self) -> None:
        """Follow the cluster and change seats until cancelled.

        Raises:
            Superseded: a newer broker is at work; the process must end for good.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._seats.run())
            group.create_task(self._changing.run())

    def decide(self, cluster: Cluster, now: float) -> Plan:
        return self._following.decide(cluster, now)

    async def settle(self, cluster: Cluster, now: float) -> None:
        self._changing.settle(cluster)

    async def admit(
        self,
        cluster: Cluster,
        lease: Lease,
        now: float,
        *,
        not_nodes: Iterable[str] = (),
        within_s: float = inf,
    ) -> Grant | Explanation:
        return await self.starting.admit(cluster, lease, now, not_nodes=not_nodes, within_s=within_s)

    def start_progress(self, lease_id: str) -> StartProgress | None:
        return self.starting.progress(lease_id)

    # ---- questions -----------------------------------------------------------

    def check_request(self, cluster: Cluster, lease: Lease) -> None:
        """Refuse a lease that KAI can never place.

        Raises:
            InvalidRequest: its project cannot be a queue, or no node takes its size.
        """
        check_project(lease.project)
        request(lease.size, cluster.devices)
        explain.check_request(cluster, lease)
        if not takes(self._following.with_pools(cluster), lease.size):
            raise InvalidRequest(
                "the GPUs here are given out in equal parts, and %1 is none", lease.size.text
            )

    def outlook(self, cluster: Cluster, now: float) -> Outlook:
        return self._following.outlook(cluster, now)

    def would_suspend(self, cluster: Cluster, now: float) -> tuple[Suspend, ...]:
        """Return what `core`'s planner would suspend for the jobs that KAI has not placed.

        KAI cannot answer this: it decides only about seats, and it never gets the seat of a session that
        is not lent.
        """
        placed = self.outlook(cluster, now).grants
        waiting = replace(cluster, leases=tuple(x for x in cluster.leases if x.id not in placed))
        planned = dry_run(self._following.with_pools(waiting), now).run().actions
        sleepable = self._following.sleepable()
        nodes = {device.uuid: device.node for device in cluster.devices}
        used = {x.id: {nodes.get(uuid) for uuid in x.devices} for x in cluster.leases}
        return tuple(a for a in planned if isinstance(a, Suspend) and used[a.lease] <= sleepable)

    def projects(self, configured: tuple[Project, ...]) -> tuple[Project, ...]:
        self._configured = configured
        return tuple(in_force(project, self._seats.queues) for project in configured)

    def set_project(self, project: Project) -> None:
        """Refuse the change.

        Raises:
            Conflict: always; the text names the Queue that has the numbers.
        """
        raise Conflict("the numbers of %1 are those of the cluster's Queue %1: change it there", project.name)

    def trouble(self) -> tuple[str, ...]:
        found = []
        if self._seats.age_s > STALE_S:
            found.append("The Kubernetes API server does not answer: nothing is lent until it does.")
        else:
            found += [
                f"The cluster has no queue {name}." for name in missing(self._configured, self._seats.queues)
            ]
            for project in self._configured:
                if in_force(project, self._seats.queues) != project:
                    found.append(f"The numbers of project {project.name} differ from those of its Queue.")
        if self._changing.cluster is not None:
            closed = obstacles(self._following.with_pools(self._changing.cluster))
            found += [f"Node {node} grants and lends nothing: {why}." for node, why in closed.items()]
        if self._changing.failure:
            found.append(f"Seats cannot be changed: {self._changing.failure}.")
        return tuple(found)
