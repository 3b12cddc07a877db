"""What the device helper said last: the one place that reads its inventory and samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from jupyter_gpushare.broker.state.records import Drains
from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.core.model import Device as PlannerDevice
from jupyter_gpushare.protocol.helper import Device, DeviceSample, Inventory, Sample

# After this many seconds without a sample the devices are unknown and nothing is decided.
STALE_S = 5.0


@dataclass(slots=True)
class DeviceState:
    """Inventory and last sample; not stored, measured again after a restart."""

    inventory: Inventory | None = None
    sample: Sample | None = None
    sampled_at: float = float("-inf")  # when the devices were measured, on the clock of this machine
    orphaned: dict[str, str] = field(default_factory=dict)  # device UUID -> lease missing in the database
    drains: Drains = field(default_factory=Drains)  # stored, other than all above

    def are_known(self, now: float) -> bool:
        """Return whether there is an inventory and a sample that is at most `STALE_S` old."""
        return self.inventory is not None and now - self.sampled_at <= STALE_S

    @property
    def listed(self) -> tuple[Device, ...]:
        """All devices of the inventory; empty before the first."""
        return self.inventory.devices if self.inventory else ()

    @property
    def measured(self) -> tuple[DeviceSample, ...]:
        """All devices of the last sample; empty before the first."""
        return self.sample.devices if self.sample else ()

    @property
    def total_milli(self) -> int:
        """Capacity of all devices, in thousandths of a GPU."""
        return WHOLE_GPU * len(self.listed)

    @property
    def left_out(self) -> tuple[str, ...]:
        """A sentence for each device that cannot be leased."""
        return self.inventory.left_out if self.inventory else ()

    @property
    def host_budget_bytes(self) -> int:
        """Host memory that suspended leases may take."""
        return self.inventory.host_budget_bytes if self.inventory else 0

    @property
    def host_saved_bytes(self) -> int:
        """Host memory that suspended leases take."""
        return self.sample.host_saved_bytes if self.sample else 0

    def for_planner(self) -> Iterator[PlannerDevice]:
        """Yield all devices as the planner sees them.

        A device that the last sample does not show, that holds an orphaned lease, or that is being emptied
        is not usable.
        """
        if self.inventory is None:
            return
        healthy = {d.uuid: d.healthy for d in self.sample.devices} if self.sample else None
        for device in self.inventory.devices:
            works = device.healthy if healthy is None else healthy.get(device.uuid, False)
            works = works and device.uuid not in self.orphaned
            draining = self.drains.on(device.uuid) is not None
            yield PlannerDevice(
                uuid=device.uuid,
                memory_bytes=device.memory_bytes,
                reserve_bytes=device.reserve_bytes,
                node=device.node or self.inventory.host,
                island=device.island,
                name=device.name,
                profile=device.profile,
                usable=works and not draining,
                draining=works and draining,
                suspendable=device.suspendable,
            )

    def model_name(self, uuids: Collection[str]) -> str:
        """Return the model of the first of these devices, for people; empty when none is known."""
        return next((d.name for d in self.listed if d.uuid in uuids), "")

    def nodes_of(self, uuids: Collection[str]) -> frozenset[str]:
        """Return the nodes of these devices."""
        return frozenset(d.node for d in self.for_planner() if d.uuid in uuids)

    def have_left(self, uuids: Collection[str]) -> bool:
        """Return whether a cluster measures none of these devices any more: their node has left it."""
        measured = {device.uuid for device in self.measured}
        is_cluster = self.inventory is not None and not self.inventory.host
        return is_cluster and bool(uuids) and measured.isdisjoint(uuids)

    def level(self, uuid: str) -> str:
        """Return how the memory limit is enforced on a device; empty for an unknown one."""
        return next((str(d.level) for d in self.listed if d.uuid == uuid), "")

    def suspend_obstacle(self, uuids: Collection[str]) -> str:
        """Return why nothing can be suspended on one of these devices; empty when it can."""
        return next((d.suspend_reason for d in self.listed if not d.suspendable and d.uuid in uuids), "")

    def copy_rates(self, uuids: Collection[str]) -> tuple[float, float]:
        """Return bytes per second of a suspension and of a resume; 0: unknown.

        Of the slowest of these devices, as the self-test measured them.
        """
        found = [d for d in self.listed if d.uuid in uuids]
        suspend = min((d.suspend_bytes_per_s for d in found), default=0.0)
        return suspend, min((d.resume_bytes_per_s for d in found), default=0.0)

    def most_utilization_percent(self, uuids: Collection[str]) -> int | None:
        """Return the highest utilization of these devices; None: not measured, as of MIG instances."""
        if any(device.profile for device in self.listed if device.uuid in uuids):
            return None
        return max((d.utilization_percent for d in self.measured if d.uuid in uuids), default=None)

    def utilization_percent(self, uuids: Collection[str]) -> int | None:
        """Return the mean utilization of these devices; None: not measured."""
        percents = [d.utilization_percent for d in self.measured if d.uuid in uuids]
        return sum(percents) // len(percents) if percents else None
