"""Host memory for suspended state: the budget, what the host has, and the lease's own cgroup."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jupyter_gpushare.gpu import host, processes
from jupyter_gpushare.gpu.host import HostMemory, with_overhead

GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """100 GiB, of which 60 are available, for no cgroup has a limit."""
    seen = SimpleNamespace(total=100 * GIB, available=60 * GIB)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: seen)
    monkeypatch.setattr(host, "room_in_cgroup", lambda pid: None)
    return HostMemory(50, lambda: None)


def refusal(memory: HostMemory, by_pid: dict[int, int], saved_bytes: int = 0) -> str:
    with memory.promise(by_pid, saved_bytes) as reason:
        return reason


def test_half_of_the_memory_is_the_budget_of_all_leases_together(memory: HostMemory) -> None:
    assert memory.budget_bytes() == 50 * GIB
    assert refusal(memory, {1: 40 * GIB}) == ""
    assert "of the budget are left" in refusal(memory, {1: 48 * GIB})  # 5 % more are needed
    assert "of the budget are left" in refusal(memory, {1: 20 * GIB}, saved_bytes=30 * GIB)
    assert refusal(memory, {}) == ""


def test_what_is_promised_counts_as_taken_until_it_is_done(memory: HostMemory) -> None:
    with memory.promise({1: 30 * GIB}, 0) as first:
        assert first == ""
        assert "of the budget are left" in refusal(memory, {2: 30 * GIB})
    assert refusal(memory, {2: 30 * GIB}) == ""


def test_what_the_host_has_left_bounds_it(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    low = SimpleNamespace(total=100 * GIB, available=5 * GIB)
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: low)
    assert "are available" in refusal(memory, {1: 5 * GIB})
    assert refusal(memory, {1: 4 * GIB}) == ""


def test_the_cgroup_of_the_lease_bounds_it(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "room_in_cgroup", lambda pid: {1: 20 * GIB, 2: 8 * GIB}[pid])
    assert refusal(memory, {1: 5 * GIB, 2: 2 * GIB}) == ""
    assert "memory cgroup of the lease" in refusal(memory, {1: 5 * GIB, 2: 4 * GIB})


def test_the_tightest_cgroup_above_a_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {
        ("/user/ada", "memory.max"): 10 * GIB, ("/user/ada", "memory.current"): 1 * GIB,
        ("/user", "memory.max"): 30 * GIB, ("/user", "memory.current"): 25 * GIB,
    }  # fmt: skip
    monkeypatch.setattr(processes, "_cgroup_number", lambda path, name: numbers[path, name])
    monkeypatch.setattr("builtins.open", opening(b"0::/user/ada\n"))
    assert processes.room_in_cgroup(1) == 5 * GIB


def opening(content: bytes) -> object:
    class File:
        def __enter__(self) -> list[bytes]:
            return [content]

        def __exit__(self, *error: object) -> None:
            pass

    return lambda *arguments, **named: File()


def test_a_copy_needs_a_twentieth_more_than_its_bytes() -> None:
    assert with_overhead(100) == 105
