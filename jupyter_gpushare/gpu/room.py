"""Free device memory for a restore: shown by the driver, and promised to one at a time.

A restore that runs out of device memory loses its process for ever, so it is tried
only where the driver shows its bytes and a margin free, less what was promised to
other restores that have not ended.  While another copies, its bytes count twice
(promised, and no longer free): that errs on the safe side, and waits for its end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .nvml import Nvml
from .verbs import Refusal

# Kept free beside a restore: the driver's own bookkeeping grows a little with it.
MARGIN_BYTES = 64 << 20
# A device's bookkeeping may lag behind an exit or a checkpoint.
ROOM_WAIT_S = 2.0
POLL_S = 0.02


class Undo(Exception):
    """A move cannot go on: put everything back where it was, and refuse."""

    def __init__(self, refused: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.refused = refused
        self.reason = reason


class DeviceRoom:
    """Hands out free device memory of this machine to restores."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._changed = threading.Condition()
        self._promised: dict[str, int] = {}

    @contextmanager
    def promise(self, saved: Mapping[str, int], timeout_s: float) -> Iterator[None]:
        """Hold room for these bytes by device until the block ends.

        Waits at most `ROOM_WAIT_S`, or ``timeout_s`` while other restores end.

        Raises:
            Undo: the driver does not show enough free (``no_room``).
            DeviceError: the driver does not answer.
        """
        began = time.monotonic()
        with self._changed:
            while reason := self._no_room(saved):
                others = any(self._promised.get(uuid) for uuid in saved)
                wait_s = timeout_s if others else min(timeout_s, ROOM_WAIT_S)
                if time.monotonic() - began >= wait_s:
                    raise Undo(Refusal.NO_ROOM, reason)
                self._changed.wait(POLL_S)
            for uuid, count in saved.items():
                self._promised[uuid] = self._promised.get(uuid, 0) + count
        try:
            yield
        finally:
            with self._changed:
                for uuid, count in saved.items():
                    self._promised[uuid] -= count
                self._changed.notify_all()

    def _no_room(self, saved: Mapping[str, int]) -> str:
        for uuid, count in saved.items():
            free = self._nvml.free_bytes(uuid) - self._promised.get(uuid, 0)
            if count and free < count + MARGIN_BYTES:
                return f"{count} bytes (and a margin of {MARGIN_BYTES}) are needed on {uuid}, {free} are free"
        return ""
