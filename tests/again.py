"""Run each failed test of a parallel run once more, alone, after all others.

A test that fails beside others and passes alone counts as passed, and the summary lists it under
*failed beside others*.  More than `MAX_BESIDE` of them fail the run, because then the tests disturb
each other.

Some failures are final:

* Tests in `ORACLES`, which get the marker ``oracle``, and other tests with that marker.  They judge the
  promises P1 to P3, crashes and attacks, where one failure in many runs is a defect of the product.
* Failures of a teardown, which judge what tests left behind.
* All failures, once more than `MAX_FAILED` tests have failed.

The controller of pytest-xdist runs this plugin.  It keeps both outputs of a test in build/failed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ORACLES = frozenset(
    {
        "tests/attack",
        "tests/faults",
        "tests/broker/test_faults.py",
        "tests/broker/test_losses.py",
        "tests/broker/test_recovery.py",
        "tests/gpu/test_faults.py",
        "tests/gpu/test_guest_histories.py",
        "tests/gpu/test_guests.py",
        "tests/gpu/test_hostile.py",
        "tests/gpu/test_move_elsewhere.py",
        "tests/gpu/test_moves.py",
        "tests/gpu/test_reservations.py",
        "tests/gpu/test_reserve.py",
        "tests/gpu/test_restart.py",
        "tests/gpu/test_seeds.py",
        "tests/job/test_started_once.py",
        "tests/native/test_kill.py",
    }
)
MAX_BESIDE = 5
MAX_FAILED = 20
# Longer than pytest's own timeout of 300 s for each of set-up, call and teardown.
ALONE_S = 900
LOGS = Path("build", "failed")


class Again:
    """Collects the failures of the workers and runs them again at the end of the session."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, list[pytest.TestReport]] = {}
        self._beside: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, []).append(report)

    @pytest.hookimpl(trylast=True)  # the workers have ended
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus is not pytest.ExitCode.TESTS_FAILED or len(self._failed) > MAX_FAILED:
            return
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        for nodeid, reports in self._failed.items():
            if any(report.when == "teardown" or "oracle" in report.keywords for report in reports):
                continue
            terminal.write_line(f"\nAgain, alone: {nodeid}")
            if self._passes_alone(nodeid, reports):
                self._beside.append(nodeid)
                _count_as_passed(terminal, reports)
        if len(self._beside) == len(self._failed) and len(self._beside) <= MAX_BESIDE:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._beside:
            terminalreporter.section("failed beside others")
            for nodeid in self._beside:
                terminalreporter.write_line(f"{nodeid}  (both outputs: {_folder(nodeid)})")
                terminalreporter.write_line(self._failed[nodeid][0].longreprtext[-3_000:])
            if len(self._beside) > MAX_BESIDE:
                terminalreporter.write_line(
                    f"More than {MAX_BESIDE}: the tests disturb each other.", red=True
                )

    def _passes_alone(self, nodeid: str, reports: list[pytest.TestReport]) -> bool:
        folder = self._config.rootpath / _folder(nodeid)
        folder.mkdir(parents=True, exist_ok=True)
        sections = [f"--- {name}\n{text}" for report in reports for name, text in report.sections]
        output = "\n".join([*(report.longreprtext for report in reports), *sections])
        (folder / "beside-others.log").write_text(output)
        options = ["-m", self._config.option.markexpr, "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, nodeid]
        with (folder / "alone.log").open("wb") as log:
            try:
                done = subprocess.run(
                    command, cwd=self._config.rootpath, stdout=log, stderr=log, timeout=ALONE_S, check=False
                )
            except subprocess.TimeoutExpired:
                return False
        return done.returncode == 0


def is_oracle(path: Path, root: Path) -> bool:
    """Return whether failures of the tests in this file are final."""
    relative = path.relative_to(root) if path.is_relative_to(root) else path
    return not ORACLES.isdisjoint(each.as_posix() for each in (relative, *relative.parents))


def _folder(nodeid: str) -> Path:
    return LOGS / re.sub(r"[^\w.-]+", "_", nodeid)[-150:]


def _count_as_passed(terminal: pytest.TerminalReporter, reports: list[pytest.TestReport]) -> None:
    for report in reports:
        for category in ("failed", "error"):
            if report in terminal.stats.get(category, []):
                terminal.stats[category].remove(report)
    terminal.stats.setdefault("passed", []).append(reports[0])
