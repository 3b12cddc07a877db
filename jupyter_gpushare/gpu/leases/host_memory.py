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

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jupyter_gpushare.gibibytes import compared
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.os import memory


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
        return simulated[0] if simulated else memory.total_bytes()

    def available_bytes(self) -> int:
        """Memory that can be taken without swapping, now."""
        simulated = self._checkpoint.simulated_host_memory()
        return simulated[1] if simulated else memory.available_bytes()

    def budget_bytes(self) -> int:
        """How many bytes of suspended state all leases together may hold."""
        return self.total_bytes() * self._percent // 100

    @contextmanager
    def promise(self, by_pid: Mapping[int, int], saved_bytes: int, lease: str = "") -> Iterator[str]:
        """Reserve memory for the bytes of these processes; yields why there is not enough, or "".

        ``saved_bytes`` is what all leases hold already.  What is reserved for ``lease`` is for this.
        """
        need_bytes = with_overhead(sum(by_pid.values()))
        free = {} if self._checkpoint.simulated_host_memory() else memory.free_in_cgroups(by_pid)
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
        return _cgroup_refusal(with_overhead(sum(by_pid.values())), memory.free_in_cgroups(by_pid))

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
