"""Gathering room for one job from a list of victims, in their order.

Victims are taken one after the other until the job fits into some set of
devices; then those whose room is not needed are let go, the dearest first.  So
the dearest of those who leave is as cheap as it can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jupyter_gpushare.core.board import Board, Room
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.placement import Group, Layout, demand
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.victims import Rights, Victim


class Gathering:
    """What one job could have if some victims left."""

    def __init__(self, board: Board, layout: Layout, rights: Rights, job: Lease) -> None:
        self._board = board
        self._layout = layout
        self._job = job
        self._sets: list[Group] = [board.rooms_of(job)] if job.devices else _sets(layout, job)
        self._of: dict[Room, list[int]] = {}
        self._short: dict[Room, int] = {}  # what the job still needs of a device
        self._able = [0] * len(self._sets)  # devices with enough
        for number, group in enumerate(self._sets):
            for room in group:
                if room not in self._short:
                    need = held_by(job) if job.devices else demand(job, room.device)
                    self._short[room] = need - rights.there(room)
                    self._of[room] = []
                self._of[room].append(number)
                self._able[number] += self._short[room] <= 0

    def gather(self, victims: Sequence[Victim]) -> tuple[list[Room], tuple[Victim, ...]] | None:
        """The devices to take and who must leave them; None: it is not enough."""
        taken: list[Victim] = []
        found = self._complete(range(len(self._sets)))
        for v in victims:
            if found is not None:
                break
            taken.append(v)
            found = self._complete(self._give(v, 1))
        return None if found is None else self._trim(found, taken)

    def _give(self, victim: Victim, sign: int) -> set[int]:
        """Count what a victim gives, or take it back; returns the sets in which a device has now enough."""
        changed = set()
        for room in self._board.rooms_of(victim.lease):
            if room in self._short:
                before = self._short[room] <= 0
                self._short[room] -= sign * held_by(victim.lease)
                if (self._short[room] <= 0) != before:
                    changed.update(self._of[room])
                    for number in self._of[room]:
                        self._able[number] += sign
        return changed

    def _complete(self, numbers: Iterable[int]) -> int | None:
        """The first of the sets that the job fits into."""
        count = self._job.device_count
        return next((n for n in sorted(numbers) if self._able[n] >= count and self._choose(n)), None)

    def _choose(self, number: int) -> list[Room] | None:
        able = [room for room in self._sets[number] if self._short[room] <= 0]
        if self._job.devices:
            return able
        return self._layout.choose(self._job, able, lambda room: -self._short[room])

    def _trim(self, number: int, taken: list[Victim]) -> tuple[list[Room], tuple[Victim, ...]]:
        """Let go whose room is not needed, the dearest first."""
        inside = {room.device.uuid for room in self._sets[number]}
        kept = [v for v in taken if not inside.isdisjoint(v.lease.devices)]
        for v in reversed(kept.copy()):
            self._give(v, -1)
            if self._complete((number,)) is None:
                self._give(v, 1)
            else:
                kept.remove(v)
        rooms = self._choose(number)
        assert rooms is not None
        return rooms, tuple(kept)


def _sets(layout: Layout, job: Lease) -> list[Group]:
    return [group for tier in layout.tiers(job) for group in tier]
