"""Fixtures: `http` is a listening broker with a Hub that knows a few tokens; `start` starts a job's runner.

`unchanged` is such a broker, shared by all tests of a file that change nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.broker.conftest import http
from tests.broker.http_site import Http
from tests.broker.site import Site
from tests.job.conftest import others, runners, start

__all__ = ["http", "others", "runners", "start"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unchanged(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Http]:
    async with Http(Site(tmp_path_factory.mktemp("broker"))) as http:
        yield http
        assert not http.broker.registry.overrides
        assert not http.broker.registry.jobs
