"""What every test may use.  Standard library and pytest only: `make test-gpu` has no more.

* ``chromium``: how to start Debian's chromium with Playwright.  A test marked
  ``browser`` is skipped by name where there is none.
* With GPUSHARE_FAIL_ON_SKIP set (`.ci/run`) a test that would be skipped fails instead, unless it
  needs root and there is none.
* No process that a test started may outlive the run: every child inherits
  ``GPUSHARE_TEST_RUN``; one that still carries it at the end is named, ended and
  makes the run fail.  Each worker of pytest-xdist is a run of its own.
* The longest files run first (`tests/order.py`); what fails in a parallel run is run again, alone
  (`tests/again.py`).
* Garbage is collected after each test and each module: a socket, a file or a loop that
  was left open fails the test that left it, not the test that happens to run later.
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

    # Nothing is judged by the clock of a machine that may be busy.  With CI set (`.ci/run`)
    # Hypothesis takes its own profile "ci" instead, which also draws the same examples each time.
    if settings.get_current_profile_name() == "default":
        settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("default")

with contextlib.suppress(ImportError):
    from httpx._transports import default as transports

    # Else each request loads the machine's authorities, by http:// too: 20 ms of a processor.
    transports.create_ssl_context = functools.lru_cache(transports.create_ssl_context)

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help="renew tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(config))
        if config.getoption("--store-durations"):
            config.pluginmanager.register(StoreDurations())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Processor time of this process and of all that it and its children waited for."""
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
    """What the module's own fixtures left behind; what is alive by then is passed over from now on."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def india() -> Iterator[None]:
    """This process in a zone 5:30 h before UTC."""
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
    """How to start the installed chromium: ``launch(executable_path=..., args=[...])``."""
    path = find_chromium()
    if path is None:
        pytest.fail(f"no chromium; install it with: {INSTALL_CHROMIUM}")
    return Chromium(path)


@pytest.fixture(scope="session", autouse=True)
def no_process_outlives_the_run() -> Iterator[None]:
    """Fails the run, naming them, when processes that tests started are still alive."""
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
