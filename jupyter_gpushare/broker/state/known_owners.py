"""The owners that the broker knows, and those of them of which no waiting job starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from jupyter_gpushare.broker.state.records import Owner


class KnownOwners:
    """Changed by `control.ownership` alone, which says which of them are absent."""

    def __init__(self) -> None:
        self.of: dict[str, Owner] = {}  # by `Owner.user`
        self.absent: frozenset[str] = frozenset()
        self.are_undated = False  # the Hub does not say of all users when it made them
        self.doubted = asyncio.Event()  # the Hub may not have an owner

    def load(self, stored: Iterable[Owner]) -> None:
        """Replace all owners by those on disk."""
        self.of = {owner.user: owner for owner in stored}
        self.absent |= {user for user, owner in self.of.items() if owner.held or owner.is_former}

    def doubt(self, user: str) -> None:
        """Start no job of an owner until the Hub was asked: it said that it has no such user."""
        self.absent |= {user}
        self.doubted.set()
