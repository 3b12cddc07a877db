"""Guests: leases that use memory and time of another lease, and leave at once when it wants them back.

A *host* has a whole device, and its *guest* uses part of it.  The limit page of each states its whole
limit and the bytes kept for the other: in the host's page the bytes of the guest, in the guest's page all
except these.  An allocation that fits the limit, but not beside the kept bytes, waits in the library and
increments a counter in the account (`gpushare_lease.h`).  A thread of this module reads these counters.  If
a counter of either lease grows, the helper suspends the guest without the broker and keeps no bytes for it.
The host continues, and the guest's call waits until the guest is resumed where it has its whole limit.

* The guest's record defines the pair: `SetLimit.guest_of` of a lease that is not suspended.  The pair ends
  when the guest is suspended or dropped (`LeaseRegistry.end_pair`).
* A pair begins in an order without gaps.  Host memory is reserved, then the kept bytes are written into the
  host's page, then its account is read.  If the host already uses more, the pair ends.  Only then the
  guest's page is created or the guest resumes.  The library takes bytes first and reads the kept bytes
  again afterwards, so one of the two always sees the other.
* A guest that cannot be suspended, for a lasting reason or for `BUSY_S`, is killed except for its runner,
  so that the host waits no longer.  The sample says so (`LeaseSample.ended_as_guest`).
* A guest whose host has left remains a guest, on nobody's capacity, until the broker decides.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from dataclasses import dataclass, replace

from jupyter_gpushare.errors import DeviceError, HelperError, InvalidRequest
from jupyter_gpushare.gibibytes import compared
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.steps import UNEXPLAINED_BYTES
from jupyter_gpushare.gpu.moves.suspend import Mover, refusal
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import (
    Drop,
    Dropped,
    ErrorKind,
    EventKind,
    LeaseFiles,
    MoveResult,
    Phase,
    Refusal,
    SetLimit,
)

log = logging.getLogger(__name__)

POLL_S = 0.005
RETRY_S = 0.01
GONE_S = 5.0
# A process that writes a core file takes longer to end: the host waits this long, but no request does.
LATE_S = 60.0
MAX_KNOWN = 1024
# Suspending a guest is retried this long if it does not come to rest ...
BUSY_S = 10.0
# ... and this long if it is refused for another reason.
REFUSED_S = 0.5


@dataclass(slots=True)
class _Departure:
    """The progress of a guest that leaves."""

    began_at: float
    refused_at: float = 0.0  # when its suspension was first refused
    killed_at: float = 0.0


class Guests:
    """All pairs of this machine; `run` needs its own thread."""

    def __init__(
        self, machine: Machine, registry: LeaseRegistry, devices: DeviceStates, mover: Mover
    ) -> None:
        self._machine = machine
        self._registry = registry
        self._devices = devices
        self._mover = mover
        self._begun = threading.Event()
        self._beginning = threading.Lock()
        self._seen: dict[str, dict[Key, int]] = {}  # the last counter of each process, by lease
        self._leaving: dict[str, threading.Thread] = {}  # by guest
        self._known: dict[str, set[Key]] = {}  # the processes of each guest, ended ones included

    def adopt(self) -> None:
        """Write the kept bytes again from the records of the leases; an earlier helper may have died."""
        for lease in self._registry.all():
            lease.guests = self._registry.guests_of(lease)
            lease.write_kept()
            if lease.is_guest:
                self._machine.host.keep_reserved(lease.name, lease.asked.guest_bytes)
        self._begun.set()

    # Pairs begin

    def set_limit(self, request: SetLimit, epoch: int) -> LeaseFiles:
        """Do as `LeaseRegistry.set_limit`; for a guest, also begin the pair.

        Raises:
            InvalidRequest: the request makes no sense.
            HelperError: it cannot be done now; kind ``conflict`` if the lease cannot be a guest.
        """
        lease = self._registry.get(request.lease)
        if not request.guest_of:
            if lease is not None and lease.is_guest and self._host_is_present(lease):
                reason = f"lease {lease.name} is a guest whose host is there: suspend it first"
                raise HelperError(ErrorKind.CONFLICT, reason)
            files = self._registry.set_limit(request, epoch)
            self._registry.end_pair(request.lease)
            return files
        _check(request)
        lives = lease is not None and self._registry.may_be_alive(lease)
        if lease is not None and lease.is_guest:
            request = replace(request, suspended=False)  # only suspending or dropping it ends the pair
        if lease.phase is Phase.SUSPENDED if lease and lives else request.suspended:
            # The pair begins when it resumes.  If its processes end now, it must not run again.
            return self._registry.set_limit(replace(request, suspended=True), epoch)
        if lease is not None and (lease.is_guest or lives):
            asked = lease.asked
            if lease.is_guest and (asked.guest_of, asked.guest_bytes) == (
                request.guest_of,
                request.guest_bytes,
            ):
                return self._registry.set_limit(request, epoch)
            reason = f"lease {lease.name} runs: it becomes a guest when it resumes"
            raise HelperError(ErrorKind.CONFLICT, reason)
        if refused := self._begin(request, next(iter(request.limits)), None):
            raise HelperError(ErrorKind.CONFLICT, refused.reason)
        try:
            return self._registry.set_limit(request, epoch)
        except BaseException:
            self._registry.end_pair(request.lease)
            raise

    def resume(self, lease: HelperLease, timeout_s: float, devices: tuple[str, ...]) -> MoveResult:
        """Do as `Mover.resume`; for a guest, also begin the pair.  The caller holds the lease."""
        if not lease.asked.guest_of or lease.phase is not Phase.SUSPENDED:
            return self._mover.resume(lease, timeout_s, devices)
        parked, guest_bytes = sum(lease.saved_bytes.values()), lease.asked.guest_bytes
        if parked > guest_bytes:
            needs, has = compared(parked, guest_bytes)
            return refusal(Refusal.NO_MEMORY, f"it needs {needs}, and has {has} as a guest")
        if refused := self._begin(lease.asked, (*devices, *lease.limits)[0], lease):
            return refused
        try:
            return self._mover.resume(lease, timeout_s, devices)
        finally:
            if lease.is_guest:
                self._machine.host.keep_reserved(lease.name, guest_bytes)
            else:
                self._registry.end_pair(lease.name)

    def drop(self, request: Drop, epoch: int) -> Dropped:
        """Do as `LeaseRegistry.drop`; the host of a dropped guest gets the memory once it is free.

        Raises:
            HelperError: it is being moved, or the epoch is stale.
        """
        lease = self._registry.get(request.lease)
        pids = set[int]()
        if lease and lease.asked.guest_of:
            # Including processes that began after the last sample.
            living = {process.key for process in self._registry.living(lease.name)}
            pids = {pid for pid, _ in self._processes(lease) | living}
        dropped = self._registry.drop(request, epoch)
        if lease is None or not lease.is_guest:
            self._end(request.lease)
        elif not self._end_when_gone(lease, pids, GONE_S):
            late = threading.Thread(
                target=self._end_late, args=(lease, pids), name="guest-is-gone", daemon=True
            )
            late.start()
        return dropped

    def _end_late(self, guest: HelperLease, pids: set[int]) -> None:
        if not self._end_when_gone(guest, pids, LATE_S):
            log.error("lease=%s was dropped, and the driver still shows its memory", guest.name)
            self._end(guest.name)

    def _end_when_gone(self, guest: HelperLease, pids: set[int], patience_s: float) -> bool:
        """End the pair of a dropped guest when its memory is free; return False after ``patience_s``."""
        until = time.monotonic() + patience_s
        while self._shows(guest, pids):
            if time.monotonic() >= until:
                return False
            time.sleep(RETRY_S)
        self._end(guest.name)
        return True

    def _end(self, name: str) -> None:
        """End the pair of a dropped lease, unless a new lease of that name is already a guest."""
        lease = self._registry.get(name)
        if lease is None or not lease.is_guest:
            self._registry.end_pair(name)

    def _begin(self, asked: SetLimit, uuid: str, guest: HelperLease | None) -> MoveResult | None:
        """Reserve host memory for a guest, and let its host keep bytes for it; return the refusal or None."""
        name, guest_bytes = asked.lease, asked.guest_bytes
        with self._beginning:
            host = self._registry.get(asked.guest_of)
            reason = "" if host else f"no lease {asked.guest_of} on this machine"
            if host is None or (reason := self._obstacle(host, uuid, asked, guest)):
                return refusal(Refusal.NO_MEMORY, reason)
            parked = sum(guest.saved_bytes.values()) if guest else 0
            reason = self._machine.host.reserve(name, max(0, guest_bytes - parked), self._mover.held_bytes())
            if reason:
                return refusal(Refusal.HOST_MEMORY, reason)
            if not self._registry.begin_pair(host, uuid, name, guest_bytes):
                self._machine.host.keep_reserved(name, 0)
                return refusal(Refusal.BUSY, f"lease {host.name} was dropped or replaced meanwhile")
            max_used, used = host.limits[uuid] - guest_bytes, self._used_bytes(host, uuid)
            if used is None or used > max_used:
                self._registry.end_pair(name)
                has, remaining = compared(used or host.limits[uuid], max_used)
                reason = f"lease {host.name} uses {has}, with a guest {remaining} are left"
                return refusal(Refusal.NO_MEMORY, reason)
        self._begun.set()
        return None

    def _obstacle(self, host: HelperLease, uuid: str, asked: SetLimit, guest: HelperLease | None) -> str:
        """Return why a lease cannot be a guest of ``host`` on a device now; "" if it can."""
        if uuid not in host.limits or host.phase is not Phase.RUNNING:
            return f"lease {host.name} does not run on device {uuid[:80]}"
        if host.is_guest or (guest is not None and guest.guests):
            return "a guest cannot be a host"
        if host.guests.get(uuid, (asked.lease,))[0] != asked.lease:
            return f"lease {host.name} has a guest there: {host.guests[uuid][0]}"
        if asked.guest_bytes > host.limits[uuid]:
            return f"lease {host.name} has less there than its guest is to have"
        if uuid.startswith("MIG-"):
            return "a MIG instance has no guest"
        on_device = [each for each in self._registry.all() if uuid in each.limits]
        awake = {each.name for each in on_device if each.phase is not Phase.SUSPENDED}
        if others := awake - {host.name, asked.lease}:
            return f"lease {min(others)} is on the device of the host too"
        if reason := self._devices.turns_obstacle(host, proves_end=self._machine.checkpoint.proves_end):
            return f"it cannot share the time of its host: {reason}"
        if host.outside:
            return f"a process of lease {host.name} does not load the library that limits memory"
        # As of the last sample; the guest is new, or was suspended before.
        blocker = self._mover.blockers.reason(host, host.account, host.held, forced=True)
        return self._devices.suspend_blocker(uuid) or blocker

    def _used_bytes(self, host: HelperLease, uuid: str) -> int | None:
        """Return the bytes that a host uses on a device by its account; None if the account is broken."""
        account = host.files.account()
        if account is None:
            return None
        index, alive = list(host.limits).index(uuid), self._machine.processes.alive
        # Until the next sample, the account names processes in containers by their own pids.
        contained = any(map(self._machine.processes.is_contained, host.processes))
        slots = account.slots.items()
        used = sum(slot.used_bytes[index] for key, slot in slots if contained or alive(key))
        return host.contexts.get(uuid, 0) + used

    def _host_is_present(self, guest: HelperLease) -> bool:
        host = self._registry.get(guest.asked.guest_of)
        if host is None or host.phase is Phase.SUSPENDED:
            return False
        return bool(host.limits.keys() & guest.limits.keys())

    # Guests leave

    def run(self) -> None:
        """Watch for ever; sleep while there is no guest."""
        while True:
            try:
                if not self.poll():
                    self._begun.wait()
            except Exception:  # the outermost loop: a host must not wait for another pair's fault
                log.exception("guests cannot be watched")
            time.sleep(POLL_S)

    def poll(self) -> bool:
        """Read the counters of all pairs once; return whether a pair exists or is about to begin."""
        leases = self._registry.all()
        guests = [lease for lease in leases if lease.is_guest]
        if self._begun.is_set():  # a count from before the pair began does not concern the pair
            self._begun.clear()
            self._seen = {}
        self._leaving = {name: each for name, each in self._leaving.items() if each.is_alive()}
        names = {name for guest in guests for name in (guest.name, guest.asked.guest_of)}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        self._known = {guest.name: self._processes(guest) for guest in guests}
        # Each lease is read once, because a host of several devices may have several guests.
        waiting = {lease.name for lease in leases if lease.name in names and self._wants_memory(lease)}
        for guest in guests:
            causes = [("host_memory", guest.asked.guest_of), ("own_memory", guest.name)]
            reason = next((reason for reason, name in causes if name in waiting), "")
            if reason and guest.name not in self._leaving:
                thread = threading.Thread(
                    target=self.leave, args=(guest, reason), name="guest-leaves", daemon=True
                )
                self._leaving[guest.name] = thread
                thread.start()
        return bool(guests) or any(lease.guests for lease in leases)

    def _processes(self, guest: HelperLease) -> set[Key]:
        """Return the processes seen since the lease became a guest; above `MAX_KNOWN` only living ones."""
        known = self._known.get(guest.name, set()) | {process.key for process in guest.processes}
        if len(known) <= MAX_KNOWN:
            return known
        return {each for each in known if self._machine.processes.alive(each)}

    def _wants_memory(self, lease: HelperLease) -> bool:
        """Return whether a process of a lease waits for kept bytes, so that its counter has grown."""
        now = {slot.key: slot.wants_memory for slot in lease.files.turn_slots()}
        before = self._seen.get(lease.name, now)
        self._seen[lease.name] = now
        return any(count > before.get(key, count) for key, count in now.items())

    def leave(self, guest: HelperLease, reason: str) -> None:
        """Take a guest off the device of its host; retry, and kill its processes if need be."""
        departure, host = _Departure(time.monotonic()), guest.asked.guest_of
        while (moved_bytes := self._try_to_leave(guest, departure)) is None:
            time.sleep(RETRY_S)
        took_s = time.monotonic() - departure.began_at
        fields = {"host": host, "bytes": str(moved_bytes), "took_s": f"{took_s:.3f}"}
        fields["ended"] = "true" if departure.killed_at else "false"
        log.info("lease=%s leaves its host reason=%s %s", guest.name, reason, fields)
        self._machine.events.publish(EventKind.GUEST, lease=guest.name, reason=reason, fields=fields)

    def _try_to_leave(self, guest: HelperLease, departure: _Departure) -> int | None:
        """Try to suspend a guest; return the bytes that were moved, or None if it has not left yet."""
        if not guest.moving.acquire(timeout=GONE_S):
            return None  # another move is in progress
        try:
            if guest.dropped or not guest.is_guest:
                return sum(guest.saved_bytes.values())
            if departure.killed_at and guest.phase is Phase.LOST:
                self._mover.forget_lost(guest)
            # A suspension does not move memory of dead processes; other memory may look the same.
            is_early = time.monotonic() - (departure.killed_at or departure.began_at) < GONE_S
            dead = {key[0] for key in self._processes(guest) if not self._machine.processes.alive(key)}
            if is_early and self._shows(guest, dead):
                return None
            tried_at = time.monotonic()
            moved = self._mover.suspend(guest, "", BUSY_S)  # a CUDA kernel of some seconds may finish
            if moved.done:
                return moved.bytes
            departure.refused_at = departure.refused_at or tried_at
            patience_s = BUSY_S if moved.refused is Refusal.BUSY else REFUSED_S
            if time.monotonic() - departure.refused_at >= patience_s:
                departure.killed_at = departure.killed_at or time.monotonic()
                self._kill(guest, departure, moved.reason)
        except Exception:  # the outermost loop of this thread, for which the host waits
            log.exception("lease=%s cannot be taken off the device of its host", guest.name)
        finally:
            guest.moving.release()
        return None

    def _shows(self, guest: HelperLease, pids: set[int]) -> bool:
        """Return whether the driver may still hold memory of these ended processes of a guest.

        True if it lists one of them, shows bytes that no process holds, or does not answer.
        """
        for uuid in guest.limits if pids else ():
            try:
                usage = self._machine.nvml.usage(uuid)
            except DeviceError:
                return True
            expected_bytes = self._devices.hidden_bytes(uuid) + UNEXPLAINED_BYTES
            is_beyond = not self._devices.is_blind(uuid) and usage.unexplained_bytes > expected_bytes
            if is_beyond or pids & usage.processes.keys():
                return True
        return False

    def _on_devices(self, guest: HelperLease) -> set[int]:
        """Return the pids that the driver lists on the devices of a guest, without devices that fail."""
        found = set[int]()
        for uuid in guest.limits:
            with contextlib.suppress(DeviceError):
                found |= self._machine.nvml.processes(uuid).keys()
        return found

    def _kill(self, guest: HelperLease, departure: _Departure, reason: str) -> None:
        """Kill the processes of a guest except its runner, which reports so that the broker restarts the job.

        Every program can take the arguments of a runner.  A real runner uses no device, and the driver shows
        which processes do.  `GONE_S` after the first kill the runner is killed too, because a program that
        only looks like a runner may start others again and again.
        """
        ended = list(self._registry.living(guest.name))
        if time.monotonic() - departure.killed_at < GONE_S:
            on_devices = self._on_devices(guest)
            ended = [each for each in ended if not each.is_runner or each.pid in on_devices]
        if ended and not guest.ended_as_guest:
            guest.ended_as_guest = True  # before the runner can report
            self._mover.save_again(guest)
            log.error("lease=%s its processes are ended, for its host waits: %s", guest.name, reason)
        for process in ended:
            self._machine.processes.signal(process.key, signal.SIGKILL)


def _check(request: SetLimit) -> None:
    """Check what a request says about a guest.

    Raises:
        InvalidRequest: it makes no sense.
    """
    if request.guest_of == request.lease:
        raise InvalidRequest("a lease is not its own guest")
    if len(request.limits) != 1:
        raise InvalidRequest(f"a guest has one device, not {len(request.limits)}")
    (limit_bytes,) = request.limits.values()
    if not 0 < request.guest_bytes <= limit_bytes:
        raise InvalidRequest(f"guest_bytes is 1 to its limit, {limit_bytes}, not {request.guest_bytes}")
