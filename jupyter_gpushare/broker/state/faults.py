"""What an administrator has to mend outside the broker: one sentence per source, for health and the page."""

from __future__ import annotations

import math
from collections.abc import Callable

# Sentences kept; a source is a part of the site, of which there are few.
_MOST = 20


class Faults:
    """Faults that were reported and not yet seen to be mended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[str, tuple[str, float]] = {}
        self._checks: list[Callable[[], str]] = []

    def check(self, look: Callable[[], str]) -> None:
        """Ask ``look`` at each `sentences`; it returns the fault, or an empty text."""
        self._checks.append(look)

    def found(self, source: str, sentence: str, *, forget_s: float = math.inf) -> None:
        """Note the fault of a source in place of an earlier one; it counts until mended, or ``forget_s``."""
        if source in self._found or len(self._found) < _MOST:
            self._found[source] = (sentence, self._clock() + forget_s)

    def mended(self, *sources: str) -> None:
        """Forget the faults of these sources."""
        for source in sources:
            self._found.pop(source, None)

    def sentences(self) -> list[str]:
        """Return the faults that are known now."""
        now = self._clock()
        self._found = {source: found for source, found in self._found.items() if now < found[1]}
        checked = [said for look in self._checks if (said := look())]
        return [*checked, *(sentence for sentence, _ in self._found.values())]
