"""Move the device memory of one lease to host memory and back.

Suspend:  decide -> journal -> page SUSPENDING -> Lock all -> counters -> Checkpoint all
          -> counters -> the driver shows it gone -> journal -> page SUSPENDED
Resume:   room -> journal -> page RESUMING -> Restore all -> Unlock all -> page RUNNING -> journal

Rules:

* The counters of CUDA calls are taken with the decision.  A call entered since,
  seen after Lock or after Checkpoint, means that the owner is back: everything is
  put back and the answer is *wanted*.  A forced suspension does not look at them.
* A restore is tried only when the driver shows the bytes plus a margin free on
  every device, less what other restores in progress were promised.  One that runs
  out of memory would lose the process for ever.
* Memory counts as given back only when the driver no longer shows it.
* Nothing is believed about where a process is: GetState is asked.  `settle` brings
  a lease from any mixture of states to one of the two ends.  It ends a failed
  move, finds out after a restart what the last helper left, and is repeated while
  a driver call hangs.
* A process that ended is dropped.  None is ever killed here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from ..errors import DeviceError
from .checkpoint import Checkpoint, State
from .events import Events
from .hindrance import Hindrances
from .host import HostMemory
from .isolation import NO_COUNTERS, Account, Counters
from .journal import StateDirectory
from .lease import ASLEEP, Key, Lease, parked_of
from .nvml import Nvml
from .processes import Processes, shares_memory_of_nccl
from .room import ROOM_WAIT_S, DeviceRoom, Undo
from .steps import Steps, copy_s
from .verbs import EventKind, Moved, Phase, Refusal

log = logging.getLogger(__name__)

# A process that appears between the list and the page is caught by the next round.
ROUNDS = 3
IN_HOST_MEMORY = (Phase.SUSPENDED, Phase.RESUMING)


class Mover:
    """Suspends and resumes leases; safe to call from several threads."""

    def __init__(
        self,
        *,
        nvml: Nvml,
        checkpoint: Checkpoint,
        processes: Processes,
        state: StateDirectory,
        host: HostMemory,
        events: Events,
        boot_id: str,
        hindrance: Callable[[str], str],
        out_of_service: Callable[[str], str],
        on_driver_error: Callable[[str], None],
        margin_bytes: Callable[[str], int],
        leases: Callable[[], Iterable[Lease]],
        on_suspended: Callable[[], None],
        on_phase: Callable[[Lease], None],
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Wire it up.

        ``hindrance`` says why nothing on a device can be suspended (or ""), ``out_of_service``
        why nothing can be restored there, ``margin_bytes`` what a restore may take beyond its
        bytes; ``on_driver_error`` is told of devices on which the driver failed, ``on_phase`` of
        leases whose phase changed, ``step`` of each step.
        """
        self._on_suspended = on_suspended
        self._on_phase = on_phase
        self._nvml = nvml
        self._checkpoint = checkpoint
        self._processes = processes
        self._state = state
        self._host = host
        self._events = events
        self._boot_id = boot_id
        self.hindrances = Hindrances(checkpoint, hindrance)
        self._steps = Steps(
            nvml=nvml,
            checkpoint=checkpoint,
            processes=processes,
            leases=leases,
            hindrances=self.hindrances,
            on_driver_error=on_driver_error,
            save=self._save,
            step=step,
        )
        self._out_of_service = out_of_service
        self._leases = leases
        self._step = step
        self._room = DeviceRoom(nvml, margin_bytes, leases)

    # Verbs

    def suspend(self, lease: Lease, calls: str, timeout_s: float, *, keep_memory: bool = False) -> Moved:
        """Park the lease's device memory, or only lock it; ``lease.moving`` is held by the caller."""
        began = time.monotonic()
        if lease.unsettled:
            self.settle(lease)
        if lease.phase is Phase.SUSPENDED or (keep_memory and lease.phase is Phase.LOCKED):
            return Moved(done=True, bytes=sum(lease.saved_bytes.values()))
        if lease.phase is Phase.LOST:
            return _refused(Refusal.LOST, "the driver lost a process of this lease; it has to be restarted")
        if lease.phase not in (Phase.RUNNING, Phase.LOCKED):
            return _refused(Refusal.BUSY, "the driver has not finished an earlier move of this lease")
        if reason := self._broken(lease):
            return _refused(Refusal.BUSY, reason)
        try:
            if keep_memory:
                self._lock_only(lease, calls, timeout_s)
            else:
                self._suspend(lease, calls, timeout_s)
        except Undo as undo:
            return _refused(undo.refused, undo.reason)
        except DeviceError as error:
            return _refused(Refusal.BUSY, str(error))
        return Moved(
            done=True, bytes=sum(lease.saved_bytes.values()), took_s=round(time.monotonic() - began, 4)
        )

    def resume(self, lease: Lease, timeout_s: float) -> Moved:
        """Copy the lease's memory back; ``lease.moving`` is held by the caller."""
        began = time.monotonic()
        if lease.unsettled:
            self.settle(lease)
        if lease.phase is Phase.RUNNING:
            return Moved(done=True)
        if lease.phase is Phase.LOST:
            return _refused(Refusal.LOST, "the driver lost a process of this lease; it has to be restarted")
        if lease.phase not in ASLEEP:
            return _refused(Refusal.BUSY, "the driver has not finished an earlier move of this lease")
        if lease.phase is Phase.LOCKED:
            return self._unlock_all(lease, began)
        lease.parked = {key: each for key, each in lease.parked.items() if self._processes.alive(key)}
        saved = lease.saved_bytes
        if reason := self._broken(lease):
            return _refused(Refusal.BUSY, reason)
        try:
            with self._room.promise(saved, timeout_s):
                self._resume(lease)
        except Undo as undo:
            return _refused(undo.refused, undo.reason)
        except DeviceError as error:
            return _refused(Refusal.BUSY, str(error))
        return Moved(done=True, bytes=sum(saved.values()), took_s=round(time.monotonic() - began, 4))

    def _broken(self, lease: Lease) -> str:
        for uuid in lease.limits:
            if reason := self._out_of_service(uuid):
                return f"the device is out of service: {reason}"
        return ""

    def settle(self, lease: Lease) -> None:
        """Bring a lease whose move was cut short to an end, whatever the driver says it reached.

        It ends where most of the work is done already: suspended when every process
        is checkpointed, running otherwise.  ``lease.unsettled`` tells whether it has
        to be called again.
        """
        try:
            states = self._steps.states(lease)
            if lease.phase is Phase.SUSPENDED and not states:
                lease.unsettled = False  # it held no device memory, or its processes have ended
                return
            if lease.phase is Phase.LOCKED and set(states.values()) == {State.LOCKED}:
                lease.unsettled = False
                return
            if any(state in (State.CHECKPOINTING, State.RESTORING) for state in states.values()):
                lease.unsettled = True
                return
            parked = [key for key, state in states.items() if state is State.CHECKPOINTED]
            if lease.parked and len(parked) == len(states):
                self._enter(lease, Phase.SUSPENDED, "found checkpointed")
            elif not parked:
                self._finish_running(lease, "found in device memory")
            else:
                self._settle_mixed(lease, parked)
            lease.unsettled = False
        except (DeviceError, Undo) as error:
            if not lease.unsettled:
                log.warning("lease=%s phase=%s unsettled: %s", lease.name, lease.phase, error)
            lease.unsettled = True

    def save_again(self, lease: Lease) -> None:
        """Write down what could not be written when it was reached."""
        with suppress(Undo):
            self._save(lease)

    def forget_lost(self, lease: Lease) -> None:
        """Let a lease go on once the processes that the driver lost have ended."""
        lease.lost = {key: each for key, each in lease.lost.items() if self._processes.alive(key)}
        if not lease.lost:
            self._enter(lease, Phase.RUNNING, "the lost processes have ended")

    # Suspend

    def _suspend(self, lease: Lease, calls: str, timeout_s: float) -> None:
        forced = not calls
        deadline = time.monotonic() + timeout_s
        found = self._movable(lease, calls)
        by_pid = {pid: sum(saved.values()) for (pid, _), saved in found.items()}
        held = sum(
            sum(other.saved_bytes.values()) for other in self._leases() if other.phase in IN_HOST_MEMORY
        )
        with self._host.promise(by_pid, held) as no_room:
            if no_room:
                raise Undo(Refusal.HOST_MEMORY, no_room)
            try:
                self._enter(lease, Phase.SUSPENDING, "forced" if forced else "idle")
                self._park(lease, calls, deadline)
            except (Undo, DeviceError) as error:
                if lease.phase is Phase.SUSPENDING:
                    self._put_back(lease)
                if lease.phase is Phase.SUSPENDED:
                    return  # it could not be put back: whoever wants it resumes it
                if isinstance(error, DeviceError):
                    raise Undo(Refusal.BUSY, str(error)) from None
                raise
        self._enter(lease, Phase.SUSPENDED, "forced" if forced else "idle")
        self._step("suspend:done")

    def _movable(self, lease: Lease, calls: str) -> dict[Key, dict[str, int]]:
        """The processes to move with their bytes by device, where nothing is in the way."""
        account = lease.files.account()
        if calls:
            _check_calls(account, calls)
        found = self._steps.on_devices(lease)
        if reason := self.hindrances.reason(lease, account, found, forced=not calls):
            raise Undo(Refusal.NOT_SUSPENDABLE, reason)
        if any(pid in self._nvml.under_mps(uuid) for (pid, _), held in found.items() for uuid in held):
            raise Undo(Refusal.NOT_SUSPENDABLE, "it runs under MPS")
        if any(shares_memory_of_nccl(pid) for pid, _ in found):
            raise Undo(Refusal.NOT_SUSPENDABLE, "it uses NCCL between processes")
        return found

    def _lock_only(self, lease: Lease, calls: str, timeout_s: float) -> None:
        """RUNNING -> LOCKED for every process: they stop where they are."""
        deadline = time.monotonic() + timeout_s
        found = self._movable(lease, calls)
        try:
            self._enter(lease, Phase.SUSPENDING, "lock only")
            lease.parked = parked_of(found)
            lease.baseline = _counters(lease.files.account())
            self._save(lease)
            for key in found:
                self._steps.lock(lease, key, deadline)
            if calls:
                _check_calls(lease.files.account(), calls)
        except (Undo, DeviceError):
            if lease.phase is Phase.SUSPENDING:
                self._put_back(lease)
            raise
        self._enter(lease, Phase.LOCKED, "lock only")

    def _unlock_all(self, lease: Lease, began: float) -> Moved:
        try:
            self._finish_running(lease, "")
        except DeviceError as error:
            self.settle(lease)
            return _refused(Refusal.BUSY, str(error))
        return Moved(done=True, took_s=round(time.monotonic() - began, 4))

    def _park(self, lease: Lease, calls: str, deadline: float) -> None:
        """Lock and checkpoint every process of the lease that is on a device."""
        done: set[Key] = set()
        for attempt in range(ROUNDS):
            found = {key: held for key, held in self._steps.on_devices(lease).items() if key not in done}
            if attempt and not found:
                break
            if attempt == ROUNDS - 1 and found:
                raise Undo(Refusal.BUSY, "new processes of the lease keep appearing on the GPU")
            # Written down before it is done: the next helper asks the driver about these.
            lease.parked = {**lease.parked, **parked_of(found)}
            if not attempt:
                # Forced: taken before Lock.  Rather a wish too many than a call that nobody sees.
                lease.baseline = _counters(lease.files.account())
            self._save(lease)
            self._step("suspend:intent")
            locked = self._steps.locked(lease) if not attempt else set()
            for key in found.keys() - locked:
                self._steps.lock(lease, key, deadline)
            self._step("suspend:locked")
            # Locked processes allocate no more: these are the bytes that will be missing.
            held = self._steps.on_devices(lease)
            lease.parked.update(parked_of({key: held[key] for key in found if key in held}))
            account = lease.files.account()
            if calls:
                _check_calls(account, calls)
                lease.baseline = _counters(account)
            self._save(lease)
            for key in found:
                self._steps.park(lease, key)
            done |= found.keys()
            if calls:
                _check_calls(lease.files.account(), calls)
            self._step("suspend:parked")
        self._steps.wait_gone(lease)

    def _put_back(self, lease: Lease) -> None:
        """After a suspension failed: running again, or as near as the driver lets us."""
        try:
            saved = {
                uuid: count
                for key, state in self._steps.states(lease).items()
                if state is State.CHECKPOINTED
                for uuid, count in lease.parked[key].saved_bytes.items()
            }
            with self._room.promise(saved, ROOM_WAIT_S):
                self._steps.restore_all(lease)
                self._finish_running(lease, "suspension undone")
        except (Undo, DeviceError):
            self.settle(lease)

    # Resume

    def _resume(self, lease: Lease) -> None:
        """Restore and unlock every process; the room is promised by the caller."""
        self._enter(lease, Phase.RESUMING, "")
        self._step("resume:intent")
        try:
            self._steps.restore_all(lease)
            self._step("resume:restored")
            self._finish_running(lease, "")
        except (Undo, DeviceError) as error:
            self._park_again(lease)
            raise Undo(Refusal.BUSY, str(error)) from None
        if lease.phase is Phase.LOST:
            raise Undo(Refusal.LOST, "the driver could not bring the memory of a process back")
        self._step("resume:done")

    def _finish_running(self, lease: Lease, reason: str) -> None:
        """LOCKED -> RUNNING for every process, and the phase with them."""
        for key, parked in lease.parked.items():
            if parked.core_filter > 0:
                self._processes.set_core_filter(key, parked.core_filter)
        for key, state in self._steps.states(lease).items():
            if state is State.LOCKED:
                self._steps.unlock(lease, key)
        phase = Phase.LOST if lease.lost else Phase.RUNNING
        self._step("resume:unlocked")
        self._enter(lease, phase, "the driver lost a process" if lease.lost else reason)

    def _park_again(self, lease: Lease) -> None:
        """After a resume failed: suspended again, or as near as the driver lets us."""
        try:
            for key, state in self._steps.states(lease).items():
                if state is State.LOCKED:
                    self._checkpoint.checkpoint(key[0], copy_s(lease.parked[key]))
        except DeviceError as error:
            log.warning("lease=%s could not be parked again: %s", lease.name, error)
        self.settle(lease)

    def _settle_mixed(self, lease: Lease, parked: list[Key]) -> None:
        """Some processes are in host memory, some on the device: all to the device if they fit."""
        saved: dict[str, int] = {}
        for key in parked:
            for uuid, count in lease.parked[key].saved_bytes.items():
                saved[uuid] = saved.get(uuid, 0) + count
        try:
            with self._room.promise(saved, ROOM_WAIT_S):
                self._steps.restore_all(lease)
                self._finish_running(lease, "found half-way")
        except (Undo, DeviceError):
            for key, state in self._steps.states(lease).items():
                if state is State.RUNNING:
                    self._checkpoint.lock(key[0], ROOM_WAIT_S)
                if state in (State.RUNNING, State.LOCKED):
                    self._checkpoint.checkpoint(key[0], copy_s(lease.parked[key]))
            self._enter(lease, Phase.SUSPENDED, "found half-way, no room to go back")

    # What is kept

    def _save(self, lease: Lease, phase: Phase | None = None) -> None:
        """Write the lease down, as it will be in ``phase``.

        Raises:
            Undo: the disk does not take it; nothing may be begun.
        """
        try:
            record = lease.record(self._boot_id)
            self._state.save(replace(record, phase=phase or lease.phase))
            lease.unsaved = False
        except OSError as error:
            lease.unsaved = True
            raise Undo(Refusal.BUSY, f"the state directory cannot be written: {error}") from None

    def _enter(self, lease: Lease, phase: Phase, reason: str) -> None:
        """Change the phase: on disk, in the limit page, for those who watch, in the log.

        A suspension is written down first, and not begun when that fails: the next
        helper would know of no process to ask about.  All else is true whether it can
        be written or not, and an older record only makes the next helper ask the
        driver; a full disk keeps nobody asleep.  On the way a lease counts as
        unsettled, so that whatever breaks a move off, somebody brings it to an end.
        """
        saved = sum(lease.saved_bytes.values())
        if phase is Phase.SUSPENDING:
            self._save(lease, phase)
            before = lease.enter(phase)
        else:
            before = lease.enter(phase)
            try:
                self._save(lease)
            except Undo as error:
                log.error("lease=%s phase=%s is not written down: %s", lease.name, phase, error)
        lease.unsettled = phase in (Phase.SUSPENDING, Phase.RESUMING)
        if before is phase:
            return
        self._on_phase(lease)
        if phase in ASLEEP:
            self._on_suspended()
        log.info(
            "lease=%s %s->%s bytes=%d processes=%d reason=%s",
            lease.name, before, phase, saved, len(lease.parked), reason or "asked",
        )  # fmt: skip
        self._events.publish(
            EventKind.PHASE,
            lease=lease.name,
            reason=reason,
            fields={"from": str(before), "to": str(phase), "bytes": str(saved)},
        )


def _check_calls(account: Account | None, calls: str) -> None:
    if account is None:
        raise Undo(Refusal.NOT_SUSPENDABLE, "its account file is broken")
    if account.counters().token() != calls:
        raise Undo(Refusal.WANTED, "a process of the lease entered a CUDA call")


def _counters(account: Account | None) -> Counters:
    return account.counters() if account else NO_COUNTERS


def _refused(refused: Refusal, reason: str) -> Moved:
    return Moved(done=False, refused=refused, reason=reason)
