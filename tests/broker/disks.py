"""A disk that fills up and is cleared again."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from jupyter_gpushare.broker.state.store import Store

_UNLIMITED = 1 << 30


class SmallDisk:
    """Lets an SQLite database grow, or not: then a write that needs a page fails with SQLITE_FULL.

    Source: https://www.sqlite.org/pragma.html#pragma_max_page_count; the same error as for a write
    that ENOSPC cut short (os_unix.c, unixWrite).
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engine = store._engine
        self._max_pages = _UNLIMITED
        sa.event.listen(self._engine, "connect", self._limit)

    def _limit(self, connection: Any, _record: Any) -> None:
        connection.execute(f"PRAGMA max_page_count={self._max_pages}").close()

    def fill(self) -> None:
        """Let the database grow no more."""
        with self._engine.connect() as connection:
            self._set(connection.execute(sa.text("PRAGMA page_count")).scalar() or 1)

    def fill_all(self) -> None:
        """Leave no byte free: statvfs(3) says so, and no commit is tried."""
        self._store._free_bytes = lambda: 0  # type: ignore[method-assign]

    def clear(self) -> None:
        """Let the database grow again."""
        self._store.__dict__.pop("_free_bytes", None)
        self._set(_UNLIMITED)

    def _set(self, pages: int) -> None:
        self._max_pages = pages
        self._engine.dispose()
