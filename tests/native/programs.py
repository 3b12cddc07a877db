"""Compile C programs for tests, and run programs to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from jupyter_gpushare.native import build
from tests.waiting import PATIENCE_S


def run(
    *command: str | Path, env: Mapping[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program; return its output and its exit code, which must be 0 with ``check``."""
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert not check or not done.returncode, done.stderr
    return done


def compiled(output: Path, *arguments: str | Path) -> Path:
    """Compile a program or a library for this machine."""
    subprocess.run([*build.compiler(), *arguments, "-o", output, "-ldl"], check=True)
    return output
