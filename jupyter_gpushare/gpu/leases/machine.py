"""The parts of one machine that every component of the device layer works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.driver.nvml import Nvml
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.host_memory import HostMemory
from jupyter_gpushare.gpu.leases.journal import StateDirectory
from jupyter_gpushare.gpu.leases.processes import Processes
from jupyter_gpushare.gpu.leases.seats import SeatTable
from jupyter_gpushare.gpu.os.device_files import DeviceFiles
from jupyter_gpushare.protocol.seats import GpuPod


class GpuPods(Protocol):
    """The pods of a node of a cluster that have GPUs (`kube.node.pod_resources`)."""

    def pods(self) -> tuple[GpuPod, ...] | None:
        """Return the pods, or None if they are not known."""

    def run(self) -> None:
        """Keep the pods up to date, for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine: driver, processes, state directory, host memory, events, device files."""

    nvml: Nvml
    checkpoint: Checkpoint
    processes: Processes
    state: StateDirectory
    host: HostMemory
    events: Events
    files: DeviceFiles
    seats: SeatTable = field(default_factory=SeatTable)
    kubelet: GpuPods | None = None  # of a node of a cluster
    library: str = ""  # path of the preload library for the pods of this node

    @property
    def simulated(self) -> bool:
        """Whether the driver is the simulated one."""
        return self.checkpoint.simulated_host_memory() is not None
