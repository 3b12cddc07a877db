"""What room costs: on one device, and on the set of devices where a kind of job has it cheapest.

All is worked out when it is asked for, and again where a device has changed since.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jupyter_gpushare.core.board import Board
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.placement import Group, Layout, demand
from jupyter_gpushare.core.quota import held_by
from jupyter_gpushare.core.room import Room
from jupyter_gpushare.core.victims import Asker, Rights, Victim, rank

Price = tuple[object, ...]


class Offer(NamedTuple):
    """Room on one device for one kind of job."""

    short: int  # what is missing if everybody leaves who may be asked; thousandths
    price: Price | None  # None: they are not enough
    victims: Sequence[Victim]  # those who have to leave


class Offers:
    """The offers of single devices to jobs that ask for as much as ``job``, on the same terms."""

    def __init__(self, board: Board, asker: Asker, rights: Rights, job: Lease) -> None:
        self._job = job
        self._asker = asker
        self._rights = rights
        self._log = board.log
        self._seen = len(self._log)
        self._known: dict[Room, Offer] = {}

    def on(self, room: Room) -> Offer:
        """The offer of a device."""
        if len(self._log) != self._seen:
            for changed in self._log[self._seen :]:
                self._known.pop(changed, None)
            self._seen = len(self._log)
        offer = self._known.get(room)
        if offer is None:
            offer = self._known[room] = self._offer(room)
        return offer

    def others(self, room: Room) -> list[Victim]:
        """Everybody on a device who may be asked, the cheapest first."""
        return self._asker.on(room, self._rights)

    def need(self, room: Room) -> int:
        """What the job takes of a device."""
        return held_by(self._job) if self._job.devices else demand(self._job, room.device)

    def missing(self, room: Room) -> int:
        """What is missing if nobody leaves."""
        return self.need(room) - self._rights.there(room)

    def _offer(self, room: Room) -> Offer:
        short = self.missing(room)
        if short <= 0:
            return Offer(short, (*_FREE, -short, room.device.uuid), ())
        others = self.others(room)
        if not others:
            return Offer(short, None, ())
        picked: list[Victim] = []
        spare = -short
        for v in others:
            if spare >= 0:
                break
            picked.append(v)
            spare += held_by(v.lease)
        if spare < 0:
            return Offer(-spare, None, ())
        rest = sum([held_by(v.lease) for v in others[len(picked) :]])
        return Offer(-spare - rest, (*price(picked), spare, room.device.uuid), picked)


class Cheapest:
    """Keeps, for one kind of job, the set of devices where room costs least.

    Every set of devices on which such a job may lie, and where there may be
    somebody to ask (``places``), has a price; only those with a device that
    changed since the last question are priced again.
    """

    def __init__(self, board: Board, layout: Layout, offers: Offers, job: Lease, places: set[Room]) -> None:
        self._job = job
        self._layout = layout
        self._offers = offers
        self._log = board.log
        self._seen = len(self._log)
        alone: list[Group] = [(room,) for room in sorted(places, key=lambda room: room.device.uuid)]
        tiers = [alone] if job.device_count == 1 else layout.tiers(job)
        self._sets: list[tuple[int, Group]] = [
            (tier, group)
            for tier, groups in enumerate(tiers)
            for group in groups
            if not places.isdisjoint(group)
        ]
        self._of: dict[Room, list[int]] = {}
        self._stamp = [0] * len(self._sets)
        self._heap: list[tuple[Price, int, int, list[Room]]] = []
        for number, (_, group) in enumerate(self._sets):
            for room in group:
                self._of.setdefault(room, []).append(number)
        for number in range(len(self._sets)):
            self._price_set(number)

    def best(self) -> tuple[list[Room], list[Victim]] | None:
        """The devices where room costs least, and who must leave; None: nowhere can it be made."""
        changed = {room for room in self._log[self._seen :] if room in self._of}
        self._seen = len(self._log)
        for number in sorted({number for room in changed for number in self._of[room]}):
            self._price_set(number)
        while self._heap and self._heap[0][2] != self._stamp[self._heap[0][1]]:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        rooms = self._heap[0][3]
        return rooms, self._union(rooms)

    def _price_set(self, number: int) -> None:
        tier, group = self._sets[number]
        self._stamp[number] += 1
        if self._job.device_count == 1:
            alone = self._offers.on(group[0]).price
            if alone is not None:
                heapq.heappush(self._heap, (alone, number, self._stamp[number], [group[0]]))
            return
        able = [(offer.price, room) for room in group if (offer := self._offers.on(room)).price]
        if len(able) < self._job.device_count:
            return
        able.sort(key=lambda offered: offered[0])
        rooms = self._chosen([room for _, room in able])
        if rooms is None:
            return
        found = (*price(sorted(self._union(rooms), key=rank)), tier, *able[0][0][3:])
        heapq.heappush(self._heap, (found, number, self._stamp[number], rooms))

    def _chosen(self, able: list[Room]) -> list[Room] | None:
        """The first of these devices that will do together, the cheapest first."""
        job, layout = self._job, self._layout
        if not layout.is_wider(job):
            return able[: job.device_count]
        # Whole nodes: of as few of the cheapest devices as there are some in.
        numbers = range(job.device_count, len(able) + 1)
        least = bisect_left(
            numbers, True, key=lambda n: layout.choose(job, able[:n], self._offers.missing) is not None
        )
        return layout.choose(job, able[: job.device_count + least], self._offers.missing)

    def _union(self, rooms: Iterable[Room]) -> list[Victim]:
        return list({v.lease.id: v for room in rooms for v in self._offers.on(room).victims}.values())


# Of room for which nobody has to leave.
_FREE: Price = (-1, 0, ())


def price(victims: Sequence[Victim]) -> Price:
    """Compares sets of sorted victims: the dearest kind first, then how many, then who."""
    return (victims[-1].cost, len(victims), tuple([v.rank for v in victims])) if victims else _FREE
