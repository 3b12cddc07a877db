"""Where the public traces lie: they are no part of the project.

``GPUSHARE_TRACES`` names the folder; else it is ``../shared/traces`` beside the
repository.  A test that needs a file that is not there is skipped by its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("GPUSHARE_TRACES") or ROOT.parent / "shared" / "traces")

Trace = Callable[[str], Path]


@pytest.fixture(scope="session")
def trace() -> Trace:
    """``trace("training_philly_0e4a51")``: the path of a public trace."""

    def find(name: str) -> Path:
        found = sorted(FOLDER.glob(f"{name}.csv*"))
        if not found:
            pytest.skip(f"no trace {name} in {FOLDER}; set GPUSHARE_TRACES")
        return found[0]

    return find
