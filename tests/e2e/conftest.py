"""Demo hubs: `hub` belongs to one test, `shared_hub` to a file; no process of either may outlive it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.conftest import Chromium
from tests.e2e.demo import DemoHub, until
from tests.ui.pages import browser_of


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[DemoHub]:
    with running(DemoHub(tmp_path)) as demo:
        yield demo


@pytest.fixture
def browser(chromium: Chromium) -> Iterator[Browser]:
    with browser_of(chromium) as browser:
        yield browser


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hubs]:
    hubs = Hubs(tmp_path_factory)
    yield hubs
    hubs.end()


@pytest.fixture
def shared_hub(hubs: Hubs) -> Iterator[DemoHub]:
    """Yield a demo hub that the tests of a file share; users, servers and jobs belong to one test."""
    demo = hubs.take()
    yield demo
    if demo.is_healthy():
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(hubs.end)
            demo.clear()
            otherwise.pop_all()
    else:
        hubs.end()


class Hubs:
    """The demo hub of a file; a new one starts after a test has broken it."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._opened = contextlib.ExitStack()
        self._demo: DemoHub | None = None

    def take(self) -> DemoHub:
        if self._demo is None:
            self._demo = self._opened.enter_context(running(DemoHub(self._folders.mktemp("demo"))))
        return self._demo

    def end(self) -> None:
        self._demo = None
        self._opened.close()


@contextlib.contextmanager
def running(demo: DemoHub) -> Iterator[DemoHub]:
    """Yield a running demo hub and end it as Ctrl-C does; fail if processes are left."""
    try:
        demo.start()
        yield demo
    finally:
        demo.stop()
        with contextlib.suppress(AssertionError):
            until("everything has ended", lambda: not demo.processes(), 60)
        left = demo.kill_leftovers()
    assert not left, f"left behind after Ctrl-C: {left}\n{demo.tail()}"
