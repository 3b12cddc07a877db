"""Where a lease goes.

* A fraction goes to the device with the least room that is still enough, so
  that whole devices stay whole (best fit); ties by UUID.
* Memory is asked for in bytes and held in thousandths, which differ between
  devices: the next thousandth above.
* Several devices are taken at once or not at all.  With `Lease.consolidate`
  they lie in one island, else in one node, and only a job that is larger than
  every node gets several, the emptiest first.  Without it they lie anywhere.
* A device that is not usable takes nothing new.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jupyter_gpushare.core.board import Room
from jupyter_gpushare.core.model import WHOLE_GPU, Device, Lease

Group = Sequence[Room]
RoomOf = Callable[[Room], int]


@dataclass(frozen=True, slots=True)
class Spot:
    """Devices, and how much of each."""

    devices: tuple[str, ...]
    held_milli: int

    @property
    def size_milli(self) -> int:
        return self.held_milli * len(self.devices)


def demand(lease: Lease, device: Device) -> int:
    """Thousandths of ``device`` that ``lease`` needs there; more than 1000 if it cannot fit."""
    return _demand(lease, device.grantable_bytes)


def _demand(lease: Lease, grantable_bytes: int) -> int:
    if not lease.memory_bytes:
        return lease.fraction_milli
    return -(-lease.memory_bytes * WHOLE_GPU // grantable_bytes) if grantable_bytes > 0 else WHOLE_GPU + 1


class Layout:
    """The sets of devices that lie together: islands and nodes."""

    def __init__(self, rooms: Group) -> None:
        islands: dict[tuple[str, str], list[Room]] = {}
        nodes: dict[str, list[Room]] = {}
        for room in rooms:
            nodes.setdefault(room.device.node, []).append(room)
            if room.device.island:
                islands.setdefault((room.device.node, room.device.island), []).append(room)
        self.everything = rooms
        self.islands: list[Group] = list(islands.values())
        self.nodes: list[Group] = list(nodes.values())
        self.largest_node = max(map(len, self.nodes), default=0)

    def spreads(self, lease: Lease) -> bool:
        """Whether a job for several devices may lie anywhere."""
        return not lease.consolidate or lease.device_count > self.largest_node

    def tiers(self, lease: Lease) -> list[list[Group]]:
        """Sets within which a lease may lie, the better kind of set first."""
        if lease.device_count == 1:
            return [[(room,) for room in self.everything]]
        if self.spreads(lease):
            return [[self.everything]]
        return [self.islands, self.nodes]


def find(lease: Lease, layout: Layout, room_of: RoomOf, most_milli: int | None = None) -> Spot | None:
    """Return where ``lease`` fits, or None.

    ``room_of`` says how much of a device may be used; ``most_milli`` bounds
    what is taken over all devices (what a quota or a limit leaves).
    """
    if lease.device_count > 1:
        whole = lease.fraction_milli * lease.device_count
        return None if most_milli is not None and whole > most_milli else _find_gang(lease, layout, room_of)
    best: tuple[int, str, int] | None = None
    for room in layout.everything:
        need = demand(lease, room.device)
        spare = room_of(room) - need
        if spare < 0 or (most_milli is not None and need > most_milli):
            continue
        if best is None or (spare, room.device.uuid) < best[:2]:
            best = spare, room.device.uuid, need
    return best and Spot((best[1],), best[2])


def _find_gang(lease: Lease, layout: Layout, room_of: RoomOf) -> Spot | None:
    need, count = lease.fraction_milli, lease.device_count
    for tier in layout.tiers(lease):
        insides = [[room for room in group if room_of(room) >= need] for group in tier]
        insides = [inside for inside in insides if len(inside) >= count]
        if insides:
            # The set with the fewest devices that would do: the others stay whole.
            inside = min(insides, key=len)
            return Spot(tuple(r.device.uuid for r in packed(lease, inside, room_of)[:count]), need)
    return None


def packed(lease: Lease, rooms: Iterable[Room], room_of: RoomOf) -> list[Room]:
    """The order in which a job takes devices: node by node, tight devices first.

    A consolidated job begins with the node that has most to give, any other
    with the node that has least, to leave large pieces for those who need them.
    """
    rooms = list(rooms)
    on_node: dict[str, int] = {}
    for room in rooms:
        on_node[room.device.node] = on_node.get(room.device.node, 0) + 1
    sign = -1 if lease.consolidate else 1

    def key(room: Room) -> tuple[int, str, int, str, str]:
        device = room.device
        return sign * on_node[device.node], device.node, room_of(room), device.island, device.uuid

    return sorted(rooms, key=key)


class Index:
    """Finds room as `find` does, without looking at every device each time.

    Devices of one memory size lie in buckets of equal room; gangs of whole
    devices go by the number of empty devices per set.  ``log`` names every
    device whose room changed: what a query finds there is brought up to date.
    """

    def __init__(self, layout: Layout, room_of: RoomOf, log: list[Room]) -> None:
        self._layout = layout
        self._room_of = room_of
        self._log = log
        self._seen = len(log)
        self._rooms = sorted(layout.everything, key=lambda room: room.device.uuid)
        self._value: dict[Room, int] = {}
        self._levels: dict[int, list[int]] = {}  # by memory size: the values that occur, ascending
        self._buckets: dict[tuple[int, int], list[tuple[str, Room]]] = {}  # heaps, some entries outdated
        self._sets: dict[Room, list[int]] = {room: [] for room in self._rooms}
        self._empty = [0] * (len(layout.islands) + len(layout.nodes))  # whole devices per set
        self._empty_total = 0
        for number, group in enumerate([*layout.islands, *layout.nodes]):
            for room in group:
                self._sets[room].append(number)
        for room in self._rooms:
            self._put(room, room_of(room))

    def _put(self, room: Room, value: int) -> None:
        change = (value >= WHOLE_GPU) - (self._value.get(room, 0) >= WHOLE_GPU)
        self._value[room] = value
        if change:
            self._empty_total += change
            for number in self._sets[room]:
                self._empty[number] += change
        if value > 0:
            size = room.device.grantable_bytes
            bucket = self._buckets.get((size, value))
            if bucket is None:
                bucket = self._buckets[size, value] = []
                insort(self._levels.setdefault(size, []), value)
            heapq.heappush(bucket, (room.device.uuid, room))

    def _catch_up(self) -> None:
        for room in self._log[self._seen :]:
            if room in self._value and (value := self._room_of(room)) != self._value[room]:
                self._put(room, value)
        self._seen = len(self._log)

    def find(self, lease: Lease) -> Spot | None:
        """Return where ``lease`` fits, or None: the same answer as `find`."""
        self._catch_up()
        if lease.device_count > 1:
            return self._find_gang(lease)
        best: tuple[int, str, int] | None = None
        for size, levels in self._levels.items():
            need = _demand(lease, size)
            for value in levels[bisect_left(levels, need) :]:
                if uuid := self._first(size, value):
                    found = value - need, uuid, need
                    best = found if best is None else min(best, found)
                    break
        return best and Spot((best[1],), best[2])

    def _first(self, size: int, value: int) -> str:
        bucket = self._buckets[size, value]
        while bucket and self._value[bucket[0][1]] != value:
            heapq.heappop(bucket)
        return bucket[0][0] if bucket else ""

    def _find_gang(self, lease: Lease) -> Spot | None:
        count, layout = lease.device_count, self._layout
        if lease.fraction_milli != WHOLE_GPU:
            return _find_gang(lease, layout, self._room_of)
        if self._empty_total < count:
            return None
        if layout.spreads(lease):
            return _find_gang(lease, layout, self._value.__getitem__)
        islands = len(layout.islands)
        for sets, empty in (
            (layout.islands, self._empty[:islands]),
            (layout.nodes, self._empty[islands:]),
        ):
            able = [(n, number) for number, n in enumerate(empty) if n >= count]
            if able:
                inside = [room for room in sets[min(able)[1]] if self._value[room] >= WHOLE_GPU]
                order = packed(lease, inside, self._value.__getitem__)
                return Spot(tuple(room.device.uuid for room in order[:count]), WHOLE_GPU)
        return None
