"""The fixture for traces that tests of the simulator replay (`tests.traces`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import traces

Trace = Callable[[str], Path]


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Return a function from the name of a public trace to its path, or to a made-up one instead."""
    folder = tmp_path_factory.mktemp("traces")
    return traces.public if traces.FOLDER else lambda name: traces.made_up(name, folder)
