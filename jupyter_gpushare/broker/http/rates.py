"""Limits per caller: a token bucket for its rate, and one costly request at a time."""

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
    """Costly requests of one caller run one after the other, so that more threads get no larger share."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._callers: Counter[str] = Counter()  # running and waiting requests

    @contextlib.asynccontextmanager
    async def of(self, caller: str) -> AsyncIterator[None]:
        """Wait for the end of the caller's earlier requests; the caller's requests bound how many wait."""
        self._callers[caller] += 1
        try:
            async with self._locks.setdefault(caller, asyncio.Lock()):
                yield
        finally:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller], self._locks[caller]
