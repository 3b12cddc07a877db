"""Moving running jobs together, so that a larger one finds a node.

The room for a gang may be there, but in pieces: every node also has jobs that
come before it.  Such a job may be moved, if it writes checkpoints of its own
and there is free room for it elsewhere; those whom the gang may preempt anyway
need no other place.  The nodes are taken where the fewest GPUs change hands.
A move is a preemption and costs as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jupyter_gpushare.core.model import WHOLE_GPU, Lease, Why
from jupyter_gpushare.core.placement import Group, Layout, demand
from jupyter_gpushare.core.room import Room
from jupyter_gpushare.core.victims import Victim


@dataclass(frozen=True, slots=True)
class Clearing:
    """Who leaves a node so that enough of its devices are free."""

    size: int  # devices that change hands
    node: Group
    victims: tuple[Victim, ...]


class Mover:
    """Makes room on whole nodes for one gang of whole devices."""

    def __init__(
        self,
        layout: Layout,
        job: Lease,
        juniors: Mapping[str, Victim],
        movable: Callable[[Lease], Victim | None],
    ) -> None:
        self._layout = layout
        self._job = job
        self._juniors = juniors  # those whom the job may preempt
        self._movable = movable
        fitting = [[r for r in node if demand(job, r.device) <= WHOLE_GPU] for node in layout.nodes]
        self._nodes: list[Group] = [node for node in fitting if node]
        counts = ((node, sum(map(self._is_free, node))) for node in self._nodes)
        self._free = [(node, count) for node, count in counts if count]  # devices, per node

    def _is_free(self, room: Room) -> bool:
        return room.soon >= WHOLE_GPU

    def make(self) -> tuple[list[Room], tuple[Victim, ...]] | None:
        """The devices to take and who must leave them; None: it cannot be done by moving."""
        job, largest = self._job, self._layout.largest_node
        whole, rest = (
            divmod(job.device_count, largest) if self._layout.is_wider(job) else (0, job.device_count)
        )
        chosen: list[Clearing] = []
        if whole:
            nodes = [node for node in self._nodes if len(node) == largest]
            chosen = self._cheapest(nodes, largest)[:whole]
            if len(chosen) < whole:
                return None
        if rest:
            nodes = [n for n in self._nodes if all(n is not c.node for c in chosen)]
            last = next((c for c in self._cheapest(nodes, rest) if self._have_place([*chosen, c])), None)
            if last is None:
                return None
            chosen.append(last)
        elif not self._have_place(chosen):
            return None
        victims = {v.lease.id: v for clearing in chosen for v in clearing.victims}
        leaving = {uuid for v in victims.values() for uuid in v.lease.devices}
        able = [r for c in chosen for r in c.node if self._is_free(r) or r.device.uuid in leaving]
        rooms = self._layout.choose(job, able, lambda room: room.soon)
        return None if rooms is None else (rooms, tuple(victims.values()))

    def _cheapest(self, nodes: Iterable[Group], count: int) -> list[Clearing]:
        found = [clearing for node in nodes if (clearing := self._clear(node, count))]
        return sorted(found, key=lambda c: (c.size, c.node[0].device.uuid))

    def _clear(self, node: Group, count: int) -> Clearing | None:
        """The least that has to leave ``node`` to free ``count`` of its devices."""
        missing = count - sum(map(self._is_free, node))
        leases = {x.id: x for room in node for x in room.holders.values() if len(room.holders) == 1}
        able = [v for x in leases.values() if (v := self._juniors.get(x.id) or self._movable(x))]
        inside = {room.device.uuid for room in node}
        able = [v for v in able if inside.issuperset(v.lease.devices)]
        able.sort(key=lambda v: (-v.lease.device_count, v.why is Why.MOVED, v.rank))
        taken: list[Victim] = []
        for v in able:
            if v.lease.device_count <= missing:
                taken.append(v)
                missing -= v.lease.device_count
        if missing > 0:
            larger = [v for v in reversed(able) if v not in taken and v.lease.device_count >= missing]
            if not larger:
                return None
            taken.append(larger[0])
            missing -= larger[0].lease.device_count
            for v in taken[:-1]:  # some are not needed any more
                if v.lease.device_count <= -missing:
                    missing += v.lease.device_count
                    taken.remove(v)
        return Clearing(sum(v.lease.device_count for v in taken), node, tuple(taken))

    def _have_place(self, clearings: list[Clearing]) -> bool:
        """Whether whoever is moved has free room on another node."""
        moved = [v.lease.device_count for c in clearings for v in c.victims if v.why is Why.MOVED]
        free = [count for node, count in self._free if all(node is not c.node for c in clearings)]
        for size in sorted(moved, reverse=True):
            fits = [n for n, count in enumerate(free) if count >= size]
            if not fits:
                return False
            free[min(fits, key=free.__getitem__)] -= size
        return True
