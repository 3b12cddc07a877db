"""How long tests wait.  Standard library only.

A condition that becomes true ends its wait at once, so bounds are generous: they
fail a test in which nothing happens, not one on a slow machine.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Less than pytest's own time-out (300 s), so that the failure names what was waited for.
PATIENCE_S = 120.0


def until(
    condition: Callable[[], T],
    what: str = "it happens",
    patience_s: float = PATIENCE_S,
    *,
    process: subprocess.Popen[Any] | None = None,
    log: Path | None = None,
) -> T:
    """Return the first true value of ``condition``.

    Fails at once when ``process`` has ended, and ``patience_s`` after the start or
    the last growth of ``log``, which need not exist yet.

    Raises:
        AssertionError: it did not become true; names ``what`` and the end of ``log``.
    """
    deadline, size = time.monotonic() + patience_s, 0
    while not (found := condition()):
        is_there = log is not None and log.exists()
        if log is not None and is_there and (now := log.stat().st_size) != size:
            deadline, size = time.monotonic() + patience_s, now
        said = f":\n{log.read_text(errors='replace')[-3000:]}" if log is not None and is_there else ""
        assert process is None or process.poll() is None, f"ended before {what}{said}"
        assert time.monotonic() < deadline, f"not within {patience_s:g} s: {what} ({found!r}){said}"
        time.sleep(0.02)
    return found
