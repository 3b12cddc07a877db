"""Disks that tests fill and clear, or that delay commits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sqlalchemy as sa

from jupyter_gpushare.broker.state.store import Store
from tests.broker.brokers import Broker

_UNLIMITED = 1 << 30


class SmallDisk:
    """A disk that can stop the growth of an SQLite database: writes of new pages fail with SQLITE_FULL.

    Source: https://www.sqlite.org/pragma.html#pragma_max_page_count; ENOSPC gives the same error for a
    write (os_unix.c, unixWrite).
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engine = store._engine
        self._max_pages = _UNLIMITED
        sa.event.listen(self._engine, "connect", self._limit)

    def _limit(self, connection: Any, _record: Any) -> None:
        connection.execute(f"PRAGMA max_page_count={self._max_pages}").close()

    def fill(self) -> None:
        """Stop the growth of the database."""
        with self._engine.connect() as connection:
            self._set(connection.execute(sa.text("PRAGMA page_count")).scalar() or 1)

    def fill_all(self) -> None:
        """Leave no byte free: statvfs(3) reports this, and the broker tries no commit."""
        self._store._free_bytes = lambda: 0  # type: ignore[method-assign]

    def clear(self) -> None:
        """Let the database grow again."""
        self._store.__dict__.pop("_free_bytes", None)
        self._set(_UNLIMITED)

    def _set(self, pages: int) -> None:
        self._max_pages = pages
        self._engine.dispose()


class SlowDisk:
    """Delays all commits of a broker until `release`."""

    def __init__(self, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self._released = asyncio.Event()
        commit = broker.store.commit

        async def held_back(changes: object) -> None:
            await self._released.wait()
            await commit(changes)  # type: ignore[arg-type]

        monkeypatch.setattr(broker.store, "commit", held_back)

    def release(self) -> None:
        self._released.set()
