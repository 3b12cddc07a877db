"""The steps of a move, one process at a time, and what the driver says about them.

Each step asks the driver for one thing and sorts out what may go wrong with that
process: it ended (then it leaves the move), it was lost, the driver refused (which
is remembered, `hindrance`), or a call hangs.  The order of steps is `suspend`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from ..errors import DeviceError
from .bounded import TIMED_OUT
from .checkpoint import Checkpoint, State
from .hindrance import Hindrances
from .journal import Parked
from .lease import Key, Lease
from .nvml import Nvml
from .processes import Processes
from .room import Undo
from .verbs import Phase, Refusal

GONE_WAIT_S = 10.0
# How long a device is waited for that the lease has no business with.
OTHERS_TURN_S = 0.2
# Copies run at 3-10 GB/s; a bound far above that only catches a driver that hangs.
COPY_FLOOR_S = 30.0
COPY_BYTES_PER_S = 500_000_000
RETRIES = 3
# What GetState answers for a process that does not use CUDA (any more, after an exec):
# CUDA_ERROR_INVALID_VALUE, NOT_INITIALIZED, INVALID_HANDLE, NOT_FOUND.
_NO_CUDA_PROCESS = frozenset({1, 3, 400, 500})
_NOT_READY = 600  # CUDA_ERROR_NOT_READY: the lock timed out


class Steps:
    """Moves single processes of a lease; the lease is held by the caller."""

    def __init__(
        self,
        *,
        nvml: Nvml,
        checkpoint: Checkpoint,
        processes: Processes,
        leases: Callable[[], Iterable[Lease]],
        hindrances: Hindrances,
        on_driver_error: Callable[[str], None],
        save: Callable[[Lease], None],
        step: Callable[[str], None],
    ) -> None:
        """``save`` writes a lease down; ``on_driver_error`` is told of devices, ``step`` of each step."""
        self._nvml = nvml
        self._checkpoint = checkpoint
        self._processes = processes
        self._leases = leases
        self._hindrances = hindrances
        self._on_driver_error = on_driver_error
        self._save = save
        self._step = step

    def states(self, lease: Lease) -> dict[Key, State]:
        """Where each process of the move is; those that ended or were lost leave the move.

        Raises:
            DeviceError: the driver does not answer.
        """
        states: dict[Key, State] = {}
        for key in list(lease.parked):
            try:
                state = self._checkpoint.state(key[0])
            except DeviceError as error:
                if self._processes.alive(key) and error.code not in _NO_CUDA_PROCESS:
                    raise
                del lease.parked[key]
                continue
            if not self._processes.alive(key):
                del lease.parked[key]
            elif state is State.FAILED:
                lease.lost[key] = lease.parked.pop(key)
            else:
                states[key] = state
        return states

    def on_devices(self, lease: Lease) -> dict[Key, dict[str, int]]:
        """The lease's processes that the driver shows on a device, with their bytes, now."""
        owned = {
            process.pid: process.key
            for process in self._processes.scan({each.name: each.uid for each in self._leases()}).get(
                lease.name, ()
            )
        }
        found: dict[Key, dict[str, int]] = {}
        for gpu in self._nvml.gpus:
            mine = gpu.uuid in lease.limits
            try:
                shown = self._nvml.processes(gpu.uuid, None if mine else OTHERS_TURN_S)
            except DeviceError:
                if mine:
                    raise
                continue  # another device's trouble
            for pid, count in shown.items():
                if pid in owned:
                    found.setdefault(owned[pid], {})[gpu.uuid] = count
        return found

    def locked(self, lease: Lease) -> set[Key]:
        """Which processes are locked already, because the lease was."""
        if lease.before is not Phase.LOCKED:
            return set()
        return {key for key, state in self.states(lease).items() if state is State.LOCKED}

    def lock(self, lease: Lease, key: Key, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise Undo(Refusal.BUSY, "locking the processes of the lease took too long")
        try:
            self._checkpoint.lock(key[0], left_s)
        except DeviceError as error:
            if not self._processes.alive(key):
                lease.parked.pop(key, None)
                return
            if error.code in (_NOT_READY, TIMED_OUT):
                raise Undo(Refusal.BUSY, f"process {key[0]} did not come to rest: {error}") from None
            self._failed(lease, key, f"the driver cannot lock it ({error})")
            raise Undo(Refusal.NOT_SUSPENDABLE, str(error)) from None
        if not self._processes.alive(key):
            # The driver knows pids only: another process that has this one by now would stay locked.
            with suppress(DeviceError):
                self._checkpoint.unlock(key[0])
            lease.parked.pop(key, None)

    def park(self, lease: Lease, key: Key) -> None:
        if key not in lease.parked:
            return
        # Its device memory is host memory of the process from here on: too much for a core file.
        before = self._processes.core_filter(key)
        lease.parked[key] = replace(lease.parked[key], core_filter=before)
        if before > 0:
            self._save(lease)
            self._processes.set_core_filter(key, 0)
        try:
            self._checkpoint.checkpoint(key[0], copy_s(lease.parked[key]))
        except DeviceError as error:
            if not self._processes.alive(key):
                lease.parked.pop(key, None)
                return
            self._failed(lease, key, f"the driver failed to checkpoint it ({error})")
            raise Undo(Refusal.NOT_SUSPENDABLE, str(error)) from None
        self._step("suspend:one")

    def wait_gone(self, lease: Lease) -> None:
        deadline = time.monotonic() + GONE_WAIT_S
        while self.on_devices(lease).keys() & lease.parked.keys():
            if time.monotonic() > deadline:
                raise Undo(Refusal.BUSY, "the driver still shows the memory of the lease")
            time.sleep(0.01)

    def restore_all(self, lease: Lease) -> None:
        """CHECKPOINTED -> LOCKED for every process; what the driver loses goes to ``lease.lost``.

        Raises:
            DeviceError: a process is still checkpointed, or the driver does not say.
        """
        for key, state in self.states(lease).items():
            if state is not State.CHECKPOINTED or key not in lease.parked:
                continue
            for attempt in range(RETRIES):
                try:
                    self._checkpoint.restore(key[0], copy_s(lease.parked[key]))
                    break
                except DeviceError:
                    # Gone and lost ones are sorted out by their states; tried again
                    # only where the driver says that nothing has changed.
                    if self.states(lease).get(key) is not State.CHECKPOINTED:
                        break
                    if attempt == RETRIES - 1:
                        raise
            self._step("resume:one")

    def unlock(self, lease: Lease, key: Key) -> None:
        for attempt in range(RETRIES):
            try:
                self._checkpoint.unlock(key[0])
                return
            except DeviceError:
                if self.states(lease).get(key) is not State.LOCKED:
                    return
                if attempt == RETRIES - 1:
                    raise

    def _failed(self, lease: Lease, key: Key, reason: str) -> None:
        self._hindrances.failed(lease, key, reason)
        for uuid in lease.parked[key].saved_bytes if key in lease.parked else lease.limits:
            self._on_driver_error(uuid)


def copy_s(parked: Parked) -> float:
    """The bound on a copy of what a process holds."""
    return COPY_FLOOR_S + sum(parked.saved_bytes.values()) / COPY_BYTES_PER_S
