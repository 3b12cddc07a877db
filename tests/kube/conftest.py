"""Fixtures: KAI or its model, a cluster of two nodes, and a broker that follows it.

``GPUSHARE_TEST_ENGINE=kai`` runs the tests on a real KAI-Scheduler instead of its model.  Then API server
and KAI's scheduler, binder, admission and controllers are real (`real_engine`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.hub.forked_hubs import hubs_are_forks
from tests.kube.bed import Bed, kube_bed
from tests.kube.kai_broker import NLP, VISION, Broker
from tests.kube.real_engine import real_engine, running, why_not

__all__ = ["hubs_are_forks"]  # a fixture


@pytest.fixture(scope="session", autouse=True)
def _engine() -> Iterator[None]:
    if os.environ.get("GPUSHARE_TEST_ENGINE") != "kai":
        yield
    elif why := why_not():
        pytest.skip(why)
    else:
        with real_engine():
            yield


@pytest.fixture(autouse=True)
def _engine_goes_on() -> Iterator[None]:
    yield
    if engine := running():
        engine.check()


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    async with kube_bed({"n0": ("GPU-0",), "n1": ("GPU-1",)}, (VISION, NLP)) as found:
        yield found


@pytest.fixture
def broker(bed: Bed) -> Broker:
    return Broker(bed)
