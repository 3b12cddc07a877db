"""docs/first-gpu.md names every scenario of `make test-gpu`, in the order in which they run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.gpu_real.order import PARTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "first-gpu.md"


def test_the_page_has_every_scenario_in_its_order():
    rows = re.findall(r"^\| (\d) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    named = [(int(part), name) for part, row in rows for name in re.findall(r"`([a-z]\w*)`", row)]
    first = {}
    for number, part in enumerate(PARTS, 1):
        for scenario in part:
            first.setdefault(scenario.function.__name__, number)
    assert sorted(named) == sorted((part, name) for name, part in first.items())
    numbers = [next(n for n, (_, row) in enumerate(rows) if f"`{name}`" in row) for name in first]
    assert numbers == sorted(numbers)
