"""Waiting and running jobs of each project, kept sorted between scheduling rounds.

Waiting jobs are grouped by `Shape`: jobs of one shape fit or fail alike, so a round
tries each shape once instead of each job.  Running jobs are grouped by level, so the
jobs that a waiting job may preempt are found without a scan.

Levels change with time: a running job is demoted, a waiting job starves.
`refile_due` sorts such jobs again; `next_at` is the time of the next change.
When a user falls behind (`fairshare`), `set_behind` sorts that user's running jobs
again, and `prefer` those waiting jobs that fit the user's share.

The sorted lists hold numbers and names, not leases, so the garbage collector has
nothing to follow there, whatever the number of waiting jobs.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from math import inf
from operator import itemgetter
from typing import NamedTuple
from weakref import WeakValueDictionary

from jupyter_gpushare.core import order
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.idle import eligible_at
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    Behind,
    Kind,
    Lease,
    Settings,
    State,
    held_by,
)
from jupyter_gpushare.core.size import Size


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Fit:
    """Properties that make jobs of a level fit or fail alike; `JobQueues` has one object for each value."""

    starved: int | None  # the priority of a starving job, by which it may preempt; None: it does not starve
    size: Size
    consolidate: bool
    borrow: bool
    suspends: bool
    devices: tuple[str, ...]
    movable: bool

    @property
    def is_common(self) -> bool:
        """Whether such jobs of all projects that hold nothing fit or fail alike."""
        return self.borrow and self.starved is None and not self.devices


Shape = tuple[order.Level, Fit]
RunningKey = tuple[bool, float, str]  # sort key in a level; the first job is preempted first
Timer = tuple[float, int, str]  # time, stamp of the lease when it was set, lease id

User = tuple[str, str]  # project, user

_WAITING = (State.PENDING, State.SUSPENDED)
# The maximum number of waiting jobs that come first for a user who is behind, whatever the share.
MAX_PREFERRED = 64


class Summary(NamedTuple):
    """Least sizes of the waiting jobs of a project, in thousandths of a GPU."""

    least: int  # of the smallest job
    # For each shape its first rank, its project and fit, and the least size of its jobs; sorted by rank.
    shapes: Sequence[tuple[order.Rank, tuple[str, Fit], int]]
    borrowing: int  # sum of the jobs that borrow
    unborrowing: int  # sum of the others


@dataclass(slots=True)
class ProjectQueue:
    """Waiting and running jobs of one project."""

    waiting: dict[Shape, list[order.Rank]] = field(default_factory=dict)
    running: dict[order.Level, list[RunningKey]] = field(default_factory=dict)
    demotions: list[Timer] = field(default_factory=list)  # heap of times when a running job changes its level
    summary: Summary | None = None  # of ``waiting``; None after a change

    def starved(self) -> dict[Shape, list[order.Rank]]:
        """Return the part of ``waiting`` that starves."""
        return {shape: ranks for shape, ranks in self.waiting.items() if ranks[0][0] is order.STARVED}


class Cursor:
    """Iterates over the waiting jobs of a project by rank, and can skip a shape."""

    def __init__(self, waiting: Mapping[Shape, list[order.Rank]], leases: Mapping[str, Lease]) -> None:
        self._waiting = waiting
        self._leases = leases
        self._heads = [(jobs[0], 0, shape) for shape, jobs in waiting.items()]
        heapq.heapify(self._heads)

    def __bool__(self) -> bool:
        return bool(self._heads)

    @property
    def rank(self) -> tuple[object, ...]:
        """Rank of the current job; empty at the end."""
        return self._heads[0][0] if self._heads else ()

    @property
    def current(self) -> tuple[Lease, Shape]:
        """The current job and its shape."""
        rank, _, shape = self._heads[0]
        return self._leases[rank[-1]], shape

    def advance(self) -> None:
        """Go to the next job."""
        _, number, shape = self._heads[0]
        jobs = self._waiting[shape]
        if number + 1 < len(jobs):
            heapq.heapreplace(self._heads, (jobs[number + 1], number + 1, shape))
        else:
            heapq.heappop(self._heads)

    def skip_shape(self) -> None:
        """Go to the next job of another shape."""
        heapq.heappop(self._heads)


class JobQueues:
    """Leases that wait, and leases with timers."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.by_project: dict[str, ProjectQueue] = {}
        self.new_sessions: dict[str, Lease] = {}
        self.waking_sessions: dict[str, Lease] = {}  # suspended, and their processes want the GPU
        self.idle: dict[str, Lease] = {}  # sessions that may lend their devices, now or later
        self.backing_off: dict[str, Lease] = {}  # jobs that are not tried before `Lease.retry_at`
        # By lease, `_left_at` of the leases that gave their devices up for it, ascending.
        self._made_way_for: dict[str, list[tuple[float, str]]] = {}
        self._promised: set[str] = set()  # waiting jobs in `_made_way_for` that have not run since
        self.leases: dict[str, Lease] = {}  # all leases, by id
        self._behind: Mapping[User, Behind] = {}
        self._waiting_of: dict[User, list[order.Rank]] = {}  # of users who are behind; `_not_preferred`
        self._preferred: set[str] = set()  # the preferred waiting jobs of users who are behind
        self._stamps: dict[str, int] = {}  # by id; timers with another stamp are outdated
        self._waiting_at: dict[str, tuple[Shape, order.Rank]] = {}
        self._sharing: set[str] = set()  # waiting jobs that may become guests
        self._running_at: dict[str, tuple[order.Level, RunningKey]] = {}
        self._timers: list[Timer] = []  # heap
        self._fits: WeakValueDictionary[tuple[object, ...], Fit] = WeakValueDictionary()
        self._count = count()
        self._order = order.order_of(settings)
        self._long_waits_s = order.long_waits(settings)

    def level(self, lease: Lease, now: float) -> order.Level:
        """Return the level of a job (`order.level`)."""
        return order.level(lease, now, self.settings, preferred=self._is_preferred(lease))

    def running_level(self, lease: Lease, now: float) -> order.Level:
        """Return the level of a running job as it was last sorted."""
        return self.level(lease, now) if self._order.drifts else self._running_at[lease.id][0]

    def rank(self, lease: Lease, now: float) -> order.Rank:
        """Return the sort key of a waiting job (`order.rank`)."""
        return order.rank(lease, now, self.settings, preferred=self._is_preferred(lease))

    def _is_preferred(self, lease: Lease) -> bool:
        """Return whether a job is preferred because its user is behind: it runs, or `prefer` chose it."""
        if lease.state in _WAITING:
            return lease.id in self._preferred
        return (lease.project, lease.user) in self._behind

    def set_behind(self, behind: Mapping[User, Behind], now: float) -> None:
        """Set the users who are behind (`fairshare`); re-sort the jobs of users who are new or gone."""
        changed = behind.keys() ^ self._behind.keys()
        self._behind = behind
        if not changed:
            return
        for user in changed:
            self._waiting_of.pop(user, None)
        for lease in [x for x in self.leases.values() if (x.project, x.user) in changed]:
            self.put(lease, now)

    def prefer(self, could_run: Callable[[Lease], bool], now: float) -> None:
        """Prefer the waiting jobs that users who are behind may start within their share.

        ``could_run``: whether a job could run if there were capacity; other jobs take no part of the share.
        """
        preferred: set[str] = set()
        for user, behind in self._behind.items():
            left = behind.left_milli
            waiting = (self.leases[rank[-1]] for rank in self._waiting_of.get(user, ()))
            for lease in islice(filter(could_run, waiting), MAX_PREFERRED):
                # A request for memory counts as one GPU, because its fraction depends on the device.
                size = (held_by(lease) or WHOLE_GPU) * lease.size.device_count
                if size <= left or (size <= behind.first_milli and left == behind.left_milli):
                    preferred.add(lease.id)
                    left -= size
        changed, self._preferred = preferred ^ self._preferred, preferred
        for id in changed & self._waiting_at.keys():
            self.put(self.leases[id], now)

    def put(self, lease: Lease, now: float) -> None:
        """Add a lease, or replace it after a change."""
        self.drop(lease.id)
        if lease.cancelled:
            return
        self.leases[lease.id] = lease
        self._stamps[lease.id] = next(self._count)
        waits = lease.state in _WAITING
        if lease.made_way_for:
            insort(self._made_way_for.setdefault(lease.made_way_for, []), _left_at(lease))
            self._review_promise(lease.made_way_for)
        if lease.kind is Kind.BUILD:
            self._file_session(lease, now)
        elif waits and (lease.devices or lease.state is State.PENDING):
            self._file_waiting(lease, now)
        elif lease.state in HOLDS_CAPACITY and lease.state not in LEAVING:
            self._file_running(lease, now)
        if lease.retry_at > now and (waits or lease.state is State.RUNNING):
            self._set_timer(lease.retry_at, lease)

    def _file_session(self, lease: Lease, now: float) -> None:
        if lease.state is State.PENDING:
            self.new_sessions[lease.id] = lease
        elif lease.state is State.SUSPENDED and lease.wanted and lease.devices:
            self.waking_sessions[lease.id] = lease
        elif (at := eligible_at(lease, self.settings)) is not None:
            self.idle[lease.id] = lease
            if at > now:
                self._set_timer(at, lease)

    def _file_waiting(self, lease: Lease, now: float) -> None:
        queue = self._queue_of(lease.project)
        if lease.retry_at > now:
            self.backing_off[lease.id] = lease
            return
        rank = self.rank(lease, now)
        shape = self._shape(lease, rank[0])
        queue.summary = None
        if (ranks := queue.waiting.get(shape)) is None:
            ranks = queue.waiting[shape] = []
        insort(ranks, rank)
        self._waiting_at[lease.id] = shape, rank
        if lease.share and lease.can_be_guest and shape[1].suspends:
            self._sharing.add(lease.id)
        self._review_promise(lease.id)
        if (user := (lease.project, lease.user)) in self._behind:
            insort(self._waiting_of.setdefault(user, []), _not_preferred(rank))
        for wait_s in self._long_waits_s:
            if (at := lease.waits_since_at + wait_s) > now:
                self._set_timer(at, lease)
                break

    def _file_running(self, lease: Lease, now: float) -> None:
        queue, settings = self._queue_of(lease.project), self.settings
        level = self.level(lease, now)
        if self._order.drifts:
            level = *level[:2], 0.0  # `outranked` computes the levels
        stops = not lease.survival.suspends or not lease.suspendable
        key = stops, -order.seniority(lease, now, settings), lease.id
        insort(queue.running.setdefault(level, []), key)
        self._running_at[lease.id] = level, key
        if (at := self._order.leaves_at(lease, now, settings)) is not None:
            heapq.heappush(queue.demotions, self._timer(at, lease))

    def _queue_of(self, project: str) -> ProjectQueue:
        if project not in self.by_project:
            self.by_project[project] = ProjectQueue()
        return self.by_project[project]

    def drop(self, id: str) -> None:
        """Remove a lease if it is known."""
        lease = self.leases.pop(id, None)
        if lease is None:
            return
        del self._stamps[id]
        for group in (self.new_sessions, self.waking_sessions, self.idle, self.backing_off):
            group.pop(id, None)
        if id in self._waiting_at:
            self._promised.discard(id)
            self._sharing.discard(id)
            shape, rank = self._waiting_at.pop(id)
            own = self._waiting_of.get((lease.project, lease.user), [])
            at = bisect_left(own, _not_preferred(rank))
            if at < len(own) and own[at][-1] == id:
                del own[at]
            queue = self.by_project[lease.project]
            waiting, queue.summary = queue.waiting, None
            del waiting[shape][bisect_left(waiting[shape], rank)]
            if not waiting[shape]:
                del waiting[shape]
        elif id in self._running_at:
            level, key = self._running_at.pop(id)
            running = self.by_project[lease.project].running
            del running[level][bisect_left(running[level], key)]
            if not running[level]:
                del running[level]
        if lease.made_way_for:
            others = self._made_way_for[lease.made_way_for]
            del others[bisect_left(others, _left_at(lease))]
            if not others:
                del self._made_way_for[lease.made_way_for]
            self._review_promise(lease.made_way_for)

    def refile_due(self, now: float) -> None:
        """Sort again the leases with expired timers."""
        due: list[Timer] = []
        for heap in (self._timers, *(queue.demotions for queue in self.by_project.values())):
            while heap and (heap[0][0] <= now or self._is_outdated(heap[0])):
                due.append(heapq.heappop(heap))
        for timer in due:
            if not self._is_outdated(timer):
                self.put(self.leases[timer[2]], now)

    def next_at(self) -> float | None:
        """Return the next time at which a decision may change by itself; call it right after `refile_due`."""
        heaps = [self._timers, *(queue.demotions for queue in self.by_project.values() if queue.waiting)]
        return min((heap[0][0] for heap in heaps if heap), default=None)

    def _review_promise(self, id: str) -> None:
        """Decide again whether a job waits for capacity that other leases released for it."""
        others = self._made_way_for.get(id) if id in self._waiting_at else None
        # A job that ran in the meantime has used its promise.
        if others and others[-1][0] >= self.leases[id].waits_since_at:
            self._promised.add(id)
        else:
            self._promised.discard(id)

    def promised(self) -> list[Lease]:
        """Return the waiting jobs that other leases made way for.

        Jobs that fit in the fewest places come first: bound to devices, large, not borrowing.
        """
        return sorted(
            map(self.leases.__getitem__, self._promised),
            key=lambda x: (not x.devices, -order.gpus(x), x.borrow, self._waiting_at[x.id][1]),
        )

    def sharing(self, projects: Container[str], count: int) -> list[tuple[Lease, Fit]]:
        """Return the first ``count`` waiting jobs of these projects that may become guests."""
        able = (id for id in self._sharing if self.leases[id].project in projects)
        first = heapq.nsmallest(count, able, key=lambda id: self._waiting_at[id][1])
        return [(self.leases[id], self._waiting_at[id][0][1]) for id in first]

    def summaries(self, state: ClusterState) -> dict[str, Summary]:
        """Return the summaries of the projects with waiting jobs, by name."""
        return {
            name: queue.summary or self._summarize(name, queue, state)
            for name, queue in self.by_project.items()
            if queue.waiting
        }

    def _summarize(self, name: str, queue: ProjectQueue, state: ClusterState) -> Summary:
        wanted_milli = {True: 0, False: 0}  # by whether they borrow
        shapes = []
        for (_, fit), ranks in queue.waiting.items():
            size = state.least_size(self.leases[ranks[0][-1]])
            wanted_milli[fit.borrow] += size * len(ranks)
            shapes.append((ranks[0], (name, fit), size))
        shapes.sort(key=itemgetter(0))
        least = min(size for _, _, size in shapes)
        queue.summary = Summary(least, shapes, wanted_milli[True], wanted_milli[False])
        return queue.summary

    def waiting_milli(self, state: ClusterState) -> dict[str, int]:
        """Return the least thousandths of a GPU that the waiting jobs of each project take.

        Jobs that do not borrow count only up to the unused quota.
        """
        found = {}
        for name, queue in self.by_project.items():
            account = state.quotas.account(name)  # also of a project that is not configured
            if queue.waiting:
                summary = queue.summary or self._summarize(name, queue, state)
                found[name] = summary.borrowing
                if summary.unborrowing:
                    found[name] += min(summary.unborrowing, max(0, account.unborrowed_left))
        return found

    def outranked(self, project: str, level: order.Level, now: float) -> Iterable[Lease]:
        """Return the running jobs of a project in later levels than ``level``, the first to preempt first."""
        running = self.by_project[project].running if project in self.by_project else {}
        if self._order.drifts:
            jobs = [self.leases[key[-1]] for keys in running.values() for key in keys]
            ranked = [(self.level(x, now), x.id) for x in jobs]
            return [self.leases[id] for later, id in sorted(ranked, reverse=True) if later > level]
        levels = sorted((later for later in running if later > level), reverse=True)
        return [self.leases[key[-1]] for later in levels for key in running[later]]

    def _set_timer(self, at: float, lease: Lease) -> None:
        heapq.heappush(self._timers, self._timer(at, lease))

    def _timer(self, at: float, lease: Lease) -> Timer:
        return at, self._stamps[lease.id], lease.id

    def _shape(self, lease: Lease, level: order.Level) -> Shape:
        """Return the shape of a waiting job: jobs of a project with one shape fit or fail alike."""
        key = (
            lease.priority if level is order.STARVED else None,
            lease.size,
            lease.consolidate,
            lease.borrow,
            lease.survival.suspends and lease.suspendable,
            lease.devices,
            lease.movable,
        )
        if (fit := self._fits.get(key)) is None:
            fit = self._fits[key] = Fit(*key)
        return (*level[:2], 0.0) if self._order.drifts else level, fit

    def _is_outdated(self, timer: Timer) -> bool:
        return self._stamps.get(timer[2]) != timer[1]


def _left_at(lease: Lease) -> tuple[float, str]:
    """Return the time when a lease that made way had left (inf if it has not yet), and its id."""
    return inf if lease.state in LEAVING else lease.waits_since_at, lease.id


def _not_preferred(rank: order.Rank) -> order.Rank:
    """Return the rank that a waiting job has if it is not preferred."""
    level, *place = rank
    return (level[0], True, level[2]), *place  # type: ignore[return-value]  # the length is the same
