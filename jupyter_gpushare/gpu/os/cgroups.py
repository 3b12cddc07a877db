"""Limits enforced by the driver: one cgroup per lease, with its device memory limits.

    <root>/gpushare-<lease>     the processes of one lease

The root is given (``--cgroup-root``): a cgroup (v2) below which the helper may
create others, such as one that systemd delegated.  A process that carries a lease is
moved into the lease's cgroup, where its children then start; it cannot leave,
because the files belong to the helper.  Until the next sample finds it, only the
library limits it.

The limits are set through NVML alone, never in ``dmem.*``, and cleared before a
cgroup is removed, as "MPS v3 Memory Partitioning" (docs.nvidia.com) asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.nvml import NO_LIMIT, Nvml

PREFIX = "gpushare-"


class Cgroups:
    """Creates the cgroups of leases; ``unavailable`` says why it cannot, or is empty."""

    def __init__(self, root: Path | None, nvml: Nvml) -> None:
        self._root = root or Path("/nonexistent")
        self._nvml = nvml
        if root is None:
            self.unavailable = "the helper was started without --cgroup-root"
        elif not (root / "cgroup.procs").is_file():
            self.unavailable = f"{root} is no cgroup (v2)"
        else:
            self.unavailable = ""
            # On kernels from 6.14 on the driver counts through this controller; without it by itself.
            with suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+dmem", encoding="ascii")

    def path(self, name: str) -> Path:
        """The cgroup of a lease."""
        return self._root / f"{PREFIX}{name}"

    def make(self, name: str, limits: Mapping[str, int], guaranteed: Mapping[str, int]) -> Path:
        """The path of a cgroup, created or changed to these limits (bytes by device).

        Raises:
            DeviceError: the driver cannot limit it.
            OSError: it cannot be created.
        """
        path = self.path(name)
        path.mkdir(exist_ok=True)
        for uuid, hard_bytes in limits.items():
            soft_bytes = min(guaranteed.get(uuid, hard_bytes), hard_bytes)
            self._nvml.set_memory_limits(uuid, str(path), soft_bytes, hard_bytes)
        return path

    def join(self, name: str, pid: int) -> None:
        """Move a process into the cgroup of a lease.

        Raises:
            ProcessLookupError: the process has ended.
            OSError: the kernel does not move it.
        """
        with (self.path(name) / "cgroup.procs").open("a", encoding="ascii") as procs:
            procs.write(f"{pid}\n")

    def remove(self, name: str, uuids: Iterable[str]) -> None:
        """Clear the limits of a cgroup and remove it, if no process is in it any more."""
        path = self.path(name)
        if self.unavailable or not path.exists():
            return
        self.lift(name, uuids)
        with suppress(OSError):  # processes are still in it: the next helper tries again
            path.rmdir()

    def lift(self, name: str, uuids: Iterable[str]) -> None:
        """Clear the limits of a cgroup on these devices."""
        for uuid in uuids:
            with suppress(DeviceError):
                self._nvml.set_memory_limits(uuid, str(self.path(name)), 0, NO_LIMIT)

    def sweep(self, known: Iterable[str]) -> None:
        """Remove the cgroups of leases that are not ``known`` any more."""
        if self.unavailable:
            return
        names = set(known)
        for path in self._root.glob(f"{PREFIX}*"):
            name = path.name.removeprefix(PREFIX)
            if name not in names and path.is_dir():
                self.remove(name, (gpu.uuid for gpu in self._nvml.gpus))
