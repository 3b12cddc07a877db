"""Limits per caller: a token bucket for its rate, and turns for its costly requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable

from jupyter_gpushare.errors import TooMany

# Above this number of buckets, full ones are dropped: they limit nothing.
_MANY = 10_000


class Rate:
    """Rate limit of ``per_s`` requests a second per caller, after a burst of ``burst``."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._full_at: dict[str, float] = {}  # when a bucket will be full again

    def take(self, caller: str) -> None:
        """Count one request of ``caller``.

        Raises:
            TooMany: the bucket is empty; nothing is counted.
        """
        now = self._clock()
        full_at = max(now, self._full_at.get(caller, now)) + 1 / self._per_s
        wait_s = full_at - now - self._burst / self._per_s
        if wait_s > 1e-9:
            raise TooMany(
                "at most %1 of these a second: wait before the next one",
                f"{self._per_s:g}",
                retry_after_s=wait_s,
            )
        if len(self._full_at) >= _MANY and caller not in self._full_at:
            self._full_at = {each: at for each, at in self._full_at.items() if at > now}
        self._full_at[caller] = full_at


class Turns:
    """Costly steps of one caller run one after the other, so that more connections get no larger share."""

    def __init__(self, at_once: int = 1, most: int = 128) -> None:
        """Let ``at_once`` steps of a caller run while others wait, ``most`` in all."""
        self._at_once = at_once
        self._most = most
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._callers: Counter[str] = Counter()  # running and waiting steps

    @contextlib.asynccontextmanager
    async def of(self, caller: str) -> AsyncIterator[None]:
        """Wait for the end of the caller's earlier steps.

        Raises:
            TooMany: as many of them run and wait as may.
        """
        if self._callers[caller] >= self._most:
            raise TooMany("at most %1 of your requests wait at once", self._most, retry_after_s=1.0)
        self._callers[caller] += 1
        try:
            async with self._slots.setdefault(caller, asyncio.Semaphore(self._at_once)):
                yield
        finally:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller], self._slots[caller]
