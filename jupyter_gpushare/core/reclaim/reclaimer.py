"""Reclaim capacity for a waiting lease with the least disturbance.

`victims` says which leases may be preempted and which are cheaper.  Sets of victims
compare by their most expensive kind, then by number, then by rank.

The first of three ways that succeeds is taken:

1. preempt idle sessions and leases of other projects (`options`);
2. preempt also jobs of later levels in the same project, the last first (`search`);
3. move jobs of the same project together (`defragment`).

A preemption inside a project must gain (`order.gain_gpu_s`) at least its cost
(`Victim.price_s` for every GPU that changes hands).  A preemption of another project
because of a lag must make up for its cost `COSTS_APART` times.

Either all the capacity is reclaimed or no lease is preempted; a lease that turns out
not to be needed stays.  A suspension needs host memory.  A job without enough host
memory is stopped instead; a session never is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from jupyter_gpushare.core import order
from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.cluster_state import ClusterState, suspended_bytes
from jupyter_gpushare.core.model import WHOLE_GPU, Kind, Lease, Why, held_by, size_of
from jupyter_gpushare.core.placement import Placement, to_resume_on
from jupyter_gpushare.core.placer import Placer
from jupyter_gpushare.core.queues import JobQueues
from jupyter_gpushare.core.quota import Shares
from jupyter_gpushare.core.reclaim.defragment import Defragmenter
from jupyter_gpushare.core.reclaim.options import Cheapest, ReclaimOptions
from jupyter_gpushare.core.reclaim.search import Candidate, MultiDeviceSearch, SingleDeviceSearch
from jupyter_gpushare.core.reclaim.victims import ReclaimScope, Victim, VictimIndex, prune, rank

# A lag takes GPUs from another project once it is this many times the cost.  Two gangs that want the same
# GPUs swap whenever one is ahead of the other by that much, and lose a hundredth of the GPU time.
COSTS_APART = 25.0
# Reasons to wait for host memory.
_HOST_MEMORY = frozenset({Why.HOST_MEMORY, Why.JOB_HOST_MEMORY})


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """Devices for one lease, and the leases to preempt on them."""

    placement: Placement
    victims: tuple[Victim, ...]
    final: bool = False  # the victims are needed for more than their devices and are never reinstated


class Reclaimer:
    """Plans reclaims on one `ClusterState`, for one round."""

    def __init__(self, state: ClusterState, placer: Placer, queues: JobQueues, shares: Shares) -> None:
        self.state = state
        self.victim_index = VictimIndex(state, queues)
        self._placer, self._topology = placer, placer.topology
        self._shares = shares
        self._known_options: dict[tuple[object, ...], ReclaimOptions] = {}
        self._cheapest: dict[tuple[object, ...], Cheapest] = {}
        self._searches: dict[tuple[object, ...], SingleDeviceSearch] = {}
        self._host_free = state.host_free  # when victims were last cached
        self.decided = 0  # the number of candidates found, stable or not

    def for_owner(self, lease: Lease) -> tuple[Victim, ...] | None:
        """Return the leases to preempt so that a suspended session can wake; None: it is not possible."""
        chosen: list[Victim] = []
        short = {c.device.uuid: held_by(lease) - c.soon() for c in self.state.capacities_of(lease)}
        for capacity in self.state.capacities_of(lease):
            uuid = capacity.device.uuid
            missing = short[uuid] - _freed(uuid, chosen)
            victims = [v for x in capacity.holders.values() if (v := self.victim_index.for_owner(x))]
            for v in sorted(victims, key=rank):
                if missing > 0 and all(v.lease.id != x.lease.id for x in chosen):
                    chosen.append(v)
                    missing -= held_by(v.lease)
            if missing > 0:
                return None
        found = self._with_host_memory(_needed(short, chosen), 0)
        return None if isinstance(found, Why) else found

    def for_limit(self, lease: Lease) -> tuple[Victim, ...] | None:
        """Return the jobs of its project to preempt so that a session fits the limit; None: too few."""
        held = self.state.quotas.jobs.get(lease.project, {}).values()
        jobs = sorted((v for x in held if (v := self.victim_index.for_limit(x))), key=rank)
        return self._enough_for_limit(lease, 0, (), jobs)

    def for_job(
        self, job: Lease, *, owed: bool, below_share: bool, soon: Placement | None
    ) -> ReclaimPlan | Why:
        """Return the reclaim for ``job`` that disturbs least, or why there is none.

        ``owed``: its project is below quota.  ``below_share``: its project is below its
        fair share.  ``soon``: devices that it would get if the limit allowed.
        """
        # If no project is above its share, there is nothing to take.
        below_share = below_share and not owed and self._shares.total_excess() > 0
        protected = self._shares.at_or_below_share() if below_share else frozenset()
        scope = partial(self.victim_index.scope, job, owed=owed, below_share=below_share, protected=protected)
        plan = self._for_job(job, scope(lend=job.borrow), soon)
        if plan in _HOST_MEMORY and self._host_free != self.state.host_free:
            self.victim_index.forget()
            for cache in (self._known_options, self._cheapest, self._searches):
                cache.clear()
            self._host_free = self.state.host_free
            plan = self._for_job(job, scope(lend=job.borrow), soon)
        if isinstance(plan, Why) and (plan in _HOST_MEMORY or self.victim_index.memory_short):
            without_lending = self._for_job(job, scope(lend=False), soon)
            why = plan if plan in _HOST_MEMORY else Why.HOST_MEMORY
            plan = why if isinstance(without_lending, Why) else without_lending
        return plan

    def _for_job(self, job: Lease, scope: ReclaimScope, soon: Placement | None) -> ReclaimPlan | Why:
        if self._is_over_limit(job, soon.size_milli if soon else self.state.least_size(job), ()):
            return self._under_limit(job, scope, soon)
        why = Why.NO_CAPACITY
        for way in (self._cheapest_of_others, self._from_juniors):
            plan = self._decide(job, found, scope) if (found := way(job, scope)) else Why.NO_CAPACITY
            if isinstance(plan, ReclaimPlan):
                return plan
            why = plan if plan is not Why.NO_CAPACITY else why
        return why

    def _cheapest_of_others(self, job: Lease, scope: ReclaimScope) -> Candidate | None:
        """Return the cheapest devices and victims without preempting jobs of later levels, or None."""
        candidates = self.victim_index.candidate_devices(scope)
        if not candidates:
            return None
        options = self._options(job, scope)
        key = options, job.size.device_count, job.consolidate, job.devices, job.movable
        if key not in self._cheapest:
            bound_to = self.state.resume_devices(job) if job.devices else ()
            self._cheapest[key] = Cheapest(self._topology, options, job, candidates, bound_to)
        devices = self._cheapest[key].best()
        if devices is None:
            return None
        short = {c.device.uuid: options.missing(c) for c in devices}
        return devices, _needed(short, options.victims_of(devices))

    def _options(self, job: Lease, scope: ReclaimScope) -> ReclaimOptions:
        key = scope, job.size, held_by(job) if job.devices else 0
        if key not in self._known_options:
            self._known_options[key] = ReclaimOptions(self.victim_index, scope, job)
        return self._known_options[key]

    def _decide(self, job: Lease, candidate: Candidate, scope: ReclaimScope) -> ReclaimPlan | Why:
        """Return a plan to preempt the victims of ``candidate`` if that is allowed, stable and worth it."""
        self.decided += 1
        devices, victims = candidate
        need = self._need(job, devices)
        uses_lent = self._uses_lent(devices, need, victims)
        if uses_lent and (not job.borrow or any(c.unlent for c in devices)):
            return Why.NO_CAPACITY
        if not job.borrow and need * len(devices) > self.state.account(job).unborrowed_left:
            return Why.NO_CAPACITY
        if not self._is_stable(job, need * len(devices), victims):
            return Why.NO_CAPACITY
        if self._is_over_limit(job, need * len(devices), victims):
            return Why.PROJECT_LIMIT
        if scope.below_share and not self._is_worth_a_swap(job, need * len(devices), victims):
            return Why.NO_CAPACITY
        if not self._is_worth_it(job, victims):
            return Why.NOT_WORTH_IT
        own = to_resume_on(job, devices, DeviceCapacity.soon) if job.devices else None
        placement = Placement(own or tuple(c.device.uuid for c in devices), need)
        reserve_bytes = self.state.host_memory_needed(job, placement.devices, need) if uses_lent else 0
        settled = self._with_host_memory(victims, reserve_bytes)
        # A job that does not borrow needs capacity that is not lent.
        return settled if isinstance(settled, Why) else ReclaimPlan(placement, settled, final=not job.borrow)

    def _is_worth_it(self, job: Lease, victims: Iterable[Victim]) -> bool:
        """Return whether ``job`` gains at least the cost of preemptions in its project, in GPU-seconds."""
        settings = self.state.settings
        own = [v for v in victims if v.lease.project == job.project and v.why in (Why.ORDER, Why.MOVED)]
        cost = sum(size_of(v.lease) / WHOLE_GPU * v.price_s(settings) for v in own)
        return not cost or order.gain_gpu_s(job, self.state.moment, settings) >= cost

    def _is_worth_a_swap(self, job: Lease, size: int, victims: Iterable[Victim]) -> bool:
        """Return whether the lag of a project makes up for what it takes beyond its share without the lag."""
        settings, lag_milli = self.state.settings, self._shares.catching_up(job.project)
        if self.state.account(job).use + size <= self._shares.of(job.project) - lag_milli:
            return True
        taken = [v for v in victims if v.lease.project != job.project and v.why is Why.OVER_QUOTA]
        # Work lost by a stop does not count, so a project cannot protect its jobs by declaring a loss.
        cost = sum(size_of(v.lease) * v.swap_s(settings) for v in taken)
        return lag_milli * (settings.fairness_horizon_s or 0.0) >= COSTS_APART * cost

    def _from_juniors(self, job: Lease, scope: ReclaimScope) -> Candidate | None:
        """Return devices that jobs of later levels in the project free, else devices freed by moving jobs."""
        return self._search(job, scope) or self._by_defragmenting(job, scope)

    def _search(self, job: Lease, scope: ReclaimScope) -> Candidate | None:
        options = self._options(job, scope)
        if job.devices or job.size.device_count > 1:
            juniors = self.victim_index.juniors(job)
            return MultiDeviceSearch(self.state, self._topology, job, options).search(juniors)
        outranked = self.victim_index.outranked(job)
        # The priority decides the reason shown for a victim; starved jobs of all priorities share a level.
        key = options, id(outranked), job.priority
        if key not in self._searches:
            as_victim = partial(self.victim_index.junior, priority=job.priority)
            self._searches[key] = SingleDeviceSearch(self.state, options, outranked, as_victim)
        return self._searches[key].first()

    def _by_defragmenting(self, job: Lease, scope: ReclaimScope) -> Candidate | None:
        """Return devices for a gang if enough are free but scattered over nodes."""
        preempts = order.order_of(self.state.settings).preempts
        if job.devices or job.size.device_count == 1 or not job.consolidate or not preempts:
            return None
        empty = self._placer.index(DeviceCapacity.soon).empty_devices()
        if not empty:
            return None  # there is no device to move a job to
        juniors = {v.lease.id: v for v in self.victim_index.juniors(job)}
        if empty + sum(v.lease.size.device_count for v in juniors.values()) < job.size.device_count:
            return None
        movable = partial(self.victim_index.to_move, job.project)
        return Defragmenter(self._topology, job, juniors, movable, scope.available).plan()

    def _under_limit(self, job: Lease, scope: ReclaimScope, soon: Placement | None) -> ReclaimPlan | Why:
        """Return a reclaim of devices, and of enough jobs of the project to keep ``job`` within its limit."""
        if soon:
            places: list[Candidate | None] = [([self.state.capacities[u] for u in soon.devices], ())]
        else:
            places = [self._cheapest_of_others(job, scope), self._search(job, scope)]
        juniors = list(self.victim_index.juniors(job))
        found: list[Candidate] = []
        for devices, victims in filter(None, places):
            size = self._need(job, devices) * len(devices)
            if (extended := self._enough_for_limit(job, size, victims, juniors)) is not None:
                found.append((devices, extended))
        if not found:
            return Why.NO_CAPACITY
        # The victims for the limit may be enough for the devices as well.
        return self._decide(job, min(found, key=lambda c: _price(c[1])), scope)

    def _need(self, job: Lease, devices: Sequence[DeviceCapacity]) -> int:
        """Return the thousandths that ``job`` takes of each of ``devices``."""
        return held_by(job) if job.devices else devices[0].device.demand_milli(job.size)

    def _enough_for_limit(
        self, lease: Lease, size: int, chosen: tuple[Victim, ...], more: Iterable[Victim]
    ) -> tuple[Victim, ...] | None:
        """Return ``chosen`` and enough of ``more`` that ``size`` fits the limit; None: too few."""
        names = {v.lease.id for v in chosen}
        rest = (v for v in more if v.lease.id not in names)
        while self._is_over_limit(lease, size, chosen):
            if (v := next(rest, None)) is None:
                return None
            chosen = (*chosen, v)
        return chosen

    def _is_over_limit(self, lease: Lease, size: int, leaving: Iterable[Victim]) -> bool:
        """Return whether ``size`` more would exceed the project's limit once ``leaving`` have left."""
        capped = self.state.quotas.capped_until_left
        left = sum(capped(v.lease) for v in leaving if v.lease.project == lease.project)
        return self.state.account(lease).over_limit_soon(size) > left

    def _is_stable(self, job: Lease, size: int, victims: Sequence[Victim]) -> bool:
        """Return whether ``job`` gets the capacity before any victim of its project is served again.

        A smaller victim would be served first if it fits the quota or fair share of the
        project and ``job`` does not.
        """
        sizes = [size_of(v.lease) for v in victims if v.why in (Why.PRIORITY, Why.ORDER)]
        account = self.state.account(job)
        own = [v for v in victims if v.lease.project == job.project and v.why is not Why.MOVED]
        left = account.use - sum(size_of(v.lease) for v in own)
        for maximum in (account.project.quota_milli, self._shares.of(job.project)):
            if left + size > maximum and any(left + own <= maximum for own in sizes):
                return False
        return True

    def _with_host_memory(self, victims: Sequence[Victim], reserve_bytes: int) -> tuple[Victim, ...] | Why:
        """Return ``victims`` if host memory can hold the suspended ones and ``reserve_bytes``.

        Else return `JOB_HOST_MEMORY` if it can hold the suspended ones, and `HOST_MEMORY` if it cannot.  A
        job without enough host memory becomes a victim that is stopped; a session never does.
        """
        if reserve_bytes and isinstance(self._with_host_memory(victims, 0), Why):
            return Why.HOST_MEMORY
        short = Why.JOB_HOST_MEMORY if reserve_bytes else Why.HOST_MEMORY
        left = self.state.host_free - reserve_bytes
        left += sum(self.state.reserved_bytes.get(v.lease.id, 0) for v in victims)
        settled = []
        for v in victims:
            if v.suspends and suspended_bytes(v.lease) <= left:
                left -= suspended_bytes(v.lease)
                settled.append(v)
            elif v.lease.kind is Kind.TRAIN:
                settled.append(self.victim_index.stopped(v.lease, v.why))
            else:
                return short
        return short if reserve_bytes and left < 0 else tuple(settled)

    def _uses_lent(self, capacities: Iterable[DeviceCapacity], need: int, victims: Iterable[Victim]) -> bool:
        """Return whether a suspended session would claim part of the reclaimed capacity."""
        for capacity in capacities:
            leaving = [v.lease for v in victims if capacity.device.uuid in v.lease.devices]
            unclaimed = capacity.unclaimed_soon()
            unclaimed += sum(held_by(x) for x in leaving if not self.state.has_claim(x))
            if unclaimed < need:
                return True
        return False


def _needed(short: dict[str, int], victims: list[Victim]) -> tuple[Victim, ...]:
    """Return the victims that free ``short`` on each device, after sparing the most expensive first."""
    spare = {uuid: _freed(uuid, victims) - missing for uuid, missing in short.items()}

    def try_without(v: Victim) -> bool:
        held, devices = held_by(v.lease), [uuid for uuid in v.lease.devices if uuid in spare]
        if any(spare[uuid] < held for uuid in devices):
            return False
        for uuid in devices:
            spare[uuid] -= held
        return True

    dearest_first = sorted(victims, key=lambda v: (-v.cost, held_by(v.lease), v.rank))
    return tuple(sorted(prune(dearest_first, try_without), key=rank))


def _price(victims: Iterable[Victim]) -> tuple[int, int]:
    """Return the sort key of sets of victims: the most expensive kind, then the number."""
    costs = [int(v.cost) for v in victims]
    return max(costs, default=-1), len(costs)


def _freed(uuid: str, victims: Iterable[Victim]) -> int:
    return sum(held_by(v.lease) for v in victims if uuid in v.lease.devices)
