"""What `core` works out about the present: once per change and second, however many ask."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from jupyter_gpushare.broker import snapshot
from jupyter_gpushare.broker.book import Book
from jupyter_gpushare.broker.lending import lent_milli
from jupyter_gpushare.core import explain
from jupyter_gpushare.core.model import Cluster, Lease, State, Why
from jupyter_gpushare.core.plan import look

_FRESH_S = 1.0
# Room that others free does not help these jobs.
_NOT_FOR_ROOM = frozenset({Why.TOO_LARGE, Why.PROJECT_LIMIT, Why.QUOTA, Why.BACKING_OFF})
# What a smaller size would bring is worked out for so many at the head of the queue.
_AT_THE_HEAD = 10


class Moment:
    """One moment's cluster, and what follows from it."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.seq = book.seq
        self.at = book.clock()
        self.cluster: Cluster = snapshot.cluster(book, self.at)
        self._round = look(self.cluster, self.at).run()
        #: Why each lease waits.
        self.why: Mapping[str, Why] = {x: w.why for x, w in self._round.waiting.items()}
        jobs = [x for x, why in self.why.items() if why is not Why.TOO_LARGE and self._is_job(x)]
        #: The place of each job that waits, 1 is next.
        self.position: Mapping[str, int] = {x: n for n, x in enumerate(jobs, 1)}
        self.free_milli = sum(max(0, room.now) for room in self._round.board.usable)
        self._smaller: dict[str, explain.Size | None] = {}

    def _is_job(self, lease_id: str) -> bool:
        record = self._book.leases.get(lease_id)
        return record is not None and record.is_job

    @cached_property
    def waiting(self) -> int:
        """How many jobs wait for room."""
        return sum(
            1
            for r in self._book.leases.values()
            if r.is_job
            and r.state in (State.PENDING, State.SUSPENDED)
            and self.why.get(r.id) not in _NOT_FOR_ROOM
        )

    @cached_property
    def borrowed(self) -> Mapping[str, bool]:
        """Of every lease that holds room: whether it may be taken back."""
        return explain.borrowed(self.cluster)

    @cached_property
    def lent(self) -> Mapping[str, tuple[str, ...]]:
        """Who uses the room of each sleeping session that has a claim to it."""
        return explain.lent(self.cluster)

    @cached_property
    def lent_milli(self) -> Mapping[str, float]:
        """What the sleeping sessions of each project lend, in thousandths of a GPU."""
        bound: dict[str, list[Lease]] = {}
        for lease in self.cluster.leases:
            for device in lease.devices:
                bound.setdefault(device, []).append(lease)
        found: dict[str, float] = {}
        project = {lease.id: lease.project for lease in self.cluster.leases}
        for leases in bound.values():
            for lender, milli in lent_milli(leases).items():
                found[project[lender]] = found.get(project[lender], 0.0) + milli
        return found

    @cached_property
    def uses(self) -> Mapping[str, explain.Use]:
        """What each project has."""
        return {use.project: use for use in explain.uses(self.cluster)}

    @cached_property
    def _owed(self) -> tuple[str, ...]:
        """Projects that do not use all of their quota."""
        return tuple(
            p.name
            for p in self.cluster.projects
            if p.quota_milli > self.uses[p.name].in_use_milli - self.uses[p.name].borrowed_milli
        )

    def owners(self, lease_id: str) -> set[str]:
        """Return the projects that may take back the room that a lease borrows."""
        project = {lease.id: lease.project for lease in self.cluster.leases}
        lenders = {project[x] for x, users in self.lent.items() if lease_id in users}
        return lenders or {name for name in self._owed if name != project[lease_id]}

    def smaller(self, lease_id: str) -> explain.Size | None:
        """Return the largest smaller size with which a job at the head of the queue would start now."""
        record = self._book.leases.get(lease_id)
        if record is None or not 1 <= self.position.get(lease_id, 0) <= _AT_THE_HEAD:
            return None
        if lease_id not in self._smaller:
            self._smaller[lease_id] = explain.smaller(self._round, record.lease)
        return self._smaller[lease_id]


class Moments:
    """Keeps the last moment as long as nothing has changed since, and no second has passed."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._last: Moment | None = None

    def now(self) -> Moment:
        last = self._last
        if last is None or last.seq != self._book.seq or self._book.clock() - last.at > _FRESH_S:
            self._last = last = Moment(self._book)
        return last
