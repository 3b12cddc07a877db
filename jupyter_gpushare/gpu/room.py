"""Free device memory for a restore: shown by the driver, and promised to one at a time.

A restore that runs out of device memory loses its process for ever, so it is tried
only where the driver shows its bytes and a margin free, less what was promised to
other restores that have not ended, and less what those need that asked before and
still wait: first come, first served.  While another copies, its bytes count twice
(promised, and no longer free): that errs on the safe side, and waits for its end.

Free memory could be taken between the look and the restore, where the limits of
the leases that are awake on the device do not all fit together.  Their allocations
then wait in the library until the restore is over (`hold_back`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from .ladder import reserve_bytes
from .lease import Lease
from .nvml import Nvml
from .verbs import Phase, Refusal

log = logging.getLogger(__name__)

# Kept free beside a restore at least: the driver's own bookkeeping grows a little with it.
MARGIN_BYTES = 64 << 20
# A device's bookkeeping may lag behind an exit or a checkpoint.
ROOM_WAIT_S = 2.0
POLL_S = 0.02
# An allocation that had passed the library when it was told to wait has reached the driver by then.
SETTLE_S = 0.02


class Undo(Exception):
    """A move cannot go on: put everything back where it was, and refuse."""

    def __init__(self, refused: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.refused = refused
        self.reason = reason


class DeviceRoom:
    """Hands out free device memory of this machine to restores."""

    def __init__(
        self, nvml: Nvml, margin_bytes: Callable[[str], int], leases: Callable[[], Iterable[Lease]]
    ) -> None:
        """``margin_bytes`` is what a restore may take on a device beyond its bytes."""
        self._nvml = nvml
        self._margin_bytes = margin_bytes
        self._leases = leases
        self._changed = threading.Condition()
        self._promised: dict[str, int] = {}
        self._waiting: list[Mapping[str, int]] = []

    @contextmanager
    def promise(self, saved: Mapping[str, int], timeout_s: float) -> Iterator[None]:
        """Hold room for these bytes by device until the block ends.

        Waits at most `ROOM_WAIT_S`, or ``timeout_s`` while other restores end.

        Raises:
            Undo: the driver does not show enough free (``no_room``).
            DeviceError: the driver does not answer.
        """
        with self._changed:
            self._take(saved, timeout_s)
        try:
            with self._held_back(saved):
                yield
        finally:
            with self._changed:
                for uuid, count in saved.items():
                    self._promised[uuid] -= count
                self._changed.notify_all()

    def _take(self, saved: Mapping[str, int], timeout_s: float) -> None:
        began = time.monotonic()
        self._waiting.append(saved)
        try:
            while reason := self._no_room(saved, self._before(saved)):
                others = any(self._promised.get(uuid) for uuid in saved)
                wait_s = timeout_s if others else min(timeout_s, ROOM_WAIT_S)
                if time.monotonic() - began >= wait_s:
                    raise Undo(Refusal.NO_ROOM, reason)
                self._changed.wait(POLL_S)
            for uuid, count in saved.items():
                self._promised[uuid] = self._promised.get(uuid, 0) + count
        finally:
            self._waiting = [each for each in self._waiting if each is not saved]
            self._changed.notify_all()

    def _before(self, saved: Mapping[str, int]) -> dict[str, int]:
        """What those need that wait since before this one."""
        taken = dict(self._promised)
        for each in self._waiting:
            if each is saved:
                break
            for uuid, count in each.items():
                taken[uuid] = taken.get(uuid, 0) + count
        return taken

    def _no_room(self, saved: Mapping[str, int], taken: Mapping[str, int]) -> str:
        for uuid, count in saved.items():
            if not count:
                continue
            free, margin = self._nvml.free_bytes(uuid) - taken.get(uuid, 0), self._margin_bytes(uuid)
            if free < count + margin:
                return f"{count} bytes (and a margin of {margin}) are needed on {uuid}, {free} are free"
        return ""

    @contextmanager
    def _held_back(self, saved: Mapping[str, int]) -> Iterator[None]:
        """Let allocations of leases wait that could take the room, and look once more."""
        growing = self._growing(saved)
        with ExitStack() as stack:
            for lease in growing:
                log.info("lease=%s allocations wait for a restore beside it", lease.name)
                stack.enter_context(lease.held_back())
            if growing:
                time.sleep(SETTLE_S)
                with self._changed:
                    mine = {uuid: self._promised.get(uuid, 0) - count for uuid, count in saved.items()}
                    if reason := self._no_room(saved, mine):
                        raise Undo(Refusal.NO_ROOM, reason)
            yield

    def _growing(self, saved: Mapping[str, int]) -> list[Lease]:
        """Leases that are awake and could allocate what is meant for the restore.

        What they hold at the moment says nothing: they may free it and take it again.
        """
        awake = [lease for lease in self._leases() if lease.phase is Phase.RUNNING and lease.processes]
        return [
            lease
            for lease in awake
            if any(lease.limits.get(uuid) and self._overcommitted(uuid, saved[uuid], awake) for uuid in saved)
        ]

    def _overcommitted(self, uuid: str, count: int, awake: list[Lease]) -> bool:
        gpu = next((each for each in self._nvml.gpus if each.uuid == uuid), None)
        if gpu is None or not count:
            return False
        pids = {process.pid for lease in awake for process in lease.processes}
        others = sum(held for pid, held in self._nvml.processes(uuid).items() if pid not in pids)
        limits = sum(lease.limits.get(uuid, 0) for lease in awake)
        spare = max(self._margin_bytes(uuid), reserve_bytes(gpu))
        return others + limits + count + spare > gpu.memory_bytes
