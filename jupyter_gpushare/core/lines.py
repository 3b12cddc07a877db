"""The jobs of each project in line, kept in order from round to round.

Jobs that wait are kept by `Shape`: what decides whether two of them have the
same chance.  Where one finds no room, no other of its shape does, so a round
looks once per shape and not once per job.  Jobs that run are kept by level, so
that those whom a waiting job may preempt are found without looking at others.

Levels change with time (a running job is demoted, a waiting one has waited for
too long); `catch_up` files those jobs anew, and `next_at` says when that
happens next.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import Any

from jupyter_gpushare.core import order
from jupyter_gpushare.core.idle import eligible_at
from jupyter_gpushare.core.model import HOLDS_ROOM, LEAVING, Kind, Lease, Order, Settings, State, Survival

Shape = tuple[object, ...]
Waiting = tuple[order.Rank, Lease]
Place = tuple[bool, float, str]
Running = tuple[Place, Lease]
Moment = tuple[float, int, Lease]

_FIRST = itemgetter(0)
# From so many on, leases are put in line all at once.
_MANY = 32


def _insert(items: list[Any], item: Any) -> None:
    insort(items, item, key=_FIRST)


# How to add to sorted lists, and to heaps: item by item, or all before they are put in order.
_How = tuple[Callable[[list[Any], Any], None], Callable[[list[Any], Any], None]]
_ONE_BY_ONE: _How = (_insert, heapq.heappush)
_AT_ONCE: _How = (list.append, list.append)


def _place(lease: Lease, now: float, settings: Settings) -> Place:
    """Sorts the running jobs of a level: who is preempted first, suspendable ones, then the last in."""
    stops = lease.survival is not Survival.SUSPEND or not lease.suspendable
    return stops, -order.seniority(lease, now, settings), lease.id


@dataclass(slots=True)
class Line:
    """The jobs of one project."""

    waiting: dict[Shape, list[Waiting]] = field(default_factory=dict)
    running: dict[order.Level, list[Running]] = field(default_factory=dict)
    changes: list[Moment] = field(default_factory=list)  # heap: when the level of a running job does

    def outranked(self, level: order.Level, now: float, settings: Settings) -> Iterator[Lease]:
        """The running jobs that a job of ``level`` may preempt, the first to go first."""
        if settings.order is Order.SRTF:
            everybody = [lease for jobs in self.running.values() for _, lease in jobs]
            ranked = [(order.level(x, now, settings), x.id, x) for x in everybody]
            yield from (x for worse, _, x in sorted(ranked, reverse=True) if worse > level)
            return
        for worse in sorted(self.running, reverse=True):
            if worse > level:
                yield from (lease for _, lease in self.running[worse])


class Cursor:
    """Goes through the waiting jobs of a project in their order, shape by shape."""

    def __init__(self, line: Line) -> None:
        self._waiting = line.waiting
        self._heads = [(jobs[0][0], 0, shape) for shape, jobs in line.waiting.items()]
        heapq.heapify(self._heads)

    def __bool__(self) -> bool:
        return bool(self._heads)

    @property
    def first(self) -> tuple[object, ...]:
        """The rank of who comes next."""
        return self._heads[0][0] if self._heads else ()

    def next(self) -> tuple[Lease, Shape]:
        """Who comes next, and its shape."""
        _, number, shape = self._heads[0]
        return self._waiting[shape][number][1], shape

    def go_on(self) -> None:
        """Go on to the next one."""
        _, number, shape = self._heads[0]
        jobs = self._waiting[shape]
        if number + 1 < len(jobs):
            heapq.heapreplace(self._heads, (jobs[number + 1][0], number + 1, shape))
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
        self._filed: dict[str, Lease] = {}
        self._waits: dict[str, tuple[Shape, order.Rank]] = {}  # where it is in its line
        self._runs: dict[str, tuple[order.Level, Place]] = {}
        self._clock: list[Moment] = []  # heap, some outdated
        self._demoted: list[Lease] = []  # have just been
        self._count = count()  # settles ties
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
            self.drop(lease.id)
        for lease in leases:
            self._file(lease, now, _AT_ONCE)
        heapq.heapify(self._clock)
        for line in self.of.values():
            heapq.heapify(line.changes)
            for waiting in line.waiting.values():
                waiting.sort(key=_FIRST)
            for running in line.running.values():
                running.sort(key=_FIRST)

    def _file(self, lease: Lease, now: float, how: _How) -> None:
        if lease.cancelled:
            return
        self._filed[lease.id] = lease
        if lease.kind is Kind.BUILD:
            self._file_session(lease, how)
        else:
            self._file_job(lease, now, how)
        if lease.retry_at > now and (lease.state is State.RUNNING or order.is_waiting(lease)):
            self._at(lease.retry_at, lease, how)

    def _file_session(self, lease: Lease, how: _How) -> None:
        if lease.state is State.PENDING:
            self.sessions[lease.id] = lease
        elif lease.state is State.SUSPENDED and lease.wanted and lease.devices:
            self.sleepers[lease.id] = lease
        elif (at := eligible_at(lease, self.settings)) is not None:
            self.idle[lease.id] = lease
            self._at(at, lease, how)

    def _file_job(self, lease: Lease, now: float, how: _How) -> None:
        line = self.of.get(lease.project)
        if line is None:
            line = self.of[lease.project] = Line()
        settings, (add, push) = self.settings, how
        if order.is_waiting(lease) and (lease.devices or lease.state is State.PENDING):
            if lease.retry_at > now:
                self.backing_off[lease.id] = lease
            else:
                rank = order.rank(lease, now, settings)
                shape = _shape(lease, rank[0], settings)
                add(line.waiting.setdefault(shape, []), (rank, lease))
                self._waits[lease.id] = shape, rank
                if order.is_just_demoted(lease, now, settings):
                    self._demoted.append(lease)
                for wait_s in self._long_waits_s:
                    if lease.waits_since_at + wait_s > now:
                        self._at(lease.waits_since_at + wait_s, lease, how)
                        break
        elif lease.state in HOLDS_ROOM and lease.state not in LEAVING:
            level = order.level(lease, now, settings)
            if settings.order is Order.SRTF:
                level = level[0], 0.0  # what is left changes all the time: `outranked` looks
            elif order.is_just_demoted(lease, now, settings):
                self._demoted.append(lease)
            place = _place(lease, now, settings)
            add(line.running.setdefault(level, []), (place, lease))
            self._runs[lease.id] = level, place
            if (at := order.demoted_at(lease, now, settings)) is not None:
                push(line.changes, (at, next(self._count), lease))

    def drop(self, id: str) -> None:
        """A lease has ended (or never was)."""
        lease = self._filed.pop(id, None)
        if lease is None:
            return
        for people in (self.sessions, self.sleepers, self.idle, self.backing_off):
            people.pop(id, None)
        if id in self._waits:
            shape, rank = self._waits.pop(id)
            waiting = self.of[lease.project].waiting
            del waiting[shape][bisect_left(waiting[shape], rank, key=_FIRST)]
            if not waiting[shape]:
                del waiting[shape]
        elif id in self._runs:
            level, place = self._runs.pop(id)
            running = self.of[lease.project].running
            del running[level][bisect_left(running[level], place, key=_FIRST)]
            if not running[level]:
                del running[level]

    def catch_up(self, now: float) -> None:
        """File everybody anew whose moment came."""
        due, self._demoted = self._demoted, []
        for heap in (self._clock, *(line.changes for line in self.of.values())):
            while heap and (heap[0][0] <= now or self._is_outdated(heap[0][2])):
                due.append(heapq.heappop(heap)[2])
        for lease in due:
            if not self._is_outdated(lease):
                self.put(lease, now)

    def next_at(self) -> float | None:
        """The next moment at which a wait may end though nothing happens; right after `catch_up`."""
        heaps = [self._clock, *(line.changes for line in self.of.values() if line.waiting)]
        return min((heap[0][0] for heap in heaps if heap), default=None)

    def _at(self, moment: float, lease: Lease, how: _How) -> None:
        how[1](self._clock, (moment, next(self._count), lease))

    def _is_outdated(self, lease: Lease) -> bool:
        return self._filed.get(lease.id) is not lease


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
