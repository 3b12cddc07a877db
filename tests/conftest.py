"""What every test may use.  Standard library and pytest only: `make test-gpu` has no more.

* ``chromium``: how to start Debian's chromium with Playwright.  A test marked
  ``browser`` is skipped by name where there is none.
* With GPUSHARE_FAIL_ON_SKIP set (`.ci/run`) a test that would be skipped fails instead.
* No process that a test started may outlive the run: every child inherits
  ``GPUSHARE_TEST_RUN``; one that still carries it at the end is named, ended and
  makes the run fail.  Each worker of pytest-xdist is a run of its own.
* Garbage is collected after each test and each module: a socket, a file or a loop that
  was left open fails the test that left it, not the test that happens to run later.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # Nothing is judged by the clock of a machine that may be busy.  With CI set (`.ci/run`)
    # Hypothesis takes its own profile "ci" instead, which also draws the same examples each time.
    if settings.get_current_profile_name() == "default":
        settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("default")

INSTALL_CHROMIUM = "apt-get update && apt-get install -y chromium"
# How long a process may take to end after the last test, in seconds.
LEFTOVER_PATIENCE_S = float(os.environ.get("GPUSHARE_TEST_PATIENCE_S", "30"))


@dataclass(frozen=True, slots=True)
class Chromium:
    """Arguments for ``playwright.chromium.launch``."""

    executable_path: str
    args: tuple[str, ...] = (
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
    )


def find_chromium() -> str | None:
    """Path of an installed chromium; ``GPUSHARE_CHROMIUM`` names another one."""
    named = os.environ.get("GPUSHARE_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_chromium():
        return
    skip = pytest.mark.skip(reason=f"no chromium; install it with: {INSTALL_CHROMIUM}")
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("GPUSHARE_FAIL_ON_SKIP"):
        report.outcome = "failed"
        report.longrepr = f"Nothing may be skipped here. {report.longrepr[2]}"  # type: ignore[index]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is imported by now lives to the end: the collections after the tests pass it over."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def garbage_of_a_test() -> Iterator[None]:
    """Collected at once, so that the warning about an open socket falls into its own test."""
    yield
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def garbage_of_a_module() -> Iterator[None]:
    """What the module's own fixtures left behind."""
    yield
    gc.collect()


@pytest.fixture
def india() -> Iterator[None]:
    """This process in a zone 5:30 h before UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "IST-5:30")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(scope="session")
def chromium() -> Chromium:
    """How to start the installed chromium: ``launch(executable_path=..., args=[...])``."""
    path = find_chromium()
    if path is None:
        pytest.fail(f"no chromium; install it with: {INSTALL_CHROMIUM}")
    return Chromium(path)


def marked_processes(mark: str) -> dict[int, str]:
    """Command lines, by pid, of the living processes with ``mark`` in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = command.strip()[:200]
        except (OSError, ValueError):
            continue  # gone, or another user's
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_run() -> Iterator[None]:
    """Fails the run, naming them, when processes that tests started are still alive."""
    mark = uuid.uuid4().hex
    os.environ["GPUSHARE_TEST_RUN"] = mark
    yield
    del os.environ["GPUSHARE_TEST_RUN"]
    patient_until = time.monotonic() + LEFTOVER_PATIENCE_S
    while (left := marked_processes(mark)) and time.monotonic() < patient_until:
        time.sleep(0.1)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if left:
        pytest.fail(f"processes outlived the tests that started them: {left}")
