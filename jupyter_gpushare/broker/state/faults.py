"""What an administrator has to mend outside the broker: one sentence per source, for health and the page."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

log = logging.getLogger("gpushare.broker")

# Sentences kept; a source is a part of the site, of which there are few.
_MOST = 20
# Between two lines in the log about one source: a sentence may name the server that could not start.
_LOG_S = 60.0


class Faults:
    """Faults that were reported and not yet seen to be mended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._found: dict[str, tuple[str, float]] = {}
        self._logged_at: dict[str, float] = {}
        self._checks: list[Callable[[], str]] = []

    def check(self, look: Callable[[], str]) -> None:
        """Ask ``look`` at each `sentences`; it returns the fault, or an empty text."""
        self._checks.append(look)

    def found(self, source: str, sentence: str, *, forget_s: float = math.inf) -> None:
        """Note the fault of a source in place of an earlier one; it counts until mended, or ``forget_s``.

        The log has each new sentence, of one source at most one in `_LOG_S`.
        """
        if source not in self._found and len(self._found) >= _MOST:
            return
        now, (before, until) = self._clock(), self._found.get(source, ("", 0.0))
        is_new = sentence != before or now >= until
        if is_new and now - self._logged_at.get(source, -math.inf) >= _LOG_S:
            log.error("%s", sentence)
            self._logged_at[source] = now
        self._found[source] = (sentence, now + forget_s)

    def mended(self, *sources: str) -> None:
        """Forget the faults of these sources."""
        for source in sources:
            if self._found.pop(source, None) is not None:
                log.info("%s: works again", source)
            self._logged_at.pop(source, None)

    def sentences(self) -> list[str]:
        """Return the faults that are known now."""
        now = self._clock()
        self._found = {source: found for source, found in self._found.items() if now < found[1]}
        checked = [said for look in self._checks if (said := look())]
        return [*checked, *(sentence for sentence, _ in self._found.values())]
