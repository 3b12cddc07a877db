"""Fixtures: a simulated machine of the test's own, with or without a helper on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import forks
from tests.gpu.machine import IMPORTS, Machine, machine_in
from tests.simulator import Simulator


@pytest.fixture(scope="session", autouse=True)
def helpers_are_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start helpers as forks, without the time for imports, which take longer than most tests."""
    env = Simulator(tmp_path_factory.mktemp("forks"), "1xH100-80GB").env()
    with forks(IMPORTS, env) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "forks", made)
        yield


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Machine]:
    """Yield a machine without a running helper."""
    yield from machine_in(tmp_path)


@pytest.fixture
def machine(bare: Machine) -> Machine:
    """Return a machine with a helper."""
    bare.start()
    return bare


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Machine]:
    """Yield a machine with two devices and a helper; its driver restarts under clients, unlike a real one."""
    for machine in machine_in(tmp_path, spec="2xH100-80GB,host=512GiB,restart=any-time"):
        machine.start()
        yield machine
