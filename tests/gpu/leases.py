"""Leases and processes as the parts of a helper represent them, for tests of one part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jupyter_gpushare.gpu.leases.files import LeaseDirectory
from jupyter_gpushare.gpu.leases.journal import JournalRecord
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.processes import Process
from jupyter_gpushare.protocol.helper import Phase, SetLimit


def lease_of(
    name: str = "ada",
    limits: dict[str, int] | None = None,
    *,
    folder: Path = Path("/nonexistent"),
    uid: int = 0,
    phase: Phase = Phase.RUNNING,
    **asked: Any,
) -> HelperLease:
    """Return a lease without measurements and without files."""
    request = SetLimit(lease=name, uid=uid, limits=limits or {}, **asked)
    return HelperLease(JournalRecord(asked=request, phase=phase), LeaseDirectory(folder, name))


def process_of(pid: int, start_ticks: int = 1, lease: str = "ada", **more: Any) -> Process:
    """Return a process of a lease as it was first seen."""
    seen: dict[str, Any] = {"started_at": 0.0, "uid": 0, "parent": 1, "name": "", "kernel": ""} | more
    return Process(pid=pid, start_ticks=start_ticks, carries=lease, lease=lease, **seen)
