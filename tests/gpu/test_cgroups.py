"""Into the cgroup of a lease go its own processes, and none that has taken over the pid of one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_gpushare.gpu.leases.cgroups import Cgroups
from jupyter_gpushare.gpu.leases.files import LeaseDirectory
from jupyter_gpushare.gpu.leases.journal import Record
from jupyter_gpushare.gpu.leases.lease import Lease
from jupyter_gpushare.gpu.leases.processes import Process, Processes
from jupyter_gpushare.procfs import start_ticks
from jupyter_gpushare.protocol.helper import Phase, SetLimit


@pytest.mark.parametrize("later", [0, 1], ids=["its own", "another one's"])
def test_only_the_very_process_is_put_into_a_leases_cgroup(tmp_path: Path, later: int) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.procs").touch()
    nvml: Any = SimpleNamespace(set_memory_limits=lambda *limits: None)
    processes = Processes(tmp_path)
    cgroups = Cgroups(root, nvml, processes)
    record = Record(asked=SetLimit(lease="ada", uid=os.geteuid(), limits={"GPU-1": 1}), phase=Phase.RUNNING)
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
