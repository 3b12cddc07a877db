"""A progress bar for long runs: on a terminal only, on standard error, erased at the end."""

from __future__ import annotations

import sys
import time
from types import TracebackType

WIDTH = 30
EVERY_S = 0.2


class Bar:
    """``with Bar("jobs") as bar: ...; bar(0.3)`` shows that 30 % is done."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()
        self._began = time.monotonic()
        self._next = self._began + EVERY_S

    def __enter__(self) -> Bar:
        return self

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + EVERY_S
        full = round(WIDTH * min(done, 1.0))
        passed = now - self._began
        left = f", about {passed * (1 - done) / done:.0f} s left" if done > 0.02 else ""
        bar = "#" * full + "." * (WIDTH - full)
        print(f"\r[{bar}] {done:4.0%} of the {self._what}{left}\x1b[K", end="", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
