"""Errors that repeat every second, logged once: when they begin, when they change, and when they are over."""

from __future__ import annotations

import logging

# Of leases that ended while something of them failed, the oldest are forgotten.
_MOST = 1000


class ErrorLog:
    """What fails now, by the name of what was tried."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._failing: dict[str, str] = {}

    def failed(self, what: str, error: Exception) -> None:
        """Log the error, unless the same one was logged and ``what`` has not worked since."""
        if self._is_new(what, str(error)):
            self._log.warning("%s: %s", what, error)

    def broke(self, what: str, error: Exception) -> None:
        """Log an error of our own code with its traceback, as often as `failed` does."""
        if self._is_new(what, repr(error)):
            self._log.error("%s failed", what, exc_info=error)

    def _is_new(self, what: str, text: str) -> bool:
        if self._failing.get(what) == text:
            return False
        self._failing[what] = text
        if len(self._failing) > _MOST:
            del self._failing[next(iter(self._failing))]
        return True

    def works(self, what: str) -> None:
        """Log that ``what`` works again, if it failed before."""
        if self._failing.pop(what, None) is not None:
            self._log.info("%s: works again", what)
