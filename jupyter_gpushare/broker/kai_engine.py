"""The engine of a Kubernetes cluster: KAI-Scheduler decides, and this follows the seats that it grants.

`core.kube` says what follows; here it is asked, carried out and explained.  `KaiEngine.run` keeps the
copies of the cluster up to date and makes the seats those that leases need (`settle`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf

from jupyter_gpushare.backends.kubernetes.api_server import KubeError
from jupyter_gpushare.backends.kubernetes.queues import in_force, missing
from jupyter_gpushare.backends.kubernetes.seats import STALE_S, KubeSeats
from jupyter_gpushare.broker.engine.contract import Engine, StartProgress
from jupyter_gpushare.broker.engine.outlook import Explanation, Outlook
from jupyter_gpushare.broker.kai_outlook import KaiOutlook
from jupyter_gpushare.broker.kai_start import ROUND_S, Start
from jupyter_gpushare.core import explain
from jupyter_gpushare.core.kube.claims import claimants
from jupyter_gpushare.core.kube.demand import Demands, demands
from jupyter_gpushare.core.kube.follow import (
    Change,
    Create,
    Misplaced,
    Seats,
    delayed,
    follow,
    is_awaited,
    note_misplaced,
    reconcile,
)
from jupyter_gpushare.core.kube.pool_seats import assigned
from jupyter_gpushare.core.kube.pools import keeps, marked, obstacles, pools_of, takes
from jupyter_gpushare.core.kube.seats import Demand, Seat, SeatClass, Seating, check_project, request, terms
from jupyter_gpushare.core.model import (
    Cluster,
    Grant,
    Lease,
    Plan,
    Project,
    Requeue,
    Resume,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.planner import dry_run
from jupyter_gpushare.errors import Conflict, InvalidRequest

log = logging.getLogger("gpushare.broker")

PLACE_S = 8.0
SEAT_S = 90.0
# A refusal counts once it has stood for so long: KAI's sums of fractions are floats in random order, so
# that what fails in one cycle may succeed in the next.
STANDS_S = 2.0
# Names of seats given up that a seat remembers: of its last tries.
_TRIES = 8
# Between two tries to take over the seats of an older broker.
_TAKE_OVER_S = 1.0


class KaiEngine(Engine):
    """Decides what KAI-Scheduler decided.

    ``sleepable``: nodes on which a helper can suspend leases now.
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
        """``foreign``: pods with GPUs that are not ours, by node, as a sentence has them."""
        self._seats = seats
        self._nodes = sleepable
        self._foreign = foreign
        self._clock = clock
        self._place_s, self._seat_s, self._stands_s = place_s, seat_s, STANDS_S
        self.start_s = place_s + seat_s
        self._configured: tuple[Project, ...] = ()
        self._snapshot: tuple[Cluster, float] | None = None
        self._starting: dict[str, float] = {}  # leases of starts under way, and until when they are kept
        self._starts: dict[str, Start] = {}  # under way
        self._decided: Cluster | None = None  # as it will be once the last decision is carried out
        self._placed: dict[str, Lease] = {}  # starts under way that have units of a pool
        self._restarting: set[str] = set()  # jobs that a returning owner displaced; they keep their seats
        self._misplaced: Mapping[str, Misplaced] = {}  # return seats on other devices
        self._failure = ""
        self._failed: dict[str, float] = {}  # leases and seats with a failed change: not tried again before

    async def run(self) -> None:
        """Follow the cluster and settle what leases need until cancelled.

        Raises:
            Superseded: a newer broker is at work; the process must end for good.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._seats.run())
            group.create_task(self._settling())

    def _sleepable(self) -> frozenset[str]:
        return self._nodes() if self._seats.age_s <= STALE_S else frozenset()

    def decide(self, cluster: Cluster, now: float) -> Plan:
        if not self._seats.is_known:
            return Plan(())
        cluster = self._seen(cluster)
        found = assigned(cluster, self._seats.seats(), now, frozenset(self._placed))
        cluster = self._delayed(cluster, found.seats, now)
        plan = follow(cluster, found.seats, now)
        followed = {action.lease for action in plan.actions}
        displaced = tuple(action for action in found.actions if action.lease not in followed)
        self._restarting.update(action.lease for action in displaced if isinstance(action, Requeue))
        plan = replace(plan, actions=(*displaced, *plan.actions))
        self._decided = _after(cluster, plan)
        times = [at for at in (plan.next_at, self._demands(cluster, now).next_at) if at is not None]
        return replace(plan, next_at=min(times, default=None))

    def _seen(self, cluster: Cluster) -> Cluster:
        """Return the cluster with its unit pools, and with the starts that have units there."""
        there = {lease.id for lease in cluster.leases}
        starts = (lease for lease in self._placed.values() if lease.id not in there)
        known = replace(cluster, leases=(*cluster.leases, *starts)) if self._placed else cluster
        return marked(known, self._seats.units, self._foreign())

    def _demands(self, cluster: Cluster, now: float) -> Demands:
        return demands(cluster, self._sleepable(), now, self._restarting)

    def _delayed(self, cluster: Cluster, seats: Seats, now: float) -> Cluster:
        """Return the cluster in which leases with a misplaced return seat ask for another one later."""
        known = note_misplaced(cluster, seats, self._misplaced, now)
        for lease, found in known.items():
            if found != self._misplaced.get(lease):
                log.info("lease=%s seat on other devices asks_again_in_s=%.0f", lease, found.pause_s)
        self._misplaced = known
        return delayed(cluster, known)

    async def settle(self, cluster: Cluster, now: float) -> None:
        self._snapshot = cluster, now
        self._seats.notify()

    async def _settling(self) -> None:
        while True:
            change: Change | None = None
            try:
                change = await self._next_change()
                if change is None:
                    self._failure = self._failure if self._failed else ""
                    await self._seats.wait(ROUND_S)
                else:
                    assert self._snapshot is not None
                    await self._seats.apply(change, self._snapshot[0].devices)
            except (KubeError, InvalidRequest) as error:
                if str(error) != self._failure:
                    log.warning("seats: %s", error)
                self._failure = str(error)
                if change is None:  # no seat of an older broker may be changed before it is taken over
                    await asyncio.sleep(_TAKE_OVER_S)
                    continue
                self._failed[_key(change)] = self._clock() + ROUND_S
                await self._seats.wait(0.1)

    async def _next_change(self) -> Change | None:
        """Return the most urgent change; None: the seats are those that leases need, or a change waits.

        Raises:
            KubeError: seats of an older broker cannot be taken over.
        """
        if self._snapshot is None or self._seats.age_s > STALE_S:
            return None
        await self._seats.take_over()
        (cluster, _), now = self._snapshot, self._clock()
        arrived = {lease.id for lease in cluster.leases}
        self._starting = {x: at for x, at in self._starting.items() if x not in arrived and now < at}
        self._failed = {key: at for key, at in self._failed.items() if now < at}
        self._placed = {x: lease for x, lease in self._placed.items() if x in self._starting}
        stop = {x.id for x in cluster.leases if x.state in (State.GRANTED, State.RUNNING, State.STOPPING)}
        self._restarting &= stop
        cluster = self._seen(cluster)
        seats = assigned(cluster, self._seats.seats(), now, frozenset(self._placed)).seats
        cluster = self._delayed(cluster, seats, now)
        needed = self._demands(cluster, now).by_lease
        there = {lease: mine for lease, mine in seats.items() if lease not in self._starting}
        changes = reconcile(cluster, needed, there)
        return next((change for change in changes if _key(change) not in self._failed), None)

    # ---- a session starts ----------------------------------------------------

    async def admit(
        self,
        cluster: Cluster,
        lease: Lease,
        now: float,
        *,
        not_nodes: Iterable[str] = (),
        within_s: float = inf,
    ) -> Grant | Explanation:
        """As `Engine.admit`.

        Raises:
            Conflict: the cluster has no queue for the project.
        """
        if lost := missing((p for p in cluster.projects if p.name == lease.project), self._seats.queues):
            raise Conflict("the cluster has no queue %1: an administrator creates it", lost[0])
        cluster = self._seen(cluster)
        considered = replace(cluster, leases=(*cluster.leases, lease))
        demand = self._demands(considered, now).by_lease[lease.id]
        demand = replace(demand, not_nodes=tuple(sorted({*demand.not_nodes, *not_nodes})))
        self._decided = self._decided or cluster
        self._starting[lease.id] = inf
        start = self._starts[lease.id] = Start(
            self._seats,
            place_s=self._place_s,
            seat_s=self._seat_s,
            stands_s=self._stands_s,
            within_s=within_s,
        )
        try:
            placed = await start.place(await self._instead(demand, cluster), cluster.devices)
            if not isinstance(placed, Why):
                placed = await self._take_units(lease, demand, placed, start.until)
        except BaseException:
            await asyncio.shield(self._withdraw(lease.id))
            raise
        finally:
            self._starts.pop(lease.id, None)
        if isinstance(placed, Why):
            await self._withdraw(lease.id)
            free_milli = self.outlook(cluster, now).free_milli
            return Explanation(why=placed, position=None, free_milli=free_milli)
        # Until the lease is in a snapshot, which it is right after its grant was committed.
        self._starting[lease.id] = self._clock() + ROUND_S
        held = {d.uuid: d.demand_milli(lease.size) for d in cluster.devices}
        return Grant(
            lease.id,
            placed.devices,
            max(held[uuid] for uuid in placed.devices),
            Why.FREE_CAPACITY,
            borrowed=demand.seat_class is SeatClass.BORROWED,
        )

    def start_progress(self, lease_id: str) -> StartProgress | None:
        start = self._starts.get(lease_id)
        return None if start is None else start.progress()

    async def _instead(self, demand: Demand, cluster: Cluster) -> Demand:
        """Return the demand of a start that takes over what KAI frees for one that was given up.

        KAI would evict again for a second seat beside that one, so the seat of the other start goes first.
        """
        seats, asks = self._seats.seats(), request(demand.size, cluster.devices)
        known = {*self._starting, *(lease.id for lease in cluster.leases)}
        for seat in (s for lease, mine in seats.items() if lease not in known for s in mine):
            fits = seat.terms == terms(demand) and seat.asks == asks
            if fits and set(demand.not_nodes) <= set(seat.not_nodes) and is_awaited(seats, seat):
                self._starting[seat.lease] = self._clock() + ROUND_S  # no other start takes it over
                if not await self._take_away(seat.name):
                    continue
                return replace(demand, instead_of=(seat.name, *seat.instead_of)[:_TRIES])
        return demand

    async def _take_away(self, name: str) -> bool:
        """Return whether a seat that waits is deleted; KAI may be writing to it just then."""
        try:
            for _ in range(3):
                await self._seats.delete(name)
                found = self._seats.seat(name)
                if found is None or found.seating is not Seating.WAITING:
                    return True
                await self._seats.wait(1.0)
        except KubeError as error:
            log.warning("seat=%s is not taken over: %s", name, error)
        return False

    async def _take_units(self, lease: Lease, demand: Demand, seat: Seat, until: float) -> Seat | Why:
        """Return a connected seat with its units, once these are free; on a node without units as it is."""
        if seat.seating is not Seating.PLACED or not set(seat.devices) <= {
            device.uuid for device in self._latest().devices
        }:
            return Why.DEVICE_BROKEN
        try:
            async with asyncio.timeout_at(until):
                while not isinstance(gpus := self._choose(demand, seat), tuple):
                    if gpus is not None:
                        return gpus
                    await self._seats.wait(ROUND_S)
                if not gpus:
                    return seat
                self._placed[lease.id] = replace(
                    lease,
                    state=State.GRANTED,
                    devices=gpus,
                    held_milli=lease.size.fraction_milli,
                    granted_at=self._clock(),
                    borrowed=demand.seat_class is SeatClass.BORROWED,
                )
                while not self._is_free(lease.id, seat.node):
                    await self._seats.wait(ROUND_S)
        except TimeoutError:
            return Why.NO_CAPACITY
        return replace(seat, devices=gpus)

    def _choose(self, demand: Demand, seat: Seat) -> tuple[str, ...] | Why | None:
        """Return GPUs for a start; () on a node without units, None: too few are free yet."""
        cluster = self._latest()
        pool = pools_of(cluster, claimants(cluster), frozenset(self._placed)).get(seat.node)
        if seat.node in obstacles(cluster):
            return Why.NO_CAPACITY
        if pool is None:
            return ()
        is_kept = keeps(demand, seat.node, cluster)
        placement = pool.place(demand.size.device_count, keeps=is_kept)
        if placement is None:
            return Why.NO_CAPACITY if is_kept else None
        return placement.gpus

    def _is_free(self, lease: str, node: str) -> bool:
        cluster = self._latest()
        pool = pools_of(cluster, claimants(cluster), frozenset(self._placed)).get(node)
        return pool is not None and pool.is_free(lease)

    def _latest(self) -> Cluster:
        """Return the cluster as it will be once the last decision is carried out."""
        assert self._decided is not None
        return self._seen(self._decided)

    async def _withdraw(self, lease_id: str) -> None:
        """Delete the seats of a refused start; what fails here, or is awaited, a later round deletes."""
        try:
            for _ in range(2):  # the pod, then its PodGroup
                seats = self._seats.seats()
                for seat in seats.get(lease_id, ()):
                    if seat.seating is not Seating.LEAVING and not is_awaited(seats, seat):
                        await self._seats.delete(seat.name)
                await self._seats.wait(1.0)
        except KubeError as error:
            log.warning("lease=%s its seat is not deleted yet: %s", lease_id, error)
        finally:
            self._starting.pop(lease_id, None)
            self._placed.pop(lease_id, None)

    # ---- questions -----------------------------------------------------------

    def check_request(self, cluster: Cluster, lease: Lease) -> None:
        """Return if KAI can ever place this lease.

        Raises:
            InvalidRequest: its project cannot be a queue, or no node takes its size.
        """
        check_project(lease.project)
        request(lease.size, cluster.devices)
        explain.check_request(cluster, lease)
        if not takes(self._seen(cluster), lease.size):
            raise InvalidRequest(
                "the GPUs here are given out in equal parts, and %1 is none", lease.size.text
            )

    def outlook(self, cluster: Cluster, now: float) -> Outlook:
        seats = self._seats.seats() if self._seats.is_known else {}
        cluster = self._seen(cluster)
        seats = assigned(cluster, seats, now, frozenset(self._placed)).seats
        return KaiOutlook(cluster, seats, self._sleepable(), self._misplaced, now)

    def would_suspend(self, cluster: Cluster, now: float) -> tuple[Suspend, ...]:
        """Return what the planner of `core` would suspend for the jobs that KAI has not placed.

        KAI decides about seats only, and the seat of a session that is not lent is never offered to it.
        """
        placed = self.outlook(cluster, now).grants
        waiting = replace(cluster, leases=tuple(x for x in cluster.leases if x.id not in placed))
        planned = dry_run(self._seen(waiting), now).run().actions
        sleepable, nodes = self._sleepable(), {device.uuid: device.node for device in cluster.devices}
        there = {x.id: {nodes.get(uuid) for uuid in x.devices} for x in cluster.leases}
        return tuple(a for a in planned if isinstance(a, Suspend) and there[a.lease] <= sleepable)

    def projects(self, configured: tuple[Project, ...]) -> tuple[Project, ...]:
        self._configured = configured
        return tuple(in_force(project, self._seats.queues) for project in configured)

    def set_project(self, project: Project) -> None:
        """Refuse.

        Raises:
            Conflict: the numbers are those of the Queue, which the text names.
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
        if self._snapshot is not None:
            closed = obstacles(self._seen(self._snapshot[0]))
            found += [f"Node {node} grants and lends nothing: {why}." for node, why in closed.items()]
        if self._failure:
            found.append(f"Seats cannot be changed: {self._failure}.")
        return tuple(found)


def _after(cluster: Cluster, plan: Plan) -> Cluster:
    """Return the cluster in which leases have what a plan grants them."""
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


def _key(change: Change) -> str:
    return change.demand.lease if isinstance(change, Create) else change.seat
