"""The traces that tests of the simulator replay: see `tests.traces`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import traces

Trace = Callable[[str], Path]


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """``trace("training_philly_0e4a51")``: the path of a public trace, or of a made-up one in its place."""
    folder = tmp_path_factory.mktemp("traces")
    return traces.public if traces.FOLDER else lambda name: traces.made_up(name, folder)
