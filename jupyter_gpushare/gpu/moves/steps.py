"""The steps of a move, one process at a time, and what an error of the driver means.

Each step makes one checkpoint call for one process and handles its failures:

* The process ended: it leaves the move.  An exit, or a signal of `_ORDINARY_ENDS` (its
  server restarts a kernel with SIGKILL), counts as its user's doing.  Any other signal counts as
  the driver's (NVIDIA/cuda-checkpoint issue 58: Lock ended its target with SIGSEGV, 610.57.04).
  It is reported, and a second one makes the device not suspendable.  This also counts a process
  that crashes by itself within a call, and one whose parent took its status before the
  helper saw it (Linux before 6.15).  A device that lends nothing is better than kernels that end.
* The driver lost it: Restore answered 2 (out of memory), which is final, or one of
  `_LOST_WHEN_REPEATED` twice while the process stays CHECKPOINTED (issue 44), or its state is
  FAILED.  It goes to `HelperLease.lost` and is never tried again.
* Checkpoint failed: the driver "does not attempt to keep the process in a good state"
  (README of cuda-checkpoint).  Until the process has ended, its owner is warned that it may
  be damaged (`HelperLease.damaged`).
* A call hangs: `suspend` settles the lease later.
* Every call about it hangs or fails for the maximum duration of its copy (`copy_s`).  A helper that was
  killed within a call may leave driver and process out of step (checkpoint-restore/criu PR 2547).  The
  process goes to `HelperLease.lost`, and its devices are out of service until it has ended (`health`).

`suspend` has the order of steps.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver import denied
from jupyter_gpushare.gpu.driver.bounded import TIMED_OUT
from jupyter_gpushare.gpu.driver.checkpoint import CallNotMade, ProcessState
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.files import AccountFile
from jupyter_gpushare.gpu.leases.journal import Parked
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.reservations import MoveRefused
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import EventKind, Phase, Refusal

log = logging.getLogger(__name__)

GONE_WAIT_S = 10.0
# Maximum wait for another call to a device that the lease does not use.
OTHERS_WAIT_S = 0.2
# The driver may take this long to list a process on the device that it was restored on.
SHOWN_WAIT_S = 2.0
LOCK_TOOK_LONG = "locking the processes of the lease took too long"
NOT_MOVED = "the driver did not move it to the other device"
# Copies run at 3-10 GB/s; this much lower rate only catches a driver that hangs.
COPY_FLOOR_S = 30.0
COPY_BYTES_PER_S = 500_000_000
RETRIES = 3
LIBRARY_POLL_S = 0.001
# The used bytes on a device that no process explains may vary by this much while others allocate.
UNEXPLAINED_BYTES = 256 << 20

# CUDA error codes (cuda.h).
_OUT_OF_MEMORY = 2
_NOT_READY = 600  # the lock timed out
_INVALID_VALUE = 1
# INVALID_VALUE and NOT_INITIALIZED: the process does not use CUDA (ai-dynamo/snapshot PR 109,
# llm-d-rl-time-slicing PR 148).
_NO_CUDA_PROCESS = frozenset({_INVALID_VALUE, 3})
# INVALID_HANDLE and NOT_FOUND: it no longer uses CUDA after an exec, which leaves nothing on a device.
_AFTER_EXEC = frozenset({400, 500})
# Restore answers OPERATING_SYSTEM, NOT_SUPPORTED or UNKNOWN for a process that it lost, and
# INVALID_HANDLE or ILLEGAL_STATE for one that it reports as checkpointed.
_LOST_WHEN_REPEATED = frozenset({304, 400, 401, 801, 999})
LOST_AFTER = 2
# Signals of its user, of an administrator or of the kernel (out of memory).
_ORDINARY_ENDS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE})


class ProcessMoves:
    """Moves single processes of a lease; the caller holds the lease."""

    def __init__(
        self,
        machine: Machine,
        registry: LeaseRegistry,
        devices: DeviceStates,
        drain: Callable[[HelperLease], None],
    ) -> None:
        """``drain`` takes the devices of lost processes of a lease out of service."""
        self._machine = machine
        self._registry = registry
        self._devices = devices
        self._drain = drain

    def states(self, lease: HelperLease) -> dict[Key, ProcessState]:
        """Return the state of each process of the move; ended and lost processes leave the move.

        Raises:
            DeviceError: the driver fails, but not yet for long enough that the process counts as out of step.
        """
        alive = self._machine.processes.alive
        states: dict[Key, ProcessState] = {}
        for key in list(lease.parked):
            try:
                state = self._machine.checkpoint.state(key[0])
            except DeviceError as error:
                if alive(key) and not self._uses_no_cuda(lease, key, error):
                    self._lose_if_out_of_step(lease, key, error)
                else:
                    del lease.parked[key]
                continue
            if not alive(key):
                del lease.parked[key]
            elif state is ProcessState.FAILED:
                self._lose(lease, key, "the driver says that it failed")
            else:
                states[key] = state
                if state is not ProcessState.LOCKED:  # of a locked process, Unlock may be failing
                    lease.failing.pop(key, None)
        return states

    def on_devices(self, lease: HelperLease) -> dict[Key, dict[str, int]]:
        """Return the lease's processes that hold device memory now, with their bytes by device.

        A process that is listed without bytes only called cuInit and is left out.

        Raises:
            DeviceError: the driver does not answer.
        """
        owned = {process.pid: process.key for process in self._registry.living(lease.name)}
        found: dict[Key, dict[str, int]] = {}
        for gpu in self._machine.nvml.gpus:
            mine = gpu.uuid in lease.limits
            try:
                shown = self._machine.nvml.processes(gpu.uuid, None if mine else OTHERS_WAIT_S)
            except DeviceError:
                if mine:
                    raise
                continue  # a fault of another device
            for pid, count in shown.items():
                if pid in owned and count:
                    found.setdefault(owned[pid], {})[gpu.uuid] = count
        return found

    def refuse_unknown_bytes(
        self, lease: HelperLease, account: AccountFile | None, shown: Mapping[Key, Mapping[str, int]]
    ) -> None:
        """Refuse a move if the library counts bytes for a process on a device where the driver shows none.

        The process is then not suspended for a while.  The user can write such an account, so no device is
        doubted.

        Raises:
            MoveRefused: there is such a process.
        """
        living = {process.key for process in self._registry.living(lease.name)}
        for uuid in lease.limits:
            for key, counted in lease.counted_bytes(account, uuid, living).items():
                if counted and not shown.get(key, {}).get(uuid):
                    reason = f"the driver does not say how much memory process {key[0]} holds"
                    lease.block(key, reason)
                    raise MoveRefused(Refusal.NOT_SUSPENDABLE, reason)

    def wait_for_library(self, lease: HelperLease, keys: Collection[Key], timeout_s: float) -> bool:
        """Wait until the library's thread in these processes is out of the driver; return False on timeout.

        While leases take turns the thread asks the driver whether work has completed.  The driver ends a
        process that asks while it is checkpointed (`native/preload/preload_turns.c`).  The thread stops once
        it sees the phase.
        """
        deadline = time.monotonic() + timeout_s
        while any(slot.looking and slot.key in keys for slot in lease.files.turn_slots(all_slots=True)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(LIBRARY_POLL_S)
        return True

    def lock_all(self, lease: HelperLease, keys: Iterable[Key], deadline: float) -> None:
        """RUNNING -> LOCKED for every process; after a refusal the remaining ones leave the move.

        No call was made for the remaining processes, and the driver may refuse their state as well.

        Raises:
            MoveRefused: one did not come to rest in time, or the driver cannot lock it.
        """
        remaining = list(keys)
        while remaining:
            key = remaining.pop(0)
            try:
                self.lock(lease, key, deadline)
            except MoveRefused:
                for untouched in remaining:
                    lease.parked.pop(untouched, None)
                raise

    def lock(self, lease: HelperLease, key: Key, deadline: float) -> None:
        """RUNNING -> LOCKED; a process that ended or does not use CUDA leaves the move.

        Raises:
            MoveRefused: it did not come to rest in time, or the driver cannot lock it.
        """
        checkpoint = self._machine.checkpoint
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise MoveRefused(Refusal.BUSY, LOCK_TOOK_LONG)
        try:
            checkpoint.lock(key[0], remaining_s)
        except DeviceError as error:
            if self._ended(lease, key, "Lock"):
                return
            if self._uses_no_cuda(lease, key, error):
                lease.parked.pop(key, None)
                return
            if error.code in (_NOT_READY, TIMED_OUT):
                raise MoveRefused(Refusal.BUSY, f"process {key[0]} did not come to rest: {error}") from None
            reason = denied.explained(error, self._machine.nvml, lease.limits)
            self._failed(lease, key, f"the driver cannot lock it ({reason})")
            if error.code in denied.CODES | _AFTER_EXEC:
                lease.parked.pop(key, None)  # its state cannot be read either
            raise MoveRefused(Refusal.NOT_SUSPENDABLE, reason) from None
        if self._ended(lease, key, "Lock"):
            # The driver knows only pids, so a new process with this pid may have been locked.
            with suppress(DeviceError):
                checkpoint.unlock(key[0])

    def park(self, lease: HelperLease, key: Key) -> None:
        """LOCKED -> CHECKPOINTED; a process that ended leaves the move.

        Raises:
            MoveRefused: the driver failed; the process may be damaged.
            OSError: the record cannot be written.
        """
        if key not in lease.parked:
            return
        # From now on its device memory is host memory of the process, too much for a core file.
        before = self._machine.processes.core_filter(key)
        lease.parked[key] = replace(lease.parked[key], core_filter=before)
        if before > 0:
            self.save(lease)
            self._machine.processes.set_core_filter(key, 0)
        self.checkpoint(lease, key)

    def checkpoint(self, lease: HelperLease, key: Key) -> None:
        """LOCKED -> CHECKPOINTED only, without the core file; a process that ended leaves the move.

        Raises:
            MoveRefused: the driver failed and the process may be damaged, or the record cannot be written.
            DeviceError: the driver does not say which devices the process is on.
        """
        if key not in lease.parked:
            return
        if lease.parked[key].devices:
            self._note_place(lease, key)
        try:
            self._machine.checkpoint.checkpoint(key[0], copy_s(lease.parked[key]))
        except DeviceError as error:
            if self._ended(lease, key, "Checkpoint"):
                return
            why = denied.explained(error, self._machine.nvml, lease.limits)
            reason = f"the driver failed to checkpoint it ({why})"
            if error.code != TIMED_OUT:  # after a timeout the call may still succeed
                reason += ": its GPU state may be damaged"
                alive = self._machine.processes.alive
                lease.damaged = {each for each in lease.damaged if alive(each)} | {key}
            self._failed(lease, key, reason)
            raise MoveRefused(Refusal.NOT_SUSPENDABLE, reason) from None

    def unexplained(self, lease: HelperLease) -> dict[str, int]:
        """Return the used bytes on each device of the lease that no listed process holds.

        Raises:
            DeviceError: the driver does not answer.
        """
        return {uuid: self._machine.nvml.usage(uuid).unexplained_bytes for uuid in lease.limits}

    def wait_gone(self, lease: HelperLease, unexplained_before: dict[str, int]) -> None:
        """Wait until the driver shows no memory of the parked processes, neither by process nor as used.

        Raises:
            MoveRefused: it still does after `GONE_WAIT_S`.
            DeviceError: the driver does not answer.
        """
        deadline = time.monotonic() + GONE_WAIT_S
        while True:
            listed = self.on_devices(lease).keys() & lease.parked.keys()
            now = self.unexplained(lease)
            taken = [u for u, count in now.items() if count > unexplained_before[u] + UNEXPLAINED_BYTES]
            if not listed and not taken:
                return
            if time.monotonic() > deadline:
                raise MoveRefused(Refusal.BUSY, "the driver still shows the memory of the lease")
            time.sleep(0.01)

    def restore_all(self, lease: HelperLease) -> None:
        """CHECKPOINTED -> LOCKED for every process; a process that the driver lost goes to ``lease.lost``.

        Raises:
            DeviceError: the first error for a process that is still checkpointed and not lost.
            MoveRefused: the driver cannot restore a process on the devices of the lease; a retry is useless.
        """
        for key, state in self.states(lease).items():
            if state is ProcessState.CHECKPOINTED and key in lease.parked:
                self._restore(lease, key)

    def _restore(self, lease: HelperLease, key: Key) -> None:
        """Restore a process on the devices of the lease.

        Raises:
            DeviceError: the first error, if the process is still checkpointed and not lost.
            MoveRefused: the driver refuses the list of devices, or restored the process on others.
        """
        first: DeviceError | None = None
        repeated = invalid = 0
        maps = _maps(lease, lease.parked[key])
        for attempt in range(RETRIES):
            try:
                moves = maps[min(attempt, len(maps) - 1)]
                self._machine.checkpoint.restore(key[0], copy_s(lease.parked[key]), moves)
                break
            except DeviceError as error:
                if first is None:
                    first = error
                    log.error("lease=%s process=%d restore failed: %s", lease.name, key[0], error)
                if self._ended(lease, key, "Restore"):
                    return
                invalid += error.code == _INVALID_VALUE
                repeated += error.code in _LOST_WHEN_REPEATED
                # `states` handles a failed process; a retry makes sense only if nothing has changed.
                if self.states(lease).get(key) is not ProcessState.CHECKPOINTED:
                    break
                if error.code == _OUT_OF_MEMORY or repeated >= LOST_AFTER:
                    self._lose(lease, key, str(first))
                    return
        else:
            assert first is not None
            if lease.parked[key].devices and invalid == RETRIES:
                raise MoveRefused(Refusal.NOT_SUSPENDABLE, str(first))
            raise first
        if not self.has_arrived(lease, key):
            for uuid in lease.limits:
                self._devices.doubt(uuid)
            raise MoveRefused(Refusal.NOT_SUSPENDABLE, NOT_MOVED)

    def has_arrived(self, lease: HelperLease, key: Key) -> bool:
        """Return whether a process that was checkpointed on other devices is now on those of its lease.

        The process is not checkpointed.  The driver's list of processes may lag behind its memory: if it does
        not list the process within `SHOWN_WAIT_S`, a successful Restore is taken for an arrival.

        Raises:
            DeviceError: the driver does not answer.
        """
        if key not in lease.parked or not lease.parked[key].devices:
            return True
        deadline = time.monotonic() + SHOWN_WAIT_S
        while not (found := self.on_devices(lease).get(key)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not found or found.keys() <= lease.limits.keys()

    def _note_place(self, lease: HelperLease, key: Key) -> None:
        """Record that a process has arrived on the devices of its lease, before it is checkpointed again.

        Raises:
            MoveRefused: the record cannot be written; nothing changed.
            DeviceError: the driver does not answer.
        """
        if not self.has_arrived(lease, key):
            return
        before = lease.parked[key]
        lease.parked[key] = replace(before, devices=())
        try:
            self.save(lease)
        except MoveRefused:
            lease.parked[key] = before
            raise

    def unlock(self, lease: HelperLease, key: Key) -> None:
        """LOCKED -> RUNNING; retry while the process stays locked.

        Raises:
            DeviceError: it is still locked.
        """
        for attempt in range(RETRIES):
            try:
                self._machine.checkpoint.unlock(key[0])
                return
            except DeviceError as error:
                if self.states(lease).get(key) is not ProcessState.LOCKED:
                    return
                if attempt == RETRIES - 1:
                    self._lose_if_out_of_step(lease, key, error)

    def save(self, lease: HelperLease, phase: Phase | None = None) -> None:
        """Write the lease to the journal with ``phase`` (default: its current phase).

        Raises:
            MoveRefused: the disk refused it; the caller must not begin the move.
        """
        lease.unsaved = False  # first, because the sampler may set it again during the write
        try:
            self._machine.state.save(replace(lease.record(), phase=phase or lease.phase))
        except OSError as error:
            lease.unsaved = True
            raise MoveRefused(Refusal.BUSY, f"the state directory cannot be written: {error}") from None

    def _uses_no_cuda(self, lease: HelperLease, key: Key, error: DeviceError) -> bool:
        """Return whether an error means that a process does not use CUDA, or no longer does.

        Raises:
            DeviceError: the driver does not answer.
        """
        if error.code in _AFTER_EXEC:
            return not any(self._machine.nvml.processes(uuid).get(key[0]) for uuid in lease.limits)
        return error.code in _NO_CUDA_PROCESS

    def _lose_if_out_of_step(self, lease: HelperLease, key: Key, error: DeviceError) -> None:
        """Lose a process if driver calls about it have failed for the maximum duration of its copy.

        Raises:
            DeviceError: ``error``, if they have not yet, or if the helper itself cannot make the call.
        """
        if (
            self._machine.checkpoint.unavailable
            or isinstance(error, CallNotMade)
            or denied.is_of_helper(error)
        ):
            raise error
        began_at = lease.failing.setdefault(key, time.monotonic())
        if time.monotonic() - began_at < copy_s(lease.parked[key]):
            raise error
        lease.parked[key] = replace(lease.parked[key], out_of_step=True)
        self._lose(lease, key, str(error))
        self._drain(lease)  # before anybody reads that the lease is lost

    def runs_again(self, process: Parked) -> bool:
        """Return whether a process that was lost as out of step runs after all; unlock it if it is locked."""
        checkpoint = self._machine.checkpoint
        try:
            if process.out_of_step and checkpoint.state(process.pid) is ProcessState.LOCKED:
                if process.core_filter > 0:
                    self._machine.processes.set_core_filter(process.key, process.core_filter)
                checkpoint.unlock(process.pid)
            return process.out_of_step and checkpoint.state(process.pid) is ProcessState.RUNNING
        except DeviceError:
            return False

    def _lose(self, lease: HelperLease, key: Key, why: str) -> None:
        log.error(
            "lease=%s process=%d its GPU state is lost (%s): restart the kernel or job",
            lease.name, key[0], why,
        )  # fmt: skip
        lease.failing.pop(key, None)
        lease.lost[key] = lease.parked.pop(key)

    def _ended(self, lease: HelperLease, key: Key, call: str) -> bool:
        """Return whether the process has ended; report it if the driver ended it within ``call``."""
        if self._machine.processes.alive(key):
            return False
        parked = lease.parked.pop(key, None)
        status = self._machine.processes.exit_status(key)
        if status is not None and _is_ordinary(status):
            log.info("lease=%s process=%d ended within %s, wait status %d", lease.name, key[0], call, status)
        elif parked is not None:
            reason = f"process {key[0]} ended within {call} of the driver"
            for uuid in parked.saved_bytes or lease.limits:
                deaths = self._devices.count_death(uuid)
                log.error("lease=%s device=%s %s (%d so far)", lease.name, uuid, reason, deaths)
                self._machine.events.publish(
                    EventKind.DRIVER_KILLED, lease=lease.name, device=uuid, reason=reason
                )
                self._devices.doubt(uuid)
            # At once, because the helper may be killed next.
            with suppress(OSError):
                self._machine.state.save_devices(self._devices.saved())
        return True

    def _failed(self, lease: HelperLease, key: Key, reason: str) -> None:
        log.error("lease=%s process=%d %s", lease.name, key[0], reason)
        lease.block(key, reason)
        for uuid in lease.parked[key].saved_bytes if key in lease.parked else lease.limits:
            self._devices.doubt(uuid)


def _maps(lease: HelperLease, parked: Parked) -> list[Mapping[str, str]]:
    """Return the device maps to try in a restore, from old to new UUID; the driver may refuse some.

    A map must name every device that the process used.  Whether it must, may or must not name other devices
    that the process sees is unknown; trying a refused map (INVALID_VALUE) loses nothing.
    """
    if not parked.devices:
        return [{}]
    place = dict(zip(parked.devices, lease.limits, strict=True))
    back = dict(zip(lease.limits, parked.devices, strict=True))
    used = {back[uuid]: uuid for uuid, count in parked.saved_bytes.items() if count}
    return [place] if len(used) == len(place) else [place, used]


def copy_s(parked: Parked) -> float:
    """Return the maximum duration in seconds of a copy of the bytes that a process holds."""
    return COPY_FLOOR_S + sum(parked.saved_bytes.values()) / COPY_BYTES_PER_S


def _is_ordinary(status: int) -> bool:
    """Return whether a wait status shows an exit or one of `_ORDINARY_ENDS`."""
    return os.WIFEXITED(status) or os.WTERMSIG(status) in _ORDINARY_ENDS
