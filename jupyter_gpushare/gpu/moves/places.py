"""Decide where a suspended lease can resume: on its own devices, or on equal devices of this machine.

An equal device has the same model and memory, and the self-test of both devices proved a move
(`Verdict.movable`).  The processes of the lease must be able to open the new device.  So a lease stays if
this helper closes its device files (``--own-device-files``), or if it runs in a container or in a seat of
Kubernetes.  Only the spawner knows the device rules of systemd (``DeviceAllow``).
"""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry


class Places:
    """Finds out why a suspended lease cannot resume on other devices."""

    def __init__(self, machine: Machine, registry: LeaseRegistry, devices: DeviceStates) -> None:
        self._machine = machine
        self._registry = registry
        self._devices = devices

    def obstacle(self, lease: HelperLease, devices: Sequence[str]) -> str:
        """Return why a lease cannot resume on ``devices`` now; "" if it can.

        ``devices`` are in the order of the lease's own devices.

        Raises:
            DeviceError: the driver does not answer.
        """
        if len(devices) != len(lease.limits):
            return f"the lease has {len(lease.limits)} devices, not {len(devices)}"
        if len(set(devices)) != len(devices):
            return "a device is named twice"
        if set(devices) == lease.limits.keys():
            return "these are its own devices in another order"
        pairs = [(old, new) for old, new in zip(lease.limits, devices, strict=True) if old != new]
        reasons = (reason for old, new in pairs if (reason := self._unequal(old, new)))
        return next(reasons, "") or self._leftover(lease)

    def _unequal(self, old: str, new: str) -> str:
        """Return why memory of device ``old`` cannot be restored on ``new``; "" if it can."""
        gpus: dict[str, DriverGpu] = {gpu.uuid: gpu for gpu in self._machine.nvml.gpus}
        for uuid in (new, old):
            if uuid not in gpus:
                return f"no device {uuid[:80]!r} here"
        if (gpus[old].name, gpus[old].memory_bytes) != (gpus[new].name, gpus[new].memory_bytes):
            return f"device {new} is not of the model and memory of {old}"
        if self._devices.grantable_bytes(gpus[new]) < self._devices.grantable_bytes(gpus[old]):
            return f"device {new} has less memory to grant than {old}"
        for uuid in (old, new):
            if reason := self._devices.move_obstacle(uuid):
                return f"device {uuid} takes part in no move: {reason}"
        return ""

    def permanent_obstacle(self, lease: HelperLease) -> str:
        """Return why the processes of a lease can never open another device; "" if they may."""
        if self._machine.seats.required:
            return "its devices are those of its seat on this node"
        processes = self._machine.processes
        if any(map(processes.is_contained, self._registry.living(lease.name))):
            return "it runs in a container, which has devices of its own"
        return ""

    def _leftover(self, lease: HelperLease) -> str:
        """Return what part of a lease would stay on its old devices; "" if none.

        The driver does not move a process that only called cuInit; it would still use the old device.
        """
        if lease.leftover_bytes or any(each.held_bytes for each in lease.leftovers.values()):
            return "GPU memory of an ended process is kept on its device"
        for key, each in lease.parked.items():
            if not each.saved_bytes.keys() <= lease.limits.keys():
                return f"process {key[0]} uses a device that is not the lease's"
        moved = {key[0] for key in lease.parked}
        found = {process.pid for process in self._registry.living(lease.name)} - moved
        for uuid in lease.limits:
            if stays := found & self._machine.nvml.processes(uuid).keys():
                return f"process {min(stays)} has opened the device and holds no memory that could move"
        return ""
