"""The log of decisions: one sentence each, with lease, owner and reason.

Owners and administrators read it; every entry is also stored.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from jupyter_gpushare.broker.state.records import DecisionRecord, LeaseRecord
from jupyter_gpushare.protocol.wire import Text

# Entries in memory; the database has all.
_KEPT = 1_000


class Decisions:
    """Creates all entries and keeps the latest in memory."""

    def __init__(self, wall: Callable[[], str], stored: Iterable[DecisionRecord] = ()) -> None:
        self.latest = deque(stored, maxlen=_KEPT)
        self.counted: Counter[tuple[str, str]] = Counter()  # by action and reason, for metrics
        self._wall = wall
        self._seq = self.latest[-1].seq if self.latest else 0

    def move_owner(self, old: str, new: str) -> None:
        """Let the entries about one owner's leases be those of another."""
        for number, entry in enumerate(self.latest):
            if entry.user == old:
                self.latest[number] = replace(entry, user=new)

    def made_way_for(self, lease_id: str) -> tuple[str, ...]:
        """Return the actions on other leases for this one since its last grant, of the latest entries."""
        found: dict[str, None] = {}
        for entry in reversed(self.latest):
            if entry.lease == lease_id and entry.action == "grant":
                break
            if entry.for_lease == lease_id:
                found[entry.action] = None
        return tuple(found)

    def add(
        self, record: LeaseRecord | None, action: str, text: Text, *, why: str = "", for_lease: str = ""
    ) -> DecisionRecord:
        """Return a new entry, which the caller stores; without a lease it concerns the machine."""
        self._seq += 1
        self.counted[action, why] += 1
        entry = DecisionRecord(
            seq=self._seq,
            at=self._wall(),
            lease=record.id if record else "",
            user=record.lease.user if record else "",
            project=record.lease.project if record else "",
            action=action,
            why=why,
            for_lease=for_lease or None,
            texts=(text,),
        )
        self.latest.append(entry)
        return entry
