"""Where the public traces lie, for the benchmarks of the simulator: see tests/sim/conftest.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("GPUSHARE_TRACES") or ROOT.parent / "shared" / "traces")


def trace(name: str) -> Path:
    """The path of a public trace; ends the run if it is not there."""
    found = sorted(FOLDER.glob(f"{name}.csv*"))
    if not found:
        sys.exit(f"no trace {name} in {FOLDER}; set GPUSHARE_TRACES")
    return found[0]
