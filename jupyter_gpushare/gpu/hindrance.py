"""Why a lease cannot be suspended now, in words for its owner.

What a process did to the driver (taints), what the library or the file does not
say, what the device cannot, and what the driver failed at last time.  The last is
believed for a minute, then for twice as long each time it happens again to the
same process: trying is harmless, trying all the time is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .checkpoint import Checkpoint
from .isolation import Account, words_of
from .lease import Key, Lease

BACKOFF_S = 60.0
MOST_BACKOFF_S = 3600.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The driver failed to move a process: why, and until when that is believed."""

    reason: str
    until: float
    wait_s: float


class Hindrances:
    """Answers why a lease cannot be suspended, and remembers what failed."""

    def __init__(self, checkpoint: Checkpoint, on_device: Callable[[str], str]) -> None:
        """``on_device`` says why nothing on a device can be suspended (or "")."""
        self._checkpoint = checkpoint
        self._on_device = on_device

    def reason(self, lease: Lease, account: Account | None, keys: Iterable[Key], *, forced: bool) -> str:
        """Why the lease cannot be suspended while these processes use the GPU; "" if it can."""
        keys = set(keys)
        if not keys:
            return ""
        if self._checkpoint.unavailable:
            return self._checkpoint.unavailable
        for uuid in lease.limits:
            if reason := self._on_device(uuid):
                return reason
        now = time.monotonic()
        for key, failure in list(lease.hindered.items()):
            if key in keys and failure.until > now:
                return failure.reason
        slots = {(slot.pid, slot.start_ticks): slot for slot in account.slots} if account else {}
        if words := words_of(slot.taints for key, slot in slots.items() if key in keys):
            return f"it uses {words}"
        if not forced and account is None:
            return "its account file is broken"
        if not forced and not keys <= slots.keys():
            return "preload library not loaded"
        return ""

    @staticmethod
    def failed(lease: Lease, key: Key, reason: str) -> None:
        """The driver failed to lock or checkpoint a process."""
        now = time.monotonic()
        before = lease.hindered.get(key)
        wait_s = min(2 * before.wait_s, MOST_BACKOFF_S) if before else BACKOFF_S
        lease.hindered = {
            each: failure for each, failure in lease.hindered.items() if failure.until + MOST_BACKOFF_S > now
        }
        lease.hindered[key] = Failure(reason, now + wait_s, wait_s)
