"""How often each caller may do a thing: a bucket per caller that fills up again while it rests."""

from __future__ import annotations

import time
from collections.abc import Callable

from jupyter_gpushare.errors import TooMany

# Buckets that are looked through for full ones, which are as good as none.
_MANY = 10_000


class Rate:
    """``burst`` at once, then ``per_s`` a second, for each caller alone."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._full_at: dict[str, float] = {}  # when a bucket will be full again

    def take(self, caller: str) -> None:
        """Count one.

        Raises:
            TooMany: the bucket is empty; nothing is counted.
        """
        now = self._clock()
        full_at = max(now, self._full_at.get(caller, now)) + 1 / self._per_s
        wait_s = full_at - now - self._burst / self._per_s
        if wait_s > 1e-9:
            raise TooMany(
                f"at most {self._per_s:g} of these a second: wait before the next one", retry_after_s=wait_s
            )
        if len(self._full_at) >= _MANY and caller not in self._full_at:
            self._full_at = {each: at for each, at in self._full_at.items() if at > now}
        self._full_at[caller] = full_at
