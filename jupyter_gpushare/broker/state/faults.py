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
        self._logged: dict[str, tuple[str, float]] = {}  # the last sentence in the log; empty: it is over
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
        self._end_forgotten()
        now, (logged, at) = self._clock(), self._logged.get(source, ("", -math.inf))
        if sentence != logged and now - at >= _LOG_S:
            log.error("%s", sentence)
            self._logged[source] = (sentence, now)
        self._found[source] = (sentence, now + forget_s)

    def mended(self, *sources: str) -> None:
        """Forget the faults of these sources."""
        for source in sources:
            self._found.pop(source, None)
            logged, at = self._logged.get(source, ("", 0.0))
            if logged:
                log.info("%s: works again", source)
                self._logged[source] = ("", at)

    def sentences(self) -> list[str]:
        """Return the faults that are known now."""
        self._end_forgotten()
        checked = [said for look in self._checks if (said := look())]
        return [*checked, *(sentence for sentence, _ in self._found.values())]

    def _end_forgotten(self) -> None:
        now = self._clock()
        self.mended(*[source for source, (_, until) in self._found.items() if now >= until])
