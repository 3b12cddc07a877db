"""Limits enforced by the driver: one cgroup per lease, with its device memory limits.

    <root>/gpushare-<lease>     the processes of one lease

The root (``--cgroup-root``) is a cgroup (v2) below which the helper may create others, such as one
that systemd delegated.  The helper moves a process that carries a lease into the cgroup of the lease, and
children of the process start there.  The process cannot leave, because the files belong to the helper.
Until a sample has found the process, only the preload library limits it.

The limits are set only through NVML, never in ``dmem.*``, and cleared before a cgroup is removed, as
"MPS v3 Memory Partitioning" (docs.nvidia.com) requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.nvml import NO_LIMIT, Nvml

PREFIX = "gpushare-"


class Cgroups:
    """Cgroups by the name of a lease; ``unavailable`` says why none can be created, or is empty."""

    def __init__(self, root: Path | None, nvml: Nvml) -> None:
        self._root = root or Path("/nonexistent")
        self._nvml = nvml
        if root is None:
            self.unavailable = "the helper was started without --cgroup-root"
        elif not (root / "cgroup.procs").is_file():
            self.unavailable = f"{root} is no cgroup (v2)"
        else:
            self.unavailable = ""
            # From Linux 6.14 on the driver counts through this controller; without it, by itself.
            with suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+dmem", encoding="ascii")

    def path(self, name: str) -> Path:
        """Return the folder of a lease's cgroup."""
        return self._root / f"{PREFIX}{name}"

    def make(self, name: str, limits: Mapping[str, int], guaranteed: Mapping[str, int]) -> Path:
        """Create a cgroup, or change its limits, and return its folder.

        ``limits`` and ``guaranteed`` are bytes by device.

        Raises:
            DeviceError: the driver cannot limit the cgroup.
            OSError: the cgroup cannot be created.
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
        """Clear the limits of a cgroup, and remove the cgroup if no process is in it."""
        path = self.path(name)
        if self.unavailable or not path.exists():
            return
        self.clear_limits(name, uuids)
        with suppress(OSError):  # processes are in it: the next helper tries again
            path.rmdir()

    def clear_limits(self, name: str, uuids: Iterable[str]) -> None:
        """Clear the limits of a cgroup on these devices."""
        for uuid in uuids:
            with suppress(DeviceError):
                self._nvml.set_memory_limits(uuid, str(self.path(name)), 0, NO_LIMIT)

    def sweep(self, known: Iterable[str]) -> None:
        """Remove the cgroups of all leases except the ``known`` ones."""
        if self.unavailable:
            return
        names = set(known)
        for path in self._root.glob(f"{PREFIX}*"):
            name = path.name.removeprefix(PREFIX)
            if name not in names and path.is_dir():
                self.remove(name, (gpu.uuid for gpu in self._nvml.gpus))
