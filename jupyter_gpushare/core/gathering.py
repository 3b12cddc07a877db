"""Gathering room for one job from its juniors, in their order.

Whoever may be asked anyway is taken for granted on every device: those are
cheaper.  Juniors are taken one after the other until the job fits into some
set of devices; then those whose room is not needed are let go, the dearest
first.  So the dearest of those who leave is as cheap as it can be.

Only devices near a junior are looked at: without one, there is no room to be
found here (`making` has asked the others already).

Jobs of one device, or part of one, are many: a `Sweep` goes through their
juniors once for all that ask alike (the others: `Gathering`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from jupyter_gpushare.core.board import Board
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.placement import Group, Layout
from jupyter_gpushare.core.prices import Offers
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.room import Room
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
        return self._from(*self._layout.sets(self._job), juniors)

    def _needs(self, room: Room) -> int:
        short = self._short.get(room)
        if short is None:
            short = self._short[room] = self._offers.on(room).short
        return short

    def _from(
        self, sets: list[Group], of: dict[Room, tuple[int, ...]], juniors: Iterable[Victim]
    ) -> Gathered | None:
        """Room in one of several sets of devices; ``of``: in which each device is."""
        taken: list[Victim] = []
        for v in juniors:
            for room in self._board.rooms_of(v.lease):
                for number in of.get(room, ()):
                    if number not in self._able:
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
        given = sign * held_by(victim.lease)
        for room in self._board.rooms_of(victim.lease):
            if room in of:
                before = self._needs(room)
                after = self._short[room] = before - given
                if (after <= 0) != (before <= 0):
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


class Sweep:
    """The one device that jobs of a kind and level get first if their juniors leave one after the other.

    Keeps how far it came: the next job of the kind goes on from there, and only
    devices that changed since are counted again.
    """

    def __init__(
        self, board: Board, offers: Offers, juniors: Sequence[Lease], ask: Callable[[Lease], Victim | None]
    ) -> None:
        """``juniors``: the first to go first; ``ask``: whether one of them may still be asked."""
        self._board = board
        self._offers = offers
        self._juniors = juniors
        self._ask = ask
        self._met = 0  # so many juniors have been met
        self._on: dict[Room, list[tuple[int, int, Lease]]] = {}  # of them, with their number and the device's
        self._short: dict[Room, int] = {}  # what is missing there if all of them leave
        self._enough: list[tuple[int, int, str, Room]] = []  # heap, some outdated: with whom it is enough
        self._since: dict[Room, tuple[int, int] | None] = {}
        self._seen = len(board.log)

    def first(self) -> Gathered | None:
        """The device to take and who must leave it; None: all juniors together are not enough."""
        for room in set(self._board.log[self._seen :]) & self._on.keys():
            self._count_anew(room)
        self._seen = len(self._board.log)
        while True:
            while self._enough and self._since[self._enough[0][3]] != self._enough[0][:2]:
                heapq.heappop(self._enough)
            if self._enough:
                number, _, _, room = self._enough[0]
                return [room], self._needed_on(room, number)
            if self._met == len(self._juniors):
                return None
            self._meet(self._juniors[self._met])

    def _meet(self, junior: Lease) -> None:
        for place, room in enumerate(self._board.rooms_of(junior)):
            if room.device.usable:
                if room not in self._on:
                    self._on[room], self._since[room] = [], None
                    self._short[room] = self._offers.on(room).short
                self._on[room].append((self._met, place, junior))
                self._count(room, *self._on[room][-1])
        self._met += 1

    def _count_anew(self, room: Room) -> None:
        self._since[room] = None
        self._short[room] = self._offers.on(room).short
        for number, place, junior in self._on[room]:
            self._count(room, number, place, junior)

    def _count(self, room: Room, number: int, place: int, junior: Lease) -> None:
        if self._since[room] is None and self._ask(junior):
            self._short[room] -= held_by(junior)
            if self._short[room] <= 0:
                self._since[room] = number, place
                heapq.heappush(self._enough, (number, place, room.device.uuid, room))

    def _needed_on(self, room: Room, last: int) -> tuple[Victim, ...]:
        """Who has to leave a device, of others and of the juniors up to ``last``."""
        kept, spare = list(self._offers.others(room)), -self._short[room]
        kept += [v for number, _, x in self._on[room] if number <= last and (v := self._ask(x))]
        for v in reversed(kept.copy()):
            if held_by(v.lease) <= spare:
                spare -= held_by(v.lease)
                kept.remove(v)
        return tuple(kept)
