"""All leases that have not ended, waiting jobs apart from the others.

Thousands of jobs may wait, and nothing is measured about them.  So what looks at
every lease once a second looks at the others only, and what needs the waiting
ones keeps its result until a number here changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.core.model import Lease, State


class LeaseIndex:
    """Leases by id, as read-only views: ``all``, and its parts ``queued`` and ``placed``."""

    def __init__(self) -> None:
        self._all: dict[str, LeaseRecord] = {}
        self._queued: dict[str, LeaseRecord] = {}
        self._placed: dict[str, LeaseRecord] = {}
        self.all: Mapping[str, LeaseRecord] = MappingProxyType(self._all)
        self.queued: Mapping[str, LeaseRecord] = MappingProxyType(self._queued)  # jobs that are pending
        self.placed: Mapping[str, LeaseRecord] = MappingProxyType(self._placed)
        self.changes = 0  # of any lease
        self._queue_changes = 0
        self._kept: tuple[object, tuple[Lease, ...]] = None, ()

    def put(self, record: LeaseRecord) -> None:
        """Add a lease, or replace it."""
        is_queued = record.is_job and record.state is State.PENDING
        into, other = (self._queued, self._placed) if is_queued else (self._placed, self._queued)
        self._all[record.id] = into[record.id] = record
        was_elsewhere = other.pop(record.id, None) is not None
        self.changes += 1
        self._queue_changes += is_queued or was_elsewhere

    def drop(self, id: str) -> None:
        """Remove a lease, if it is there."""
        if self._all.pop(id, None) is not None:
            self.changes += 1
            self._placed.pop(id, None)
            self._queue_changes += self._queued.pop(id, None) is not None

    def clear(self) -> None:
        """Remove all leases."""
        for id in list(self._all):
            self.drop(id)

    def waiting(
        self, version: object, as_planned: Callable[[Iterable[LeaseRecord]], Iterable[Lease]]
    ) -> tuple[Lease, ...]:
        """Return what ``as_planned`` makes of the waiting jobs.

        Made anew after a change of the queue or of ``version``, on which it may depend.
        """
        key = self._queue_changes, version
        if self._kept[0] != key:
            self._kept = key, tuple(as_planned(self._queued.values()))
        return self._kept[1]
