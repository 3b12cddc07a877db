"""Limits of local servers in cgroups (v2) of this machine with the controllers memory and pids."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu.leases.host_memory import HostMemory
from jupyter_gpushare.gpu.os import memory as machine_memory
from jupyter_gpushare.hub import GPUShareLocalSpawner
from jupyter_gpushare.hub.limits import LimitedProcesses
from tests.hub.test_limits import spawner
from tests.systemd import cgroup2
from tests.waiting import until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make cgroups and become other users"),
]

MIB = 1 << 20
LIMIT_BYTES = 256 * MIB
# Takes as much memory as its argument says, tells it, and waits.
TAKE = "import sys; held = b'x' * int(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
FORK = """
import os, sys
made = 0
try:
    for made in range(100):
        if not os.fork():
            sys.stdin.read()
            os._exit(0)
except BlockingIOError:
    print(made, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A cgroup without processes, which `cgroup_root` of the spawner may name."""
    top = cgroup2()
    found = (top / "cgroup.controllers").read_text().split()
    if not {"memory", "pids"} <= set(found):
        pytest.skip(f"{top} has the controllers {found}: memory and pids are bound to cgroup v1 here")
    (top / "cgroup.subtree_control").write_text("+memory +pids")
    folder = top / f"gpushare_test_{uuid.uuid4().hex}"
    folder.mkdir()
    yield folder
    for left in folder.glob("*/"):
        for pid in (left / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        until(lambda left=left: not (left / "cgroup.procs").read_text(), "it is empty")
        left.rmdir()
    folder.rmdir()


def start(made: Any, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A process with the limits of this spawner."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        preexec_fn=made.make_preexec_fn("ada"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_the_kernel_ends_a_server_above_its_memory_limit_and_no_other(root: Path) -> None:
    small = spawner(cgroup_root=str(root), mem_limit=LIMIT_BYTES)
    large = spawner(cgroup_root=str(root), mem_limit=LIMIT_BYTES, lease="ada-1")
    with start(small, TAKE, str(LIMIT_BYTES // 4)) as within:
        with start(large, TAKE, str(2 * LIMIT_BYTES)) as beyond:
            assert beyond.communicate(timeout=120)[0] == ""
        assert beyond.returncode == -signal.SIGKILL
        assert "oom_kill 1" in (root / "gpushare-ada-1" / "memory.events").read_text().splitlines()
        assert said(within) == "held\n"
        assert within.poll() is None


def test_no_fork_goes_beyond_the_limit_of_processes(root: Path) -> None:
    with start(spawner(cgroup_root=str(root), processes_limit=8), FORK) as process:
        assert said(process) == "7\n", "it is the eighth itself"


def test_a_server_of_another_user_cannot_leave_and_its_cgroup_is_removed(root: Path) -> None:
    made = spawner(GPUShareLocalSpawner, cgroup_root=str(root), mem_limit=LIMIT_BYTES)
    preexec = made.make_preexec_fn("nobody")
    (folder,) = root.glob("*/")
    files = [root.parent / "cgroup.procs", root / "cgroup.procs", folder / "memory.max"]
    leave = f"cat /proc/self/cgroup; for file in {' '.join(map(str, files))}; do echo 0 > $file; done"
    tried = subprocess.run(
        ["/bin/sh", "-c", leave], preexec_fn=preexec, capture_output=True, text=True, timeout=120
    )
    assert tried.stdout.splitlines()[-1].endswith(folder.name)
    assert tried.stderr.count("Permission denied") == len(files)
    assert (folder / "memory.max").read_text() == f"{LIMIT_BYTES}\n"
    asyncio.run(LimitedProcesses.run_post_stop_hook(made))
    assert not folder.exists()


def test_the_helper_counts_what_the_memory_limit_of_a_process_has_left(root: Path) -> None:
    made = spawner(cgroup_root=str(root), mem_limit=LIMIT_BYTES, lease="ada-1")
    with start(made, TAKE, str(LIMIT_BYTES // 2)) as process:
        assert said(process) == "held\n"
        assert machine_memory.limit_bytes(process.pid) == LIMIT_BYTES
        left = machine_memory.free_in_cgroups([process.pid])[f"{root}/gpushare-ada-1"]
        assert 0 < left <= LIMIT_BYTES // 2
        real: Any = SimpleNamespace(simulated_host_memory=lambda: None)
        memory = HostMemory(50, real)
        assert memory.too_small({process.pid: LIMIT_BYTES // 8}) == ""
        assert "in the memory cgroup of the lease" in memory.too_small({process.pid: LIMIT_BYTES})
