"""One future of running and waiting jobs on GPUs that are only counted: when each starts and ends.

It is much cheaper than `replay`, which plans with every rule, and answers for all
jobs at once.  What it leaves out is measured with the rest of the error
(`estimate.BANDS`).  Its rules:

* Free GPUs go to the project that is below its quota, then to the one furthest below its fair
  share, and there to the first job in the site's order that fits.  Lags (`fairshare`) are left out.
* Where the order preempts, a waiting job takes the GPUs of running jobs of its
  project that are of a later level, and within the share of its project those of
  projects above theirs.  Jobs keep their GPUs for the minimum run time.
* A running job changes its level when the order says so.
* A project keeps its limit (`quota`), and jobs that do not borrow the quota that claims leave.
* Sessions keep what they hold; one that is idle is lent once it may be.  No new work comes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.idle import eligible_at
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Cluster, Kind, Lease, State
from jupyter_gpushare.core.order import Level, attained_gpu_s, gpus, order_of, rank, share_run_s
from jupyter_gpushare.core.quota import fair_shares

HORIZON_S = 30 * 86_400.0
# Parts of a GPU: sums of thirds are not exact.
_EPSILON = 1e-6

_Place = tuple[Any, ...]  # sort key of a waiting job: level, and the rest of `order.rank`
_Alike = tuple[str, float, bool]  # project, GPUs, and whether a job borrows
_FIRST: Level = (-inf, 0, -inf)  # before every level
# Kinds of events: a job ends or changes its level, a session may be lent, a job may be preempted.
_JOB, _SESSION, _PREEMPTIBLE = range(3)


@dataclass(frozen=True, slots=True)
class Future:
    """Moments by lease; what does not happen within the bounds of `replayed` is missing."""

    starts_at: Mapping[str, float] = field(default_factory=dict)  # of waiting jobs
    ends_at: Mapping[str, float] = field(default_factory=dict)  # of all jobs
    # The first moments at which so many GPUs were free before waiting jobs took them, ascending in both;
    # without those of sessions that are lent.
    free_at: tuple[tuple[float, float], ...] = ()


def replayed(
    cluster: Cluster, now: float, left_gpu_s: Mapping[str, float], *, most_events: int = 5_000
) -> Future:
    """Return the future after ``now`` if each job of ``left_gpu_s`` has so many GPU-seconds left.

    Other jobs never end.  Replays at most ``most_events``, and `HORIZON_S`.
    """
    run = _Replay(cluster, now, left_gpu_s)
    run.run(most_events)
    return Future(run.starts_at, run.ends_at, tuple(run.free_at))


class _Job:
    __slots__ = (
        *("alike", "attained", "gpus", "granted_at", "is_new", "lease", "left", "level", "running"),
        *("runs_from", "stamp"),
    )

    def __init__(self, lease: Lease, now: float, left: float) -> None:
        self.lease = lease
        # As it runs, on a clock that shows for how long it has run on its GPUs.
        self.running = replace(lease, state=State.RUNNING, attained_gpu_s=0.0, attained_at=0.0)
        self.gpus = gpus(lease)
        self.alike: _Alike = lease.project, self.gpus, lease.borrow
        self.attained = attained_gpu_s(lease, now)
        self.left = left
        self.level: Level = (0.0, 0, 0.0)
        self.granted_at = lease.granted_at
        self.runs_from = now
        self.stamp = 0  # events scheduled under an older stamp are void
        self.is_new = True  # it has not started in this future


class _Replay:
    def __init__(self, cluster: Cluster, now: float, left_gpu_s: Mapping[str, float]) -> None:
        self.now = now
        self.starts_at: dict[str, float] = {}
        self.ends_at: dict[str, float] = {}
        self.free_at: list[tuple[float, float]] = []
        self._until = now + HORIZON_S
        self._settings = cluster.settings
        self._order = order_of(cluster.settings)
        self._user_levels = cluster.user_levels if self._order.preempts else {}
        self._projects = {p.name: p for p in cluster.projects}
        self._used = dict.fromkeys(self._projects, 0.0)
        self._unborrowing = dict.fromkeys(self._projects, 0.0)  # the part of it of jobs that do not borrow
        # What jobs of a project may hold, and the part of it that those hold which do not borrow.
        self._most: dict[str, float] = {}
        self._most_unborrowing: dict[str, float] = {}
        self._quotas = ClusterState.of(cluster, now).quotas
        self._shares = dict.fromkeys(self._projects, inf)
        self._capacity_milli = WHOLE_GPU * sum(device.usable for device in cluster.devices)
        self._free = self._capacity_milli / WHOLE_GPU
        # What each project holds and waits for; none if projects do not share.
        is_shared = cluster.settings.fairness_horizon_s and len(cluster.projects) > 1
        self._demand_milli = dict.fromkeys(self._projects if is_shared else (), 0)
        self._jobs: dict[str, _Job] = {}
        self._left = 0  # jobs that have not ended
        self._events: list[tuple[float, int, int, str]] = []
        self._scheduled = 0
        self._recheck_at = inf
        self._waiting: dict[_Alike, list[_Place]] = {}  # heaps
        self._running: dict[str, list[tuple[Level, float, str]]] = {}  # by project, the first victim last
        self._lendable: dict[str, Lease] = {}  # idle sessions
        self._lent = 0.0  # GPUs of sessions, which only jobs get
        for name, account in self._quotas.accounts.items():
            limit = account.project.limit_milli
            self._most[name] = inf if limit is None else limit / WHOLE_GPU
            self._most_unborrowing[name] = (account.project.quota_milli - account.claimed) / WHOLE_GPU
        for lease in cluster.leases:
            self._adopt(lease, left_gpu_s.get(lease.id, inf))
        self._share()

    def _adopt(self, lease: Lease, left: float) -> None:
        holds = lease.state in HOLDS_CAPACITY
        if holds or (lease.kind is Kind.TRAIN and not lease.cancelled):
            self._demand(lease, 1)
        if lease.kind is Kind.BUILD:
            if lease.state is State.PENDING:
                return  # when it starts is asked of `Future.free_at`
            at = eligible_at(lease, self._settings)
            if holds:
                self._free -= gpus(lease)
            else:
                self._lent += gpus(lease)  # it takes them back for its next cell
            self._count_session(lease, self._quotas.capped_by(lease))
            if at is not None:
                self._lendable[lease.id] = lease
                self._schedule(max(at, self.now), _SESSION, 0, lease.id)
            return
        if lease.cancelled and not holds:
            return
        job = self._jobs[lease.id] = _Job(lease, self.now, left)
        self._left += 1
        place = rank(lease, self.now, self._settings, self._user_level(lease))
        job.level = place[0]
        if holds:
            job.is_new = False
            job.level = self._level(job)
            self._hold(job)
        else:
            self._put(job, place)

    # -- events

    def run(self, most_events: int) -> None:
        self._fill()
        done = 0
        while self._events and self._left and done < most_events and self._events[0][0] <= self._until:
            self.now = self._events[0][0]
            is_due = False
            while self._events and self._events[0][0] <= self.now:
                _, kind, stamp, name = heapq.heappop(self._events)
                done += 1
                is_due |= self._handle(kind, stamp, name)
            if is_due:
                self._fill()

    def _schedule(self, at: float, kind: int, stamp: int, name: str) -> None:
        if at <= self._until:
            heapq.heappush(self._events, (at, kind, stamp, name))

    def _handle(self, kind: int, stamp: int, name: str) -> bool:
        """Return whether a waiting job may start after the event."""
        if kind == _SESSION:
            lease = self._lendable.pop(name)
            self._free += gpus(lease)
            self._lent += gpus(lease)
            self._count_session(lease, -self._quotas.capped_until_left(lease))
            return True
        if kind == _PREEMPTIBLE:
            self._recheck_at = inf
            return True
        job = self._jobs[name]
        if stamp != job.stamp:
            return False
        self._let_go(job)
        if job.left > _EPSILON * job.gpus:
            job.level = self._level(job)
            self._hold(job)
        else:
            self.ends_at[name] = self.now
            self._left -= 1
            self._demand(job.lease, -1)
            self._share()
        return True

    # -- jobs

    def _level(self, job: _Job) -> Level:
        group = self._order.group(job.running, job.attained / job.gpus, self._settings)
        return -job.lease.priority, self._user_level(job.lease), group

    def _user_level(self, lease: Lease) -> int:
        return self._user_levels.get((lease.project, lease.user), 0)

    def _leaves_after(self, job: _Job) -> float:
        """GPU-seconds after which a running job enters a later level."""
        at = self._order.leaves_at(job.running, job.attained / job.gpus, self._settings)
        return inf if at is None else at * job.gpus - job.attained

    def _hold(self, job: _Job) -> None:
        """Let a job run from now on, until it ends or enters a later level."""
        lease = job.lease
        self._free -= job.gpus
        self._count_job(job, job.gpus)
        job.runs_from = self.now
        insort(self._running.setdefault(lease.project, []), (job.level, job.granted_at, lease.id))
        self._scheduled += 1
        job.stamp = self._scheduled
        lasts_s = min(job.left, self._leaves_after(job)) / job.gpus
        self._schedule(self.now + lasts_s, _JOB, job.stamp, lease.id)

    def _let_go(self, job: _Job) -> None:
        """Take the GPUs of a running job, and write down what it received."""
        lease = job.lease
        received = (self.now - job.runs_from) * job.gpus
        job.attained += received
        job.left -= received
        self._free += job.gpus
        self._count_job(job, -job.gpus)
        running = self._running[lease.project]
        del running[bisect_left(running, (job.level, job.granted_at, lease.id))]
        job.stamp = 0

    def _put(self, job: _Job, place: _Place) -> None:
        heap = self._waiting.setdefault(job.alike, [])
        heapq.heappush(heap, (*place[:-1], job.lease.id))

    def _start(self, job: _Job) -> None:
        lease = job.lease
        heapq.heappop(self._waiting[job.alike])
        if job.is_new:
            self.starts_at[lease.id] = self.now
            job.is_new = False
        job.granted_at = self.now
        self._hold(job)

    # -- decisions

    def _fill(self) -> None:
        """Start jobs until none that waits can start at this moment."""
        free = max(0.0, self._free - self._lent)
        if not self.free_at or free > self.free_at[-1][1] + _EPSILON:
            self.free_at.append((self.now, free))
        while self._start_next() or (self._order.preempts and self._preempt()):
            pass

    def _count_job(self, job: _Job, more: float) -> None:
        for used in (self._used, *(() if job.lease.borrow else (self._unborrowing,))):
            used[job.lease.project] = used.get(job.lease.project, 0.0) + more

    def _count_session(self, lease: Lease, capped_milli: int) -> None:
        """Take from what the jobs of a project may hold what a session counts against its limit."""
        self._most[lease.project] = self._most.get(lease.project, inf) - capped_milli / WHOLE_GPU

    def _is_allowed(self, alike: _Alike, without: Iterable[_Job] = ()) -> bool:
        """Whether limit and quota of a project allow one more job, once others of it have left."""
        project, count, borrows = alike
        left = [x for x in without if x.lease.project == project]
        used = self._used.get(project, 0.0) - sum(x.gpus for x in left)
        if used + count > self._most.get(project, inf) + _EPSILON:
            return False
        unborrowing = self._unborrowing.get(project, 0.0) - sum(x.gpus for x in left if not x.lease.borrow)
        return borrows or unborrowing + count <= self._most_unborrowing.get(project, 0.0) + _EPSILON

    def _demand(self, lease: Lease, sign: int) -> None:
        if lease.project in self._demand_milli:
            self._demand_milli[lease.project] += sign * int(WHOLE_GPU * gpus(lease))

    def _share(self) -> None:
        """Compute what each project may hold, in GPUs."""
        if self._demand_milli:
            found = fair_shares(self._projects.values(), self._demand_milli, self._capacity_milli)
            self._shares = {name: milli / WHOLE_GPU for name, milli in found.items()}

    def _start_next(self) -> bool:
        if self._free <= _EPSILON:
            return False
        fitting = [
            (self._turn(alike[0], alike[1]), heap[0])
            for alike, heap in self._waiting.items()
            if heap and alike[1] <= self._free + _EPSILON and self._is_allowed(alike)
        ]
        if fitting:
            self._start(self._jobs[min(fitting)[1][-1]])
        return bool(fitting)

    def _turn(self, name: str, count: float) -> tuple[int, float]:
        """Sort key of projects: owed by quota, below the share, the rest (as `scheduler`)."""
        project, used = self._projects.get(name), self._used.get(name, 0.0)
        if project is None:
            return 2, used
        quota = project.quota_milli / WHOLE_GPU
        if used + count <= quota + _EPSILON:
            return 0, used / quota
        return 2 - self._is_within_share(name, count), (used - quota) / max(project.weight, 1)

    def _is_within_share(self, name: str, count: float) -> bool:
        return self._used.get(name, 0.0) + count <= self._shares.get(name, 0.0) + _EPSILON

    def _preempt(self) -> bool:
        """Start the first waiting job that may take the GPUs of running jobs."""
        above = self._above_share()
        heads = sorted((heap[0], key) for key, heap in self._waiting.items() if heap)
        for place, alike in heads:
            project, count, _ = alike
            missing, running = count - self._free, self._running.get(project)
            victims: list[_Job] = []
            if running and running[-1][0] > place[0]:
                victims = self._victims(project, place[0], missing, self._settings.min_run_s)
            if not victims and above:
                most, other = above[above[0][1] == project]
                if missing <= most + _EPSILON and self._is_within_share(project, count):
                    run_s = share_run_s(self._settings)
                    victims = self._victims(other, _FIRST, missing, run_s, most)
            if victims and self._is_allowed(alike, victims):
                for job in victims:
                    self._let_go(job)
                    # It comes before others of its level, the last to stop first.
                    self._put(job, (job.level, False, False, -self.now, ""))
                self._start(self._jobs[place[-1]])
                return True
        return False

    def _above_share(self) -> list[tuple[float, str]]:
        """Return GPUs and name of the two projects that are furthest above their shares, if several share."""
        above = [(self._used[n] - self._shares[n], n) for n in self._demand_milli]
        return sorted(above, reverse=True)[:2]

    def _victims(
        self, project: str, level: Level, missing: float, run_s: float, beyond: float = inf
    ) -> list[_Job]:
        """Return running jobs of a later level that make way after ``run_s``; none if they are not enough.

        Their project loses less than ``beyond`` GPUs.
        """
        found: list[_Job] = []
        for theirs, granted_at, name in reversed(self._running.get(project, ())):
            if theirs <= level or missing <= _EPSILON:
                break
            job, protected_until = self._jobs[name], granted_at + run_s
            if protected_until > self.now:
                self._recheck(protected_until)
            elif job.gpus <= beyond + _EPSILON:
                found.append(job)
                missing -= job.gpus
                beyond -= job.gpus
        return found if missing <= _EPSILON else []

    def _recheck(self, at: float) -> None:
        if at < self._recheck_at:
            self._recheck_at = at
            self._schedule(at, _PREEMPTIBLE, 0, "")
