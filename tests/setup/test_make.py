"""What `make` and `.ci/run` promise before anything is installed: clear errors, and a list of verbs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *arguments],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile and nothing set up."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.fixture
def old_python_only(tmp_path: Path) -> str:
    """A PATH on which every Python is too old."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("make", "bash", "sh", "sed", "find", "expand", "mkdir", "touch", "rm"):
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)
    old = tools / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    return str(tools)


def test_help_names_every_verb_that_people_use(checkout):
    said = make("help", cwd=checkout).stdout
    for verb in ("setup", "hub", "test", "check", "test-gpu", "build", "clean"):
        assert f"make {verb} " in said


def test_an_old_python_is_refused_with_its_version_and_a_way_out(checkout, old_python_only):
    result = make("setup", cwd=checkout, PATH=old_python_only)
    assert result.returncode != 0
    assert "needs Python 3.11 or newer; python3 here is: Python 3.9.2" in result.stderr
    assert "make setup PYTHON=" in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_missing_c_compiler_is_named_before_anything_is_downloaded(checkout):
    result = make("setup", "CC=no-such-compiler", cwd=checkout)
    assert result.returncode != 0
    assert "needs a C compiler ('no-such-compiler' does not work here)" in result.stderr
    assert not (checkout / ".venv").exists()


def test_a_port_in_use_is_named_before_the_hub_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = make("-o", "setup", "hub", cwd=ROOT, GPUSHARE_DEMO_PORT=str(port))
    assert result.returncode != 0
    assert f"Cannot use port {port}" in result.stderr
    assert "GPUSHARE_DEMO_PORT=" in result.stderr


def test_the_ci_script_can_be_run_and_is_valid():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], timeout=10, check=False).returncode == 0
