"""Why a lease cannot be suspended now, in words for its owner.

In this order: the machine or the device cannot, the driver failed at it lately,
a process used something that the driver cannot checkpoint (taints), its memory limit
cannot hold the copy, the library is not loaded or the account file is broken.  A failure
of the driver is believed for a minute, then for twice as long each time it happens again
to the same process (`Lease.block`): retrying is harmless, retrying all the time is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from jupyter_gpushare.gpu.driver.checkpoint import Checkpoint
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.files import Account, words_of
from jupyter_gpushare.gpu.leases.lease import Key, Lease


class SuspendBlockers:
    """Answers why a lease cannot be suspended."""

    def __init__(self, checkpoint: Checkpoint, devices: DeviceStates) -> None:
        self._checkpoint = checkpoint
        self._devices = devices

    def reason(self, lease: Lease, account: Account | None, keys: Iterable[Key], *, forced: bool) -> str:
        """Why the lease cannot be suspended while the processes ``keys`` use the GPU; "" if it can.

        A ``forced`` suspension (of a job) needs neither the library nor its counters.  Where the
        driver does not say how many bytes a process holds, any living process may use the GPU.
        """
        keys = set(keys)
        blind = bool(lease.processes) and any(self._devices.is_blind(uuid) for uuid in lease.limits)
        if not keys and not blind:
            return ""
        if self._checkpoint.unavailable:
            return self._checkpoint.unavailable
        for uuid in lease.limits:
            if reason := self._devices.suspend_blocker(uuid):
                return reason
        now = time.monotonic()
        for key, failure in list(lease.failures.items()):
            if key in keys and failure.until > now:
                return failure.reason
        slots = {(slot.pid, slot.start_ticks): slot for slot in account.slots} if account else {}
        if words := words_of(slot.taints for key, slot in slots.items() if key in keys):
            return f"it uses {words}"
        if lease.memory_too_small:
            return lease.memory_too_small
        if not forced and account is None:
            return "its account file is broken"
        if not forced and not keys <= slots.keys():
            return "a process in it does not load the library that limits memory"
        return ""
