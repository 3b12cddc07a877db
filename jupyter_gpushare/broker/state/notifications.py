"""Notifications of readers that wait for a change, such as long polls: bundled, with a sequence number."""

from __future__ import annotations

import asyncio
import contextlib

# Minimum interval between notifications: changes in between are sent together.
_INTERVAL_S = 0.1
# Changes per epoch; 2**21 epochs fit into the integers that a JSON number holds exactly.
_PER_EPOCH = 2**32


class Notifications:
    """Counts changes (`seq`) and wakes waiting readers.

    The numbers of a broker are above those of its predecessor: a client with
    a request that outlived a restart would otherwise take new answers for old ones.
    """

    def __init__(self, epoch: int) -> None:
        self.seq = epoch * _PER_EPOCH  # of the last change
        self.notified_seq = self.seq  # of the last notification
        self._notified_at = float("-inf")  # clock of the event loop
        self._timer: asyncio.TimerHandle | None = None
        self._event = asyncio.Event()

    def add(self) -> None:
        """Count a change; readers are notified within `_INTERVAL_S`."""
        self.seq += 1
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._notified_at + _INTERVAL_S), self._notify)

    def enter(self, epoch: int) -> None:
        """Count on from a higher epoch, as a change; readers are notified."""
        self.seq = epoch * _PER_EPOCH
        self.add()

    def is_last(self, seq: int) -> bool:
        """Return whether a reader with ``seq`` has all changes; False for a number of another broker."""
        return self.notified_seq <= seq <= self.seq

    def _notify(self) -> None:
        self.notified_seq, self._timer = self.seq, None
        self._notified_at = asyncio.get_running_loop().time()
        self._event.set()
        self._event = asyncio.Event()

    async def wait_after(self, seq: int, timeout_s: float) -> None:
        """Return after the notification of a change later than ``seq``, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.notified_seq <= seq:
                    await self._event.wait()
