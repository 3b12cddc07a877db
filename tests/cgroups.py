"""Where this machine has cgroups (v2)."""

from __future__ import annotations

from pathlib import Path

import pytest


def cgroup2() -> Path:
    """The folder of the hierarchy; skips the test where none is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    pytest.skip("no cgroup (v2) is mounted here")
