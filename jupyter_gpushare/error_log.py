"""Logs errors that repeat every second only when they begin, change and end."""

from __future__ import annotations

import logging

# Beyond this number the oldest failures are forgotten, such as those of leases that have ended.
_MAX_FAILING = 1000


class ErrorLog:
    """Keeps the current failures, by the name of the action that fails."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._failing: dict[str, str] = {}

    def failed(self, action: str, error: Exception) -> None:
        """Log an error, unless the same error was logged and ``action`` has not worked since."""
        if self._is_new(action, str(error)):
            self._log.warning("%s: %s", action, error)

    def broke(self, action: str, error: Exception) -> None:
        """Log an error of our own code, with its traceback, under the same condition as `failed`."""
        if self._is_new(action, repr(error)):
            self._log.error("%s failed", action, exc_info=error)

    def _is_new(self, action: str, text: str) -> bool:
        if self._failing.get(action) == text:
            return False
        self._failing[action] = text
        if len(self._failing) > _MAX_FAILING:
            del self._failing[next(iter(self._failing))]
        return True

    def works(self, action: str) -> None:
        """Log that ``action`` works again, if it failed before."""
        if self._failing.pop(action, None) is not None:
            self._log.info("%s: works again", action)
