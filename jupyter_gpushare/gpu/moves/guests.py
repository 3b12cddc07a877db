"""Guests: leases on memory and time that another lease holds, and leave at once when it wants them back.

A *guest* has one device, of which a *host* has the whole.  The limit page of each says its whole limit,
and how much of that is kept for the other: of the host's the bytes of the guest, of the guest's all but
these.  What fits into the limit, but not beside what is kept, waits in the library and raises a word
in the account (`gpushare_lease.h`).  A thread here reads these words.  Whoever of the two asks, the guest is
suspended, without the broker, and nothing is kept for it any more: the host goes on, and the guest's
call waits until it is resumed where it has its whole limit.

* A pair is the guest's record: `SetLimit.guest_of` of a lease that is not suspended.  It ends with the
  phase, or with the guest (`LeaseRegistry.end_pair`).
* Order without a gap: host memory is reserved, then the host's page says what is kept, then its account
  is read: if it has more already, that is taken back.  Only then the guest's page appears, or it
  resumes.  The library takes, and looks again whether something is kept: one of the two sees the other.
* A guest that cannot be suspended, for a reason that stays or for `BUSY_S`, is killed, all but its
  runner: the host does not wait longer for it.  The sample says so (`LeaseSample.ended_as_guest`).
* A guest whose host has left stays what it is, on nobody's capacity, until the broker decides.
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
# A process may take longer to end, for it writes a core file: its host waits for that, no request does.
LATE_S = 60.0
MAX_KNOWN = 1024
# How long a guest is asked again that does not come to rest, or is refused for another reason.
BUSY_S = 10.0
REFUSED_S = 0.5


@dataclass(slots=True)
class _Departure:
    """How a guest leaves."""

    began_at: float
    refused_at: float = 0.0  # when it did not come to rest, for the first time
    killed_at: float = 0.0


class Guests:
    """All pairs of this machine; `run` in a thread of its own."""

    def __init__(
        self, machine: Machine, registry: LeaseRegistry, devices: DeviceStates, mover: Mover
    ) -> None:
        self._machine = machine
        self._registry = registry
        self._devices = devices
        self._mover = mover
        self._begun = threading.Event()
        self._beginning = threading.Lock()
        self._seen: dict[str, dict[Key, int]] = {}  # the words of each lease's processes, as last read
        self._leaving: dict[str, threading.Thread] = {}  # by guest
        self._known: dict[str, set[Key]] = {}  # the processes of each guest, also those that have ended

    def adopt(self) -> None:
        """Write again what is kept, as the records of the leases say; an earlier helper may have died."""
        for lease in self._registry.all():
            lease.guests = self._registry.guests_of(lease)
            lease.write_kept()
            if lease.is_guest:
                self._machine.host.keep_reserved(lease.name, lease.asked.guest_bytes)
        self._begun.set()

    # Pairs begin

    def set_limit(self, request: SetLimit, epoch: int) -> LeaseFiles:
        """As `LeaseRegistry.set_limit`; a lease that becomes a guest has its memory from then on.

        Raises:
            InvalidRequest: the request makes no sense.
            HelperError: it cannot be done now; ``conflict``: why it cannot be a guest.
        """
        lease = self._registry.get(request.lease)
        if not request.guest_of:
            if lease is not None and lease.is_guest and self._host_is_there(lease):
                reason = f"lease {lease.name} is a guest whose host is there: suspend it first"
                raise HelperError(ErrorKind.CONFLICT, reason)
            files = self._registry.set_limit(request, epoch)
            self._registry.end_pair(request.lease)
            return files
        _check(request)
        lives = lease is not None and self._registry.may_be_alive(lease)
        if lease is not None and lease.is_guest:
            request = replace(request, suspended=False)  # it leaves by being suspended or dropped alone
        if lease.phase is Phase.SUSPENDED if lease and lives else request.suspended:
            # It counts from its resume on; and should it end now, it must not run again.
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
        """As `Mover.resume`; one that is to be a guest is one from then on.  The caller holds the lease."""
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
        """As `LeaseRegistry.drop`; the host of a guest has its memory when the driver shows that gone.

        Raises:
            HelperError: it is being moved, or the epoch is stale.
        """
        lease = self._registry.get(request.lease)
        pids = set[int]()
        if lease and lease.asked.guest_of:
            # Also those that began after the last sample.
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
        """End the pair of a dropped guest when its memory is gone; whether that was in time."""
        until = time.monotonic() + patience_s
        while self._shows(guest, pids):
            if time.monotonic() >= until:
                return False
            time.sleep(RETRY_S)
        self._end(guest.name)
        return True

    def _end(self, name: str) -> None:
        """End the pair of a lease that was dropped, if no other of its name is a guest by now."""
        lease = self._registry.get(name)
        if lease is None or not lease.is_guest:
            self._registry.end_pair(name)

    def _begin(self, asked: SetLimit, uuid: str, guest: HelperLease | None) -> MoveResult | None:
        """Reserve host memory for a guest, and let the host keep bytes for it; why not, or None."""
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
            most, used = host.limits[uuid] - guest_bytes, self._used_bytes(host, uuid)
            if used is None or used > most:
                self._registry.end_pair(name)
                has, left = compared(used or host.limits[uuid], most)
                reason = f"lease {host.name} uses {has}, with a guest {left} are left"
                return refusal(Refusal.NO_MEMORY, reason)
        self._begun.set()
        return None

    def _obstacle(self, host: HelperLease, uuid: str, asked: SetLimit, guest: HelperLease | None) -> str:
        """Why a lease cannot be a guest on the device of another now; "" if it can."""
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
        # As far as the last sample shows; the guest is new, or was suspended before.
        blocker = self._mover.blockers.reason(host, host.account, host.held, forced=True)
        return self._devices.suspend_blocker(uuid) or blocker

    def _used_bytes(self, host: HelperLease, uuid: str) -> int | None:
        """What a host uses on a device, as its account says now; None: that is broken."""
        account = host.files.account()
        if account is None:
            return None
        index, alive = list(host.limits).index(uuid), self._machine.processes.alive
        # Processes in containers are known by their own pids until the next sample.
        contained = any(map(self._machine.processes.is_contained, host.processes))
        slots = account.slots.items()
        used = sum(slot.used_bytes[index] for key, slot in slots if contained or alive(key))
        return host.contexts.get(uuid, 0) + used

    def _host_is_there(self, guest: HelperLease) -> bool:
        host = self._registry.get(guest.asked.guest_of)
        if host is None or host.phase is Phase.SUSPENDED:
            return False
        return bool(host.limits.keys() & guest.limits.keys())

    # Guests leave

    def run(self) -> None:
        """Watch for ever; sleeps while there is no guest."""
        while True:
            try:
                if not self.look():
                    self._begun.wait()
            except Exception:  # the outermost loop: a host must not wait for another pair's fault
                log.exception("guests cannot be watched")
            time.sleep(POLL_S)

    def look(self) -> bool:
        """Read the words of all pairs once; returns whether there are any, or one is about to begin."""
        leases = self._registry.all()
        guests = [lease for lease in leases if lease.is_guest]
        if self._begun.is_set():  # what was asked before is not for a pair that is new
            self._begun.clear()
            self._seen = {}
        self._leaving = {name: each for name, each in self._leaving.items() if each.is_alive()}
        names = {name for guest in guests for name in (guest.name, guest.asked.guest_of)}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        self._known = {guest.name: self._processes(guest) for guest in guests}
        # Each is read once: a host of several devices may have several guests.
        asking = {lease.name for lease in leases if lease.name in names and self._asks(lease)}
        for guest in guests:
            asks = [("host_memory", guest.asked.guest_of), ("own_memory", guest.name)]
            reason = next((reason for reason, name in asks if name in asking), "")
            if reason and guest.name not in self._leaving:
                thread = threading.Thread(
                    target=self.leave, args=(guest, reason), name="guest-leaves", daemon=True
                )
                self._leaving[guest.name] = thread
                thread.start()
        return bool(guests) or any(lease.guests for lease in leases)

    def _processes(self, guest: HelperLease) -> set[Key]:
        """The processes of a guest that were seen since it is one, or of very many those that live."""
        known = self._known.get(guest.name, set()) | {process.key for process in guest.processes}
        if len(known) <= MAX_KNOWN:
            return known
        return {each for each in known if self._machine.processes.alive(each)}

    def _asks(self, lease: HelperLease) -> bool:
        """Whether a process of a lease waits for bytes that are kept: its word has grown."""
        now = {slot.key: slot.wants_memory for slot in lease.files.turn_slots()}
        before = self._seen.get(lease.name, now)
        self._seen[lease.name] = now
        return any(count > before.get(key, count) for key, count in now.items())

    def leave(self, guest: HelperLease, reason: str) -> None:
        """Take a guest off the device of its host, whatever that takes."""
        departure, host = _Departure(time.monotonic()), guest.asked.guest_of
        while (moved_bytes := self._try_to_leave(guest, departure)) is None:
            time.sleep(RETRY_S)
        took_s = time.monotonic() - departure.began_at
        fields = {"host": host, "bytes": str(moved_bytes), "took_s": f"{took_s:.3f}"}
        fields["ended"] = "true" if departure.killed_at else "false"
        log.info("lease=%s leaves its host reason=%s %s", guest.name, reason, fields)
        self._machine.events.publish(EventKind.GUEST, lease=guest.name, reason=reason, fields=fields)

    def _try_to_leave(self, guest: HelperLease, departure: _Departure) -> int | None:
        """The bytes that were moved; None: it is still there."""
        if not guest.moving.acquire(timeout=GONE_S):
            return None  # a move is under way
        try:
            if guest.dropped or not guest.is_guest:
                return sum(guest.saved_bytes.values())
            if departure.killed_at and guest.phase is Phase.LOST:
                self._mover.forget_lost(guest)
            # What the dead held is no part of a suspension; another's may look like it.
            is_early = time.monotonic() - (departure.killed_at or departure.began_at) < GONE_S
            dead = {key[0] for key in self._processes(guest) if not self._machine.processes.alive(key)}
            if is_early and self._shows(guest, dead):
                return None
            tried_at = time.monotonic()
            moved = self._mover.suspend(guest, "", BUSY_S)  # a kernel of some seconds may run to its end
            if moved.done:
                return moved.bytes
            departure.refused_at = departure.refused_at or tried_at
            patience_s = BUSY_S if moved.refused is Refusal.BUSY else REFUSED_S
            if time.monotonic() - departure.refused_at >= patience_s:
                departure.killed_at = departure.killed_at or time.monotonic()
                self._kill(guest, departure, moved.reason)
        except Exception:  # the outermost loop of this thread: the host waits
            log.exception("lease=%s cannot be taken off the device of its host", guest.name)
        finally:
            guest.moving.release()
        return None

    def _shows(self, guest: HelperLease, pids: set[int]) -> bool:
        """Whether the driver may still have memory of these processes of a guest, which have ended.

        It may list them, or show bytes that no process holds, or not answer.
        """
        for uuid in guest.limits if pids else ():
            try:
                usage = self._machine.nvml.usage(uuid)
            except DeviceError:
                return True
            most_bytes = self._devices.hidden_bytes(uuid) + UNEXPLAINED_BYTES
            is_beyond = not self._devices.is_blind(uuid) and usage.unexplained_bytes > most_bytes
            if is_beyond or pids & usage.processes.keys():
                return True
        return False

    def _on_devices(self, guest: HelperLease) -> set[int]:
        """The pids that the driver lists on the devices of a guest, as far as it answers."""
        found = set[int]()
        for uuid in guest.limits:
            with contextlib.suppress(DeviceError):
                found |= self._machine.nvml.processes(uuid).keys()
        return found

    def _kill(self, guest: HelperLease, departure: _Departure, reason: str) -> None:
        """Kill what a guest runs, but not its runner: that reports, and the broker starts the job again.

        Every program can take the arguments of a runner.  A real runner uses no device, and the driver shows
        which processes do.  A guest that is still there `GONE_S` after the first kill loses its runner too:
        what looks like one may start programs anew.
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
    """Return if what a request says about a guest can be.

    Raises:
        InvalidRequest: it cannot.
    """
    if request.guest_of == request.lease:
        raise InvalidRequest("a lease is not its own guest")
    if len(request.limits) != 1:
        raise InvalidRequest(f"a guest has one device, not {len(request.limits)}")
    (limit_bytes,) = request.limits.values()
    if not 0 < request.guest_bytes <= limit_bytes:
        raise InvalidRequest(f"guest_bytes is 1 to its limit, {limit_bytes}, not {request.guest_bytes}")
