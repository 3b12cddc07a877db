"""Lending: the part of suspended sessions' capacity that other leases really use.

On one device the capacity of all leases, suspended sessions included, exceeds
the device only while sessions are suspended.  The excess is lent, and every
suspended session there lends its part of it.  A session that is suspended
while no other lease uses its capacity lends nothing.  A stretch is counted before every
change on its device: between two changes nothing changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Kind, Lease, State

# A lender with the device (UUID), the GPUs that it lends there, and for how many seconds.
Lent = tuple[LeaseRecord, str, float, float]


def sleeps(lease: Lease) -> bool:
    """Return whether it is a session that is asleep."""
    return lease.state is State.SUSPENDED and lease.kind is Kind.BUILD


def lent_milli(leases: Collection[Lease]) -> Mapping[str, float]:
    """Return what each session sleeping on one device lends, in thousandths of it, by lease.

    ``leases`` are all that are bound to the device.
    """
    asleep = {lease.id: lease.held_milli for lease in leases if sleeps(lease)}
    held = sum(lease.held_milli for lease in leases if lease.state in HOLDS_CAPACITY)
    over = held + sum(asleep.values()) - WHOLE_GPU
    if over <= 0 or not asleep:
        return {}
    return {lease: over * milli / sum(asleep.values()) for lease, milli in asleep.items()}


@dataclass(slots=True)
class Lending:
    """Counts it; what was lent while no broker ran, or since the last count before, is not known."""

    began_at: float  # monotonic, like the next one
    counted_at: dict[str, float] = field(default_factory=dict)  # by device

    def open(
        self, records: Iterable[LeaseRecord], now: float, devices: Collection[str] | None = None
    ) -> list[Lent]:
        """Return what was lent on ``devices`` (None: on all) since each was last counted."""
        there: dict[str, dict[str, LeaseRecord]] = {}
        for record in records:
            for device in record.lease.devices:
                if devices is None or device in devices:
                    there.setdefault(device, {})[record.id] = record
        return [
            (
                bound[lender],
                device,
                milli / WHOLE_GPU,
                max(0.0, now - self.counted_at.get(device, self.began_at)),
            )
            for device, bound in there.items()
            for lender, milli in lent_milli([record.lease for record in bound.values()]).items()
        ]

    def count(
        self, records: Collection[LeaseRecord], now: float, devices: Collection[str] | None = None
    ) -> list[Lent]:
        """Return the same, and begin anew."""
        found = self.open(records, now, devices)
        if devices is None:
            self.began_at = now
            self.counted_at.clear()
        else:
            self.counted_at.update(dict.fromkeys(devices, now))
        return found
