"""Move the device memory of one lease to host memory and back.

Suspend:  decide -> journal -> page SUSPENDING -> Lock all -> counters -> Checkpoint all
          -> counters -> device memory free -> journal -> page SUSPENDED
Resume:   reserve -> journal -> Restore all -> Unlock all -> page RUNNING -> journal
          (on other devices, first: from and to in the journal -> limit page, cgroup)

Rules:

* The decision to suspend includes the counters of CUDA calls.  If a counter has changed after
  Lock or after Checkpoint, the owner works again: the move is undone and the answer is
  *wanted*.  A forced suspension ignores the counters.
* A restore starts only if the driver shows its bytes plus a margin free on every
  device (`reservations`).  A restore that runs out of memory loses the process for ever.
* Memory counts as free only when the driver no longer shows it, neither by process
  nor as used.
* The state of a process always comes from the driver (GetState).  `settle` brings
  a lease from any mixture of states to RUNNING or SUSPENDED.  It ends a failed move,
  adopts what the last helper left, and is repeated while a driver call hangs.
* A process that ended leaves the move.  This module kills no process.
* A lease that resumes on other devices owns them from the journal on (`HelperLease.put_on`), and gets the
  old ones back if the resume fails.  After an interruption the driver decides: the lease is on the new
  devices if NVML shows that a process was restored there, otherwise it is suspended on the old ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.checkpoint import ProcessState
from jupyter_gpushare.gpu.driver.known import note_of
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.files import NO_TURNS, AccountFile, counters_of, words_of
from jupyter_gpushare.gpu.leases.lease import PAGE, HelperLease, added, parked_of
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.places import Places
from jupyter_gpushare.gpu.moves.reservations import FREE_WAIT_S, MemoryReservations, MoveRefused
from jupyter_gpushare.gpu.moves.steps import LOCK_TOOK_LONG, ProcessMoves
from jupyter_gpushare.gpu.os.process_memory import ProcessMemoryReader, shares_memory_of_nccl
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import EventKind, MoveResult, Phase, Refusal

log = logging.getLogger(__name__)


# ---- why a lease cannot be suspended now, as text for its owner --------------
# Checked in this order: a dead process left memory (`leftovers`); the machine or the device cannot; the
# driver is known to fail in the lease's container (`known`; the self-test has all devices and would not
# notice); the driver failed at it recently; a process used something that the driver cannot checkpoint
# (taints); its memory limit cannot hold the copy; the library is not loaded or the account file is
# broken.  A failure of the driver counts for a minute, and twice as long each time it happens again
# to the same process (`HelperLease.block`): retrying is harmless, but retrying all the time is not.

# A checkpoint moves only the memory of living processes.
MEMORY_KEPT = "GPU memory of an ended process is kept by processes that it started"


class SuspendBlockers:
    """Finds out why a lease cannot be suspended."""

    def __init__(self, machine: Machine, devices: DeviceStates) -> None:
        self._machine = machine
        self._devices = devices

    def reason(
        self, lease: HelperLease, account: AccountFile | None, keys: Iterable[Key], *, forced: bool
    ) -> str:
        """Return why the lease cannot be suspended while the processes ``keys`` use the GPU; "" if it can.

        A ``forced`` suspension (of a job) needs neither the library nor its counters.  If the
        driver does not report the bytes of processes, any living process may use the GPU.
        """
        if lease.leftover_bytes:
            return MEMORY_KEPT
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
        slots = account.slots if account else {}
        if words := words_of(slot.taints for key, slot in slots.items() if key in keys):
            return f"it uses {words}"
        if lease.memory_too_small:
            return lease.memory_too_small
        if not forced and account is None:
            return "its account file is broken"
        if not forced and not keys <= slots.keys():
            return "a process in it does not load the library that limits memory"
        return ""

    def _in_container(self, lease: HelperLease) -> str:
        """Return why the driver fails in a container that has only the devices of the lease, or ""."""
        driver, note = self._machine.nvml.driver, note_of(self._machine.nvml.driver)
        has_all = len(lease.limits) == len(self._machine.nvml.gpus) + len(self._machine.nvml.left_out)
        if note is None or not note.refused_in_containers or has_all:
            return ""
        if not any(map(self._machine.processes.is_contained, lease.processes)):
            return ""
        return f"driver {driver} cannot suspend in a container with some of the machine's GPUs"


# ---- moves -------------------------------------------------------------------

# The next round moves a process that appears after the list was read and before the page is written.
ROUNDS = 3
# Maximum wait for a read of the memory of its processes.
SHARING_WAIT_S = 1.0
# Maximum waits for the library's thread, before and after Lock (`ProcessMoves.wait_for_library`).  The thread
# sees the phase within a millisecond, but may be in a call that Lock holds.
LIBRARY_BEFORE_LOCK_S = 0.2
LIBRARY_WAIT_S = 1.0
IN_HOST_MEMORY = (Phase.SUSPENDED, Phase.RESUMING)
LOST = "its GPU memory could not be brought back: restart the kernel or job"
UNFINISHED = "the driver has not finished an earlier move of this lease"


class Mover:
    """Suspends and resumes leases; safe to call from several threads."""

    def __init__(
        self,
        machine: Machine,
        registry: LeaseRegistry,
        devices: DeviceStates,
        drain: Callable[[HelperLease], None],
        parks_before_kill: bool = False,
    ) -> None:
        """``drain``: see `ProcessMoves`; ``parks_before_kill``: suspend a lease before it is killed."""
        self.parks_before_kill = parks_before_kill
        self._machine = machine
        self._registry = registry
        self._devices = devices
        self.blockers = SuspendBlockers(machine, devices)
        self._sharing = ProcessMemoryReader(shares_memory_of_nccl)
        self._processes = ProcessMoves(machine, registry, devices, drain)
        self._reservations = MemoryReservations(machine.nvml, devices, registry)
        self._places = Places(machine, registry, devices)

    def reserve(self, needed: Mapping[str, int], timeout_s: float) -> AbstractContextManager[None]:
        """Reserve bytes by device for a restore outside any lease (`MemoryReservations.reserve`)."""
        return self._reservations.reserve(needed, timeout_s)

    def held_bytes(self) -> int:
        """Return the bytes that all leases hold in host memory."""
        leases = [lease for lease in self._registry.all() if lease.phase in IN_HOST_MEMORY]
        return sum(sum(lease.saved_bytes.values()) for lease in leases)

    # Verbs

    def suspend(self, lease: HelperLease, calls: str, timeout_s: float) -> MoveResult:
        """Move the lease's device memory to host memory and return the result; the caller holds the lease."""
        return self._move(
            lease, Phase.RUNNING, Phase.SUSPENDED, lambda: self._suspend(lease, calls, timeout_s)
        )

    def resume(self, lease: HelperLease, timeout_s: float, devices: Sequence[str] = ()) -> MoveResult:
        """Copy the lease's memory back to its devices and return the result; the caller holds the lease.

        ``devices``, if any, are other devices to resume on, in the order of its own.
        """
        moved = self._move(
            lease, Phase.SUSPENDED, Phase.RUNNING, lambda: self._resume(lease, timeout_s, devices)
        )
        if moved.done and devices and list(devices) != list(lease.limits):
            return refusal(Refusal.BUSY, "it runs: only what is suspended moves to another device")
        return moved

    def _move(self, lease: HelperLease, start: Phase, end: Phase, move: Callable[[], int]) -> MoveResult:
        """Return the result of ``move``, which brings a lease from ``start`` to ``end`` and returns bytes."""
        began = time.monotonic()
        if lease.unsettled:
            self.settle(lease)
        if lease.phase is end:
            return MoveResult(done=True, bytes=sum(lease.saved_bytes.values()))
        if lease.phase is Phase.LOST:
            return refusal(Refusal.LOST, LOST)
        if lease.phase is not start:
            return refusal(Refusal.BUSY, UNFINISHED)
        for uuid in lease.limits:
            if reason := self._devices.out_of_service(uuid):
                return refusal(Refusal.BUSY, f"the device is out of service: {reason}")
        try:
            moved_bytes = move()
        except MoveRefused as error:
            return refusal(error.refused, error.reason)
        except DeviceError as error:
            return refusal(Refusal.BUSY, str(error))
        return MoveResult(done=True, bytes=moved_bytes, took_s=round(time.monotonic() - began, 4))

    def adopt(self, lease: HelperLease) -> None:
        """Settle a lease of an earlier helper."""
        was_asleep = lease.phase is Phase.SUSPENDED
        if lease.phase not in (Phase.RUNNING, Phase.LOST):
            self.settle(lease)
        if was_asleep and lease.phase is Phase.RUNNING:
            # Its resume could not be written, and a broker may not know of it.
            lease.unconfirmed = True
            self.save_again(lease)
        lease.files.set_phase(PAGE[lease.phase])
        lease.take_turn(NO_TURNS, lease.ahead_us)
        log.info("lease=%s adopted phase=%s processes=%d", lease.name, lease.phase, len(lease.processes))

    def settle(self, lease: HelperLease) -> None:
        """End an interrupted move of a lease, by the states that the driver reports.

        The lease ends up suspended if every process is checkpointed, running otherwise.  While
        ``lease.unsettled`` is set, call this again.
        """
        try:
            states = self._processes.states(lease)
            if lease.phase is Phase.SUSPENDED and not states and not lease.lost:
                # It held no device memory, or its processes have ended.
                lease.unsettled, lease.failing = False, {}
                return
            if any(
                state in (ProcessState.CHECKPOINTING, ProcessState.RESTORING) for state in states.values()
            ):
                lease.unsettled = True
                return
            if not all(
                self._processes.has_arrived(lease, key)
                for key, state in states.items()
                if state is not ProcessState.CHECKPOINTED
            ):
                self._park_again(lease)
                states = self._processes.states(lease)
            parked = [key for key, state in states.items() if state is ProcessState.CHECKPOINTED]
            if lease.parked and len(parked) == len(states) and not lease.lost:
                self._enter(lease, Phase.SUSPENDED, "found checkpointed")
            elif not parked:
                self._finish_running(lease, "found in device memory")
            else:
                self._settle_mixed(lease, parked)
            lease.unsettled = False
        except (DeviceError, MoveRefused) as error:
            if not lease.unsettled:
                log.warning("lease=%s phase=%s unsettled: %s", lease.name, lease.phase, error)
            lease.unsettled = True

    def save_again(self, lease: HelperLease) -> None:
        """Write the lease to the journal again; a failure is noted in ``lease.unsaved``."""
        with suppress(MoveRefused):
            self._processes.save(lease)

    def forget_lost(self, lease: HelperLease) -> None:
        """End the LOST phase of a lease once its lost processes have ended or run after all."""
        lost = {key: each for key, each in lease.lost.items() if self._machine.processes.alive(key)}
        lease.lost = {key: each for key, each in lost.items() if not self._processes.runs_again(each)}
        if not lease.lost:
            self._enter(lease, Phase.RUNNING, "the lost processes have ended or run again")

    # Suspend

    def _suspend(self, lease: HelperLease, calls: str, timeout_s: float) -> int:
        reason = "idle" if calls else "forced"
        deadline = time.monotonic() + timeout_s
        found = self._movable(lease, calls)
        by_pid = {pid: sum(saved.values()) for (pid, _), saved in found.items()}
        with self._machine.host.promise(by_pid, self.held_bytes(), lease.name) as shortage:
            if shortage:
                raise MoveRefused(Refusal.HOST_MEMORY, shortage)
            try:
                self._enter(lease, Phase.SUSPENDING, reason)
                self._park(lease, calls, deadline)
            except (MoveRefused, DeviceError) as error:
                if lease.phase is Phase.SUSPENDING:
                    self._undo_suspend(lease)
                if lease.phase is Phase.SUSPENDED:  # it could not be undone; the next resume brings it back
                    return sum(lease.saved_bytes.values())
                if isinstance(error, DeviceError):
                    raise MoveRefused(Refusal.BUSY, str(error)) from None
                raise
        self._enter(lease, Phase.SUSPENDED, reason)
        return sum(lease.saved_bytes.values())

    def _movable(self, lease: HelperLease, calls: str) -> dict[Key, dict[str, int]]:
        """Return the processes to move, with their bytes by device.

        Raises:
            MoveRefused: something blocks the suspension.
            DeviceError: the driver does not answer.
        """
        account = lease.files.account()
        if calls:
            _check_calls(account, calls)
        found = self._processes.on_devices(lease)
        keys = set(found)
        if any(self._devices.is_blind(uuid) for uuid in lease.limits):
            # Any process of the lease may hold memory, and the last sample may have missed some.
            keys |= {process.key for process in self._registry.living(lease.name)}
        if reason := self.blockers.reason(lease, account, keys, forced=not calls):
            raise MoveRefused(Refusal.NOT_SUSPENDABLE, reason)
        self._processes.refuse_unknown_bytes(lease, account, found)
        under_mps = self._machine.nvml.under_mps
        if any(pid in under_mps(uuid) for (pid, _), held in found.items() for uuid in held):
            raise MoveRefused(Refusal.NOT_SUSPENDABLE, "it runs under MPS")
        requested_at = time.monotonic()
        answers = self._sharing.read(dict.fromkeys(found, lease.asked.uid), SHARING_WAIT_S)
        sharing = {key: answer.value for key, answer in answers.items() if answer.began_at >= requested_at}
        if silent := found.keys() - sharing.keys():
            raise MoveRefused(Refusal.BUSY, f"process {min(silent)[0]} does not answer")
        if any(sharing.values()):
            raise MoveRefused(Refusal.NOT_SUSPENDABLE, "it uses NCCL between processes")
        return needed_bytes(lease, account, found)

    def _park(self, lease: HelperLease, calls: str, deadline: float) -> None:
        """Lock and checkpoint every process of the lease that is on a device."""
        done: set[Key] = set()
        unexplained = self._processes.unexplained(lease)
        for attempt in range(ROUNDS):
            found = {key: held for key, held in self._processes.on_devices(lease).items() if key not in done}
            if attempt and not found:
                break
            if attempt == ROUNDS - 1 and found:
                raise MoveRefused(Refusal.BUSY, "new processes of the lease keep appearing on the GPU")
            # In the journal first, so that the next helper asks the driver about these processes.
            account = lease.files.account()
            lease.parked = {**lease.parked, **parked_of(needed_bytes(lease, account, found))}
            if not attempt:
                # A forced suspension takes them before Lock: an extra wake-up is better than a missed call.
                lease.baseline = counters_of(account)
            self._processes.save(lease)
            self._processes.wait_for_library(lease, found, LIBRARY_BEFORE_LOCK_S)
            self._processes.lock_all(lease, found, deadline)
            if not self._processes.wait_for_library(lease, found, LIBRARY_WAIT_S):
                raise MoveRefused(Refusal.BUSY, LOCK_TOOK_LONG)
            # Locked processes cannot allocate, so these are the bytes to be restored.
            held = self._processes.on_devices(lease)
            account = lease.files.account()
            needed = needed_bytes(lease, account, held)
            lease.parked.update(
                parked_of({key: needed[key] for key in found if key in needed and key in lease.parked})
            )
            if calls:
                _check_calls(account, calls)
                lease.baseline = counters_of(account)
            self._processes.save(lease)
            for key in found:
                self._processes.park(lease, key)
            done |= found.keys()
            if calls:
                _check_calls(lease.files.account(), calls)
        self._processes.wait_gone(lease, unexplained)

    def _undo_suspend(self, lease: HelperLease) -> None:
        """Resume a lease after a failed suspension; if that fails, settle it."""
        try:
            states = self._processes.states(lease).items()
            parked = [key for key, state in states if state is ProcessState.CHECKPOINTED]
            self._bring_back(lease, parked, "suspension undone")
        except (MoveRefused, DeviceError):
            self.settle(lease)

    def _bring_back(self, lease: HelperLease, parked: Iterable[Key], reason: str) -> None:
        """Restore the ``parked`` processes and let all processes of the lease run.

        Raises:
            MoveRefused: there is not enough free device memory.
            DeviceError: the driver fails.
        """
        saved = added(lease.parked[key].saved_bytes for key in parked)
        with self._reservations.reserve(saved, FREE_WAIT_S):
            self._processes.restore_all(lease)
            self._finish_running(lease, reason)

    # Resume

    def _resume(self, lease: HelperLease, timeout_s: float, devices: Sequence[str]) -> int:
        """Restore and unlock every living process, on ``devices`` if any are given."""
        if list(devices) == list(lease.limits):
            devices = ()
        if devices and (reason := self._places.permanent_obstacle(lease)):
            raise MoveRefused(Refusal.NOT_SUSPENDABLE, reason)
        if devices and (reason := self._places.obstacle(lease, devices)):
            raise MoveRefused(Refusal.BUSY, reason)
        alive = self._machine.processes.alive
        lease.parked = {key: each for key, each in lease.parked.items() if alive(key)}
        place = dict(zip(lease.limits, devices, strict=True)) if devices else {}
        saved = {place.get(uuid, uuid): count for uuid, count in lease.saved_bytes.items()}
        with self._reservations.reserve(saved, timeout_s):
            if devices:
                self._change_devices(lease, devices)
            self._enter(lease, Phase.RESUMING, "")
            try:
                self._processes.restore_all(lease)
                self._finish_running(lease, "")
            except (MoveRefused, DeviceError) as error:
                self._undo_resume(lease)
                # A move to other devices that the driver refuses would fail again.  On its own devices
                # the lease must be resumed, so the caller retries.
                refused = error.refused if devices and isinstance(error, MoveRefused) else Refusal.BUSY
                raise MoveRefused(refused, str(error)) from None
        if lease.phase is Phase.LOST:
            raise MoveRefused(Refusal.LOST, LOST)
        return sum(saved.values())

    def _finish_running(self, lease: HelperLease, reason: str) -> None:
        """LOCKED -> RUNNING for every process, and enter the phase RUNNING or LOST."""
        for key, parked in lease.parked.items():
            if parked.core_filter > 0:
                self._machine.processes.set_core_filter(key, parked.core_filter)
        for key, state in self._processes.states(lease).items():
            if state is ProcessState.LOCKED:
                self._processes.unlock(lease, key)
        phase = Phase.LOST if lease.lost else Phase.RUNNING
        self._enter(lease, phase, LOST if lease.lost else reason)

    def _change_devices(self, lease: HelperLease, devices: Sequence[str]) -> None:
        """Give a suspended lease other devices; write the journal before anything is restored on them.

        Raises:
            MoveRefused: the journal or the page cannot be written; the lease keeps its devices.
        """
        lease.moves_from = tuple(lease.limits)
        log.info("lease=%s devices %s->%s", lease.name, ",".join(lease.moves_from), ",".join(devices))
        lease.put_on(devices)
        try:
            self._processes.save(lease, Phase.RESUMING)
            self._registry.put_on(lease, devices)
        except (MoveRefused, OSError) as error:
            self._put_on(lease, lease.moves_from)
            lease.moves_from = ()
            with suppress(MoveRefused):
                self._processes.save(lease)
            raise MoveRefused(Refusal.BUSY, str(error)) from None

    def _put_on(self, lease: HelperLease, devices: Sequence[str]) -> None:
        try:
            self._registry.put_on(lease, devices)
        except OSError as error:  # removed by a process with the helper's rights
            log.error("lease=%s its limit page cannot be written: %s", lease.name, error)

    def _undo_resume(self, lease: HelperLease) -> None:
        """Suspend a lease again after a failed resume, and settle it."""
        try:
            for key, state in self._processes.states(lease).items():
                if state is ProcessState.LOCKED:
                    self._processes.checkpoint(lease, key)
        except (MoveRefused, DeviceError) as error:
            log.warning("lease=%s could not be suspended again: %s", lease.name, error)
        self.settle(lease)

    def _settle_mixed(self, lease: HelperLease, parked: list[Key]) -> None:
        """Settle a lease of which only the ``parked`` processes are in host memory: resume if they fit."""
        try:
            self._bring_back(lease, parked, "found half-way")
        except (MoveRefused, DeviceError):
            self._park_again(lease)
            self._enter(lease, Phase.SUSPENDED, "found half-way, not enough memory to go back")

    def _park_again(self, lease: HelperLease) -> None:
        """Move all processes of a lease to host memory again.

        Raises:
            MoveRefused: one does not come to rest, or the driver fails.
            DeviceError: the driver does not answer.
        """
        states = self._processes.states(lease)
        if not self._processes.wait_for_library(lease, states, LIBRARY_WAIT_S):
            raise MoveRefused(Refusal.BUSY, LOCK_TOOK_LONG)
        for key, state in states.items():
            if state is ProcessState.RUNNING:
                self._processes.lock(lease, key, time.monotonic() + FREE_WAIT_S)
            if state in (ProcessState.RUNNING, ProcessState.LOCKED):
                self._processes.checkpoint(lease, key)

    # Phase

    def _enter(self, lease: HelperLease, phase: Phase, reason: str) -> None:
        """Change the phase in the journal and in the limit page, publish it and log it.

        A suspension is written to the journal first, and does not begin if the write fails, because
        the next helper would not know which processes to ask about.  Any other change takes effect even
        if it cannot be written: an older record only makes the next helper ask the driver, and a full
        disk keeps no lease suspended.  During a move the lease counts as unsettled, so that an
        interrupted move is always ended later.

        Raises:
            MoveRefused: a suspension cannot be written.
        """
        saved = sum(lease.saved_bytes.values())
        if lease.moves_from and phase is not Phase.RESUMING:
            # It ends on these devices; an interrupted move may not have changed page and cgroup.
            self._put_on(lease, lease.moves_from if phase is Phase.SUSPENDED else tuple(lease.limits))
            lease.moves_from = ()
        if phase is Phase.SUSPENDING:
            self._processes.save(lease, phase)
            before = lease.enter(phase)
        else:
            before = lease.enter(phase)
            try:
                self._processes.save(lease)
            except MoveRefused as error:
                log.error("lease=%s phase=%s is not in the journal: %s", lease.name, phase, error)
        lease.unsettled = phase in (Phase.SUSPENDING, Phase.RESUMING)
        if not lease.unsettled:
            lease.failing = {}
        if before is phase:
            return
        self._registry.phase_changed(lease)
        log.info(
            "lease=%s %s->%s bytes=%d processes=%d reason=%s",
            lease.name, before, phase, saved, len(lease.parked), reason or "asked",
        )  # fmt: skip
        self._machine.events.publish(
            EventKind.PHASE,
            lease=lease.name,
            reason=reason,
            fields={"from": str(before), "to": str(phase), "bytes": str(saved)},
        )


def needed_bytes(
    lease: HelperLease, account: AccountFile | None, shown: Mapping[Key, Mapping[str, int]]
) -> dict[Key, dict[str, int]]:
    """Return the bytes by device that a restore of each process needs.

    The driver and the library count them; the higher number is used.
    """
    needed = {key: dict(held) for key, held in shown.items()}
    for uuid in lease.limits:
        for key, counted in lease.counted_bytes(account, uuid, shown).items():
            if counted > needed[key].get(uuid, 0):
                needed[key][uuid] = counted
    return needed


def _check_calls(account: AccountFile | None, calls: str) -> None:
    if account is None:
        raise MoveRefused(Refusal.NOT_SUSPENDABLE, "its account file is broken")
    if account.counters().token() != calls:
        raise MoveRefused(Refusal.WANTED, "a process of the lease entered a CUDA call")


def refusal(refused: Refusal, reason: str) -> MoveResult:
    """Return the answer to a move that moved nothing."""
    return MoveResult(done=False, refused=refused, reason=reason)
