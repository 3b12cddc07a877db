"""Who is put into the cgroup of a lease: its own processes, and nobody who has come into the pid of one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu.cgroups import Cgroups
from jupyter_gpushare.gpu.isolation import LeaseDirectory
from jupyter_gpushare.gpu.journal import Record
from jupyter_gpushare.gpu.lease import Lease
from jupyter_gpushare.gpu.processes import Process, Processes
from jupyter_gpushare.gpu.verbs import Phase


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


@pytest.mark.parametrize("later", [0, 1], ids=["its own", "another one's"])
def test_only_the_very_process_is_put_into_a_leases_cgroup(tmp_path: Path, later: int) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.procs").touch()
    nvml: Any = SimpleNamespace(set_memory_limits=lambda *limits: None)
    processes = Processes(tmp_path)
    cgroups = Cgroups(root, nvml, processes.alive)
    record = Record(boot_id="b", lease="ada", uid=os.geteuid(), phase=Phase.RUNNING, limits={"GPU-1": 1})
    lease = Lease(record, LeaseDirectory(tmp_path, "ada"))
    cgroups.limit(lease)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        # The one that was seen may have ended since, and its pid may have gone to another.
        seen = start_ticks(child.pid) - later
        lease.processes = (
            Process(pid=child.pid, start_ticks=seen, started_at=0, uid=0, parent=1, name="", kernel="",
                    carries="ada", lease="ada"),
        )  # fmt: skip
        cgroups.place(lease)
        members = cgroups.path("ada") / "cgroup.procs"
        written = members.read_text() if members.exists() else ""
        assert written == ("" if later else f"{child.pid}\n")
        child.communicate()
    processes.close()
