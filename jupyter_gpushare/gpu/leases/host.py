"""Host memory for suspended state: how much there is, and how much a suspension may take.

A suspension needs its device bytes and 5 % in host memory (assumed, not measured on
a GPU: the driver's overhead is not published), within three bounds: the budget (a
part of all memory, for all leases together), what the host has available, and the
memory limit of each cgroup above the process, where the driver allocates the bytes
(NVIDIA/cuda-checkpoint issue 33: in the target process).  Memory promised to a
suspension in progress counts as taken, so that two at once cannot count on the same, and so
does what is reserved for a guest (`moves.guests`), which may have to leave at any moment.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from jupyter_gpushare import procfs
from jupyter_gpushare.gibibytes import compared
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint

CGROUPS = "/sys/fs/cgroup"
_CGROUP_FILE_BYTES = 8192
# Where each version of cgroups keeps limit and usage, and what memory.stat calls cached files that
# were not used lately: those are dropped when memory is needed.  cgroup-v2.rst, cgroup-v1/memory.rst
# (its "no limit" is the largest multiple of a page below 2**63).
_V2 = ("", "memory.max", "memory.current", "inactive_file")
_V1 = ("/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V1_NO_LIMIT_BYTES = 1 << 62


def with_overhead(saved_bytes: int) -> int:
    """Host bytes that a suspension of ``saved_bytes`` device bytes takes (assumed: 5 % more)."""
    return saved_bytes + saved_bytes // 20


class HostMemory:
    """Answers whether host memory allows a suspension, and reserves it meanwhile."""

    def __init__(self, budget_percent: int, checkpoint: Checkpoint) -> None:
        """The budget is a part of all memory; a simulated driver has a host memory of its own."""
        self._checkpoint = checkpoint
        self._percent = budget_percent
        self._guard = threading.Lock()
        self._promised_bytes = 0
        self._promised_by_cgroup: dict[str, int] = {}
        self._reserved: dict[str, int] = {}  # bytes by the lease that is a guest

    def total_bytes(self) -> int:
        """All memory of this host."""
        simulated = self._checkpoint.simulated_host_memory()
        return simulated[0] if simulated else int(psutil.virtual_memory().total)

    def available_bytes(self) -> int:
        """Memory that can be taken without swapping, now."""
        simulated = self._checkpoint.simulated_host_memory()
        return simulated[1] if simulated else int(psutil.virtual_memory().available)

    def budget_bytes(self) -> int:
        """How many bytes of suspended state all leases together may hold."""
        return self.total_bytes() * self._percent // 100

    @contextmanager
    def promise(self, by_pid: Mapping[int, int], saved_bytes: int, lease: str = "") -> Iterator[str]:
        """Reserve memory for the bytes of these processes; yields why there is not enough, or "".

        ``saved_bytes`` is what all leases hold already.  What is reserved for ``lease`` is for this.
        """
        need_bytes = with_overhead(sum(by_pid.values()))
        free = {} if self._checkpoint.simulated_host_memory() else free_in_cgroups(by_pid)
        with self._guard:
            reason = self._refusal(need_bytes, with_overhead(saved_bytes), free, lease)
            if not reason:
                self._add(need_bytes, free)
        try:
            yield reason
        finally:
            if not reason:
                with self._guard:
                    self._add(-need_bytes, free)

    def reserve(self, lease: str, count: int, saved_bytes: int) -> str:
        """Reserve memory for as many device bytes of a guest, in place of what is; why not, or "".

        ``saved_bytes`` is what all leases hold already.
        """
        need_bytes = with_overhead(count)
        with self._guard:
            if not (reason := self._refusal(need_bytes, with_overhead(saved_bytes), {}, lease)):
                self._reserved[lease] = need_bytes
        return reason

    def keep_reserved(self, lease: str, count: int) -> None:
        """Reserve memory for device bytes of a guest that runs (0: none), whether it is there or not."""
        with self._guard:
            self._reserved = {k: v for k, v in self._reserved.items() if k != lease}
            if count:
                self._reserved[lease] = with_overhead(count)

    def too_small(self, by_pid: Mapping[int, int]) -> str:
        """Why a memory limit of these processes cannot hold their device bytes beside them; "" if it can."""
        if self._checkpoint.simulated_host_memory():
            return ""
        return _cgroup_refusal(with_overhead(sum(by_pid.values())), free_in_cgroups(by_pid))

    def _add(self, count: int, cgroups: Mapping[str, int]) -> None:
        self._promised_bytes += count
        for path in cgroups:
            self._promised_by_cgroup[path] = self._promised_by_cgroup.get(path, 0) + count
            if not self._promised_by_cgroup[path]:
                del self._promised_by_cgroup[path]

    def _refusal(self, need_bytes: int, taken_bytes: int, free: Mapping[str, int], lease: str) -> str:
        if need_bytes == 0:
            return ""
        promised_bytes = self._promised_bytes + sum(v for k, v in self._reserved.items() if k != lease)
        budget_bytes = self.budget_bytes() - taken_bytes - promised_bytes
        if need_bytes > budget_bytes:
            needs, left = compared(need_bytes, max(0, budget_bytes))
            return f"the copy needs {needs} of host memory, {left} of the budget are left"
        available_bytes = self.available_bytes() - promised_bytes
        if need_bytes > available_bytes:
            needs, left = compared(need_bytes, max(0, available_bytes))
            return f"the copy needs {needs} of host memory, {left} are available"
        promised = self._promised_by_cgroup
        return _cgroup_refusal(need_bytes, {path: free[path] - promised.get(path, 0) for path in free})


def _cgroup_refusal(need_bytes: int, left: Mapping[str, int]) -> str:
    left_bytes = min(left.values(), default=need_bytes)
    if need_bytes <= left_bytes:
        return ""
    needs, has = compared(need_bytes, max(0, left_bytes))
    return f"the copy needs {needs} in the memory cgroup of the lease, {has} are left"


def free_in_cgroups(pids: Iterable[int]) -> dict[str, int]:
    """Bytes that each limited cgroup (v1 or v2) above these processes may still take, by its folder.

    The root of the hierarchy may be a container's own cgroup, and then has a limit.
    """
    free: dict[str, int] = {}
    for pid in pids:
        for where, names in _cgroups_above(pid):
            if where not in free and (left := _free_in(where, *names[1:])) is not None:
                free[where] = left
    return free


def limit_bytes(pid: int) -> int | None:
    """The tightest memory limit of the cgroups above a process (0: this one); None: there is none."""
    limits = (_limit(f"{where}/{names[1]}") for where, names in _cgroups_above(pid))
    return min((limit for limit in limits if limit is not None), default=None)


def _cgroups_above(pid: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The folders of each cgroup of a process and those above it, with the names of its version."""
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
    """Bytes that one cgroup may still take; None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        if (most := _limit(f"{folder}/{limit}")) is not None:
            return most - int(Path(folder, usage).read_text(encoding="ascii")) + _stat(folder, inactive)
    return None


def _stat(folder: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(folder, "memory.stat").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
