"""The users that held a lease since the machine booted, and those with a lease whose record was lost.

The watchdog stops only processes of users that hold a lease here, or held one since boot.  It stops none of
a user with a lost record, because it does not know which processes were in that lease.  A record is lost if
the directory of a lease exists without one.  A process that names a lease without a record proves
nothing, because every user can start such a process.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.os.files import write_whole

log = logging.getLogger(__name__)

# Users that one boot remembers; no process of a further user is stopped.
MAX_UIDS = 10_000


class Holders:
    """The users, in one file that outlives the helper but not the boot."""

    def __init__(self, path: Path, boot_id: str) -> None:
        """Read the file; a file of another boot or a damaged file counts as empty."""
        self._path = path
        self._boot_id = boot_id
        self._guard = threading.Lock()
        self.uids: frozenset[int] = frozenset()
        self.with_lost_record: frozenset[int] = frozenset()
        # A process that began earlier may have been in a lease that this file does not know.
        self.since_ticks = procfs.ticks(time.clock_gettime(time.CLOCK_BOOTTIME))
        try:
            stored = json.loads(path.read_bytes())
            if stored["boot_id"] == boot_id:
                self.since_ticks = int(stored.get("since_ticks", 0))
                self.uids = frozenset(int(uid) for uid in stored["uids"])
                self.with_lost_record = frozenset(int(uid) for uid in stored.get("with_lost_record", ()))
        except (OSError, ValueError, KeyError, TypeError):
            pass

    def add(self, uid: int) -> None:
        """Note that a user holds a lease."""
        with self._guard:
            if uid not in self.uids and len(self.uids) < MAX_UIDS:
                self.uids |= {uid}
                self._save()

    def lose_record(self, uid: int) -> None:
        """Note that a lease of this user has lost its record."""
        with self._guard:
            if uid not in self.with_lost_record:
                self.with_lost_record |= {uid}
                self._save()

    def _save(self) -> None:
        """Write the file; if the disk refuses it, the users are remembered until this helper ends."""
        stored = {
            "boot_id": self._boot_id,
            "since_ticks": self.since_ticks,
            "uids": sorted(self.uids),
            "with_lost_record": sorted(self.with_lost_record),
        }
        try:
            write_whole(self._path, json.dumps(stored).encode())
        except OSError as error:
            log.warning("the holders of leases cannot be noted in %s: %s", self._path, error)
