"""Where a lease fits on a cluster that changes: one `placement.Index` per view of capacity, kept."""

from __future__ import annotations

from collections.abc import Iterable

from jupyter_gpushare.core.capacity import CapacityView
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.fragmentation import Task, Workload
from jupyter_gpushare.core.model import Lease, Why
from jupyter_gpushare.core.placement import Index, Placement, Topology, empty_device, find
from jupyter_gpushare.core.queues import Shape


class Placer:
    """Finds devices for leases on the usable devices of a `ClusterState`."""

    def __init__(self, state: ClusterState, workload: Iterable[tuple[int, int, float]]) -> None:
        """``workload``: thousandths of each GPU, GPUs and frequency, as in `Settings`."""
        self.topology = Topology(state.usable)
        self._state = state
        tasks = ((Task(gpu_milli=milli, gpu_count=n), often) for milli, n, often in workload)
        self._workload = Workload(tasks)
        self._indexes: dict[CapacityView, Index] = {}
        self._possible: dict[Shape, bool] = {}

    def find(self, lease: Lease, view: CapacityView, most_milli: int | None = None) -> Placement | None:
        """Return where ``lease`` fits by ``view``, or None."""
        index = self._indexes.get(view)
        if index is None:
            index = Index(self.topology, view, self._workload, self._state.watch())
            self._indexes[view] = index
        return index.find(lease, most_milli)

    def fits_ever(self, lease: Lease) -> bool:
        """Whether ``lease`` fits on the usable devices if they are empty."""
        key = lease.size, lease.consolidate
        if key not in self._possible:
            self._possible[key] = self.find(lease, empty_device) is not None
        return self._possible[key]

    def unplaced(self, lease: Lease) -> Why:
        """Why a lease that does not fit now does not."""
        if self.fits_ever(lease):
            return Why.NO_CAPACITY
        everything = Topology(list(self._state.capacities.values()))
        return Why.DEVICE_BROKEN if find(lease, everything, empty_device, self._workload) else Why.TOO_LARGE
