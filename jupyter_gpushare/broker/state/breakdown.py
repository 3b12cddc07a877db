"""Use of the machine's GPUs: at this moment, and as means over the last months.

Four parts add up to all usable GPUs: *computing* and *idle* are held by running
sessions and jobs, *lent* is held in the capacity of suspended sessions, *free*
is the rest.  What computes was seen to use the GPU: neither holding one nor a busy
kernel is enough.  Utilization is measured; allocation is what leases hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from jupyter_gpushare.broker.state.lending import lent_milli
from jupyter_gpushare.broker.state.records import MachineUse
from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Lease
from jupyter_gpushare.protocol.helper import DeviceSample

# Time that one stored row covers.
ROW_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBreakdown:
    """Numbers of GPUs; all but ``broken`` add up to the usable ones."""

    computing: float = 0.0
    idle: float = 0.0
    lent: float = 0.0
    free: float = 0.0
    broken: float = 0.0

    @property
    def usable(self) -> float:
        """GPUs that are not broken, fractions included."""
        return self.computing + self.idle + self.lent + self.free


def gpu_breakdown(
    leases: Iterable[Lease], usable: Iterable[str], broken: int, at_work: Container[str]
) -> GpuBreakdown:
    """Return the use of the usable devices (UUIDs) by ``leases``; ``at_work``: ids of those that compute."""
    bound: dict[str, list[Lease]] = {uuid: [] for uuid in usable}
    for lease in leases:
        for device in lease.devices:
            if device in bound:
                bound[device].append(lease)
    lent = held = idle = 0.0
    for there in bound.values():
        holders = [lease for lease in there if lease.state in HOLDS_CAPACITY]
        lent += sum(lent_milli(there).values()) / WHOLE_GPU
        held += sum(lease.held_milli for lease in holders) / WHOLE_GPU
        idle += sum(lease.held_milli for lease in holders if lease.id not in at_work) / WHOLE_GPU
    # An idle borrower counts as lent, not as idle.
    idle = min(idle, held - lent)
    return GpuBreakdown(
        computing=held - lent - idle,
        idle=idle,
        lent=lent,
        free=max(0.0, len(bound) - held),
        broken=broken,
    )


class Meter:
    """Averages the use of the GPUs over `ROW_S`."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._noted: deque[MachineUse] = deque(maxlen=10_000)  # about one a second

    def note(self, share: GpuBreakdown, devices: Iterable[DeviceSample]) -> None:
        """Add one sample."""
        self._noted.append(
            MachineUse(
                at="",
                gpus=share.usable + share.broken,
                held=share.computing + share.idle + share.lent,
                busy=sum(device.utilization_percent for device in devices) / 100,
                lent=share.lent,
            )
        )

    def row(self, now: float, wall: str) -> MachineUse | None:
        """Return the means since the last row and start the next; None: `ROW_S` has not passed."""
        if now - self._began_at < ROW_S or not self._noted:
            return None
        row = replace(_mean(self._noted), at=wall)
        self._began_at = now
        self._noted.clear()
        return row


def downsample(rows: Sequence[MachineUse], until: str, hours: float, most: int) -> list[MachineUse | None]:
    """Return the means of ``most`` equal parts of the last ``hours``, oldest first; None: no rows."""
    end = datetime.fromisoformat(until)
    part = timedelta(hours=hours) / most
    parts: list[list[MachineUse]] = [[] for _ in range(most)]
    for row in rows:
        number = most - 1 - int((end - datetime.fromisoformat(row.at)) / part)
        if 0 <= number < most:
            parts[number].append(row)
    return [_mean(found) if found else None for found in parts]


def _mean(rows: Collection[MachineUse]) -> MachineUse:
    n = len(rows)
    return MachineUse(
        at="",
        gpus=sum(r.gpus for r in rows) / n,
        held=sum(r.held for r in rows) / n,
        busy=sum(r.busy for r in rows) / n,
        lent=sum(r.lent for r in rows) / n,
    )
