"""Shared parts of the tests of the service's own page: a browser, a listening broker, files of the Hub."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from jupyterhub._data import DATA_FILES_PATH
from playwright.async_api import Browser

from tests.broker.http_site import Http
from tests.broker.site import Site
from tests.conftest import Chromium
from tests.ui.pages import launched

HUB_STATIC = Path(DATA_FILES_PATH) / "static"
# 640: a page of 1280 at a zoom of 200 %
WIDTHS = (1280, 640, 360)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_browser(chromium: Chromium) -> AsyncIterator[Browser]:
    """Yield one chromium for all tests of a file."""
    async with launched(chromium) as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def module_http(tmp_path: Path) -> AsyncIterator[Http]:
    """Yield a broker for each test, in the event loop of `module_browser`."""
    async with Http(Site(tmp_path)) as http:
        yield http
