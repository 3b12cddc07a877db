"""Move running jobs together, so that a gang finds enough empty devices on a node.

The capacity for a gang may be free but scattered.  A running job of the gang's project
may be moved if it writes its own checkpoints and another node has free devices for it.
A job of a later level may leave without either.  The planner chooses the nodes where the
fewest GPUs change hands, then those where the least capacity is awaited by suspended
leases, which may have no other place to resume.  A move costs as much as a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jupyter_gpushare.core.capacity import CapacityView, DeviceCapacity
from jupyter_gpushare.core.model import WHOLE_GPU, Lease, Why, held_by
from jupyter_gpushare.core.placement import Group, Topology
from jupyter_gpushare.core.reclaim.victims import Victim, prune


@dataclass(frozen=True, slots=True)
class NodeClearing:
    """Leases to preempt on a node so that enough of its devices become empty."""

    size: int  # number of devices that change hands
    node: Group
    victims: tuple[Victim, ...]


class Defragmenter:
    """Clears nodes for one gang of whole devices."""

    def __init__(
        self,
        topology: Topology,
        job: Lease,
        juniors: Mapping[str, Victim],
        movable: Callable[[Lease], Victim | None],
        available: CapacityView,
    ) -> None:
        """Prepare to clear nodes for ``job``.

        ``juniors``: jobs that ``job`` may preempt, by id.  ``movable``: returns a lease as a victim to be
        moved, or None.  ``available``: capacity that ``job`` can use without a preemption.
        """
        self._topology = topology
        self._job = job
        self._juniors = juniors
        self._movable = movable
        fitting = [_fitting(job, node) for node in topology.nodes]
        self._nodes: list[Group] = [node for node in fitting if node]
        self._available = {c: available(c) for node in topology.nodes for c in node}
        self._free = {c for c, milli in self._available.items() if milli >= WHOLE_GPU}
        free_on = ((node, [c for c in node if c in self._free]) for node in topology.nodes)
        self._free_on = [(node, devices) for node, devices in free_on if devices]

    def plan(self) -> tuple[list[DeviceCapacity], tuple[Victim, ...]] | None:
        """Return the devices to take and the leases to preempt on them; None: moving does not help."""
        job, largest = self._job, self._topology.largest_node
        whole, rest = 0, job.size.device_count
        if self._topology.spans_nodes(job):
            whole, rest = divmod(job.size.device_count, largest)
        chosen: list[NodeClearing] = []
        if whole:
            nodes = [node for node in self._nodes if len(node) == largest]
            chosen = self._cheapest(nodes, largest)[:whole]
            if len(chosen) < whole:
                return None
        if rest:
            nodes = [n for n in self._nodes if all(n is not c.node for c in chosen)]
            last = next((c for c in self._cheapest(nodes, rest) if self._all_fit([*chosen, c])), None)
            if last is None:
                return None
            chosen.append(last)
        elif not self._all_fit(chosen):
            return None
        victims = {v.lease.id: v for clearing in chosen for v in clearing.victims}
        leaving = {uuid for v in victims.values() for uuid in v.lease.devices}
        able = [x for c in chosen for x in c.node if x in self._free or x.device.uuid in leaving]
        devices = self._topology.choose(job, able, DeviceCapacity.soon)
        return None if devices is None else (devices, tuple(victims.values()))

    def _cheapest(self, nodes: Iterable[Group], count: int) -> list[NodeClearing]:
        found = [clearing for node in nodes if (clearing := self._clear(node, count))]
        return sorted(found, key=lambda c: (c.size, sum(x.awaited for x in c.node), c.node[0].device.uuid))

    def _clear(self, node: Group, count: int) -> NodeClearing | None:
        """Return how ``count`` devices of ``node`` become empty with the fewest changing hands, or None."""
        missing = count - len(self._free.intersection(node))
        # Leases that share a device cannot empty it; some may have started there in this round.
        leases: dict[str, Lease] = {}
        shared: set[str] = set()
        for capacity in node:
            available = self._available[capacity]
            for x in capacity.holders.values():
                leases[x.id] = x
                if available + held_by(x) < WHOLE_GPU:
                    shared.add(x.id)
        able = [
            v
            for x in leases.values()
            if x.id not in shared and (v := self._juniors.get(x.id) or self._movable(x))
        ]
        inside = {capacity.device.uuid for capacity in node}
        able = [v for v in able if inside.issuperset(v.lease.devices)]
        able.sort(key=lambda v: (-v.lease.size.device_count, v.why is Why.MOVED, v.rank))
        taken: list[Victim] = []
        for v in able:
            if v.lease.size.device_count <= missing:
                taken.append(v)
                missing -= v.lease.size.device_count
        if missing > 0:
            larger = [v for v in reversed(able) if v not in taken and v.lease.size.device_count >= missing]
            if not larger:
                return None
            missing -= larger[0].lease.size.device_count

            def try_without(v: Victim) -> bool:
                nonlocal missing
                if v.lease.size.device_count > -missing:
                    return False
                missing += v.lease.size.device_count
                return True

            taken = [*prune(taken, try_without), larger[0]]
        return NodeClearing(sum(v.lease.size.device_count for v in taken), node, tuple(taken))

    def _all_fit(self, clearings: list[NodeClearing]) -> bool:
        """Return whether other nodes have free devices for every job that is moved."""
        moved = [v.lease for c in clearings for v in c.victims if v.why is Why.MOVED]
        cleared = {c.node[0].device.node for c in clearings}
        free = [list(devices) for node, devices in self._free_on if node[0].device.node not in cleared]
        for lease in sorted(moved, key=lambda x: -x.size.device_count):
            able = [(devices, _fitting(lease, devices)) for devices in free]
            fits = [(devices, inside) for devices, inside in able if len(inside) >= lease.size.device_count]
            if not fits:
                return False
            devices, inside = min(fits, key=lambda x: len(x[0]))
            for capacity in inside[: lease.size.device_count]:
                devices.remove(capacity)
        return True


def _fitting(lease: Lease, devices: Iterable[DeviceCapacity]) -> list[DeviceCapacity]:
    return [c for c in devices if c.device.demand_milli(lease.size) <= WHOLE_GPU]
