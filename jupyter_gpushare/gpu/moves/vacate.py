"""Take the memory of leases without a seat off the devices (`leases.seats` has the rule).

Each such lease is suspended in a thread of its own, again and again while that is refused: a driver
call that hangs for one lease delays no other, and no deadline.  A job that is stopped and starts again
(`SetLimit.stops`) is never suspended: the broker stops it, and where it has not within `BROKER_S`, or
does not answer, the job's runner gets SIGTERM here (a second one changes nothing).

From the deadline on the processes of a lease that the driver shows on a device get SIGTERM, and SIGKILL
`TERM_S` later; the broker is told with `EventKind.EVICTED`.  Where the driver does not answer `FAILURES`
times in a row, those get it that it showed there last, but never a process of a suspended lease.

A lease is off the devices when it cannot allocate (it is suspended, or has no process) and the driver
shows none of its memory.  A suspended one is looked at until that was seen once.
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

LOOK_S = 0.2
RETRY_S = 1.0
SUSPEND_S = 10.0
BROKER_S = 3.0
TERM_S = 4.0
DEVICE_WAIT_S = 1.0
FAILURES = 3


@dataclass(slots=True)
class _Eviction:
    """What is done to one lease without a seat."""

    began_at: float
    asked: bool = False  # the runner of its job got SIGTERM
    suspending: threading.Thread | None = None
    again_at: float = 0.0
    off: bool = False  # it is suspended, and was seen to have no device memory since
    seen: set[Key] = field(default_factory=set)  # its processes with device memory, as last measured
    failures: int = 0  # looks in a row at which a device did not answer
    reason: str = ""  # why it could not be suspended, last
    ended: bool = False  # its processes were told to end
    told: dict[Key, float] = field(default_factory=dict)  # when each was


class Evictions:
    """Watches the seats of all leases; `run` in a thread of its own."""

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
        """Look every `LOOK_S`, for ever."""
        while True:
            time.sleep(LOOK_S)
            self.look_at_all()

    def look_at_all(self) -> None:
        """Look at every lease and every lost seat; one of them that fails keeps no other from it."""
        leases = self._registry.all()
        for lease in leases:
            try:
                self.look(lease)
            except Exception:  # the outermost loop: one lease must not keep others on a device
                log.exception("lease=%s cannot be taken off its devices", lease.name)
        self._forget({lease.name for lease in leases})
        for seat, lost_at, seat_lease in self._machine.seats.lost():
            try:
                if self._is_left(seat_lease):
                    self._machine.seats.forget_if_lost(seat, lost_at)
            except Exception:  # as above; it is looked at again
                log.exception("seat=%s cannot be forgotten", seat)

    def look(self, lease: HelperLease) -> None:
        """Begin or go on to take one lease off the devices, if it has no seat."""
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
        """Return what became of the attempts of a lease when its seat leaves; None: memory is left.

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
        """Forget what is noted about leases that are gone."""
        with self._guard:
            for name in self._evictions.keys() - present:
                del self._evictions[name]
        self._machine.seats.keep_missed(list(present))

    def _is_left(self, seat_lease: str) -> bool:
        """Whether all attempts of a lease are without a seat and off the devices."""
        held = [lease for lease in self._registry.all() if lease_id(lease.name) == seat_lease]
        may_keep = self._machine.seats.may_keep
        return all(not may_keep(lease.name, lease.limits) and self._is_off(lease) for lease in held)

    def _is_off(self, lease: HelperLease) -> bool:
        """Whether a lease has no device memory and can get none."""
        living = self._registry.living(lease.name)
        if not living and lease.phase in (Phase.RUNNING, Phase.SUSPENDED, Phase.LOST):
            return not self._registry.may_be_alive(lease)
        return lease.phase in (Phase.SUSPENDED, Phase.LOST) and self._shown(lease) == (set(), True)

    def _shown(self, lease: HelperLease) -> tuple[set[Key], bool]:
        """The processes of a lease that hold device memory, and whether all devices answered.

        They are those that the driver shows there, and those that keep what dead ones held.
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
            # 0: a context that holds nothing, or is parked.
            found |= {keys[pid] for pid, count in shown.items() if pid in keys and count != 0}
        return found, all_answered

    def _to_end(self, lease: HelperLease, eviction: _Eviction) -> set[Key]:
        """The processes of a lease that hold device memory, as far as the driver says."""
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
        """Ask the runner of a job to stop it, unless the broker has time to do so."""
        awaits_broker = self._clock() - eviction.began_at < BROKER_S and not self._registry.is_unattended()
        if eviction.asked or awaits_broker:
            return
        eviction.asked = True
        runner = leader(self._registry.living(lease.name))
        if runner is not None and self._machine.processes.signal(runner.key, signal.SIGTERM):
            log.warning("lease=%s has no seat: its job is asked to stop", lease.name)

    def _end_processes(self, lease: HelperLease, eviction: _Eviction) -> None:
        now = self._clock()
        for key in self._to_end(lease, eviction):
            if key not in eviction.told:
                eviction.told[key] = now
                self._machine.processes.signal(key, signal.SIGTERM)
            elif now - eviction.told[key] >= TERM_S:
                self._machine.processes.signal(key, signal.SIGKILL)
        if eviction.told and not eviction.ended:
            eviction.ended = True
            eviction.reason = eviction.reason or "they did not come to rest in time"
            log.error("lease=%s its GPU processes are ended: %s", lease.name, eviction.reason)
            self._machine.events.publish(EventKind.EVICTED, lease=lease.name, reason=eviction.reason)


def _is_busy(eviction: _Eviction) -> bool:
    return eviction.suspending is not None and eviction.suspending.is_alive()
