"""The jobs of each project in line, kept in order from round to round.

Jobs that wait are kept by `Shape`: what decides whether two of them have the
same chance.  Where one finds no room, no other of its shape does, so a round
looks once per shape and not once per job.  Jobs that run are kept by level, so
that those whom a waiting job may preempt are found without looking at others.

Levels change with time (a running job is demoted, a waiting one has waited for
too long); `catch_up` files those jobs anew, and `next_at` says when that
happens next.

What is kept in order is numbers and names, not leases: the garbage collector
has nothing to follow there, however many wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from jupyter_gpushare.core import order
from jupyter_gpushare.core.idle import eligible_at
from jupyter_gpushare.core.model import HOLDS_ROOM, LEAVING, Kind, Lease, Order, Settings, State, Survival

Shape = tuple[object, ...]
Place = tuple[bool, float, str]  # as in `order.Rank`, the id comes last
Moment = tuple[float, int, str]  # when, and for whom: its stamp (`Lines._stamps`) and id

_WAITING = (State.PENDING, State.SUSPENDED)
# From so many on, leases are put in line all at once.
_MANY = 32


# How to add to sorted lists, and to heaps: item by item, or all before they are put in order.
_How = tuple[Callable[[list[Any], Any], None], Callable[[list[Any], Any], None]]
_ONE_BY_ONE: _How = (insort, heapq.heappush)
_AT_ONCE: _How = (list.append, list.append)


def _place(lease: Lease, now: float, settings: Settings) -> Place:
    """Sorts the running jobs of a level: who is preempted first, suspendable ones, then the last in."""
    stops = lease.survival is not Survival.SUSPEND or not lease.suspendable
    return stops, -order.seniority(lease, now, settings), lease.id


@dataclass(slots=True)
class Line:
    """The jobs of one project."""

    waiting: dict[Shape, list[order.Rank]] = field(default_factory=dict)
    running: dict[order.Level, list[Place]] = field(default_factory=dict)
    changes: list[Moment] = field(default_factory=list)  # heap: when the level of a running job does


class Cursor:
    """Goes through the waiting jobs of a project in their order, shape by shape."""

    def __init__(self, line: Line, leases: Mapping[str, Lease]) -> None:
        self._waiting = line.waiting
        self._leases = leases
        self._heads = [(jobs[0], 0, shape) for shape, jobs in line.waiting.items()]
        heapq.heapify(self._heads)

    def __bool__(self) -> bool:
        return bool(self._heads)

    @property
    def first(self) -> tuple[object, ...]:
        """The rank of who comes next."""
        return self._heads[0][0] if self._heads else ()

    def next(self) -> tuple[Lease, Shape]:
        """Who comes next, and its shape."""
        rank, _, shape = self._heads[0]
        return self._leases[rank[-1]], shape

    def go_on(self) -> None:
        """Go on to the next one."""
        _, number, shape = self._heads[0]
        jobs = self._waiting[shape]
        if number + 1 < len(jobs):
            heapq.heapreplace(self._heads, (jobs[number + 1], number + 1, shape))
        else:
            heapq.heappop(self._heads)

    def close(self) -> None:
        """Go on to the next one of another shape."""
        heapq.heappop(self._heads)


class Lines:
    """Everybody who waits, or whose standing changes with time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.of: dict[str, Line] = {}  # by project
        self.sessions: dict[str, Lease] = {}  # are new
        self.sleepers: dict[str, Lease] = {}  # sessions that want to wake
        self.idle: dict[str, Lease] = {}  # sessions whose room may be lent, now or later
        self.backing_off: dict[str, Lease] = {}  # jobs that are not tried again before their moment
        self.leases: dict[str, Lease] = {}  # all of them, by id
        self._stamps: dict[str, int] = {}  # by id: what was foreseen under another one is outdated
        self._waits: dict[str, tuple[Shape, order.Rank]] = {}  # where it is in its line
        self._runs: dict[str, tuple[order.Level, Place]] = {}
        self._clock: list[Moment] = []  # heap, some outdated
        self._demoted: list[Moment] = []  # have just been
        self._count = count()
        self._long_waits_s = order.long_waits(settings)

    def put(self, lease: Lease, now: float) -> None:
        """A lease is new, or has changed."""
        self.drop(lease.id)
        self._file(lease, now, _ONE_BY_ONE)

    def put_all(self, leases: Collection[Lease], now: float) -> None:
        """The same for several; many are sorted at once."""
        if len(leases) < _MANY:
            for lease in leases:
                self.put(lease, now)
            return
        for lease in leases:
            if lease.id in self.leases:
                self.drop(lease.id)
        for lease in leases:
            self._file(lease, now, _AT_ONCE)
        heapq.heapify(self._clock)
        for line in self.of.values():
            heapq.heapify(line.changes)
            for waiting in line.waiting.values():
                waiting.sort()
            for running in line.running.values():
                running.sort()

    def _file(self, lease: Lease, now: float, how: _How) -> None:
        if lease.cancelled:
            return
        self.leases[lease.id] = lease
        self._stamps[lease.id] = next(self._count)
        waits = lease.state in _WAITING
        if lease.kind is Kind.BUILD:
            self._file_session(lease, how)
        elif waits and (lease.devices or lease.state is State.PENDING):
            self._file_waiting(lease, now, how)
        elif lease.state in HOLDS_ROOM and lease.state not in LEAVING:
            self._file_running(lease, now, how)
        if lease.retry_at > now and (waits or lease.state is State.RUNNING):
            self._at(lease.retry_at, lease, how)

    def _file_session(self, lease: Lease, how: _How) -> None:
        if lease.state is State.PENDING:
            self.sessions[lease.id] = lease
        elif lease.state is State.SUSPENDED and lease.wanted and lease.devices:
            self.sleepers[lease.id] = lease
        elif (at := eligible_at(lease, self.settings)) is not None:
            self.idle[lease.id] = lease
            self._at(at, lease, how)

    def _file_waiting(self, lease: Lease, now: float, how: _How) -> None:
        line = self._line(lease.project)
        if lease.retry_at > now:
            self.backing_off[lease.id] = lease
            return
        rank = order.rank(lease, now, self.settings)
        shape = _shape(lease, rank[0], self.settings)
        if (ranks := line.waiting.get(shape)) is None:
            ranks = line.waiting[shape] = []
        how[0](ranks, rank)
        self._waits[lease.id] = shape, rank
        if lease.queued_at > now - order.DEMOTED_S and order.is_just_demoted(lease, now, self.settings):
            self._demoted.append(self._moment(now, lease))
        for wait_s in self._long_waits_s:
            if (at := lease.waits_since_at + wait_s) > now:
                self._at(at, lease, how)
                break

    def _file_running(self, lease: Lease, now: float, how: _How) -> None:
        line, settings = self._line(lease.project), self.settings
        level = order.level(lease, now, settings)
        if settings.order is Order.SRTF:
            level = level[0], 0.0  # what is left changes all the time: `outranked` looks
        elif order.is_just_demoted(lease, now, settings):
            self._demoted.append(self._moment(now, lease))
        place = _place(lease, now, settings)
        how[0](line.running.setdefault(level, []), place)
        self._runs[lease.id] = level, place
        if (at := order.demoted_at(lease, now, settings)) is not None:
            how[1](line.changes, self._moment(at, lease))

    def _line(self, project: str) -> Line:
        if project not in self.of:
            self.of[project] = Line()
        return self.of[project]

    def drop(self, id: str) -> None:
        """A lease has ended (or never was)."""
        lease = self.leases.pop(id, None)
        if lease is None:
            return
        del self._stamps[id]
        for people in (self.sessions, self.sleepers, self.idle, self.backing_off):
            people.pop(id, None)
        if id in self._waits:
            shape, rank = self._waits.pop(id)
            waiting = self.of[lease.project].waiting
            del waiting[shape][bisect_left(waiting[shape], rank)]
            if not waiting[shape]:
                del waiting[shape]
        elif id in self._runs:
            level, place = self._runs.pop(id)
            running = self.of[lease.project].running
            del running[level][bisect_left(running[level], place)]
            if not running[level]:
                del running[level]

    def catch_up(self, now: float) -> None:
        """File everybody anew whose moment came."""
        due, self._demoted = self._demoted, []
        for heap in (self._clock, *(line.changes for line in self.of.values())):
            while heap and (heap[0][0] <= now or self._is_outdated(heap[0])):
                due.append(heapq.heappop(heap))
        for moment in due:
            if not self._is_outdated(moment):
                self.put(self.leases[moment[2]], now)

    def next_at(self) -> float | None:
        """The next moment at which a wait may end though nothing happens; right after `catch_up`."""
        heaps = [self._clock, *(line.changes for line in self.of.values() if line.waiting)]
        return min((heap[0][0] for heap in heaps if heap), default=None)

    def outranked(self, project: str, level: order.Level, now: float) -> Iterable[Lease]:
        """The running jobs of a project that a job of ``level`` may preempt, the first to go first."""
        running = self.of[project].running if project in self.of else {}
        if self.settings.order is Order.SRTF:
            everybody = [self.leases[place[-1]] for places in running.values() for place in places]
            ranked = [(order.level(x, now, self.settings), x.id) for x in everybody]
            return [self.leases[id] for worse, id in sorted(ranked, reverse=True) if worse > level]
        levels = sorted((worse for worse in running if worse > level), reverse=True)
        return [self.leases[place[-1]] for worse in levels for place in running[worse]]

    def _at(self, at: float, lease: Lease, how: _How) -> None:
        how[1](self._clock, self._moment(at, lease))

    def _moment(self, at: float, lease: Lease) -> Moment:
        return at, self._stamps[lease.id], lease.id

    def _is_outdated(self, moment: Moment) -> bool:
        return self._stamps.get(moment[2]) != moment[1]


def _shape(lease: Lease, level: order.Level, settings: Settings) -> Shape:
    """What decides whether two waiting jobs of a project have the same chance."""
    return (
        level[0] if settings.order is Order.SRTF else level,
        lease.fraction_milli,
        lease.device_count,
        lease.memory_bytes,
        lease.profile,
        lease.consolidate,
        lease.borrow,
        lease.survival is Survival.SUSPEND and lease.suspendable,
        lease.devices,
    )
