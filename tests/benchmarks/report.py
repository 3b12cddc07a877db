"""Print the results of a benchmark: the machine, the command, and rows for docs/benchmarks.md."""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def spread(values: Sequence[float]) -> str:
    """Return median and range of the runs in the form of the tables: ``12.3 (11.9-13.0)``."""
    return f"{_short(statistics.median(values))} ({_short(min(values))}-{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def machine() -> str:
    """Return one line about the machine: processors, memory, system, Python."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} x {model}, {memory_gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def print_table(module: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the rows in the form of docs/benchmarks.md, with the machine and the command."""
    command = " ".join([".venv/bin/python -m", module, *sys.argv[1:]])
    print(f"`{command}`\n{datetime.now(UTC):%Y-%m-%d}, {machine()}\n")
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")
