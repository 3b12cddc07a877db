"""Why a lease cannot be suspended now, in words for its owner.

In this order: a dead process left memory (`leftovers`), the machine or the device cannot, the driver
is known to fail in the lease's container (`known`: the self-test sees all devices, and would not
notice), the driver failed at it lately, a process used something that the driver cannot checkpoint
(taints), its memory limit cannot hold the copy, the library is not loaded or the account file is
broken.  A failure of the driver is believed for a minute, then for twice as long each time it happens
again to the same process (`Lease.block`): retrying is harmless, retrying all the time is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from jupyter_gpushare.gpu.driver.known import note_of
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.files import Account, words_of
from jupyter_gpushare.gpu.leases.lease import Key, Lease
from jupyter_gpushare.gpu.leases.machine import Machine

# A checkpoint takes only the memory of living processes.
LEFT = "GPU memory of an ended process is kept by processes that it started"


class SuspendBlockers:
    """Answers why a lease cannot be suspended."""

    def __init__(self, machine: Machine, devices: DeviceStates) -> None:
        self._machine = machine
        self._devices = devices

    def reason(self, lease: Lease, account: Account | None, keys: Iterable[Key], *, forced: bool) -> str:
        """Why the lease cannot be suspended while the processes ``keys`` use the GPU; "" if it can.

        A ``forced`` suspension (of a job) needs neither the library nor its counters.  Where the
        driver does not say how many bytes a process holds, any living process may use the GPU.
        """
        if lease.left_bytes:
            return LEFT
        keys = set(keys)
        blind = bool(lease.processes) and any(self._devices.is_blind(uuid) for uuid in lease.limits)
        if not keys and not blind:
            return ""
        if reason := self._machine.checkpoint.unavailable:
            return reason
        for uuid in lease.limits:
            if reason := self._devices.suspend_blocker(uuid):
                return reason
        if reason := self._in_container(lease):
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

    def _in_container(self, lease: Lease) -> str:
        """Why the driver fails in the container of a lease, which has the devices of the lease alone."""
        driver, note = self._machine.nvml.driver, note_of(self._machine.nvml.driver)
        has_all = len(lease.limits) == len(self._machine.nvml.gpus) + len(self._machine.nvml.left_out)
        if note is None or not note.refused_in_containers or has_all:
            return ""
        if not any(map(self._machine.processes.is_contained, lease.processes)):
            return ""
        return f"driver {driver} cannot suspend in a container with some of the machine's GPUs"
