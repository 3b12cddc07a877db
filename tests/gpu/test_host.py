"""Host memory for suspended state: the budget, what the host has, and the lease's own cgroup."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.host_memory import HostMemory, with_overhead
from jupyter_gpushare.gpu.moves.suspend import SuspendBlockers
from jupyter_gpushare.gpu.os import memory as machine_memory
from tests.gpu.leases import lease_of

GIB = 1 << 30


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """100 GiB, of which 60 are available, for no cgroup has a limit."""
    seen = SimpleNamespace(total=100 * GIB, available=60 * GIB)
    monkeypatch.setattr(machine_memory.psutil, "virtual_memory", lambda: seen)
    monkeypatch.setattr(machine_memory, "free_in_cgroups", lambda pids: {})
    real: Any = SimpleNamespace(simulated_host_memory=lambda: None)
    return HostMemory(50, real)


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
    monkeypatch.setattr(machine_memory.psutil, "virtual_memory", lambda: low)
    assert "are available" in refusal(memory, {1: 5 * GIB})
    assert refusal(memory, {1: 4 * GIB}) == ""


def test_the_cgroup_of_the_lease_bounds_it(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_memory, "free_in_cgroups", lambda pids: {"/a": 20 * GIB, "/a/b": 8 * GIB})
    assert refusal(memory, {1: 5 * GIB, 2: 2 * GIB}) == ""
    assert "memory cgroup of the lease" in refusal(memory, {1: 5 * GIB, 2: 4 * GIB})


def test_two_processes_of_different_leases_share_the_limit_of_their_cgroup(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_memory, "free_in_cgroups", lambda pids: {"/slice": 10 * GIB})
    with memory.promise({1: 6 * GIB}, 0) as first:
        assert first == ""
        assert "memory cgroup of the lease" in refusal(memory, {2: 6 * GIB})
    assert refusal(memory, {2: 6 * GIB}) == ""


class Cgroups:
    """The cgroups of a process and what the kernel says about their memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, own: str) -> None:
        self._folder = folder
        monkeypatch.setattr(machine_memory, "CGROUPS", str(folder))
        monkeypatch.setattr(procfs, "read", lambda pid, name, limit_bytes: f"{own}\n".encode())

    def add(self, path: str, limit: int | str, current: int, inactive_file: int = 0) -> None:
        here = self._folder / path.strip("/")
        here.mkdir(parents=True, exist_ok=True)
        (here / "memory.max").write_text(f"{limit}\n")
        (here / "memory.current").write_text(f"{current}\n")
        (here / "memory.stat").write_text(f"anon 5\nfile 6\ninactive_file {inactive_file}\nslab 7\n")

    def add_v1(self, path: str, limit: int, usage: int, inactive_file: int = 0) -> None:
        here = self._folder / "memory" / path.strip("/")
        here.mkdir(parents=True, exist_ok=True)
        (here / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (here / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (here / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {inactive_file}\n")


def free() -> int | None:
    return min(machine_memory.free_in_cgroups([1]).values(), default=None)


def test_the_tightest_cgroup_above_a_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroups = Cgroups(monkeypatch, tmp_path, "0::/user/ada")
    assert free() is None
    cgroups.add("/user/ada", "max", 1 * GIB)
    assert free() is None
    cgroups.add("/user/ada", 10 * GIB, 1 * GIB)
    cgroups.add("/user", 30 * GIB, 25 * GIB)
    assert free() == 5 * GIB


def test_a_limit_that_cannot_hold_the_copy_makes_a_lease_not_suspendable(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_memory, "free_in_cgroups", lambda pids: {"/a": 20 * GIB, "/a/b": 8 * GIB})
    assert memory.too_small({1: 5 * GIB, 2: 2 * GIB}) == ""
    small = memory.too_small({1: 5 * GIB, 2: 4 * GIB})
    assert "memory cgroup of the lease" in small
    lease = lease_of()
    lease.memory_too_small = small
    can: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(unavailable=""),
        nvml=SimpleNamespace(gpus=(), left_out=(), driver="580.95.05"),
    )
    assert SuspendBlockers(can, DeviceStates(())).reason(lease, None, [(1, 1)], forced=True) == small


def test_the_tightest_limit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroups = Cgroups(monkeypatch, tmp_path, "0::/user/ada")
    assert machine_memory.limit_bytes(0) is None
    cgroups.add("/user/ada", 10 * GIB, 1 * GIB)
    cgroups.add("/user", 4 * GIB, 1 * GIB)
    assert machine_memory.limit_bytes(0) == 4 * GIB


def test_the_limit_of_a_container_counts_which_sees_its_own_cgroup_as_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Cgroups(monkeypatch, tmp_path, "0::/").add("/", 8 * GIB, 2 * GIB)
    assert free() == 6 * GIB


def test_files_in_the_cache_count_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cgroups(monkeypatch, tmp_path, "0::/ada").add("/ada", 8 * GIB, 8 * GIB, inactive_file=5 * GIB)
    assert free() == 5 * GIB


def test_a_limit_of_cgroup_v1_counts_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RHEL 8 and Docker on v1: without it the kernel is killed by the copy of its own suspension."""
    cgroups = Cgroups(monkeypatch, tmp_path, "5:cpu,cpuacct:/ada\n4:memory:/docker/ada\n0::/system.slice")
    cgroups.add_v1("/docker", (1 << 63) - 4096, 2 * GIB)  # no limit, as v1 writes it
    assert free() is None
    cgroups.add_v1("/docker/ada", 16 * GIB, 14 * GIB, inactive_file=1 * GIB)
    assert free() == 3 * GIB


def test_a_copy_needs_a_twentieth_more_than_its_bytes() -> None:
    assert with_overhead(100) == 105
