"""A cluster of two nodes with a model of KAI, and a broker that follows it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.kube.bed import Bed, kube_bed
from tests.kube.kai_broker import NLP, VISION, Broker


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    async with kube_bed({"n0": ("GPU-0",), "n1": ("GPU-1",)}, (VISION, NLP)) as found:
        yield found


@pytest.fixture
def broker(bed: Bed) -> Broker:
    return Broker(bed)
