"""Cost of reclaiming capacity on one device, and on the cheapest set of devices.

Costs are computed on demand, and again after the device has changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.model import Lease, held_by
from jupyter_gpushare.core.placement import Group, Topology
from jupyter_gpushare.core.reclaim.victims import ReclaimScope, Victim, VictimIndex, rank

Price = tuple[object, ...]
# The price of capacity that needs no preemption.
_FREE: Price = (-1, 0, ())


class ReclaimOption(NamedTuple):
    """Reclaim of one device for one kind of job."""

    short: int  # thousandths that are still missing if every possible victim leaves
    price: Price | None  # None: the possible victims are not enough
    victims: Sequence[Victim]  # victims that have to leave


class ReclaimOptions:
    """Reclaim options of single devices for jobs of the size and scope of ``job``."""

    def __init__(self, victim_index: VictimIndex, scope: ReclaimScope, job: Lease) -> None:
        self._job = job
        self._victim_index = victim_index
        self._scope = scope
        self._candidates = victim_index.candidate_devices(scope)
        self._known: dict[DeviceCapacity, tuple[int, ReclaimOption]] = {}  # with the version of the device

    def option(self, capacity: DeviceCapacity) -> ReclaimOption:
        """Return the reclaim option of a device."""
        known = self._known.get(capacity)
        if known is None or known[0] != capacity.version:
            known = self._known[capacity] = capacity.version, self._make_option(capacity)
        return known[1]

    def short(self, capacity: DeviceCapacity) -> int:
        """Return the thousandths of a device that are missing if every possible victim leaves."""
        return self.option(capacity).short if capacity in self._candidates else self.missing(capacity)

    def victims_on(self, capacity: DeviceCapacity) -> list[Victim]:
        """Return every possible victim on a device, the cheapest first."""
        return self._victim_index.victims_on(capacity, self._scope)

    def victims_of(self, capacities: Iterable[DeviceCapacity]) -> list[Victim]:
        """Return the victims, each once, that have to leave so that the job gets all of these devices."""
        return list({v.lease.id: v for c in capacities for v in self.option(c).victims}.values())

    def missing(self, capacity: DeviceCapacity) -> int:
        """Return the thousandths that are missing if no lease leaves."""
        need = held_by(self._job) if self._job.devices else capacity.device.demand_milli(self._job.size)
        return need - self._scope.available(capacity)

    def _make_option(self, capacity: DeviceCapacity) -> ReclaimOption:
        short = self.missing(capacity)
        if short <= 0:
            return ReclaimOption(short, (*_FREE, -short, capacity.device.uuid), ())
        possible = self.victims_on(capacity) if capacity in self._candidates else ()
        if not possible:
            return ReclaimOption(short, None, ())
        picked: list[Victim] = []
        spare = -short
        for v in possible:
            if spare >= 0:
                break
            picked.append(v)
            spare += held_by(v.lease)
        if spare < 0:
            return ReclaimOption(-spare, None, ())
        rest = sum([held_by(v.lease) for v in possible[len(picked) :]])
        return ReclaimOption(-spare - rest, (*price(picked), spare, capacity.device.uuid), picked)


class Cheapest:
    """Finds the cheapest devices for one kind of job.

    It considers every set of devices that the job may use and that has a candidate device.
    """

    def __init__(
        self,
        topology: Topology,
        options: ReclaimOptions,
        job: Lease,
        candidates: set[DeviceCapacity],
        bound_to: Group,
    ) -> None:
        """Prepare to search; ``bound_to`` has the devices that a suspended job may resume on, else none."""
        self._job = job
        self._topology = topology
        self._options = options
        self._devices = candidates.intersection(bound_to) if bound_to else candidates
        tiers: list[list[Group]] = []
        if job.size.device_count > 1:
            tiers = [[bound_to]] if bound_to else topology.tiers(job)
        self._tiers = [[x for x in groups if not candidates.isdisjoint(x)] for groups in tiers]

    def best(self) -> list[DeviceCapacity] | None:
        """Return the cheapest devices to reclaim; None: no set of devices is enough."""
        if self._job.size.device_count == 1:
            singles = [(option.price, c) for c in self._devices if (option := self._options.option(c)).price]
            return [min(singles, key=itemgetter(0))[1]] if singles else None
        sets = (self._priced(tier, x) for tier, groups in enumerate(self._tiers) for x in groups)
        cheapest = min(filter(None, sets), key=lambda priced: priced[0], default=None)
        return cheapest and cheapest[1]

    def _priced(self, tier: int, group: Group) -> tuple[Price, list[DeviceCapacity]] | None:
        """Return the price of the cheapest devices of a set, and these; None: too few can be reclaimed."""
        able = [(option.price, c) for c in group if (option := self._options.option(c)).price]
        if len(able) < self._job.size.device_count:
            return None
        able.sort(key=lambda priced: priced[0])
        capacities = self._chosen([capacity for _, capacity in able])
        if capacities is None:
            return None
        victims = sorted(self._options.victims_of(capacities), key=rank)
        return (*price(victims), tier, *able[0][0][3:]), capacities

    def _chosen(self, able: list[DeviceCapacity]) -> list[DeviceCapacity] | None:
        """Return the devices to take of ``able``, which are sorted by price."""
        job, topology = self._job, self._topology
        if job.devices or not topology.spans_nodes(job):
            return able[: job.size.device_count]
        # Whole nodes, from the smallest number of cheapest devices that contains enough of them.
        numbers = range(job.size.device_count, len(able) + 1)
        extra = bisect_left(
            numbers, True, key=lambda n: topology.choose(job, able[:n], self._options.missing) is not None
        )
        return topology.choose(job, able[: job.size.device_count + extra], self._options.missing)


def price(victims: Sequence[Victim]) -> Price:
    """Return the sort key of sorted victims: the most expensive kind, then their number, then their ranks."""
    return (victims[-1].cost, len(victims), tuple([v.rank for v in victims])) if victims else _FREE
