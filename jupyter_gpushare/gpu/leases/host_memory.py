"""Host memory for suspended state: the budget of all leases, and what a suspension may take of it.

A suspension needs host memory for its device bytes and 5 % more.  (The 5 % are assumed: NVIDIA does not
publish the driver's overhead, and we have not measured it on a GPU.)  Three bounds apply:

* the budget, a part of the machine's memory for all leases together;
* the memory that the machine has available;
* the memory limit of each cgroup above the process, because the driver allocates the bytes in the
  target process (NVIDIA/cuda-checkpoint issue 33).

Memory promised to a suspension in progress counts as taken, so that two suspensions cannot use the same
bytes.  So does the memory reserved for a guest (`moves.guests`), which may have to leave at any moment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jupyter_gpushare.gibibytes import compared
from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.os import memory


def with_overhead(saved_bytes: int) -> int:
    """Return the host bytes that a suspension of ``saved_bytes`` device bytes takes (5 % more, assumed)."""
    return saved_bytes + saved_bytes // 20


class HostMemory:
    """Says whether host memory allows a suspension, and reserves it until the suspension is over."""

    def __init__(self, budget_percent: int, checkpoint: Checkpoint) -> None:
        """``budget_percent`` is a part of all memory; a simulated driver has its own host memory."""
        self._checkpoint = checkpoint
        self._percent = budget_percent
        self._guard = threading.Lock()
        self._promised_bytes = 0
        self._promised_by_cgroup: dict[str, int] = {}
        self._reserved: dict[str, int] = {}  # bytes by the lease that is a guest

    def total_bytes(self) -> int:
        """Return the bytes of memory that this machine has."""
        simulated = self._checkpoint.simulated_host_memory()
        return simulated[0] if simulated else memory.total_bytes()

    def available_bytes(self) -> int:
        """Return the bytes of memory that can be taken now without swapping."""
        simulated = self._checkpoint.simulated_host_memory()
        return simulated[1] if simulated else memory.available_bytes()

    def budget_bytes(self) -> int:
        """Return the bytes of suspended state that all leases together may hold."""
        return self.total_bytes() * self._percent // 100

    @contextmanager
    def promise(self, by_pid: Mapping[int, int], saved_bytes: int, lease: str = "") -> Iterator[str]:
        """Reserve memory for the device bytes of these processes; yield why there is not enough, or "".

        ``saved_bytes`` are the suspended bytes of all leases.  Memory reserved for ``lease`` may be used.
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
        """Reserve memory for ``count`` device bytes of a guest; return why there is not enough, or "".

        This replaces an earlier reservation for the guest.  ``saved_bytes`` are the suspended bytes of all
        leases.
        """
        need_bytes = with_overhead(count)
        with self._guard:
            if not (reason := self._refusal(need_bytes, with_overhead(saved_bytes), {}, lease)):
                self._reserved[lease] = need_bytes
        return reason

    def keep_reserved(self, lease: str, count: int) -> None:
        """Reserve memory for ``count`` device bytes of a running guest, however little is free; 0 ends it."""
        with self._guard:
            self._reserved = {k: v for k, v in self._reserved.items() if k != lease}
            if count:
                self._reserved[lease] = with_overhead(count)

    def too_small(self, by_pid: Mapping[int, int]) -> str:
        """Return why a memory limit of these processes cannot also hold their device bytes; "" if it can."""
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
            needs, free_text = compared(need_bytes, max(0, budget_bytes))
            return f"the copy needs {needs} of host memory, {free_text} of the budget are left"
        available_bytes = self.available_bytes() - promised_bytes
        if need_bytes > available_bytes:
            needs, free_text = compared(need_bytes, max(0, available_bytes))
            return f"the copy needs {needs} of host memory, {free_text} are available"
        promised = self._promised_by_cgroup
        return _cgroup_refusal(need_bytes, {path: free[path] - promised.get(path, 0) for path in free})


def _cgroup_refusal(need_bytes: int, free: Mapping[str, int]) -> str:
    free_bytes = min(free.values(), default=need_bytes)
    if need_bytes <= free_bytes:
        return ""
    needs, has = compared(need_bytes, max(0, free_bytes))
    return f"the copy needs {needs} in the memory cgroup of the lease, {has} are left"
