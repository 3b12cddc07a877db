"""Where a lease is placed.

* One device or a part of one is on the device with the least sufficient capacity
  (best fit), then on the node with the least free capacity; ties by UUID.
* Memory is requested in bytes and held in thousandths of a device, rounded up.
* A request for a MIG profile gets a whole instance; a request for bytes may get a
  part of one.
* Several devices are taken at once or not at all.  With `Lease.consolidate` they are
  in one island, else in one node.  A job larger than every node takes whole nodes and
  the rest from one more.  Without `Lease.consolidate` they may be anywhere.
* An unusable device takes no new lease; a lease that is bound to it may sleep, wake and end there.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jupyter_gpushare.core.capacity import CapacityView, DeviceCapacity
from jupyter_gpushare.core.model import WHOLE_GPU, Device, Lease

Group = Sequence[DeviceCapacity]


def empty_device(capacity: DeviceCapacity) -> int:
    """Return the capacity of an empty device."""
    return WHOLE_GPU


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices, and the thousandths held of each."""

    devices: tuple[str, ...]
    held_milli: int

    @property
    def size_milli(self) -> int:
        """Thousandths of a GPU over all devices."""
        return self.held_milli * len(self.devices)


class Topology:
    """Islands and nodes: the sets of devices that belong together."""

    def __init__(self, capacities: Group) -> None:
        islands: dict[tuple[str, str], list[DeviceCapacity]] = {}
        nodes: dict[str, list[DeviceCapacity]] = {}
        for capacity in capacities:
            nodes.setdefault(capacity.device.node, []).append(capacity)
            if capacity.device.island:
                islands.setdefault((capacity.device.node, capacity.device.island), []).append(capacity)
        self.everything = capacities
        self.islands: list[Group] = list(islands.values())
        self.nodes: list[Group] = list(nodes.values())
        self._by_size = sorted(self.nodes, key=lambda node: (-len(node), min(r.device.uuid for r in node)))
        self._sets: dict[bool, tuple[list[Group], dict[DeviceCapacity, tuple[int, ...]]]] = {}
        self.largest_node = max(map(len, self.nodes), default=0)

    def spans_nodes(self, lease: Lease) -> bool:
        """Return whether a job is larger than every node."""
        return lease.consolidate and lease.size.device_count > self.largest_node

    def tiers(self, lease: Lease) -> list[list[Group]]:
        """Return the sets of devices that a lease may be placed in, the better kind of set first."""
        if lease.size.device_count == 1:
            return [[(capacity,) for capacity in self.everything]]
        if not lease.consolidate or self.spans_nodes(lease):
            return [[self.everything]]
        return [self.islands, self.nodes]

    def sets(self, lease: Lease) -> tuple[list[Group], dict[DeviceCapacity, tuple[int, ...]]]:
        """Return the sets of all tiers, and the set numbers of each device; for several devices only."""
        together = lease.consolidate and not self.spans_nodes(lease)
        if together not in self._sets:
            sets = [*self.islands, *self.nodes] if together else [self.everything]
            numbers: dict[DeviceCapacity, tuple[int, ...]] = dict.fromkeys(self.everything, ())
            for number, group in enumerate(sets):
                for capacity in group:
                    numbers[capacity] = (*numbers[capacity], number)
            self._sets[together] = sets, numbers
        return self._sets[together]

    def choose(self, lease: Lease, able: Group, view: CapacityView) -> list[DeviceCapacity] | None:
        """Return the devices that ``lease`` takes from ``able``, which are of one set; None: too few."""
        count = lease.size.device_count
        if len(able) < count:
            return None
        if not self.spans_nodes(lease):
            return packed(lease, able, view)[:count]
        nodes: dict[str, list[DeviceCapacity]] = {}
        for capacity in sorted(able, key=lambda capacity: capacity.device.uuid):
            nodes.setdefault(capacity.device.node, []).append(capacity)
        chosen: list[DeviceCapacity] = []
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
            chosen += packed(lease, others[0], view)[:rest]
        return chosen


def packed(lease: Lease, capacities: Iterable[DeviceCapacity], view: CapacityView) -> list[DeviceCapacity]:
    """Return devices in the order in which a job takes them: node by node, the fullest device first.

    A consolidated job begins with the node that has the most of ``capacities``.  Any other
    job begins with the node that has the fewest, which leaves large sets free.
    """
    capacities = list(capacities)
    on_node: dict[str, int] = {}
    for capacity in capacities:
        on_node[capacity.device.node] = on_node.get(capacity.device.node, 0) + 1
    sign = -1 if lease.consolidate else 1

    def key(capacity: DeviceCapacity) -> tuple[int, str, int, str, str]:
        device = capacity.device
        return sign * on_node[device.node], device.node, view(capacity), device.island, device.uuid

    return sorted(capacities, key=key)


def to_resume_on(lease: Lease, able: Iterable[DeviceCapacity], view: CapacityView) -> tuple[str, ...] | None:
    """Return the devices of ``able`` that a suspended lease resumes on, in the order of its own devices.

    It keeps its own devices if they are able, leaves draining ones if it can, and takes the
    fullest of the others.  None: too few.
    """
    others = {c.device.uuid: c for c in able}
    own = {uuid: others.pop(uuid) for uuid in lease.devices if uuid in others}
    spare = len(own) + len(others) - len(lease.devices)
    if spare < 0:
        return None
    leaves = [uuid for uuid, c in own.items() if c.device.draining][: min(spare, len(others))]
    rest = iter(packed(lease, others.values(), view))
    stays = own.keys() - leaves
    return tuple(uuid if uuid in stays else next(rest).device.uuid for uuid in lease.devices)


def find(
    lease: Lease, topology: Topology, view: CapacityView, max_milli: int | None = None
) -> Placement | None:
    """Return where ``lease`` fits, or None.

    ``view`` says how much of a device may be used.  ``max_milli`` is the maximum over
    all devices that a quota or a limit leaves.
    """
    return Index(topology, view, set()).find(lease, max_milli)


# A device with capacity: its capacity, the capacity of its node, first UUID of the node, UUID.
_Entry = tuple[int, int, str, str]


class Index:
    """Finds capacity by one ``view`` without scanning all devices.

    A single device is found by its capacity, a gang of whole devices by the number of
    empty devices per set.  Each query first updates the devices in ``changed``.
    """

    def __init__(self, topology: Topology, view: CapacityView, changed: set[DeviceCapacity]) -> None:
        self._topology = topology
        self._view = view
        self._changed = changed
        self._value: dict[DeviceCapacity, int] = dict.fromkeys(topology.everything, 0)
        # By kind: entries of devices with capacity, ascending.  A request takes equal parts of them.
        self._able: dict[tuple[int, str], list[_Entry]] = {}
        self._kinds: dict[tuple[int, str], Device] = {}
        self._entry: dict[DeviceCapacity, _Entry] = {}  # of devices with capacity
        for capacity in topology.everything:
            self._able.setdefault(_kind(capacity), [])
            self._kinds.setdefault(_kind(capacity), capacity.device)
        self._node = {capacity: number for number, node in enumerate(topology.nodes) for capacity in node}
        self._first = [min(capacity.device.uuid for capacity in node) for node in topology.nodes]
        self._empty = [0] * (len(topology.islands) + len(topology.nodes))  # empty devices per set
        self._empty_total = 0
        self._sets: dict[DeviceCapacity, list[int]] = {capacity: [] for capacity in topology.everything}
        for number, group in enumerate([*topology.islands, *topology.nodes]):
            for capacity in group:
                self._sets[capacity].append(number)
        self._update(topology.everything)

    def _update(self, capacities: Iterable[DeviceCapacity]) -> None:
        nodes = set()
        for capacity in capacities:
            if capacity not in self._value:
                continue  # not usable
            value = self._view(capacity)
            before = self._value[capacity]
            if value != before:
                self._value[capacity] = value
                nodes.add(self._node[capacity])
                change = (value >= WHOLE_GPU) - (before >= WHOLE_GPU)
                if change:
                    self._empty_total += change
                    for number in self._sets[capacity]:
                        self._empty[number] += change
        for number in nodes:
            node = self._topology.nodes[number]
            total = sum([max(0, self._value[capacity]) for capacity in node])
            for capacity in node:
                value, filed = self._value[capacity], self._entry.pop(capacity, None)
                if value <= 0 and filed is None:
                    continue
                able = self._able[_kind(capacity)]
                if filed is not None:
                    del able[bisect_left(able, filed)]
                if value > 0:
                    entry = self._entry[capacity] = value, total, self._first[number], capacity.device.uuid
                    insort(able, entry)

    def _refresh(self) -> None:
        if self._changed:
            self._update(self._changed)
            self._changed.clear()

    def empty_devices(self) -> int:
        """Return the number of devices that are free as a whole."""
        self._refresh()
        return self._empty_total

    def find(self, lease: Lease, max_milli: int | None = None) -> Placement | None:
        """Return where ``lease`` fits, or None."""
        self._refresh()
        if lease.size.device_count > 1:
            if max_milli is not None and lease.size.fraction_milli * lease.size.device_count > max_milli:
                return None
            return self._find_gang(lease)
        return self._find_one(lease, max_milli)

    def _find_one(self, lease: Lease, max_milli: int | None) -> Placement | None:
        best: tuple[_Entry, int] | None = None
        for kind, able in self._able.items():
            need = self._kinds[kind].demand_milli(lease.size)
            at = bisect_left(able, (need,))
            if at == len(able) or (max_milli is not None and need > max_milli):
                continue
            value, total, first, uuid = able[at]
            found = (value - need, total, first, uuid), need
            best = found if best is None else min(best, found)
        return None if best is None else Placement((best[0][3],), best[1])

    def _find_gang(self, lease: Lease) -> Placement | None:
        size, topology = lease.size, self._topology
        count, need = size.device_count, size.fraction_milli
        tiers = topology.tiers(lease)
        if need == WHOLE_GPU and not size.profile:
            if self._empty_total < count:
                return None
            if lease.consolidate and not topology.spans_nodes(lease):
                if max(self._empty) < count:
                    return None
                empty = iter(self._empty)
                tiers = [[group for group in tier if next(empty) >= count] for tier in tiers]
        for tier in tiers:
            insides: list[list[DeviceCapacity]] = []
            for group in tier:
                inside = [r for r in group if self._value[r] >= need and r.device.demand_milli(size) <= need]
                if len(inside) >= count:
                    insides.append(inside)
            # The set with the fewest able devices, so that larger sets stay free for larger gangs.
            inside = min(insides, key=len, default=[])
            if inside and (chosen := topology.choose(lease, inside, self._value.__getitem__)):
                return Placement(tuple(capacity.device.uuid for capacity in chosen), need)
        return None


def _kind(capacity: DeviceCapacity) -> tuple[int, str]:
    return capacity.device.grantable_bytes, capacity.device.profile
