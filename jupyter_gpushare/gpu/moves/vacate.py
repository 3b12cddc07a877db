"""Evict leases without a seat: take their memory off the devices (`leases.seats` has the rule).

Each such lease is suspended in its own thread, and the suspension is retried while it is refused.  So
a hanging driver call for one lease delays no other lease and no deadline.  A job that is stopped and starts
again (`SetLimit.stops`) is never suspended; the broker stops it.  If the broker has not done so within
`BROKER_S`, or does not answer, this module sends SIGTERM to the job's runner (a second one is harmless).

From the deadline on, the lease's processes that the driver shows on a device get SIGTERM, and SIGKILL
`TERM_S` later; `EventKind.EVICTED` tells the broker.  If the driver fails `FAILURES` times in a row, the
processes that it last showed get the signals, but never a process of a suspended lease.

A lease is off the devices when it cannot allocate (it is suspended, or has no process) and the driver
shows none of its memory.  A suspended lease is checked until that was seen once.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.leftovers import keepers_of
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.processes import leader
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.leases.seats import lease_id
from jupyter_gpushare.gpu.moves.suspend import Mover
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import EventKind, Phase
from jupyter_gpushare.protocol.seats import SeatOutcome, Vacated

log = logging.getLogger(__name__)

POLL_S = 0.2
RETRY_S = 1.0
SUSPEND_S = 10.0
BROKER_S = 3.0
TERM_S = 4.0
DEVICE_WAIT_S = 1.0
FAILURES = 3


@dataclass(slots=True)
class _Eviction:
    """The progress of evicting one lease."""

    began_at: float
    job_stopped: bool = False  # the runner of its job got SIGTERM
    suspending: threading.Thread | None = None
    again_at: float = 0.0
    off: bool = False  # it is suspended, and has been seen without device memory since
    seen: set[Key] = field(default_factory=set)  # its processes with device memory, as last measured
    failures: int = 0  # checks in a row in which a device did not answer
    reason: str = ""  # the last reason why it could not be suspended
    ended: bool = False  # a process got SIGTERM
    signalled_at: dict[Key, float] = field(default_factory=dict)  # when each process got SIGTERM


class Evictions:
    """Watches the seats of all leases; `run` needs its own thread."""

    def __init__(
        self,
        machine: Machine,
        registry: LeaseRegistry,
        mover: Mover,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine = machine
        self._registry = registry
        self._mover = mover
        self._clock = clock
        self._guard = threading.Lock()
        self._evictions: dict[str, _Eviction] = {}  # by handle

    def run(self) -> None:
        """Check all leases and seats every `POLL_S`, for ever."""
        while True:
            time.sleep(POLL_S)
            self.check_all()

    def check_all(self) -> None:
        """Check every lease and every lost seat; a failure of one affects no other."""
        leases = self._registry.all()
        for lease in leases:
            try:
                self.check(lease)
            except Exception:  # the outermost loop: one lease must not keep others on a device
                log.exception("lease=%s cannot be taken off its devices", lease.name)
        self._forget({lease.name for lease in leases})
        for seat, lost_at, seat_lease in self._machine.seats.lost():
            try:
                if self._is_left(seat_lease):
                    self._machine.seats.forget_if_lost(seat, lost_at)
            except Exception:  # as above; the next check retries
                log.exception("seat=%s cannot be forgotten", seat)

    def check(self, lease: HelperLease) -> None:
        """Begin or continue to evict one lease if it has no seat."""
        seats = self._machine.seats
        if seats.may_keep(lease.name, lease.limits):
            with self._guard:
                self._evictions.pop(lease.name, None)
            return
        with self._guard:
            eviction = self._evictions.setdefault(lease.name, _Eviction(self._clock()))
        by_process = lease.by_process
        eviction.seen |= {each.key for each in lease.processes if by_process.get(each.pid)}
        is_due = not _is_busy(eviction) and self._clock() >= eviction.again_at
        if is_due:
            eviction.again_at = self._clock() + RETRY_S
        if lease.phase is not Phase.SUSPENDED:
            eviction.off = False
            if lease.asked.stops:
                self._stop_job(lease, eviction)
            elif is_due:
                eviction.suspending = threading.Thread(
                    target=self._suspend, args=(lease, eviction), name="evict", daemon=True
                )
                eviction.suspending.start()
        elif not lease.unsettled:
            eviction.off = eviction.off or (is_due and self._is_off(lease))
            if eviction.off or not is_due:
                return
        if self._clock() >= seats.ends_at(lease.name, lease.limits):
            self._end_processes(lease, eviction)

    def outcome(self, seat_lease: str) -> Vacated | None:
        """Return what became of the attempts of a lease whose seat leaves; None while they have memory.

        Raises:
            OSError: no descriptor or memory is free.
        """
        leases = [lease for lease in self._registry.all() if lease_id(lease.name) == seat_lease]
        if leases and all(self._machine.seats.may_keep(lease.name, lease.limits) for lease in leases):
            return Vacated(outcome=SeatOutcome.SEATED)
        if not all(self._is_off(lease) for lease in leases):
            return None
        with self._guard:
            evictions = [self._evictions.get(lease.name) for lease in leases]
        ended = [eviction for eviction in evictions if eviction is not None and eviction.ended]
        if ended:
            return Vacated(outcome=SeatOutcome.ENDED, reason=ended[0].reason)
        parked = any(lease.phase is Phase.SUSPENDED and lease.saved_bytes for lease in leases)
        return Vacated(outcome=SeatOutcome.SUSPENDED if parked else SeatOutcome.EMPTY)

    def _forget(self, present: set[str]) -> None:
        """Forget the evictions of leases that are gone."""
        with self._guard:
            for name in self._evictions.keys() - present:
                del self._evictions[name]
        self._machine.seats.keep_missed(list(present))

    def _is_left(self, seat_lease: str) -> bool:
        """Return whether all attempts of a lease have no seat and are off the devices."""
        held = [lease for lease in self._registry.all() if lease_id(lease.name) == seat_lease]
        may_keep = self._machine.seats.may_keep
        return all(not may_keep(lease.name, lease.limits) and self._is_off(lease) for lease in held)

    def _is_off(self, lease: HelperLease) -> bool:
        """Return whether a lease has no device memory and can get none."""
        living = self._registry.living(lease.name)
        if not living and lease.phase in (Phase.RUNNING, Phase.SUSPENDED, Phase.LOST):
            return not self._registry.may_be_alive(lease)
        return lease.phase in (Phase.SUSPENDED, Phase.LOST) and self._shown(lease) == (set(), True)

    def _shown(self, lease: HelperLease) -> tuple[set[Key], bool]:
        """Return the processes of a lease that hold device memory, and whether all devices answered.

        These are the processes that the driver shows, and those that keep memory of dead processes.
        """
        keys = {process.pid: process.key for process in self._registry.living(lease.name)}
        found = {process.key for process in keepers_of(lease, self._machine.processes)}
        all_answered = True
        for uuid in lease.limits:
            try:
                shown = self._machine.nvml.processes(uuid, DEVICE_WAIT_S)
            except DeviceError:
                all_answered = False
                continue
            # 0 is a context that holds nothing or is parked.
            found |= {keys[pid] for pid, count in shown.items() if pid in keys and count != 0}
        return found, all_answered

    def _to_end(self, lease: HelperLease, eviction: _Eviction) -> set[Key]:
        """Return the processes to end: those that hold device memory, or held it before the driver failed."""
        found, all_answered = self._shown(lease)
        eviction.seen = found if all_answered else eviction.seen | found
        eviction.failures = 0 if all_answered else eviction.failures + 1
        if eviction.failures >= FAILURES and lease.phase is not Phase.SUSPENDED:
            found |= {key for key in eviction.seen if self._machine.processes.alive(key)}
        return found

    def _suspend(self, lease: HelperLease, eviction: _Eviction) -> None:
        if not lease.moving.acquire(timeout=SUSPEND_S):
            return
        try:
            if lease.dropped or self._machine.seats.may_keep(lease.name, lease.limits):
                return
            moved = self._mover.suspend(lease, "", SUSPEND_S)
        except Exception:  # the outermost loop of this thread
            log.exception("lease=%s cannot be suspended", lease.name)
            return
        finally:
            lease.moving.release()
        if not moved.done and moved.reason != eviction.reason:
            eviction.reason = moved.reason
            log.warning("lease=%s has no seat and cannot be suspended: %s", lease.name, moved.reason)

    def _stop_job(self, lease: HelperLease, eviction: _Eviction) -> None:
        """Send SIGTERM to the runner of a job, unless the broker still has time to stop the job."""
        awaits_broker = self._clock() - eviction.began_at < BROKER_S and not self._registry.is_unattended()
        if eviction.job_stopped or awaits_broker:
            return
        eviction.job_stopped = True
        runner = leader(self._registry.living(lease.name))
        if runner is not None and self._machine.processes.signal(runner.key, signal.SIGTERM):
            log.warning("lease=%s has no seat: its job is asked to stop", lease.name)

    def _end_processes(self, lease: HelperLease, eviction: _Eviction) -> None:
        now = self._clock()
        for key in self._to_end(lease, eviction):
            if key not in eviction.signalled_at:
                eviction.signalled_at[key] = now
                self._machine.processes.signal(key, signal.SIGTERM)
            elif now - eviction.signalled_at[key] >= TERM_S:
                self._machine.processes.signal(key, signal.SIGKILL)
        if eviction.signalled_at and not eviction.ended:
            eviction.ended = True
            eviction.reason = eviction.reason or "they did not come to rest in time"
            log.error("lease=%s its GPU processes are ended: %s", lease.name, eviction.reason)
            self._machine.events.publish(EventKind.EVICTED, lease=lease.name, reason=eviction.reason)


def _is_busy(eviction: _Eviction) -> bool:
    return eviction.suspending is not None and eviction.suspending.is_alive()
