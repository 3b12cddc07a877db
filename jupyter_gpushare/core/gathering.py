"""Gathering room for one job from victims, in their order.

Victims are taken one after the other until the job fits into some set of
devices; then those whose room is not needed are let go, the dearest first.  So
the dearest of those who leave is as cheap as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from jupyter_gpushare.core.board import Board, Room
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.placement import Group, Layout, demand
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.victims import Victim

Gathered = tuple[list[Room], tuple[Victim, ...]]


class Gathering:
    """What one job could have if some victims left; ``there``: what it has of a device anyway."""

    def __init__(self, board: Board, layout: Layout, there: Callable[[Room], int], job: Lease) -> None:
        self._board = board
        self._layout = layout
        self._there = there
        self._job = job
        self._short: dict[Room, int] = {}  # what the job still needs of a device

    def gather(self, victims: Iterable[Victim]) -> Gathered | None:
        """The devices to take and who must leave them; None: it is not enough."""
        victims = iter(victims)
        first = next(victims, None)
        if first is None:
            return None  # most often: there is nobody to ask
        victims = chain((first,), victims)
        if self._job.devices:
            return self._from([self._board.rooms_of(self._job)], victims)
        if self._job.device_count == 1:
            return self._one(victims)
        return self._from([g for tier in self._layout.tiers(self._job) for g in tier], victims)

    def _needs(self, room: Room) -> int:
        short = self._short.get(room)
        if short is None:
            need = held_by(self._job) if self._job.devices else demand(self._job, room.device)
            short = self._short[room] = need - self._there(room)
        return short

    def _one(self, victims: Iterable[Victim]) -> Gathered | None:
        taken: dict[Room, list[Victim]] = {}
        for v in victims:
            for room in self._board.rooms_of(v.lease):
                if room.device.usable:
                    taken.setdefault(room, []).append(v)
                    self._short[room] = self._needs(room) - held_by(v.lease)
                    if self._short[room] <= 0:
                        return [room], self._without_idle_gifts(room, taken[room])
        return None

    def _without_idle_gifts(self, room: Room, taken: list[Victim]) -> tuple[Victim, ...]:
        kept = taken.copy()
        for v in reversed(taken):
            if self._short[room] + held_by(v.lease) <= 0:
                self._short[room] += held_by(v.lease)
                kept.remove(v)
        return tuple(kept)

    def _from(self, sets: list[Group], victims: Iterable[Victim]) -> Gathered | None:
        """Room in one of several sets of devices."""
        of: dict[Room, list[int]] = {}
        able = [0] * len(sets)
        for number, group in enumerate(sets):
            for room in group:
                of.setdefault(room, []).append(number)
                able[number] += self._needs(room) <= 0
        taken: list[Victim] = []
        found: int | None = None
        for v in victims:
            taken.append(v)
            done = [n for n in self._give(v, 1, of, able) if self._is_enough(sets[n], able[n])]
            if done:
                found = min(done)
                break
        if found is None:
            return None
        group = sets[found]
        inside = {room.device.uuid for room in group}
        kept = [v for v in taken if not inside.isdisjoint(v.lease.devices)]
        for v in reversed(kept.copy()):
            self._give(v, -1, of, able)
            if self._is_enough(group, able[found]):
                kept.remove(v)
            else:
                self._give(v, 1, of, able)
        rooms = self._chosen(group)
        assert rooms is not None
        return rooms, tuple(kept)

    def _give(self, victim: Victim, sign: int, of: dict[Room, list[int]], able: list[int]) -> set[int]:
        """Count what a victim gives, or take it back; returns the sets where that made a difference."""
        changed = set()
        for room in self._board.rooms_of(victim.lease):
            if room in of:
                before = self._short[room] <= 0
                self._short[room] -= sign * held_by(victim.lease)
                if (self._short[room] <= 0) != before:
                    changed.update(of[room])
                    for number in of[room]:
                        able[number] += sign
        return changed

    def _is_enough(self, group: Group, able: int) -> bool:
        if able < self._job.device_count:
            return False
        return not self._layout.is_wider(self._job) or self._chosen(group) is not None

    def _chosen(self, group: Group) -> list[Room] | None:
        rooms = [room for room in group if self._needs(room) <= 0]
        if self._job.devices:
            return rooms
        return self._layout.choose(self._job, rooms, lambda room: -self._short[room])
