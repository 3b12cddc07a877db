"""Errors that repeat every second, logged once: when they begin, when they change, and when they are over."""

from __future__ import annotations

import logging

log = logging.getLogger("gpushare.broker")

# Of leases that ended while something of them failed, the oldest are forgotten.
_MOST = 1000


class ErrorLog:
    """What fails now, by the name of what was tried."""

    def __init__(self) -> None:
        self._failing: dict[str, str] = {}

    def failed(self, what: str, error: Exception) -> None:
        """Log the error, unless the same one was logged and ``what`` has not worked since."""
        if self._failing.get(what) != str(error):
            log.warning("%s: %s", what, error)
            self._failing[what] = str(error)
            if len(self._failing) > _MOST:
                del self._failing[next(iter(self._failing))]

    def works(self, what: str) -> None:
        """Log that ``what`` works again, if it failed before."""
        if self._failing.pop(what, None) is not None:
            log.info("%s: works again", what)
