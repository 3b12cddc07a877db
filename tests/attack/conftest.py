"""`http`: a broker that listens, with a Hub that knows a few tokens; `start`: a runner of a job."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.broker.http_site import Http
from tests.broker.site import Site
from tests.job.conftest import others, runners, start

__all__ = ["http", "others", "runners", "start"]


@pytest.fixture
async def http(tmp_path) -> AsyncIterator[Http]:
    http = Http(Site(tmp_path))
    await http.open()
    yield http
    await http.close()
