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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jupyter_gpushare.core.board import Room
from jupyter_gpushare.core.model import WHOLE_GPU, Device, Lease


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
    if not lease.memory_bytes:
        return lease.fraction_milli
    if device.grantable_bytes <= 0:
        return WHOLE_GPU + 1
    return -(-lease.memory_bytes * WHOLE_GPU // device.grantable_bytes)


Group = Sequence[Room]


def tiers(lease: Lease, rooms: Sequence[Room]) -> list[list[Group]]:
    """Sets of devices within which a job for several may lie, the better kind of set first."""
    if not lease.consolidate:
        return [[rooms]]
    islands: dict[tuple[str, str], list[Room]] = {}
    nodes: dict[str, list[Room]] = {}
    for room in rooms:
        nodes.setdefault(room.device.node, []).append(room)
        if room.device.island:
            islands.setdefault((room.device.node, room.device.island), []).append(room)
    if max((len(n) for n in nodes.values()), default=0) < lease.device_count:
        return [[rooms]]
    return [[g for g in sets.values() if len(g) >= lease.device_count] for sets in (islands, nodes)]


def find(
    lease: Lease, rooms: Sequence[Room], room_of: Callable[[Room], int], most_milli: int | None = None
) -> Spot | None:
    """Return where ``lease`` fits, or None.

    ``room_of`` says how much of a device may be used; ``most_milli`` bounds
    what is taken over all devices (what a quota or a limit leaves).
    """
    if lease.device_count > 1:
        return _find_gang(lease, rooms, room_of, most_milli)
    best: tuple[int, str, int] | None = None
    for room in rooms:
        need = demand(lease, room.device)
        spare = room_of(room) - need
        if spare < 0 or (most_milli is not None and need > most_milli):
            continue
        if best is None or (spare, room.device.uuid) < best[:2]:
            best = spare, room.device.uuid, need
    return best and Spot((best[1],), best[2])


def _find_gang(
    lease: Lease, rooms: Sequence[Room], room_of: Callable[[Room], int], most_milli: int | None
) -> Spot | None:
    need, count = lease.fraction_milli, lease.device_count
    if most_milli is not None and need * count > most_milli:
        return None
    fitting = [room for room in rooms if room_of(room) >= need]
    if len(fitting) < count:
        return None
    for tier in tiers(lease, rooms):
        insides = [[room for room in group if room_of(room) >= need] for group in tier]
        insides = [inside for inside in insides if len(inside) >= count]
        if insides:
            # The set with the fewest devices that would do: the others stay whole.
            inside = min(insides, key=len)
            return Spot(tuple(r.device.uuid for r in packed(lease, inside, room_of)[:count]), need)
    return None


def packed(lease: Lease, rooms: Group, room_of: Callable[[Room], int]) -> list[Room]:
    """The order in which a job takes devices: node by node, tight devices first.

    A consolidated job begins with the node that has most to give, any other
    with the node that has least, to leave large pieces for those who need them.
    """
    on_node: dict[str, int] = {}
    for room in rooms:
        on_node[room.device.node] = on_node.get(room.device.node, 0) + 1
    sign = -1 if lease.consolidate else 1

    def key(room: Room) -> tuple[int, str, int, str, str]:
        device = room.device
        return sign * on_node[device.node], device.node, room_of(room), device.island, device.uuid

    return sorted(rooms, key=key)
