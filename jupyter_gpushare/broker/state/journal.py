"""Commits of the registry's changes, and what follows from one that fails.

A failed database ends the broker.  A full disk does not: the changes that are not
durable are undone in memory once no commit is open, and changes are refused until
`retry` finds space.  So memory never shows for long what a restart would lose.
A database that hangs is waited for: `takes_nothing` says so after `LATE_S`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from jupyter_gpushare.broker.state.rows import Change
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.errors import DiskFull, StoreError

# A disk syncs within this time, a database answers within it.
LATE_S = 5.0


class Journal:
    """Makes changes durable, in the order of the calls."""

    def __init__(self, store: Store, roll_back: Callable[[], None]) -> None:
        """Commit to ``store``; ``roll_back`` replaces what is in memory by what is on disk."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_disk_full = False
        self._store = store
        self._roll_back = roll_back
        self._open: dict[asyncio.Future[None], float] = {}  # and when each began

    async def commit(self, *changes: Change) -> None:
        """Make changes durable.

        Raises:
            DiskFull: they are not, and are undone in memory.
            StoreError: the database failed; the broker ends (`failed`).
        """
        self._refuse_after_failure()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._open[ended] = loop.time()
        try:
            await self._store.commit(changes)
        except DiskFull:
            self.is_disk_full = True
            raise
        except StoreError as error:
            raise self.fail(error) from None
        finally:
            del self._open[ended]
            if self.is_disk_full and not self._open:
                self._undo()
            ended.set_result(None)

    async def durable(self) -> None:
        """Return when all changes made so far are on disk: an answer may rest on those of another request.

        Raises:
            DiskFull: one of them is not.
            StoreError: a commit failed; the broker ends.
        """
        if self._open:
            await asyncio.wait(tuple(self._open))
            self.check()
        self._refuse_after_failure()

    @property
    def takes_nothing(self) -> bool:
        """Whether nothing can be stored now: the disk was full at the last try, or a commit is late."""
        began_at = min(self._open.values(), default=math.inf)
        return self.is_disk_full or asyncio.get_running_loop().time() - began_at > LATE_S

    def check(self) -> None:
        """Return if changes can be stored now; called before memory changes.

        Raises:
            DiskFull: the disk was full at the last try.
            StoreError: a commit failed; the broker ends.
        """
        self._refuse_after_failure()
        if self.is_disk_full:
            raise DiskFull

    async def retry(self) -> bool:
        """Return whether the disk takes changes again.

        Raises:
            StoreError: the database failed; the broker ends.
        """
        if self._open:
            return False  # what failed is not undone yet
        try:
            await self._store.retry()
        except DiskFull:
            return False
        except StoreError as error:
            raise self.fail(error) from None
        self.is_disk_full = False
        return True

    def raise_epoch(self, epoch: int) -> None:
        """Take a higher epoch, before anything else is stored.

        Raises:
            DiskFull: it cannot be stored; the broker does nothing before it is.
            StoreError: a newer broker uses the database, or it failed; the broker ends.
        """
        try:
            self._store.raise_epoch(epoch)
        except DiskFull:
            self.is_disk_full = True
            raise
        except StoreError as error:
            raise self.fail(error) from None

    def fail(self, error: StoreError) -> StoreError:
        """End the broker: nothing is stored from now on; returns the error, to be raised."""
        if not self.failed.done():
            self.failed.set_exception(error)
        return error

    def _undo(self) -> None:
        try:
            self._roll_back()
        except StoreError as error:
            self.fail(error)

    def _refuse_after_failure(self) -> None:
        if self.failed.done() and (error := self.failed.exception()) is not None:
            raise StoreError(str(error))
