"""Host memory for suspended state: how much there is, and who may take it now.

A suspension needs 1.05 times its device bytes in host memory (measured driver
overhead), within three bounds: the budget (a part of all memory, for all leases
together), what the host has available, and each process's own cgroup, where the
bytes land.  What is promised to a suspension in progress counts as taken, so that
two at once cannot both count on the same memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import psutil

from .processes import room_in_cgroup


def with_overhead(saved_bytes: int) -> int:
    """Host bytes that a suspension of so many device bytes takes."""
    return saved_bytes + saved_bytes // 20


class HostMemory:
    """Answers whether there is room for a suspension, and holds it meanwhile."""

    def __init__(self, budget_percent: int, simulated: Callable[[], tuple[int, int] | None]) -> None:
        self._simulated = simulated
        self._percent = budget_percent
        self._guard = threading.Lock()
        self._promised_bytes = 0

    def total_bytes(self) -> int:
        """All memory of this host."""
        simulated = self._simulated()
        return simulated[0] if simulated else int(psutil.virtual_memory().total)

    def available_bytes(self) -> int:
        """Memory that can be taken without swapping, now."""
        simulated = self._simulated()
        return simulated[1] if simulated else int(psutil.virtual_memory().available)

    def budget_bytes(self) -> int:
        """How much suspended state all leases together may hold."""
        return self.total_bytes() * self._percent // 100

    @contextmanager
    def promise(self, by_pid: Mapping[int, int], saved_bytes: int) -> Iterator[str]:
        """Hold room for the bytes of these processes; yields why there is none, or "".

        ``saved_bytes`` is what all leases hold already.
        """
        need_bytes = with_overhead(sum(by_pid.values()))
        with self._guard:
            reason = self._refusal(by_pid, need_bytes, with_overhead(saved_bytes))
            if not reason:
                self._promised_bytes += need_bytes
        try:
            yield reason
        finally:
            if not reason:
                with self._guard:
                    self._promised_bytes -= need_bytes

    def _refusal(self, by_pid: Mapping[int, int], need_bytes: int, taken_bytes: int) -> str:
        if need_bytes == 0:
            return ""
        budget_bytes = self.budget_bytes() - taken_bytes - self._promised_bytes
        if need_bytes > budget_bytes:
            return (
                f"the copy needs {need_bytes} bytes of host memory, "
                f"{max(0, budget_bytes)} of the budget are left"
            )
        available_bytes = self.available_bytes() - self._promised_bytes
        if need_bytes > available_bytes:
            return (
                f"the copy needs {need_bytes} bytes of host memory, {max(0, available_bytes)} are available"
            )
        if self._simulated() is None:
            # The processes of one lease share their cgroups, or at least the upper ones.
            rooms = [room for pid in by_pid if (room := room_in_cgroup(pid)) is not None]
            if rooms and need_bytes > min(rooms):
                return (
                    f"the copy needs {need_bytes} bytes in the memory cgroup of the lease, "
                    f"{max(0, min(rooms))} are left"
                )
        return ""
