"""Fixtures and rules of all tests.  Standard library and pytest only: `make test-gpu` has no more.

* The fixture ``chromium`` says how to start Debian's chromium with Playwright.  Without a chromium,
  tests marked ``browser`` are skipped by name.
* With GPUSHARE_FAIL_ON_SKIP set (`.ci/run`) a skipped test fails, unless it needs root and
  does not have it.
* No process that a test started may outlive the run.  Every child inherits ``GPUSHARE_TEST_RUN``;
  at the end, living processes with it are named and killed, and the run fails.  Each worker of
  pytest-xdist is a separate run.
* The longest files run first (`tests/order.py`).  Tests that fail in a parallel run run again, alone
  (`tests/again.py`).
* Garbage is collected after each test and each module, so that an open socket, file or loop
  fails the test that left it, not a later one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import shutil
import signal
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import pytest

from tests.again import Again, is_oracle
from tests.json_server import Receiver
from tests.order import StoreDurations, by_duration
from tests.waiting import RUN_VARIABLE, marked_processes

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # The machine may be busy, so no test has a deadline.  With CI set (`.ci/run`) Hypothesis uses
    # its own profile "ci" instead, which also draws the same examples each time.
    if settings.get_current_profile_name() == "default":
        settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("default")

with contextlib.suppress(ImportError):
    from httpx._transports import default as transports

    # Without the cache each request, also by http://, loads the machine's authorities: 20 ms of a processor.
    transports.create_ssl_context = functools.lru_cache(transports.create_ssl_context)

INSTALL_CHROMIUM = "apt-get update && apt-get install -y chromium"
# The maximum seconds that a process may take to end after the last test.
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
    """Return the path of an installed chromium, or of the one that ``GPUSHARE_CHROMIUM`` names."""
    named = os.environ.get("GPUSHARE_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help="renew tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(config))
        if config.getoption("--store-durations"):
            config.pluginmanager.register(StoreDurations())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the processor time of this process and of its children that have ended."""
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in spent)
    terminalreporter.write_line(f"processor time: {seconds:.0f} s")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_duration(items, config.rootpath, shortest_first=config.option.maxfail == 1)
    for item in items:
        if is_oracle(item.path, config.rootpath):
            item.add_marker("oracle")
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
        if os.geteuid() != 0 and "needs root" in report.longrepr[2]:  # type: ignore[index]
            return report
        report.outcome = "failed"
        report.longrepr = f"Nothing may be skipped here. {report.longrepr[2]}"  # type: ignore[index]
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exempt imported modules, which live until the end, from the collections after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def garbage_of_a_test() -> Iterator[None]:
    """Collect garbage after each test, so that a warning about an open socket belongs to its test."""
    yield
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def garbage_of_a_module() -> Iterator[None]:
    """Collect garbage of the module's fixtures; exempt objects that are still alive from then on."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def india() -> Iterator[None]:
    """Put this process into a time zone 5:30 h ahead of UTC."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "IST-5:30")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="session")
def chromium() -> Chromium:
    """Return the arguments that start the installed chromium: ``launch(executable_path=..., args=[...])``."""
    path = find_chromium()
    if path is None:
        pytest.fail(f"no chromium; install it with: {INSTALL_CHROMIUM}")
    return Chromium(path)


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_run() -> Iterator[None]:
    """Fail the run and name the processes, if processes that tests started are still alive."""
    mark = uuid.uuid4().hex
    os.environ[RUN_VARIABLE] = mark
    yield
    del os.environ[RUN_VARIABLE]
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
