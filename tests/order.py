"""Run the longest files first, so that no long file keeps one worker busy at the end.

A run that ends at the first failure (`-x`) starts with the shortest.

`tests/durations.json` has the seconds of each file in a whole parallel run.  Renew it with
``make test PYTEST_ARGS=--store-durations``.  A file that it does not name comes first.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

STORED = Path(__file__).with_name("durations.json")


def by_duration(items: list[pytest.Item], root: Path, *, shortest_first: bool = False) -> None:
    """Sort tests by the stored seconds of their files; keep the order within a file."""
    seconds: dict[str, float] = json.loads(STORED.read_text()) if STORED.exists() else {}
    sign = 1 if shortest_first else -1
    items.sort(key=lambda item: sign * seconds.get(_name(item.path, root), float("inf")))


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


class StoreDurations:
    """Adds up the seconds of each file, and stores them at the end of the run."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        longest = sorted(self._seconds.items(), key=lambda each: (-round(each[1]), each[0]))
        STORED.write_text(json.dumps({name: round(took) for name, took in longest}, indent=0) + "\n")
