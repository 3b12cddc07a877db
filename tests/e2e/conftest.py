"""One demo hub per test; nothing of it may be left when the test ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.demo import DemoHub, until


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[DemoHub]:
    demo = DemoHub(tmp_path)
    try:
        demo.start()
        yield demo
    finally:
        demo.stop()
        with contextlib.suppress(AssertionError):
            until("everything has ended", lambda: not demo.processes(), 60)
        left = demo.kill_leftovers()
    assert not left, f"left behind after Ctrl-C: {left}\n{demo.tail()}"
