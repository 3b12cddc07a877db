"""Host memory: how much this machine has, and how much the cgroups above a process allow (v1 and v2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from jupyter_gpushare import procfs

CGROUPS = "/sys/fs/cgroup"
_CGROUP_FILE_BYTES = 8192
# For each version of cgroups: its folder, the files with limit and usage, and the entry of memory.stat for
# cached files that were not used lately, which the kernel drops when memory is needed.  See cgroup-v2.rst
# and cgroup-v1/memory.rst (where "no limit" is the largest multiple of a page below 2**63).
_V2 = ("", "memory.max", "memory.current", "inactive_file")
_V1 = ("/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V1_NO_LIMIT_BYTES = 1 << 62


def total_bytes() -> int:
    """Return the bytes of memory that this machine has."""
    return int(psutil.virtual_memory().total)


def available_bytes() -> int:
    """Return the bytes of memory that can be taken now without swapping."""
    return int(psutil.virtual_memory().available)


def free_in_cgroups(pids: Iterable[int]) -> dict[str, int]:
    """Return the bytes that each limited cgroup above these processes may still take, by its folder.

    The root of the hierarchy counts too: in a container it is the container's cgroup, and may have a limit.
    """
    free: dict[str, int] = {}
    for pid in pids:
        for where, names in _cgroups_above(pid):
            if where not in free and (left := _free_in(where, *names[1:])) is not None:
                free[where] = left
    return free


def limit_bytes(pid: int) -> int | None:
    """Return the tightest memory limit, in bytes, above a process (0: this one); None if there is none."""
    limits = (_limit(f"{where}/{names[1]}") for where, names in _cgroups_above(pid))
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroups_above(pid: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the folder of each cgroup above a process, with the names that its version uses."""
    for line in procfs.read(pid, "cgroup", _CGROUP_FILE_BYTES).splitlines():
        hierarchy, controllers, path = [*line.decode(errors="replace").split(":", 2), "", ""][:3]
        if not path.startswith("/"):
            continue
        if hierarchy == "0":
            names = _V2
        elif "memory" in controllers.split(","):
            names = _V1
        else:
            continue
        for folder in (path, *map(str, Path(path).parents)):
            yield f"{CGROUPS}{names[0]}{folder}", names


def _limit(file: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        count = int(Path(file).read_text(encoding="ascii"))
        return count if count < _V1_NO_LIMIT_BYTES else None
    return None


def _free_in(folder: str, limit: str, usage: str, inactive: str) -> int | None:
    """Return the bytes that one cgroup may still take; None if it has no limit."""
    with contextlib.suppress(OSError, ValueError):
        if (maximum := _limit(f"{folder}/{limit}")) is not None:
            return maximum - int(Path(folder, usage).read_text(encoding="ascii")) + _stat(folder, inactive)
    return None


def _stat(folder: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(folder, "memory.stat").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
