"""Host memory for suspended state: the budget, what the host has, and the lease's own cgroup."""

from __future__ import annotations

from pathlib import Path
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


class Cgroups:
    """What a process and the kernel say about the memory of its cgroups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, own: str) -> None:
        self._folder = folder
        monkeypatch.setattr(processes, "CGROUPS", str(folder))
        monkeypatch.setattr(processes, "_bytes", lambda path, most: f"0::{own}\n".encode())

    def add(self, path: str, most: int | str, current: int, inactive_file: int = 0) -> None:
        here = self._folder / path.strip("/")
        here.mkdir(parents=True, exist_ok=True)
        (here / "memory.max").write_text(f"{most}\n")
        (here / "memory.current").write_text(f"{current}\n")
        (here / "memory.stat").write_text(f"anon 5\nfile 6\ninactive_file {inactive_file}\nslab 7\n")


def test_the_tightest_cgroup_above_a_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroups = Cgroups(monkeypatch, tmp_path, "/user/ada")
    assert processes.room_in_cgroup(1) is None
    cgroups.add("/user/ada", "max", 1 * GIB)
    assert processes.room_in_cgroup(1) is None
    cgroups.add("/user/ada", 10 * GIB, 1 * GIB)
    cgroups.add("/user", 30 * GIB, 25 * GIB)
    assert processes.room_in_cgroup(1) == 5 * GIB


def test_the_limit_of_a_container_counts_which_sees_its_own_cgroup_as_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cgroups(monkeypatch, tmp_path, "/").add("/", 8 * GIB, 2 * GIB)
    assert processes.room_in_cgroup(1) == 6 * GIB


def test_files_in_the_cache_leave_when_their_room_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cgroups(monkeypatch, tmp_path, "/ada").add("/ada", 8 * GIB, 8 * GIB, inactive_file=5 * GIB)
    assert processes.room_in_cgroup(1) == 5 * GIB


def test_a_copy_needs_a_twentieth_more_than_its_bytes() -> None:
    assert with_overhead(100) == 105
