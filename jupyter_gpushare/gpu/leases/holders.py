"""Which users held a lease since the machine booted, and whether a record of a lease was lost.

Servers without a GPU name a lease that they may get later (`reserve`): that it has no record is no loss.

The watchdog stops processes only of users that hold, or since boot held, a lease here,
and none after a record was lost: it does not know then which processes were in that lease.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection
from pathlib import Path

from jupyter_gpushare import procfs
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.protocol.helper import ErrorKind

# Users of one boot; of further ones no process is stopped.
MAX_UIDS = 10_000
MAX_RESERVED = 10_000


class Holders:
    """Kept in one file, so that it outlives the helper and not the boot."""

    def __init__(self, path: Path, boot_id: str) -> None:
        """Read the file; one of another boot, or a damaged one, counts as empty."""
        self._path = path
        self._boot_id = boot_id
        self._guard = threading.Lock()
        self.uids: frozenset[int] = frozenset()
        self.reserved: frozenset[str] = frozenset()  # names of leases that are not created yet
        self.record_lost = False
        # A process that began earlier may have been in a lease that is not known here.
        self.since_ticks = procfs.ticks(time.clock_gettime(time.CLOCK_BOOTTIME))
        try:
            stored = json.loads(path.read_bytes())
            if stored["boot_id"] == boot_id:
                self.since_ticks = int(stored.get("since_ticks", 0))
                self.uids = frozenset(int(uid) for uid in stored["uids"])
                self.reserved = frozenset(map(str, stored.get("reserved", ())))
                self.record_lost = bool(stored["record_lost"])
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def add(self, uid: int) -> None:
        """Note that a user holds a lease.

        Raises:
            OSError: the disk does not take it.
        """
        with self._guard:
            if uid not in self.uids and len(self.uids) < MAX_UIDS:
                self.uids |= {uid}
                self._save()

    def reserve(self, lease: str) -> None:
        """Note the name of a lease that a server without a GPU may get.

        Raises:
            HelperError: `MAX_RESERVED` names are known (kind ``conflict``).
            OSError: the disk does not take it.
        """
        with self._guard:
            if lease not in self.reserved:
                if len(self.reserved) >= MAX_RESERVED:
                    raise HelperError(ErrorKind.CONFLICT, f"{MAX_RESERVED} leases are reserved")
                self.reserved |= {lease}
                self._save()

    def created(self, lease: str) -> None:
        """Note that a lease has a record from now on.

        Raises:
            OSError: the disk does not take it.
        """
        with self._guard:
            if lease in self.reserved:
                self.reserved -= {lease}
                self._save()

    def keep(self, named: Collection[str]) -> None:
        """Forget the reserved leases that no process names.

        Raises:
            OSError: the disk does not take it.
        """
        with self._guard:
            if not self.reserved <= (kept := self.reserved.intersection(named)):
                self.reserved = kept
                self._save()

    def lose_record(self) -> None:
        """Note that a lease of this boot has no record any more.

        Raises:
            OSError: the disk does not take it; it is noted until this helper ends.
        """
        with self._guard:
            if not self.record_lost:
                self.record_lost = True
                self._save()

    def _save(self) -> None:
        new = self._path.with_name(f".{self._path.name}.new")
        stored = {
            "boot_id": self._boot_id,
            "since_ticks": self.since_ticks,
            "uids": sorted(self.uids),
            "reserved": sorted(self.reserved),
            "record_lost": self.record_lost,
        }
        new.write_text(json.dumps(stored), encoding="ascii")
        new.rename(self._path)
