"""Where a lease goes.

* One device, or a part of one: where it adds least fragmentation to its node
  (`fragmentation`), then the device with the least room that is still enough,
  then the node with the least; ties by UUID.
* Memory is asked for in bytes and held in thousandths, which differ between
  devices: the next thousandth above.
* A MIG instance is given whole, to who asks for its profile; who asks for
  bytes may get a part of one.
* Several devices are taken at once or not at all.  With `Lease.consolidate`
  they lie in one island, else in one node; a job that is larger than every node
  takes whole nodes, and what remains of it lies in one more.  Without it they
  lie anywhere.
* A device that is not usable takes nothing new.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jupyter_gpushare.core.fragmentation import Workload
from jupyter_gpushare.core.model import WHOLE_GPU, Device, Lease
from jupyter_gpushare.core.room import Room, RoomOf

Group = Sequence[Room]


def whole(room: Room) -> int:
    """What an empty device has."""
    return WHOLE_GPU


@dataclass(frozen=True, slots=True)
class Spot:
    """Devices, and how much of each."""

    devices: tuple[str, ...]
    held_milli: int

    @property
    def size_milli(self) -> int:
        return self.held_milli * len(self.devices)


def demand(lease: Lease, device: Device) -> int:
    """Thousandths of ``device`` that ``lease`` needs there; more than 1000 if it cannot be there."""
    if lease.memory_bytes:
        most = device.grantable_bytes
        return -(-lease.memory_bytes * WHOLE_GPU // most) if most > 0 else WHOLE_GPU + 1
    return lease.fraction_milli if lease.profile == device.profile else WHOLE_GPU + 1


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
        self._by_size = sorted(self.nodes, key=lambda node: (-len(node), min(r.device.uuid for r in node)))
        self._sets: dict[bool, tuple[list[Group], dict[Room, tuple[int, ...]]]] = {}
        self.largest_node = max(map(len, self.nodes), default=0)

    def is_wider(self, lease: Lease) -> bool:
        """Whether a job has to take several nodes."""
        return lease.consolidate and lease.device_count > self.largest_node

    def tiers(self, lease: Lease) -> list[list[Group]]:
        """Sets within which a lease may lie, the better kind of set first."""
        if lease.device_count == 1:
            return [[(room,) for room in self.everything]]
        if not lease.consolidate or self.is_wider(lease):
            return [[self.everything]]
        return [self.islands, self.nodes]

    def sets(self, lease: Lease) -> tuple[list[Group], dict[Room, tuple[int, ...]]]:
        """The sets of all tiers in a row, and in which of them each device is; not for one device alone."""
        together = lease.consolidate and not self.is_wider(lease)
        if together not in self._sets:
            sets = [*self.islands, *self.nodes] if together else [self.everything]
            of: dict[Room, tuple[int, ...]] = dict.fromkeys(self.everything, ())
            for number, group in enumerate(sets):
                for room in group:
                    of[room] = (*of[room], number)
            self._sets[together] = sets, of
        return self._sets[together]

    def choose(self, lease: Lease, able: Group, room_of: RoomOf) -> list[Room] | None:
        """Which of the devices with enough room, all of one tier's set, ``lease`` takes; None: too few."""
        count = lease.device_count
        if len(able) < count:
            return None
        if not self.is_wider(lease):
            return packed(lease, able, room_of)[:count]
        nodes: dict[str, list[Room]] = {}
        for room in sorted(able, key=lambda room: room.device.uuid):
            nodes.setdefault(room.device.node, []).append(room)
        chosen: list[Room] = []
        for node in self._by_size:
            inside = nodes.get(node[0].device.node, [])
            if len(inside) == len(node) <= count - len(chosen):
                chosen += inside
                del nodes[node[0].device.node]
        rest = count - len(chosen)
        others = [inside for inside in nodes.values() if len(inside) >= rest]
        if rest and not others:
            return None
        if rest:
            others.sort(key=lambda inside: (len(inside), inside[0].device.uuid))
            chosen += packed(lease, others[0], room_of)[:rest]
        return chosen


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


def find(
    lease: Lease, layout: Layout, room_of: RoomOf, workload: Workload, most_milli: int | None = None
) -> Spot | None:
    """Return where ``lease`` fits, or None.

    ``room_of`` says how much of a device may be used; ``most_milli`` bounds
    what is taken over all devices (what a quota or a limit leaves).
    """
    return Index(layout, room_of, workload, set()).find(lease, most_milli)


# After so many changes an index forgets what fitted nowhere.
_FORGET = 10_000
# What a node looks like to who wants to be placed there: kind of device and room, ascending.
_Look = tuple[tuple[int, int], ...]
# How good a node is (less is better), and how the devices look that are as good.
_Best = tuple[tuple[int, int, int], _Look]


class Index:
    """Finds room by ``room_of``, without looking at every device each time.

    Nodes that look alike are looked at once; gangs of whole devices go by the
    number of empty devices per set.  What lies in ``changed`` is brought up to
    date by the next query.
    """

    def __init__(self, layout: Layout, room_of: RoomOf, workload: Workload, changed: set[Room]) -> None:
        self._layout = layout
        self._room_of = room_of
        self._workload = workload
        self._changed = changed
        self._value: dict[Room, int] = dict.fromkeys(layout.everything, 0)
        kinds: dict[tuple[int, str], int] = {}
        self._kind: dict[Room, int] = {}
        self._kinds: list[Device] = []
        for room in layout.everything:
            key = room.device.grantable_bytes, room.device.profile
            if key not in kinds:
                kinds[key] = len(kinds)
                self._kinds.append(room.device)
            self._kind[room] = kinds[key]
        self._node: dict[Room, int] = {}
        self._first: list[str] = []  # the first UUID of each node, its name in ties
        for number, node in enumerate(layout.nodes):
            self._first.append(min(room.device.uuid for room in node))
            for room in node:
                self._node[room] = number
        self._look: list[_Look] = [()] * len(layout.nodes)
        self._alike: dict[_Look, list[tuple[str, int]]] = {}  # heaps of nodes, some entries outdated
        self._best: dict[object, dict[_Look, _Best | None]] = {}
        self._renewed: list[_Look] = []  # how nodes came to look, in order
        self._nowhere: dict[object, int] = {}  # what fitted nowhere when so many had come
        self._empty = [0] * (len(layout.islands) + len(layout.nodes))  # whole devices per set
        self._empty_total = 0
        self._sets: dict[Room, list[int]] = {room: [] for room in layout.everything}
        for number, group in enumerate([*layout.islands, *layout.nodes]):
            for room in group:
                self._sets[room].append(number)
        self._update(layout.everything)

    def _update(self, rooms: Iterable[Room]) -> None:
        nodes = set()
        for room in rooms:
            if room not in self._value:
                continue  # not usable
            value = self._room_of(room)
            before = self._value[room]
            if value != before or not self._look[self._node[room]]:
                self._value[room] = value
                nodes.add(self._node[room])
                change = (value >= WHOLE_GPU) - (before >= WHOLE_GPU)
                if change:
                    self._empty_total += change
                    for number in self._sets[room]:
                        self._empty[number] += change
        for number in nodes:
            node = self._layout.nodes[number]
            look = tuple(sorted([(self._kind[room], max(0, self._value[room])) for room in node]))
            if look != self._look[number]:
                self._look[number] = look
                self._renewed.append(look)
                heapq.heappush(self._alike.setdefault(look, []), (self._first[number], number))

    def find(self, lease: Lease, most_milli: int | None = None) -> Spot | None:
        """Return where ``lease`` fits, or None."""
        if self._changed:
            if len(self._renewed) > _FORGET:
                self._renewed.clear()
                self._nowhere.clear()
            self._update(self._changed)
            self._changed.clear()
        if lease.device_count > 1:
            if most_milli is not None and lease.fraction_milli * lease.device_count > most_milli:
                return None
            return self._find_gang(lease)
        return self._find_one(lease, most_milli)

    def _find_one(self, lease: Lease, most_milli: int | None) -> Spot | None:
        shape = lease.fraction_milli, lease.memory_bytes, lease.profile, most_milli
        known = self._best.setdefault(shape, {})
        since = self._nowhere.get(shape)
        if since is not None and not any(
            self._judged(known, lease, x, most_milli) for x in self._renewed[since:]
        ):
            self._nowhere[shape] = len(self._renewed)
            return None
        found: tuple[tuple[int, int, int], tuple[str, int], _Look] | None = None
        for look, nodes in list(self._alike.items()):
            while nodes and self._look[nodes[0][1]] != look:
                heapq.heappop(nodes)
            if not nodes:
                del self._alike[look]
                continue
            if best := self._judged(known, lease, look, most_milli):
                candidate = best[0], nodes[0], best[1]
                if found is None or candidate < found:
                    found = candidate
        if found is None:
            self._nowhere[shape] = len(self._renewed)
            return None
        self._nowhere.pop(shape, None)
        node = self._layout.nodes[found[1][1]]
        alike = [r for r in node if (self._kind[r], self._value[r]) in found[2]]
        room = min(alike, key=lambda room: room.device.uuid)
        return Spot((room.device.uuid,), demand(lease, room.device))

    def _judged(
        self, known: dict[_Look, _Best | None], lease: Lease, look: _Look, most_milli: int | None
    ) -> _Best | None:
        if look not in known:
            known[look] = self._judge(lease, look, most_milli)
        return known[look]

    def _judge(self, lease: Lease, look: _Look, most_milli: int | None) -> _Best | None:
        gpus = [value for _, value in look]
        free = sum(gpus)
        before = self._workload.fragment_milli(tuple(sorted(gpus)))
        best: tuple[int, int, int] | None = None
        alike: list[tuple[int, int]] = []
        for n, (kind, value) in enumerate(look):
            need = demand(lease, self._kinds[kind])
            if value < need or (most_milli is not None and need > most_milli) or look[n] in look[:n]:
                continue
            after = sorted([*gpus[:n], value - need, *gpus[n + 1 :]])
            score = self._workload.score(before, self._workload.fragment_milli(tuple(after)))
            this = -score, value - need, free
            if best is None or this < best:
                best, alike = this, []
            if this == best:
                alike.append(look[n])
        return None if best is None else (best, tuple(alike))

    def _find_gang(self, lease: Lease) -> Spot | None:
        count, layout, need = lease.device_count, self._layout, lease.fraction_milli
        if need == WHOLE_GPU and not lease.profile:
            if self._empty_total < count:
                return None
            if lease.consolidate and not layout.is_wider(lease) and max(self._empty) < count:
                return None
        for tier in layout.tiers(lease):
            insides: list[list[Room]] = []
            for group in tier:
                inside = [r for r in group if self._value[r] >= need and demand(lease, r.device) <= need]
                if len(inside) >= count:
                    insides.append(inside)
            # The set with the fewest devices that would do: the others stay whole.
            inside = min(insides, key=len, default=[])
            if inside and (chosen := layout.choose(lease, inside, self._value.__getitem__)):
                return Spot(tuple(room.device.uuid for room in chosen), need)
        return None
