"""Gathering room for one job from its juniors, in their order.

Whoever may be asked anyway is taken for granted on every device: those are
cheaper.  Juniors are taken one after the other until the job fits into some
set of devices; then those whose room is not needed are let go, the dearest
first.  So the dearest of those who leave is as cheap as it can be.

Only devices near a junior are looked at: without one, there is no room to be
found here (`making` has asked the others already).
"""

from __future__ import annotations

from collections.abc import Iterable

from jupyter_gpushare.core.board import Board, Room
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.placement import Group, Layout
from jupyter_gpushare.core.prices import Offers
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.victims import Victim, rank

Gathered = tuple[list[Room], tuple[Victim, ...]]


class Gathering:
    """What one job could have if some of its juniors left, beside what devices offer it anyway."""

    def __init__(self, board: Board, layout: Layout, job: Lease, offers: Offers) -> None:
        self._board = board
        self._layout = layout
        self._job = job
        self._offers = offers
        self._short: dict[Room, int] = {}  # what the job still needs of a device
        self._able: dict[int, int] = {}  # by set of devices: how many have enough

    def gather(self, juniors: Iterable[Victim]) -> Gathered | None:
        """The devices to take and who must leave them; None: it is not enough."""
        if self._job.devices:
            own = self._board.rooms_of(self._job)
            return self._from([own], dict.fromkeys(own, (0,)), juniors)
        if self._job.device_count == 1:
            return self._one(juniors)
        return self._from(*self._layout.sets(self._job), juniors)

    def _needs(self, room: Room) -> int:
        short = self._short.get(room)
        if short is None:
            short = self._short[room] = self._offers.on(room).short
        return short

    def _one(self, juniors: Iterable[Victim]) -> Gathered | None:
        taken: dict[Room, list[Victim]] = {}
        for v in juniors:
            held = held_by(v.lease)
            for room in self._board.rooms_of(v.lease):
                if room.device.usable:
                    taken.setdefault(room, []).append(v)
                    self._short[room] = short = self._needs(room) - held
                    if short <= 0:
                        return [room], self._needed_on(room, [*self._offers.others(room), *taken[room]])
        return None

    def _needed_on(self, room: Room, taken: list[Victim]) -> tuple[Victim, ...]:
        kept = taken.copy()
        for v in reversed(taken):
            if self._short[room] + held_by(v.lease) <= 0:
                self._short[room] += held_by(v.lease)
                kept.remove(v)
        return tuple(kept)

    def _from(
        self, sets: list[Group], of: dict[Room, tuple[int, ...]], juniors: Iterable[Victim]
    ) -> Gathered | None:
        """Room in one of several sets of devices; ``of``: in which each device is."""
        taken: list[Victim] = []
        for v in juniors:
            near = {number for room in self._board.rooms_of(v.lease) for number in of.get(room, ())}
            for number in near - self._able.keys():
                self._able[number] = sum([self._needs(room) <= 0 for room in sets[number]])
            taken.append(v)
            done = [n for n in self._give(v, 1, of) if self._is_enough(sets[n], n)]
            if done:
                return self._needed_in(sets, min(done), of, taken)
        return None

    def _needed_in(
        self, sets: list[Group], number: int, of: dict[Room, tuple[int, ...]], taken: list[Victim]
    ) -> Gathered:
        group = sets[number]
        inside = {room.device.uuid for room in group}
        others = {v.lease.id: v for room in group for v in self._offers.others(room)}
        kept = sorted(others.values(), key=rank)
        kept += [v for v in taken if not inside.isdisjoint(v.lease.devices)]
        for v in reversed(kept.copy()):
            self._give(v, -1, of)
            if self._is_enough(group, number):
                kept.remove(v)
            else:
                self._give(v, 1, of)
        rooms = self._chosen(group)
        assert rooms is not None
        return rooms, tuple(kept)

    def _give(self, victim: Victim, sign: int, of: dict[Room, tuple[int, ...]]) -> set[int]:
        """Count what a victim gives, or take it back; returns the sets where that made a difference."""
        changed: set[int] = set()
        for room in self._board.rooms_of(victim.lease):
            if room in of:
                before = self._needs(room) <= 0
                self._short[room] -= sign * held_by(victim.lease)
                if (self._short[room] <= 0) != before:
                    changed.update(of[room])
                    for number in of[room]:
                        if number in self._able:
                            self._able[number] += sign
        return changed

    def _is_enough(self, group: Group, number: int) -> bool:
        if self._able[number] < self._job.device_count:
            return False
        return not self._layout.is_wider(self._job) or self._chosen(group) is not None

    def _chosen(self, group: Group) -> list[Room] | None:
        rooms = [room for room in group if self._needs(room) <= 0]
        if self._job.devices:
            return rooms
        return self._layout.choose(self._job, rooms, lambda room: -self._short[room])
