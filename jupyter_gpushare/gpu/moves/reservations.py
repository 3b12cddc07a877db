"""Reserve free device memory for a restore.

A restore that runs out of device memory loses its process for ever.  So it starts only
if its bytes and a margin are free.  Free is what the driver shows, minus the bytes reserved
for other restores in progress, minus the bytes requested by earlier waiters (first come,
first served).  While another restore copies, its bytes count twice (reserved, and no
longer free), which errs on the safe side.

If the limits of the running leases on a device do not all fit beside the restore, these leases
could take the memory between the check and the restore.  The library then pauses their
allocations until the restore is over (`HelperLease.allocations_paused`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from jupyter_gpushare.gibibytes import compared
from jupyter_gpushare.gpu.driver.nvml import Nvml
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.protocol.helper import Phase, Refusal

log = logging.getLogger(__name__)

# The driver may free memory a moment after an exit or a checkpoint.
FREE_WAIT_S = 2.0
POLL_S = 0.02
# By then an allocation that passed the library before the pause has reached the driver.
SETTLE_S = 0.02


class MoveRefused(Exception):
    """A move must be undone and answered with this refusal."""

    def __init__(self, refused: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.refused = refused
        self.reason = reason


class MemoryReservations:
    """Reserves free device memory of this machine for restores."""

    def __init__(self, nvml: Nvml, devices: DeviceStates, registry: LeaseRegistry) -> None:
        self._nvml = nvml
        self._devices = devices
        self._registry = registry
        self._changed = threading.Condition()
        self._reserved = Counter[str]()
        self._waiting: list[Mapping[str, int]] = []

    @contextmanager
    def reserve(self, saved: Mapping[str, int], timeout_s: float) -> Iterator[None]:
        """Reserve these bytes by device until the block ends.

        Wait at most `FREE_WAIT_S`, or ``timeout_s`` while other restores are in progress.

        Raises:
            MoveRefused: the driver does not show enough free memory (`Refusal.NO_MEMORY`).
            DeviceError: the driver does not answer.
        """
        with self._changed:
            self._take(saved, timeout_s)
        try:
            with self._allocations_paused(saved):
                yield
        finally:
            with self._changed:
                self._reserved.subtract(saved)
                self._changed.notify_all()

    def _take(self, saved: Mapping[str, int], timeout_s: float) -> None:
        began = time.monotonic()
        self._waiting.append(saved)
        try:
            while reason := self._shortage(saved, self._requested_before(saved)):
                others = any(self._reserved[uuid] for uuid in saved)
                wait_s = timeout_s if others else min(timeout_s, FREE_WAIT_S)
                if time.monotonic() - began >= wait_s:
                    raise MoveRefused(Refusal.NO_MEMORY, reason)
                self._changed.wait(POLL_S)
            self._reserved.update(saved)
        finally:
            self._waiting = [each for each in self._waiting if each is not saved]
            self._changed.notify_all()

    def _requested_before(self, saved: Mapping[str, int]) -> dict[str, int]:
        """Return the bytes reserved, plus the bytes requested by earlier waiters, by device."""
        taken = self._reserved.copy()
        for each in self._waiting:
            if each is saved:
                break
            taken.update(each)
        return taken

    def _shortage(self, saved: Mapping[str, int], taken: Mapping[str, int]) -> str:
        """Return which device lacks how much free memory; "" if none does."""
        for uuid, count in saved.items():
            if not count:
                continue
            free = self._nvml.free_bytes(uuid) - taken.get(uuid, 0)
            margin = self._devices.margin_bytes(uuid, count)
            if free < count + margin:
                needs, kept, has = compared(count, margin, free)
                return f"{needs} (and a margin of {kept}) are needed on {uuid}, {has} are free"
        return ""

    @contextmanager
    def _allocations_paused(self, saved: Mapping[str, int]) -> Iterator[None]:
        """Pause the allocations of leases that could take the memory, then check the memory again.

        Raises:
            MoveRefused: they have taken it.
        """
        growing = self._growing(saved)
        with ExitStack() as stack:
            for lease in growing:
                log.info("lease=%s allocations wait for a restore on its device", lease.name)
                stack.enter_context(lease.allocations_paused())
            if growing:
                time.sleep(SETTLE_S)
                with self._changed:
                    others = {uuid: self._reserved[uuid] - count for uuid, count in saved.items()}
                    if reason := self._shortage(saved, others):
                        raise MoveRefused(Refusal.NO_MEMORY, reason)
            yield

    def _growing(self, saved: Mapping[str, int]) -> list[HelperLease]:
        """Return the running leases that could allocate the memory meant for the restore.

        Their whole limits count, because they may free the bytes that they hold and allocate them again.
        """
        running = [
            lease for lease in self._registry.all() if lease.phase is Phase.RUNNING and lease.processes
        ]
        return [
            lease
            for lease in running
            if any(
                lease.limits.get(uuid) and self._overcommitted(uuid, saved[uuid], running) for uuid in saved
            )
        ]

    def _overcommitted(self, uuid: str, count: int, running: list[HelperLease]) -> bool:
        gpu = next((each for each in self._nvml.gpus if each.uuid == uuid), None)
        if gpu is None or not count:
            return False
        pids = {process.pid for lease in running for process in lease.processes}
        usage = self._nvml.usage(uuid)
        # The driver does not list graphics sessions, and lists some processes without their bytes.
        listed = sum(held or 0 for pid, held in usage.processes.items() if pid in pids)
        others = max(0, usage.used_bytes - listed)
        # A host cannot allocate the bytes kept for its guest.
        limits = sum(
            lease.limits[uuid] - lease.kept_bytes_of(uuid) for lease in running if uuid in lease.limits
        )
        spare = self._devices.margin_bytes(uuid, gpu.memory_bytes)
        return others + limits + count + spare > gpu.memory_bytes
