"""The rules of tests/conftest.py, seen from outside: a run of pytest on a file of one test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

BROWSER = """
import pytest

@pytest.mark.browser
def test_the_page_opens(chromium):
    assert chromium.executable_path
"""
LEAVES_A_PROCESS = """
import subprocess

def test_forgets_what_it_started():
    subprocess.Popen(["sleep", "600"], start_new_session=True)
"""
LEAVES_A_SOCKET = """
import socket

class Page:
    def __init__(self):
        self.socket = socket.socket()
        self.itself = self  # only a collection finds the end of this one

def test_leaves_a_socket_open():
    Page()

def test_that_comes_later():
    pass
"""
LONG = """
import pytest

@pytest.mark.long
def test_takes_hours():
    raise AssertionError

@pytest.mark.long_form
def test_has_a_long_form():
    pass
"""

# Plugins that nothing here needs take longer to load than the tests take.
ONLY_THESE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run_pytest(
    folder: Path, test: str, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    (folder / "test_one.py").write_text(test)
    steering = ("GPUSHARE_FAIL_ON_SKIP", "GPUSHARE_CHROMIUM", "PYTEST_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(steering)}
    plugins = (
        "pytest_asyncio.plugin",
        "pytest_timeout",
        "xdist.plugin",
        "tests.conftest",
        "no:cacheprovider",
    )
    fixed = [*(word for plugin in plugins for word in ("-p", plugin)), "-c", ROOT / "pyproject.toml"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *fixed, *options, f"--rootdir={folder}", folder / "test_one.py"],
        cwd=ROOT,
        env={**kept, "GPUSHARE_TEST_PATIENCE_S": "0.5", "COLUMNS": "300", **ONLY_THESE, **environment},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )


@pytest.fixture
def no_chromium(tmp_path: Path) -> str:
    """A PATH without a browser."""
    empty = tmp_path / "bin"
    empty.mkdir()
    return str(empty)


SKIPS = """
import pytest

@pytest.mark.skipif(True, reason="REASON")
def test_does_something():
    pass
"""


@pytest.mark.parametrize(
    ("reason", "uid", "status"), [("needs root", 65534, 0), ("needs root", 0, 1), ("no compiler", 65534, 1)]
)
def test_where_nothing_may_be_skipped_only_root_may_be_missing(tmp_path, reason, uid, status):
    as_user = f"import os\nos.geteuid = lambda: {uid}\n"
    test = as_user + SKIPS.replace("REASON", reason)
    assert run_pytest(tmp_path, test, GPUSHARE_FAIL_ON_SKIP="1").returncode == status


def test_without_a_browser_its_tests_are_skipped_by_name_with_the_line_that_installs_it(
    tmp_path, no_chromium
):
    result = run_pytest(tmp_path, BROWSER, PATH=no_chromium)
    assert result.returncode == 0
    assert "SKIPPED" in result.stdout
    assert "::test_the_page_opens - Skipped: no chromium" in result.stdout
    assert "apt-get install -y chromium" in result.stdout


def test_a_process_that_outlives_the_run_is_named_ended_and_makes_it_fail(tmp_path):
    result = run_pytest(tmp_path, LEAVES_A_PROCESS)
    assert result.returncode == 1
    assert "processes outlived the tests that started them" in result.stdout
    assert "sleep 600" in result.stdout


def test_garbage_that_warns_fails_the_test_that_left_it(tmp_path):
    result = run_pytest(tmp_path, LEAVES_A_SOCKET)
    assert "2 passed, 1 error" in result.stdout
    assert "ERROR at teardown of test_leaves_a_socket_open" in result.stdout
    assert "unclosed <socket.socket" in result.stdout


def test_workers_look_for_leftover_processes_each_on_its_own(tmp_path):
    (tmp_path / "test_two.py").write_text("def test_passes():\n    pass\n")
    result = run_pytest(tmp_path, LEAVES_A_PROCESS, "-n2", "--dist=loadfile", str(tmp_path / "test_two.py"))
    assert result.returncode == 1
    assert "processes outlived the tests that started them" in result.stdout
    blamed = [line for line in result.stdout.splitlines() if line.startswith("ERROR ")]
    assert ["test_one.py" in line for line in blamed] == [True]


def test_long_tests_run_only_when_asked_for(tmp_path):
    assert "1 passed, 1 deselected" in run_pytest(tmp_path, LONG).stdout
    assert "1 failed, 1 passed" in run_pytest(tmp_path, LONG, "-m", "long or long_form").stdout


@pytest.mark.parametrize(("number", "first", "last"), [(0, 15_000, 22_499), (1, 22_500, 29_999)])
def test_workers_draw_ports_from_ranges_of_their_own(monkeypatch, number, first, last):
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{number}")
    drawn = {ports.free_ports(3) for _ in range(200)}
    assert first <= min(drawn)
    assert max(drawn) + 2 <= last
    assert max(drawn) - min(drawn) > 5_000
