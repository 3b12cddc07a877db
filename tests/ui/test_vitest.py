"""The tests of the JupyterLab extension that need no browser: models and words, with vitest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

UI = Path(__file__).parents[2] / "jupyter_gpushare" / "ui"

pytestmark = [
    pytest.mark.skipif(
        not (UI / "node_modules" / "vitest").is_dir(), reason="no node_modules: run `make setup`"
    ),
    pytest.mark.skipif(shutil.which("node") is None, reason="no node: run `make setup`"),
]


def run(*words: str) -> None:
    """Run a tool of node_modules; fail with what it printed."""
    done = subprocess.run(
        ["node", *words],
        cwd=UI,
        env={**os.environ, "CI": "1", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_models_and_words_agree_with_the_golden_messages():
    run("node_modules/vitest/vitest.mjs", "run")
