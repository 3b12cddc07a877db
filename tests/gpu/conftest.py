"""Fixtures: a simulated machine of the test's own, with or without a helper on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.machine import Machine, machine_in


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Machine]:
    """A machine on which no helper runs yet."""
    yield from machine_in(tmp_path)


@pytest.fixture
def machine(bare: Machine) -> Machine:
    """A machine with a helper."""
    bare.start()
    return bare


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Machine]:
    """A machine with two devices and a helper."""
    for machine in machine_in(tmp_path, spec="2xH100-80GB,host=512GiB,restart=any-time"):
        machine.start()
        yield machine
