"""Limits of memory and processes for local servers."""

from __future__ import annotations

import asyncio
import os
import pwd
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from traitlets.config import Config

from jupyter_gpushare.core.model import Kind
from jupyter_gpushare.gpu.leases.host_memory import with_overhead
from jupyter_gpushare.hub import GPUShareLocalSpawner, GPUShareSimpleSpawner
from jupyter_gpushare.hub.compat import SpawnException
from jupyter_gpushare.hub.limits import LimitedProcesses
from jupyter_gpushare.protocol.wire import SpawnGrant

GIB = 1 << 30


def spawner(kind: type[Any] = GPUShareSimpleSpawner, lease: str = "", **limits: Any) -> Any:
    mem_limit = limits.pop("mem_limit", None)
    named = type("Named", (kind,), {"name": "b:c"})
    homes = {"home_dir_template": "/dev/null/{username}"}  # none is made
    given = {"LimitedProcesses": limits, "Spawner": {"mem_limit": mem_limit}}
    made: Any = named(config=Config(given | {"SimpleLocalProcessSpawner": homes}))
    made.user = SimpleNamespace(name="ada/x")
    made._environment = {"GPUSHARE_LEASE": lease} if lease else {}
    return made


def processes_of_a_child(made: Any, user: str = "ada") -> list[str]:
    """The soft and the hard limit of processes (RLIMIT_NPROC) in a process of this spawner."""
    preexec = made.make_preexec_fn(user)
    limits = subprocess.run(["cat", "/proc/self/limits"], preexec_fn=preexec, capture_output=True, check=True)
    (line,) = (line for line in limits.stdout.decode().splitlines() if line.startswith("Max processes"))
    return line.split()[2:4]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to start processes of other users")
def test_without_a_cgroup_the_processes_of_the_user_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    made = spawner(GPUShareLocalSpawner, processes_limit=4096)
    monkeypatch.setattr(made, "server_uid", lambda: pwd.getpwnam("nobody").pw_uid)
    assert processes_of_a_child(made, "nobody") == ["4096", "4096"]


def test_servers_with_the_hubs_uid_do_not_share_one_limit() -> None:
    assert processes_of_a_child(spawner(processes_limit=4096)) == processes_of_a_child(spawner())


FILES = ("cgroup.procs", "memory.max", "memory.swap.max", "pids.max")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which each new one has the files that the kernel puts into a cgroup."""
    (tmp_path / "cgroup.subtree_control").touch()
    mkdir = Path.mkdir

    def made(folder: Path, *given: Any, **named: Any) -> None:
        mkdir(folder, *given, **named)
        for name in FILES if folder.parent == tmp_path else ():
            (folder / name).touch()

    monkeypatch.setattr(Path, "mkdir", made)
    return tmp_path


def read(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def test_each_server_joins_a_cgroup_with_its_limits(root: Path) -> None:
    made = spawner(cgroup_root=str(root), processes_limit=100, mem_limit="2G")
    processes_of_a_child(made)
    limits = {
        "cgroup.procs": "0", "memory.max": str(2 * GIB), "memory.swap.max": "0", "pids.max": "100"
    }  # fmt: skip
    assert read(root / "server-ada%2Fx:b%3Ac") == limits
    assert (root / "cgroup.subtree_control").read_text() == "+memory +pids"
    # With a lease it is the one where the device helper looks for it.
    processes_of_a_child(spawner(cgroup_root=str(root), mem_limit="2G", lease="ada-1"))
    assert read(root / "gpushare-ada-1") == limits | {"pids.max": "max"}


def test_the_cgroup_is_removed_after_the_server_even_by_a_new_hub(root: Path) -> None:
    made = spawner(cgroup_root=str(root), processes_limit=100)
    made.make_preexec_fn("ada")
    (folder,) = (path for path in root.iterdir() if path.is_dir())
    for path in folder.iterdir():
        path.unlink()  # the kernel removes them with their folder
    later = spawner()
    later.load_state(made.get_state())
    asyncio.run(LimitedProcesses.run_post_stop_hook(later))
    assert not folder.exists()


def test_a_cgroup_with_processes_left_is_removed_at_a_later_start(root: Path) -> None:
    for lease in ("", "ada-1"):
        made = spawner(cgroup_root=str(root), processes_limit=100, lease=lease)
        made.make_preexec_fn("ada")
        asyncio.run(LimitedProcesses.run_post_stop_hook(made))  # rmdir fails: the folder is not empty
    left = [folder for folder in root.iterdir() if folder.is_dir()]
    assert len(left) == 2
    empty(*left)
    spawner(cgroup_root=str(root), mem_limit="2G", lease="bo-1").make_preexec_fn("bo")
    assert [folder.name for folder in root.iterdir() if folder.is_dir()] == ["gpushare-bo-1"]


def test_a_new_hub_removes_what_an_earlier_one_left_without_a_lease(root: Path) -> None:
    names = ("server-ada:", "server-starts:", "gpushare-ada-1", "others")
    for name in names:
        (root / name).mkdir()
        empty(root / name)
    for name in names[:1] + names[2:]:
        os.utime(root / name, (0, 0))
    spawner(cgroup_root=str(root), mem_limit="2G", lease="bo-1").make_preexec_fn("bo")
    assert {folder.name for folder in root.iterdir() if folder.is_dir()} == {"gpushare-bo-1", *names[1:]}


def test_a_kernel_without_swap_needs_no_limit_of_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.FILES", tuple(name for name in FILES if "swap" not in name))
    spawner(cgroup_root=str(root), mem_limit="2G").make_preexec_fn("ada")


def empty(*folders: Path) -> None:
    for folder in folders:
        for path in folder.iterdir():
            path.unlink()


async def test_no_server_starts_without_the_limits_that_are_set(tmp_path: Path) -> None:
    with pytest.raises(SpawnException) as refused:
        spawner(cgroup_root=str(tmp_path / "none"), processes_limit=100).make_preexec_fn("ada")
    assert "could not be set" in str(refused.value)


GRANT = SpawnGrant(lease="ada-1", kind=Kind.BUILD, env={}, devices=["GPU-1"], memory_limit_bytes=40 * GIB + 7)


@pytest.mark.parametrize(
    ("grant", "setting", "added_bytes"),
    [
        pytest.param(GRANT, True, with_overhead(GRANT.memory_limit_bytes), id="lease"),
        pytest.param(GRANT, False, 0, id="switched off"),
        pytest.param(msgspec.structs.replace(GRANT, lease=None), True, 0, id="no lease"),
        pytest.param(msgspec.structs.replace(GRANT, devices=["MIG-1"]), True, 0, id="never asleep"),
        pytest.param(None, True, 0, id="no broker"),
    ],
)
def test_a_memory_limit_holds_what_the_helper_wants_free_for_a_suspension(
    grant: SpawnGrant | None, setting: bool, added_bytes: int
) -> None:
    made = spawner(mem_limit="2G")
    made.add_gpu_memory_to_mem_limit = setting
    with made.memory_for_sleep(grant):
        assert made.mem_limit == 2 * GIB + added_bytes
    assert made.mem_limit == 2 * GIB


def test_a_server_without_a_memory_limit_gets_none_from_its_lease() -> None:
    made = spawner()
    with made.memory_for_sleep(GRANT):
        assert made.mem_limit is None


def test_without_limits_nothing_is_made(root: Path) -> None:
    spawner(cgroup_root=str(root)).make_preexec_fn("ada")
    assert [path.name for path in root.iterdir()] == ["cgroup.subtree_control"]
