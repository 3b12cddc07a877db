"""Capacity of one device: what is free, reserved and claimed.

All numbers are thousandths of the device; `cluster_state` defines them.  A
`CapacityView` says how much of a device a lease may use; placement works with
any view.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from jupyter_gpushare.core.model import WHOLE_GPU, Device, Lease, held_by


@dataclass(slots=True, eq=False)
class DeviceCapacity:
    """The free, reserved and claimed parts of one device."""

    device: Device
    free: int = WHOLE_GPU
    releasing: int = 0
    reserved: int = 0
    claimed: int = 0
    suspended_claims: int = 0
    unreclaimable: int = 0
    awaited: int = 0
    guest_demand: int = 0
    unlent: bool = False  # reserved for a job that does not borrow: until it starts, claims are not lent
    guest: str = ""  # the lease that is a guest on it; no other lease gets the device before the guest leaves
    holders: dict[str, Lease] = field(default_factory=dict)  # leases that hold capacity and stay, by id
    version: int = 0  # grows with every change; caches compare it

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that restores the numbers that decisions change."""
        free, releasing, reserved, claimed = self.free, self.releasing, self.reserved, self.claimed
        suspended_claims, guest_demand = self.suspended_claims, self.guest_demand
        unlent = self.unlent
        holders = self.holders.copy()

        def undo() -> None:
            self.free, self.releasing, self.reserved, self.claimed = free, releasing, reserved, claimed
            self.suspended_claims, self.guest_demand = suspended_claims, guest_demand
            self.unlent, self.holders = unlent, holders

        return undo

    def seen_by(self, lease: Lease, view: CapacityView) -> int:
        """Return how much of the device ``lease`` may use; a guest does not block itself."""
        guest, self.guest = self.guest, "" if self.guest == lease.id else self.guest
        seen = view(self)
        self.guest = guest
        return seen

    def _at_once(self) -> int:
        return 0 if self.guest else self.free

    # The views of placement

    def now(self) -> int:
        """Return the capacity that can be granted at once."""
        return min(self._at_once(), self.soon())

    def soon(self) -> int:
        """Return the capacity that can be granted once every leaving lease has left."""
        soon = self.free + self.releasing - self.reserved
        return soon - self.suspended_claims if self.unlent else soon

    def unclaimed(self) -> int:
        """Return the capacity that can be granted at once and that no suspended session claims."""
        return min(self._at_once(), self.unclaimed_soon())

    def unawaited(self) -> int:
        """Return `unclaimed` minus the capacity that suspended leases wait for on this device."""
        return self.unclaimed() - self.awaited

    def unclaimed_soon(self) -> int:
        """Return `soon` minus the claims of suspended sessions."""
        return self.free + self.releasing - self.reserved - self.suspended_claims

    def claimable(self) -> int:
        """Return the capacity that can still be guaranteed to a build session."""
        return WHOLE_GPU - self.claimed - self.unreclaimable

    def claimable_now(self) -> int:
        """Return the capacity that can be guaranteed to a session and granted at once."""
        return min(self.claimable(), self.now())

    def returnable(self) -> int:
        """Return the free, unclaimed capacity of a device that supports suspending; 0 on any other."""
        return self.unclaimed() if self.device.suspendable else 0

    def on_lent(self, claimants: Container[str]) -> list[Lease]:
        """Return the leases without a claim that hold claimed capacity, the oldest grant first."""
        found: list[Lease] = []
        if not self.claimed:
            return found
        unclaimed = WHOLE_GPU - self.claimed
        for lease in sorted(self.holders.values(), key=lambda x: (x.granted_at, x.id)):
            if lease.id not in claimants:
                unclaimed -= held_by(lease)
                if unclaimed < 0:
                    found.append(lease)
        return found


CapacityView = Callable[[DeviceCapacity], int]
# The view of a job that does not borrow.
UNLENT: dict[CapacityView, CapacityView] = {
    DeviceCapacity.now: DeviceCapacity.unclaimed,
    DeviceCapacity.soon: DeviceCapacity.unclaimed_soon,
}
