"""Placement on a changing cluster, with one cached `placement.Index` per view of capacity."""

from __future__ import annotations

from dataclasses import replace

from jupyter_gpushare.core.capacity import UNLENT, CapacityView, DeviceCapacity
from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import CheckpointMode, Grant, Lease, Why, held_by
from jupyter_gpushare.core.placement import (
    Index,
    Placement,
    Topology,
    empty_device,
    find,
    to_resume_on,
)
from jupyter_gpushare.core.size import Size


class Placer:
    """Finds devices for leases on the usable devices of a `ClusterState`."""

    def __init__(self, state: ClusterState) -> None:
        self.topology = Topology(state.usable)
        self._state = state
        self._indexes: dict[CapacityView, Index] = {}
        self._possible: dict[tuple[Size, bool], bool] = {}

    def find(self, lease: Lease, view: CapacityView, max_milli: int | None = None) -> Placement | None:
        """Return where ``lease`` fits by ``view``, or None."""
        return self.index(view).find(lease, max_milli)

    def index(self, view: CapacityView) -> Index:
        """Return the index of the usable devices by ``view``."""
        index = self._indexes.get(view)
        if index is None:
            index = Index(self.topology, view, self._state.watch())
            self._indexes[view] = index
        return index

    def find_for_job(self, job: Lease, view: CapacityView) -> Placement | None:
        """Return where ``job`` fits by ``view``, or None; on lent devices only if host memory can hold it."""
        state, account, max_milli = self._state, self._state.account(job), None
        if job.size.memory_bytes:  # it takes a larger part of a small device
            max_milli = account.limit_left
        if not job.borrow:
            left = account.unborrowed_left
            view, max_milli = UNLENT.get(view, view), left if max_milli is None else min(left, max_milli)
        found = self.find_to_resume(job, view) if job.devices else self.find(job, view, max_milli)
        unclaimed = DeviceCapacity.unclaimed_soon if view is DeviceCapacity.soon else DeviceCapacity.unclaimed
        if found is None or not job.borrow or not self.uses_lent(found, unclaimed):
            return found
        needed = state.host_memory_needed(job, found.devices, found.held_milli)
        return found if not needed or needed <= state.host_free else None

    def find_to_resume(self, lease: Lease, view: CapacityView) -> Placement | None:
        """Return where a suspended lease can resume by ``view``, or None."""
        held = held_by(lease)
        able = [c for c in self._state.resume_devices(lease) if c.seen_by(lease, view) >= held]
        devices = to_resume_on(lease, able, view)
        return None if devices is None else Placement(devices, held)

    def fits_soon(self, job: Lease) -> bool:
        """Return whether ``job`` fits by its size alone once every leaving lease has left."""
        find = self.find_to_resume if job.devices else self.find
        return find(job, DeviceCapacity.soon) is not None

    def lacks_quota(self, job: Lease) -> bool:
        """Return whether ``job`` would have to borrow but must not."""
        return not job.borrow and self._state.least_size(job) > self._state.account(job).unborrowed_left

    def lacks_host_memory(self, job: Lease) -> bool:
        """Return whether ``job``, which fits nowhere, would fit if it were stopped instead of suspended."""
        stopped = replace(job, survival=CheckpointMode.NONE)
        return self.find_for_job(stopped, DeviceCapacity.soon) is not None

    def uses_lent(self, placement: Placement, unclaimed: CapacityView) -> bool:
        """Return whether part of ``placement`` is claimed by suspended sessions."""
        return any(unclaimed(self._state.capacities[u]) < placement.held_milli for u in placement.devices)

    def borrows(self, job: Lease, placement: Placement, *, lent: bool) -> bool:
        """Return whether ``job`` borrows ``placement``; ``lent``: suspended sessions claim part of it."""
        return job.borrow and (lent or not self._state.account(job).fits_quota(placement.size_milli))

    def fits_ever(self, lease: Lease) -> bool:
        """Return whether ``lease`` fits on the usable devices if they are empty."""
        key = lease.size, lease.consolidate
        if key not in self._possible:
            self._possible[key] = self.find(lease, empty_device) is not None
        return self._possible[key]

    def could_run(self, job: Lease) -> bool:
        """Return whether a waiting job could start if its project and its devices had capacity."""
        fits = self._state.has_all_devices(job) if job.devices else self.fits_ever(job)
        return fits and not self.lacks_quota(job)

    def unplaced(self, lease: Lease) -> Why:
        """Return why a lease does not fit now."""
        if self.fits_ever(lease):
            return Why.NO_CAPACITY
        everything = list(self._state.capacities.values())
        working = [c for c in everything if c.device.usable or c.device.draining]
        for devices, why in ((working, Why.DRAINING), (everything, Why.DEVICE_BROKEN)):
            if find(lease, Topology(devices), empty_device):
                return why
        return Why.TOO_LARGE

    def session_grant(self, lease: Lease) -> Grant | Why:
        """Return the grant of a new session at this point of the round, or why it gets none.

        Within quota it gets capacity that it can claim: free capacity if possible, else
        lent capacity, on which it starts suspended.  Beyond quota it gets free and
        unclaimed capacity that it can give back.
        """
        account = self._state.account(lease)
        quota_left = account.claimable - account.claimed
        found = self.find(lease, DeviceCapacity.claimable_now, quota_left)
        if found and not account.over_limit(found.size_milli):
            return Grant(lease.id, found.devices, found.held_milli, Why.CLAIM)
        if found := found or self.find(lease, DeviceCapacity.claimable, quota_left):
            return Grant(lease.id, found.devices, found.held_milli, Why.CLAIM, asleep=True)
        if found := self.find(lease, DeviceCapacity.returnable):
            if account.over_limit(found.size_milli):
                return Why.PROJECT_LIMIT
            return Grant(lease.id, found.devices, found.held_milli, Why.FREE_CAPACITY, borrowed=True)
        return self.unplaced(lease)
