"""Which leases may be preempted, for which waiting lease, and at what cost.

`Cost` sorts the kinds of victims, the cheapest first.  `RULES` says which leases
each kind of waiting lease may preempt.  A lease that is resuming is never a victim.

==================  ==========================================  ==============
waiting lease       may take from                               minimum run
                                                                time respected
==================  ==========================================  ==============
returning owner     leases without a claim and idle sessions    no
                    on its devices
session at a limit  jobs of its own project                     no
any job             idle sessions, host memory permitting       no
job owed by quota   leases over quota of other projects         no
job below share     jobs over quota of projects above share     yes
job                 jobs of its own project of lower priority   yes (*)
                    or of a later group
==================  ==========================================  ==============

Among jobs of one priority and user, a job that suspends is preempted first if fewer
suspended leases wait for its devices, because it resumes behind them.

(*) A job that loses its work by a stop may be preempted sooner, to spare a job that would lose more.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from jupyter_gpushare.core import order
from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.cluster_state import ClusterState, suspended_bytes
from jupyter_gpushare.core.idle import eligible
from jupyter_gpushare.core.model import CheckpointMode, Kind, Lease, Settings, State, Why, held_by, size_of
from jupyter_gpushare.core.queues import JobQueues


class Cost(enum.IntEnum):
    """Kinds of victims, the cheapest first."""

    OFFERED = 0  # a session that its owner offered
    IDLE = 1  # an idle session, the longest idle first (`VictimIndex._idle_session`)
    SUSPENDED_JOB = 2  # a job that is suspended, the latest grant first
    STARTING_JOB = 3  # a job that has not started yet
    STOPPED_JOB = 4  # a job that starts again
    BUSY_SESSION = 5  # a session beyond quota; suspended, never stopped


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """One row of the table above: the leases of one kind that may be preempted."""

    why: Why
    sessions: bool = False  # busy sessions without a claim, too
    after_min_run: bool = True


class RULES:
    """The rows of the table above; idle sessions have a rule of their own (`_idle_session`)."""

    OWNER = Rule(Why.LENDER_RETURNED, sessions=True, after_min_run=False)
    LIMIT = Rule(Why.PRIORITY, after_min_run=False)
    OWED = Rule(Why.OVER_QUOTA, sessions=True, after_min_run=False)
    BELOW_SHARE = Rule(Why.OVER_QUOTA)
    MOVE = Rule(Why.MOVED)
    PRIORITY = Rule(Why.PRIORITY)
    ORDER = Rule(Why.ORDER)


class Victim:
    """A lease to preempt, with the way and the cost."""

    __slots__ = ("cost", "lease", "lost_s", "rank", "suspends", "why")

    def __init__(
        self,
        lease: Lease,
        cost: Cost,
        why: Why,
        *,
        suspends: bool,
        frees_bytes: int = 0,
        lost_s: float = 0.0,
    ) -> None:
        self.lease = lease
        self.cost = cost
        self.why = why
        self.suspends = suspends  # False: it is stopped
        since_at = (lease.idle_since_at or 0.0) if cost <= Cost.IDLE else -lease.granted_at
        self.lost_s = lost_s  # lost by a stop (`order.lost_s`)
        self.rank = (int(cost), -frees_bytes, lost_s, since_at, lease.id)  # sorts victims, the cheapest first

    def price_s(self, settings: Settings) -> float:
        """Return the cost of its preemption, in seconds of its GPUs."""
        return self.swap_s(settings) + min(self.lost_s, order.MAX_LOST * settings.min_run_s)

    def swap_s(self, settings: Settings) -> float:
        """Return `price_s` without the work that it loses."""
        return settings.preempt_cost_s + (0.0 if self.suspends else settings.grace_s)


def rank(victim: Victim) -> tuple[int, int, float, float, str]:
    """Return the sort key of victims, the cheapest first."""
    return victim.rank


def prune(victims: Iterable[Victim], try_without: Callable[[Victim], bool]) -> list[Victim]:
    """Return the needed victims; ``try_without`` is called for each, and spares it if the rest is enough."""
    return [v for v in victims if not try_without(v)]


@dataclass(frozen=True, slots=True, eq=False)
class ReclaimScope:
    """Scope of a reclaim: which leases may be preempted.

    Only `VictimIndex` makes scopes, one object per scope and round.
    """

    project: str  # of the waiting job; "" if it is protected in any case
    owed: bool  # the project is below quota
    below_share: bool  # the project is below its fair share
    lend: bool  # devices of idle and suspended sessions may be used
    protected: frozenset[str]  # projects whose leases are not preempted

    @property
    def takes(self) -> bool:
        """Whether leases of other projects may be preempted, not only idle sessions."""
        return self.owed or self.below_share

    def available(self, capacity: DeviceCapacity) -> int:
        """Return the capacity of a device that the job can use without a preemption."""
        available = capacity.free + capacity.releasing - capacity.reserved  # `DeviceCapacity.soon`, inlined
        if capacity.unlent or not self.lend:
            available -= capacity.suspended_claims
        return available if self.owed else available - capacity.guest_demand


class VictimIndex:
    """Finds the leases of a `ClusterState` that may be preempted, for one round."""

    def __init__(self, state: ClusterState, queues: JobQueues) -> None:
        self.state = state
        self.memory_short = False  # host memory was too small for an idle session
        self.next_at: float | None = None  # when the next job reaches its minimum run time
        self._queues = queues
        self._scopes: dict[tuple[object, ...], ReclaimScope] = {}
        self._candidates: dict[ReclaimScope, set[DeviceCapacity]] = {}
        self._outranked: dict[tuple[str, order.Level], list[Lease]] = {}
        self._victims: dict[tuple[Rule | None, str], Victim | None] = {}  # by rule and lease
        self._found: dict[tuple[ReclaimScope, DeviceCapacity], tuple[int, list[Victim]]] = {}

    def scope(
        self,
        job: Lease,
        *,
        owed: bool,
        below_share: bool,
        lend: bool,
        protected: frozenset[str] = frozenset(),
    ) -> ReclaimScope:
        """Return the scope of a reclaim for ``job``."""
        # A project that is below its share is protected anyway.
        project = job.project if owed else ""
        key = project, owed, below_share, lend, protected
        return self._scopes.setdefault(key, ReclaimScope(*key))

    def candidate_devices(self, scope: ReclaimScope) -> set[DeviceCapacity]:
        """Return the devices on which a lease may be preempted."""
        if scope not in self._candidates:
            found = self._candidates[scope] = set(self._idle_on) if scope.lend else set()
            if scope.takes:
                on = self._over_quota_on
                found.update(c for c, leases in on.items() if any(self._may_take(x, scope) for x in leases))
        return self._candidates[scope]

    @cached_property
    def _idle_sessions(self) -> list[Lease]:
        state = self.state
        return [x for x in self._queues.idle.values() if eligible(x, state.settings, state.moment)]

    @cached_property
    def _idle_on(self) -> dict[DeviceCapacity, list[Lease]]:
        return self._by_device(self._idle_sessions)

    @cached_property
    def _over_quota_on(self) -> dict[DeviceCapacity, list[Lease]]:
        return self._by_device(self.state.quotas.over_quota())

    def _by_device(self, leases: Iterable[Lease]) -> dict[DeviceCapacity, list[Lease]]:
        found: dict[DeviceCapacity, list[Lease]] = {}
        for lease in leases:
            for capacity in self.state.capacities_of(lease):
                if capacity.device.usable:
                    found.setdefault(capacity, []).append(lease)
        return found

    def victims_on(self, capacity: DeviceCapacity, scope: ReclaimScope) -> list[Victim]:
        """Return the leases on a device that may be preempted, the cheapest first."""
        known = self._found.get((scope, capacity))
        if known is None or known[0] != capacity.version:
            victims = sorted(self._victims_on(capacity, scope), key=rank)
            known = self._found[scope, capacity] = capacity.version, victims
        return known[1]

    def _victims_on(self, capacity: DeviceCapacity, scope: ReclaimScope) -> Iterable[Victim]:
        found: dict[str, Victim] = {}
        if scope.lend:
            for lease in self._idle_on.get(capacity, ()):
                if lease.id in capacity.holders and (victim := self._idle_session(lease)):
                    found[lease.id] = victim
        if scope.takes:
            rule = RULES.OWED if scope.owed else RULES.BELOW_SHARE
            for lease in self._over_quota_on.get(capacity, ()):
                if lease.id in found or lease.id not in capacity.holders or not self._may_take(lease, scope):
                    continue
                victim = self.victim(lease, rule)
                if victim and (not rule.after_min_run or self._has_run(lease, by_order=False)):
                    found[lease.id] = victim
        return found.values()

    def _may_take(self, lease: Lease, scope: ReclaimScope) -> bool:
        """Return whether the capacity of a lease may go to the project of ``scope``."""
        own_or_protected = lease.project == scope.project or lease.project in scope.protected
        return not own_or_protected and lease.id not in self.state.quotas.in_quota

    def forget(self) -> None:
        """Clear the caches, because free host memory changed."""
        self._found.clear()
        self._victims.clear()

    # -- one lease

    def victim(self, lease: Lease, rule: Rule) -> Victim | None:
        """Return ``lease`` as a victim by ``rule``; None: it cannot be preempted now."""
        key = rule, lease.id
        if key not in self._victims:
            self._victims[key] = self._victim(lease, rule)
        return self._victims[key]

    def _victim(self, lease: Lease, rule: Rule) -> Victim | None:
        if lease.kind is Kind.BUILD:
            if rule.sessions and self._can_suspend_now(lease):
                return Victim(lease, Cost.BUSY_SESSION, rule.why, suspends=True)
            return None
        if lease.state is State.GRANTED:
            return Victim(lease, Cost.STARTING_JOB, rule.why, suspends=False)
        if lease.state is not State.RUNNING:
            return None
        suspends = lease.survival.suspends and self._can_suspend_now(lease)
        if suspends and not self._is_better_stopped(lease, rule):
            return Victim(lease, Cost.SUSPENDED_JOB, rule.why, suspends=True)
        return self.stopped(lease, rule.why)

    def stopped(self, lease: Lease, why: Why) -> Victim:
        """Return a running job as a victim that is stopped."""
        lost_s = order.lost_s(lease, self.state.moment)
        return Victim(lease, Cost.STOPPED_JOB, why, suspends=False, lost_s=lost_s)

    def _is_better_stopped(self, lease: Lease, rule: Rule) -> bool:
        """Return whether a job with its own checkpoint would get other devices sooner than these again.

        An order suspends such a job only if it has one device and can move to another, and no
        suspended lease waits for these devices yet.
        """
        if not (rule.after_min_run and lease.survival.has_checkpoint):
            return False
        devices = self.state.resume_devices(lease)
        is_bound = len(lease.devices) > 1 or len(devices) == 1
        return rule is RULES.MOVE or is_bound or any(c.awaited for c in devices)

    def for_owner(self, holder: Lease) -> Victim | None:
        """Return a lease on the devices of a returning owner as a victim; None: it stays."""
        # Not cached, because each owner's victims take host memory from the next owner's victims.
        if holder.kind is Kind.BUILD and (idle := self._make_idle(holder)):
            return idle
        return None if self.state.has_claim(holder) else self._victim(holder, RULES.OWNER)

    def for_limit(self, holder: Lease) -> Victim | None:
        """Return a job as a victim for a session of its project that a limit keeps from waking, or None."""
        return self._victim(holder, RULES.LIMIT)

    def to_move(self, project: str, holder: Lease) -> Victim | None:
        """Return a job of ``project`` as a victim that continues elsewhere from its checkpoint, or None."""
        movable = holder.project == project and holder.survival.has_checkpoint and self._has_run(holder)
        return self.victim(holder, RULES.MOVE) if movable else None

    def _idle_session(self, lease: Lease) -> Victim | None:
        key = None, lease.id
        if key not in self._victims:
            self._victims[key] = self._make_idle(lease)
        return self._victims[key]

    def _make_idle(self, lease: Lease) -> Victim | None:
        """Return an idle session as a victim, or None.

        The longest idle session comes first.  If host memory cannot hold all idle
        sessions, the session that frees the most bytes comes first.
        """
        state = self.state
        if not eligible(lease, state.settings, state.moment) or not state.can_suspend(lease):
            return None
        if suspended_bytes(lease) > state.host_free:
            self.memory_short = True
            return None
        if lease.lend_now:
            return Victim(lease, Cost.OFFERED, Why.LEND_NOW, suspends=True)
        frees_bytes = 0
        if self._idle_exceed_memory:
            uuids = [capacity.device.uuid for capacity in state.capacities_of(lease)]
            frees_bytes = state.granted_bytes(uuids, held_by(lease))
        return Victim(lease, Cost.IDLE, Why.IDLE, suspends=True, frees_bytes=frees_bytes)

    @cached_property
    def _idle_exceed_memory(self) -> bool:
        """Whether host memory was too small for all idle sessions when the round first needed some."""
        idle = (x for x in self._idle_sessions if self.state.can_suspend(x))
        return sum(map(suspended_bytes, idle)) > self.state.host_free

    # -- jobs of the same project

    def juniors(self, job: Lease) -> Iterator[Victim]:
        """Yield the jobs in its project that ``job`` may preempt, the first to be preempted first."""
        if job.devices:  # usually a session holds them, and there is no job to preempt
            jobs = self.state.quotas.jobs.get(job.project, {})
            in_way = {id for c in self.state.resume_devices(job) for id in c.holders if id in jobs}
            if not in_way:
                return
        for lease in self.outranked(job):
            if (not job.devices or lease.id in in_way) and (victim := self.junior(lease, job.priority)):
                yield victim

    def outranked(self, job: Lease) -> Sequence[Lease]:
        """Return the jobs of later levels in the project of ``job``, the first to be preempted first.

        Some may have been evicted already.
        """
        state = self.state
        key = job.project, self._queues.level(job, state.moment)
        if key not in self._outranked:
            later = list(self._queues.outranked(*key, state.moment))
            able = list(filter(self._has_run, later))
            # Jobs with SIGTERM lose nothing and wait for no device, so they are sorted already.
            if any(x.survival is not CheckpointMode.SIGTERM for x in later):
                able = sorted([*able, *self._instead_of(able, later)], key=self._makes_way)
            self._outranked[key] = able
        return self._outranked[key]

    def _instead_of(self, able: Iterable[Lease], later: Iterable[Lease]) -> Iterator[Lease]:
        """Yield young jobs, each to spare a job of ``able`` that would lose more by a stop."""
        spared = sorted(size_of(x) for x in able if self._restarts(x))
        young = [x for x in later if self._restarts(x) and not x.turns and not self._has_run(x)]
        for lease in sorted(young, key=lambda x: (-x.granted_at, x.id)):
            if (at := bisect_left(spared, size_of(lease))) < len(spared):
                del spared[at]
                yield lease

    def _makes_way(self, lease: Lease) -> tuple[float, ...]:
        """Return the sort key of juniors.

        By priority, users who are not behind, capacity that suspended leases await, loss, and group.
        Without the third key, one GPU collects suspended jobs while the jobs on other GPUs end.
        """
        capacities = self.state.capacities_of(lease) if lease.survival.suspends else ()
        awaited = max([c.awaited for c in capacities]) if capacities else 0
        _, is_not_behind, group = self._queues.running_level(lease, self.state.moment)
        lost_s = order.lost_s(lease, self.state.moment) if self._restarts(lease) else 0.0
        return lease.priority, not is_not_behind, awaited, lost_s, -group

    def _restarts(self, lease: Lease) -> bool:
        """Return whether a job loses its work when it makes way."""
        survival = lease.survival
        return not survival.has_checkpoint and not (survival.suspends and self.state.can_suspend(lease))

    def junior(self, lease: Lease, priority: int) -> Victim | None:
        """Return a job of a later level as a victim for a job with ``priority``.

        None: it has been evicted or cannot be preempted now.
        """
        if lease.id not in self.state.quotas.jobs[lease.project]:
            return None
        return self.victim(lease, RULES.PRIORITY if lease.priority < priority else RULES.ORDER)

    def _has_run(self, lease: Lease, *, by_order: bool = True) -> bool:
        """Return whether a job has reached its minimum run time; if not, note when it will.

        ``by_order``: use the time for which no job of its project preempts it, which may be longer.
        """
        settings = self.state.settings
        if by_order:
            at = order.undisturbed_until(lease, settings)
        else:
            at = lease.granted_at + order.share_run_s(settings)
        if at > self.state.moment:
            self.next_at = at if self.next_at is None else min(at, self.next_at)
        return at <= self.state.moment

    def _can_suspend_now(self, lease: Lease) -> bool:
        state = self.state
        return (
            lease.state is State.RUNNING
            and state.can_suspend(lease)
            and state.moment >= lease.retry_at
            and suspended_bytes(lease) <= state.host_free + state.reserved_bytes.get(lease.id, 0)
        )
