"""One scheduling round: rules applied to a `ClusterState` that each decision changes.

Rules, in the order in which they bind:

1. *Owners*: a suspended session with a claim gets its devices back when its
   processes want the GPU; leases on those devices without a claim are preempted.
2. *New sessions* within quota get a claim: they start awake on free capacity, or
   suspended on lent capacity.  Beyond quota they start on free, unclaimed capacity
   or not at all.  Between the two come *jobs that others made way for*, which get
   the capacity released for them, and *jobs that starve* (`order`), in projects that
   hold no more than their share.
3. *Jobs*, in the passes of `PASSES`: owed by quota, below fair share, rest.
   After the first pass, sessions beyond quota wake, and sessions that wait for
   their start (`Lease.waits`) start.  A job takes free capacity, else capacity that
   is being released, else capacity that it may reclaim (`reclaim`).

A job that does not fit blocks no other job, unless the order is strict or capacity
is reserved for it because it was bypassed for too long (`reservations`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from jupyter_gpushare.core import order
from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.fairshare import REVIEW_S
from jupyter_gpushare.core.model import (
    WHOLE_GPU,
    Action,
    Grant,
    Lease,
    Requeue,
    Resume,
    State,
    Suspend,
    Why,
    held_by,
)
from jupyter_gpushare.core.placement import Placement
from jupyter_gpushare.core.placer import Placer
from jupyter_gpushare.core.queues import Cursor, Fit, JobQueues, Shape
from jupyter_gpushare.core.quota import Shares
from jupyter_gpushare.core.reclaim.reclaimer import Reclaimer
from jupyter_gpushare.core.reclaim.victims import Victim
from jupyter_gpushare.core.reservations import Reservations

# Sort key of a project by use, rank of its next job, and its name.
Turn = tuple[tuple[float, ...], tuple[Any, ...], str]

# A job that waits for one of these reasons does not block the jobs behind it in a strict order.
BLOCKS_NOTHING = frozenset({Why.TOO_LARGE, Why.DEVICE_BROKEN, Why.DRAINING})
# Reasons of a job that has reserved capacity.
_HAS_RESERVATION = frozenset({Why.RESERVED, Why.NOT_BYPASSED})


class SchedulingRound:
    """One application of all rules, with the reason of every lease that got nothing."""

    def __init__(
        self,
        state: ClusterState,
        queues: JobQueues,
        placer: Placer,
        lags_gpu_s: Mapping[str, float],
        now: float,
        *,
        explain_all: bool,
    ) -> None:
        """Create a round that has not run.

        ``lags_gpu_s``: by project (`fairshare`); ``explain_all``: find a reason per job, not per shape.
        """
        self.state = state
        self.queues = queues
        self.placer = placer
        self.now = now
        self.settings = state.settings
        self.order = order.order_of(self.settings)
        horizon_s = self.settings.fairness_horizon_s or inf
        self.catch_up_milli = {name: int(WHOLE_GPU * lag / horizon_s) for name, lag in lags_gpu_s.items()}
        capacity_milli = WHOLE_GPU * len(self.state.usable)
        # A partial, not a method, which would be a reference cycle for the garbage collector.
        waiting_milli = partial(self.queues.waiting_milli, self.state)
        self.shares = Shares(
            self.state.quotas, waiting_milli, capacity_milli, self.catch_up_milli, self.state.version
        )
        self.reclaimer = Reclaimer(self.state, placer, self.queues, self.shares)
        self.reservations = Reservations(self.state, placer.topology, placer.find, queues.rank)
        self.actions: list[Action] = []
        self.waiting: dict[str, Why] = {}  # leases that got nothing, in the order of service
        self.places: dict[str, tuple[str, ...]] = {}  # devices reserved for a job until they are released
        self.next_at: float | None = None
        self.shared = sum(bool(q.waiting or q.running) for q in self.queues.by_project.values()) > 1
        self._explain_all = explain_all
        self._evicted: list[Victim] = []
        self._summaries = queues.summaries(state)
        # Each project is tried by itself, because the result of a job depends on more than its shape.
        self._is_single = explain_all or self.order.strict or self.order.bounds_bypass
        self._evicted_from: set[str] = set()  # projects of leases that were evicted
        self._failed_fits: set[Fit] = set()  # fits that failed in this pass regardless of own jobs
        self._failed_version = -1  # the version of the state when they failed
        self._unplaceable: dict[tuple[str, Fit], Why] = {}  # fits that failed; they fail at later levels too
        self._not_worth: dict[tuple[str, Shape], float] = {}  # gains that were not worth a preemption
        self.served: set[str] = set()  # leases for which this round decided something
        self._guests: list[Lease] = []  # new sessions beyond quota

    def run(self) -> SchedulingRound:
        """Apply all rules."""
        self.run_sessions()
        for lease in sorted(self.queues.backing_off.values(), key=lambda x: (x.queued_at, x.id)):
            self._backs_off(lease)
        for serving in PASSES:
            if self.shared or not serving.competes:
                self._run_pass(serving)
            if serving.serves_guests:
                for lease in self._waking(claim=False):
                    self._wake_guest(lease)
                self._start_guests(waited=True)
        self._reinstate_unneeded()
        for id, why in self.waiting.items():
            if why is Why.NO_CAPACITY and self._is_kept_from_others(self.state.leases[id]):
                self.waiting[id] = Why.OWN_DEVICES
        if self.waiting:
            self._wake_planner(self.queues.next_at())
            self._wake_planner(self.reclaimer.victim_index.next_at)
            if self.shared and self.settings.fairness_horizon_s:
                self._wake_planner(self.now + REVIEW_S)
        return self

    def run_sessions(self) -> SchedulingRound:
        """Apply only rules 1 and 2, which decide what one more session would get."""
        for lease in self._waking(claim=True):
            self._wake_owner(lease)
        self._reinstate_unneeded()
        ranked = sorted(self.queues.new_sessions.values(), key=order.session_rank)
        new = [lease for lease in ranked if not self._backs_off(lease)]
        for lease in new:
            found = self.placer.session_grant(lease)
            if isinstance(found, Grant) and not found.borrowed:
                self._start_session(lease, found)
        self._serve_promised()
        self._run_pass(STARVED_JOBS)
        self._guests = [lease for lease in new if lease.id not in self.served]
        self._start_guests(waited=False)
        return self

    def _waking(self, *, claim: bool) -> list[Lease]:
        waking = (x for x in self.queues.waking_sessions.values() if self.state.has_claim(x) is claim)
        return sorted(waking, key=order.session_rank)

    # -- build sessions

    def _wake_owner(self, lease: Lease) -> None:
        """Wake a session on its claim, or reserve the claim and evict the leases in its way."""
        state, held = self.state, held_by(lease)
        if not state.has_all_devices(lease):
            self.waiting[lease.id] = Why.DEVICE_BROKEN
            return
        if not self._backs_off(lease):
            if (why := self._clear_way(lease)) is None:
                self.actions.append(Resume(lease.id, Why.WANTED))
                state.allocate(lease, lease.devices, held)
                return
            self.waiting[lease.id] = why
        state.reserve(lease, lease.devices, held)

    def _clear_way(self, lease: Lease) -> Why | None:
        """Evict the leases in the way of a session with a claim; return why it has to wait, or None."""
        is_short = any(c.now() < held_by(lease) for c in self.state.capacities_of(lease))
        if is_short:
            victims = self.reclaimer.for_owner(lease)
            if victims is None:
                return Why.NO_CAPACITY
            self._evict(victims, lease)
        return Why.AWAITING_RELEASE if self._over_own_limit(lease) or is_short else None

    def _over_own_limit(self, lease: Lease) -> bool:
        """Evict jobs so that a session stays within the limit; return whether it must wait for them.

        If too few jobs can leave, the limit does not keep an owner from a claim.
        """
        account = self.state.account(lease)
        if not account.over_limit(0):
            return False
        victims = self.reclaimer.for_limit(lease)
        self._evict(victims or (), lease, final=True)
        return bool(victims or account.leaving)

    def _start_guests(self, *, waited: bool) -> None:
        for lease in self._guests:
            if lease.waits is waited:
                self._start_session(lease, self.placer.session_grant(lease))

    def _start_session(self, lease: Lease, grant: Grant | Why) -> None:
        if isinstance(grant, Why):
            self.waiting[lease.id] = grant
            return
        self.actions.append(grant)
        self.served.add(lease.id)
        if grant.asleep:
            self.state.allocate_suspended(lease, grant.devices, grant.held_milli)
        else:
            self.state.allocate(lease, grant.devices, grant.held_milli, claim=not grant.borrowed)

    def _wake_guest(self, lease: Lease) -> None:
        """Wake a session beyond quota on free, unclaimed capacity."""
        state = self.state
        found = self.placer.find_to_resume(lease, DeviceCapacity.unclaimed)
        if not state.has_all_devices(lease):
            self.waiting[lease.id] = Why.DEVICE_BROKEN
        elif found is None:
            self.waiting[lease.id] = Why.NO_CAPACITY
            state.add_guest_demand(lease)
        elif state.account(lease).over_limit(found.size_milli):
            self.waiting[lease.id] = Why.PROJECT_LIMIT
        elif not self._backs_off(lease):
            self._resume(lease, found, Why.WANTED)

    # -- jobs

    def would_start(self, job: Lease) -> bool:
        """Return whether a new job would start at this point of the round."""
        found = None if self.placer.lacks_quota(job) else self.placer.find_for_job(job, DeviceCapacity.now)
        return found is not None and not self.state.account(job).over_limit(found.size_milli)

    def is_owed(self, job: Lease) -> bool:
        """Return whether the project of ``job`` stays within its quota with ``job``."""
        return self.state.account(job).is_below_quota(self.state.least_size(job))

    def is_below_share(self, job: Lease) -> bool:
        """Return whether the project of ``job`` stays within its fair share with ``job``."""
        return self.state.account(job).use + self.state.least_size(job) <= self.shares.of(job.project)

    def quota_of(self, project: str) -> int:
        """Return the quota of a project."""
        return self.state.quotas.account(project).project.quota_milli

    def share_of(self, project: str) -> int:
        """Return the fair share of a project."""
        return self.shares.of(project)

    def is_within_share(self, job: Lease) -> bool:
        """Return whether the project holds no more than its share, and the share can hold ``job``."""
        share = self._entitled(job)
        return self.state.account(job).use <= share and self.state.least_size(job) <= share

    def _run_pass(self, serving: Pass) -> None:
        """Serve the jobs that a pass admits, project by project."""
        self._failed_fits.clear()
        cursors: dict[str, Cursor] = {}
        turns = self._turns(serving)
        while turns:
            turn, rank, name = turns.pop(0)
            served = bool(rank) and rank[-1] in self.served and not self.order.strict
            if not served and self._fails_as_others(name, serving):
                continue
            if name not in cursors:
                queue = self.queues.by_project[name]
                waiting = queue.starved() if serving.starved else queue.waiting
                cursors[name] = Cursor(waiting, self.queues.leases)
            if served:  # the project's turn comes with its next job
                cursors[name].advance()
                if cursors[name]:
                    insort(turns, (turn, cursors[name].rank, name))
                continue
            decided = len(self.actions)
            if self._serve_next(cursors[name], serving):
                insort(turns, (self._turn(name, serving), cursors[name].rank, name))
            if any(not isinstance(a, Grant | Resume) for a in self.actions[decided:]):
                # Projects that lost capacity now come earlier.
                turns = sorted((self._turn(n, serving), rank, n) for _, rank, n in turns)

    def _turns(self, serving: Pass) -> list[Turn]:
        """Return the turns of the projects that a pass may serve, in the order of service."""
        ranks = [(summary.shapes[0][0], name, summary.least) for name, summary in self._summaries.items()]
        if serving.starved:
            return sorted(((), rank, name) for rank, name, _ in ranks if rank[0] is order.STARVED)
        account_of, maximum = self.state.quotas.account, serving.maximum
        # The use of a project may fall.  A project without use must fit its smallest job.
        return sorted(
            (self._turn(name, serving), rank, name)
            for rank, name, least in ranks
            if account_of(name).use or least <= maximum(self, name)
        )

    def _turn(self, project: str, serving: Pass) -> tuple[float, ...]:
        if serving.starved:
            return ()
        account = self.state.quotas.account(project)
        return account.turn(self.catch_up_milli.get(project, 0), owed=serving.by_quota)

    def _fails_as_others(self, project: str, serving: Pass) -> bool:
        """Return whether every job of a project fails as jobs of other projects did; note the failures.

        This is only so if the project has no jobs of its own to preempt.
        """
        shapes = self._summaries[project].shapes
        if self._is_single or project in self._evicted_from or shapes[0][0][0] is order.STARVED:
            return False
        if self._failed_version != self.state.version():
            self._failed_version = self.state.version()
            self._failed_fits.clear()
        available = serving.maximum(self, project) - self.state.quotas.account(project).use
        failed, unplaceable = self._failed_fits, self._unplaceable
        tried = []
        for rank, key, size in shapes:
            if size <= available and key not in unplaceable:
                if key[1] not in failed:
                    return False
                tried.append((rank, key))
        if self.queues.by_project[project].running:
            for rank, _ in tried:
                job = self.queues.leases[rank[-1]]
                # Any job of its project may move for a gang.
                if job.id in self.served or job.size.device_count > 1:
                    return False
                if self.reclaimer.victim_index.outranked(job):
                    return False
        for _, key in tried:
            unplaceable[key] = Why.NO_CAPACITY
        return True

    def _serve_next(self, cursor: Cursor, serving: Pass) -> bool:
        """Serve one job of a project; return False if the pass is over for the project."""
        while cursor:
            job, shape = cursor.current
            if job.id in self.served:
                cursor.advance()
                if self.order.strict and job.id in self.waiting:
                    return False
            elif not serving.admits(self, job):
                is_last = serving.competes or not self.shared  # jobs not admitted wait for their own project
                if self.order.strict or (is_last and self._is_bypass_over(job) and self._may_hold_up(job)):
                    return False
                cursor.skip_shape()
            elif self._serve(job, shape, serving):
                self.served.add(job.id)
                cursor.advance()
                return not self.order.strict or job.id not in self.waiting
            elif self._holds_up_its_project(job) or (
                self.order.strict and self.waiting[job.id] not in BLOCKS_NOTHING
            ):
                self._mark_blocked(cursor)
                return False
            elif (job.project, shape[1]) in self._unplaceable and not self._explain_all:
                cursor.skip_shape()
            else:
                cursor.advance()
        return False

    def _holds_up_its_project(self, job: Lease) -> bool:
        """Return whether later jobs of its project wait for ``job``: it starves and exceeds the share.

        The project then falls behind its share until its lag makes up for the size of the job.
        """
        stuck = self.shared and self.waiting[job.id] is Why.NO_CAPACITY
        starves = stuck and order.is_starved(job, self.now, self.settings)
        return starves and not self.is_within_share(job) and self._may_hold_up(job)

    def _may_hold_up(self, job: Lease) -> bool:
        """Return whether the share of its project can hold a starving job, now or once the project lags."""
        maximum = self.shares.maximum(job.project) if self.settings.fairness_horizon_s else 0
        reachable = self.state.least_size(job) <= max(self._entitled(job), maximum)
        return not self.shared or reachable or not order.is_starved(job, self.now, self.settings)

    def _entitled(self, job: Lease) -> int:
        """Return the thousandths that the project of ``job`` may hold by its share or its quota."""
        return max(self.shares.of(job.project), self.state.account(job).project.quota_milli)

    def _mark_blocked(self, cursor: Cursor) -> None:
        cursor.advance()
        while self._explain_all and cursor:
            self.waiting[cursor.current[0].id] = Why.IN_LINE
            cursor.advance()

    def _serve(self, job: Lease, shape: Shape, serving: Pass) -> bool:
        """Start ``job`` or reserve capacity for it; return False if nothing was decided."""
        key = job.project, shape[1]
        if why := self._unplaceable.get(key):
            if self.waiting.get(job.id) not in _HAS_RESERVATION:
                self.waiting[job.id] = why
            return False
        gain_gpu_s = order.gain_gpu_s(job, self.now, self.settings)
        if gain_gpu_s <= self._not_worth.get((job.project, shape), -inf):
            self.waiting[job.id] = Why.NOT_WORTH_IT
            return False
        if (why := self._try_to_start(job, shape[1], serving)) is None:
            return True
        self.waiting[job.id] = why
        if why is Why.NOT_WORTH_IT:
            self._not_worth[job.project, shape] = gain_gpu_s
        if why not in (Why.AWAITING_RELEASE, Why.NOT_WORTH_IT):
            self._unplaceable[key] = Why.IN_LINE if why in _HAS_RESERVATION else why
        return why is Why.AWAITING_RELEASE

    def _serve_promised(self) -> None:
        """Serve the jobs that other leases made way for, which own the capacity released for them."""
        for job in self.queues.promised():
            if (why := self._start_or_reserve(job)[0]) is Why.AWAITING_RELEASE:
                self.waiting[job.id] = why
            if why in (None, Why.AWAITING_RELEASE):
                self.served.add(job.id)

    def _try_to_start(self, job: Lease, fit: Fit, serving: Pass) -> Why | None:
        """Start ``job``, or reserve or reclaim capacity for it; return why it waits, or None."""
        why, soon = self._start_or_reserve(job)
        if why not in (Why.NO_CAPACITY, Why.PROJECT_LIMIT):
            return why
        decided, why = self.reclaimer.decided, self._reclaim(job, soon, serving)
        if why is not Why.NO_CAPACITY or soon:
            return why
        if self.placer.fits_soon(job):
            return Why.JOB_HOST_MEMORY if self.placer.lacks_host_memory(job) else why
        # For a job that its quota owes capacity, sessions over quota may be preempted, except those of its
        # own project.
        is_special = bool(self.queues.by_project[job.project].running) or job.project in self._evicted_from
        is_special = is_special or (serving.by_quota and self.state.account(job).use > 0)
        if self.reclaimer.decided == decided and fit.is_common and not is_special:
            self._failed_fits.add(fit)
        return why

    def _start_or_reserve(self, job: Lease) -> tuple[Why | None, Placement | None]:
        """Start ``job`` or reserve capacity that is being released; return why it waits, and its place."""
        state, account = self.state, self.state.account(job)
        if not state.has_all_devices(job):
            return Why.DEVICE_BROKEN, None
        if self.placer.lacks_quota(job) and self.placer.fits_ever(job):
            return Why.QUOTA, None
        if not self.placer.fits_soon(job):
            return Why.NO_CAPACITY, None
        find = partial(self.placer.find_for_job, job)
        found = None if job.devices else find(DeviceCapacity.unawaited)
        found = found or find(DeviceCapacity.unclaimed) or find(DeviceCapacity.now)
        soon = found or find(DeviceCapacity.soon)
        if soon is None:
            return Why.NO_CAPACITY, None
        if found and not account.over_limit(found.size_milli):
            self._start(job, found)
            return None, found
        if account.over_limit_soon(soon.size_milli):
            return Why.PROJECT_LIMIT, soon
        self._reserve(job, soon)
        if job.size.device_count > 1:
            self.reservations.reserve_targets(self.reservations.moving_for(job, soon))
        return Why.AWAITING_RELEASE, soon

    def _reclaim(self, job: Lease, soon: Placement | None, serving: Pass) -> Why:
        """Evict leases for ``job``, or reserve capacity if it was bypassed for too long."""
        state, account = self.state, self.state.account(job)
        if not job.devices and not self.placer.fits_ever(job):
            return self.placer.unplaced(job)
        size = soon.size_milli if soon else state.least_size(job)
        over, owed = account.over_limit_soon(size) > 0, self.is_owed(job)
        below_share = not owed and self.shared and self.is_below_share(job)
        # In another pass, the first project of the next round would get the reclaimed capacity.
        takes = below_share and (serving.competes or serving.starved)
        plan = self.reclaimer.for_job(job, owed=owed, below_share=takes, soon=soon)
        if isinstance(plan, Why):
            if over:
                return Why.PROJECT_LIMIT
            # A project beyond its share must not reserve capacity against others.
            may_reserve = owed or below_share or not self.shared or serving.starved
            if may_reserve and self._is_bypass_over(job) and self.reservations.reserve_for(job):
                return Why.RESERVED if serving.starved else Why.NOT_BYPASSED
            return plan
        self._evict(plan.victims, job, final=over or plan.final)
        self._reserve(job, plan.placement)
        moved = (v.lease for v in plan.victims if v.why is Why.MOVED)
        self.reservations.reserve_targets(moved)
        return Why.AWAITING_RELEASE

    def reason(self, job: Lease, fit: Fit) -> Why | None:
        """Return why a waiting job got nothing; None if it got something or was not tried."""
        return self.waiting.get(job.id) or self._unplaceable.get((job.project, fit))

    def _is_bypass_over(self, job: Lease) -> bool:
        """Return whether no later job may overtake ``job`` any more."""
        # A job that lacks quota waits for its own project only.
        return not self.placer.lacks_quota(job) and order.is_bypass_over(job, self.now, self.settings)

    # -- effects on the cluster state

    def _reserve(self, job: Lease, placement: Placement) -> None:
        self.state.reserve(job, placement.devices, placement.held_milli)
        self.places[job.id] = placement.devices

    def _start(self, job: Lease, placement: Placement) -> None:
        state, lent = self.state, self.placer.uses_lent(placement, DeviceCapacity.unclaimed)
        if lent:
            state.host_free -= state.host_memory_needed(job, placement.devices, placement.held_milli)
        if job.state is State.SUSPENDED:
            self._resume(job, placement, Why.CAPACITY_BACK)
        else:
            borrowed = self.placer.borrows(job, placement, lent=lent)
            grant = Grant(
                job.id, placement.devices, placement.held_milli, Why.FREE_CAPACITY, borrowed=borrowed
            )
            self.actions.append(grant)
            state.allocate(job, placement.devices, placement.held_milli)

    def _resume(self, lease: Lease, placement: Placement, why: Why) -> None:
        """Resume a suspended lease on its devices, or on those that it moves to.

        A guest keeps the device that its host has left, or is suspended and resumes elsewhere.  While it is
        being suspended, the place is reserved for it.
        """
        stays = placement.devices == lease.devices
        guest = self.state.guests.get(lease.id)
        if guest is None:
            self.actions.append(Resume(lease.id, why, () if stays else placement.devices))
        elif guest.state is State.SUSPENDING:
            pass
        elif stays:
            self.actions.append(Grant(lease.id, lease.devices, placement.held_milli, why))
        else:
            self.actions.append(Suspend(lease.id, why, lease.id))
        self.state.allocate(lease, placement.devices, placement.held_milli)

    def _evict(self, victims: Iterable[Victim], lease: Lease, *, final: bool = False) -> None:
        """Suspend or requeue ``victims``; with ``final``, never reinstate them."""
        for v in victims:
            action = Suspend if v.suspends else Requeue
            self.actions.append(action(v.lease.id, v.why, lease.id))
            self._evicted_from.add(v.lease.project)
            self.state.evict(v.lease, suspended=v.suspends)
            if not final:
                self._evicted.append(v)

    def _reinstate_unneeded(self) -> None:
        """Take back the eviction of leases that turned out not to be needed.

        A large borrower that was evicted last may be enough for several owners.
        """
        for v in sorted(self._evicted, key=lambda v: (-v.cost, held_by(v.lease), v.rank)):
            if all(c.soon() >= held_by(v.lease) for c in self.state.capacities_of(v.lease)):
                self.state.reinstate(v.lease, suspended=v.suspends)
                self.actions = [a for a in self.actions if a.lease != v.lease.id]
        self._evicted = []

    # -- waiting leases, and when to plan again

    def _is_kept_from_others(self, lease: Lease) -> bool:
        """Return whether a suspended lease without a claim would resume if it could use the free devices."""
        if not lease.devices or self.state.has_claim(lease):
            return False
        for _, until_at in lease.avoids:
            self._wake_planner(until_at)
        return self.placer.find(lease, DeviceCapacity.unclaimed) is not None

    def _backs_off(self, lease: Lease) -> bool:
        if lease.retry_at <= self.now:
            return False
        self.waiting[lease.id] = Why.BACKING_OFF
        self._wake_planner(lease.retry_at)
        return True

    def _wake_planner(self, at: float | None) -> None:
        if at is not None and at > self.now and (self.next_at is None or at < self.next_at):
            self.next_at = at


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the waiting jobs of all projects."""

    admits: Callable[[SchedulingRound, Lease], bool]
    # Returns the use up to which it serves a project.
    maximum: Callable[[SchedulingRound, str], float] = lambda *_: inf
    by_quota: bool = False  # sorts projects by the used part of their quota, else by excess per weight
    competes: bool = False  # runs only with several projects; its jobs may reclaim from projects above share
    serves_guests: bool = False  # sessions beyond quota wake and start after it
    starved: bool = False  # serves starving jobs, the longest wait first, before sessions beyond quota


STARVED_JOBS = Pass(SchedulingRound.is_within_share, starved=True)
PASSES = (
    Pass(SchedulingRound.is_owed, SchedulingRound.quota_of, by_quota=True, serves_guests=True),
    Pass(SchedulingRound.is_below_share, SchedulingRound.share_of, competes=True),
    Pass(lambda _, job: True),
)
