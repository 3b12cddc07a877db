"""Create, change, drop and adopt the leases of this machine.

A thread that changes or moves a lease holds it (`LeaseRegistry.hold`).  After the wait the broker's epoch is
checked again, so that a waiting request of an old broker does nothing.  A lease is in the journal before
its files are created, and until they are removed, so that the next helper sees what a killed helper left
half done.

While no broker answers, or the broker cannot store anything, the helper may resume a lease that no broker
has recorded as awake (`moves.wake`).  A broker may have granted the same capacity meanwhile.  So until it
confirms the resume, no other lease that does not fit beside the resumed one gets a limit or is resumed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from jupyter_gpushare.errors import HelperError, InvalidRequest
from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.leases import cgroup_limits
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.files import DEVICES, LeaseDirectory, PagePhase, counters_of, uuid_bytes
from jupyter_gpushare.gpu.leases.journal import SELF_TEST_PREFIX, JournalRecord
from jupyter_gpushare.gpu.leases.lease import PAGE, HelperLease
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.processes import Process, keys_by_inner
from jupyter_gpushare.gpu.os.cgroups import Cgroups
from jupyter_gpushare.gpu.os.process_memory import ANSWER_S
from jupyter_gpushare.protocol.helper import Drop, Dropped, ErrorKind, LeaseFiles, Level, Phase, SetLimit

log = logging.getLogger(__name__)


# ---- check a request before a lease is created or changed --------------------


def check_limits(request: SetLimit, gpus: Iterable[DriverGpu]) -> None:
    """Check the limits of a request against these devices.

    Raises:
        InvalidRequest: a limit is invalid.
        HelperError: this helper may not create files for that user.
    """
    if request.uid < 0 or (os.geteuid() != 0 and request.uid != os.geteuid()):
        raise HelperError(
            ErrorKind.NOT_ALLOWED,
            f"a helper of uid {os.geteuid()} cannot create files for uid {request.uid}: run it as root",
        )
    if not 1 <= len(request.limits) <= DEVICES:
        raise InvalidRequest(f"a lease has 1 to {DEVICES} devices")
    memory = {gpu.uuid: gpu.memory_bytes for gpu in gpus}
    for uuid, limit_bytes in request.limits.items():
        if uuid not in memory:
            raise InvalidRequest(f"no device {uuid[:80]!r} here")
        uuid_bytes(uuid)
        if not 0 < limit_bytes <= memory[uuid]:
            raise InvalidRequest(f"a limit on {uuid} is 1 to {memory[uuid]} bytes, not {limit_bytes}")
    if not 0 < request.share <= 1:
        raise InvalidRequest(f"a share of compute time is above 0 and at most 1, not {request.share}")
    for uuid, soft_bytes in request.guaranteed.items():
        if not 0 <= soft_bytes <= request.limits.get(uuid, -1):
            raise InvalidRequest(f"guaranteed on {uuid[:80]!r} is 0 to its limit, not {soft_bytes}")


# ---- the leases --------------------------------------------------------------

MAX_LEASES = 256
# A change of a lease waits this long for a move in progress.
HOLD_WAIT_S = 5.0
# A drop waits this long for killed processes; the watchdog handles a process that is stuck in the kernel.
END_PROCESSES_S = 1.0
# The first scan may wait this long for processes that do not answer, because no sample is due yet.
FIRST_SCAN_S = 1.0
# A broker requests a sample every second.  After this long without a request it counts as unreachable.
SILENT_S = 5.0


class LeaseRegistry:
    """All leases by name."""

    def __init__(self, machine: Machine, devices: DeviceStates, cgroups: Cgroups) -> None:
        self._machine = machine
        self._devices = devices
        self._cgroups = cgroups
        self._guard = threading.RLock()
        self._epoch_guard = threading.Lock()
        self._access_guard = threading.Lock()
        self._leases: dict[str, HelperLease] = {}
        self._heard_at = time.monotonic()
        # Set when a lease may have become suspended.
        self.suspended = threading.Event()

    def all(self) -> list[HelperLease]:
        """Return all leases."""
        with self._guard:
            return list(self._leases.values())

    def get(self, name: str) -> HelperLease | None:
        """Return the lease of this name; None if there is none."""
        with self._guard:
            return self._leases.get(name)

    def scan(self, within_s: float = ANSWER_S) -> dict[str, tuple[Process, ...]]:
        """Scan now; return the living processes of every lease, oldest first.

        A process that does not answer belongs to the lease whose account or record names it.

        Raises:
            OSError: no descriptor or memory is free.
        """
        processes, leases = self._machine.processes, self.all()
        owners = {lease.name: lease.asked.uid for lease in leases}
        found = processes.scan(owners, within_s)
        claimed = [lease.claim(processes) for lease in leases]
        if any(claimed):
            found = processes.scan(owners)
        for lease in leases:
            lease.files.know(keys_by_inner(found[lease.name]))
        return found

    def living(self, name: str) -> tuple[Process, ...]:
        """Scan now; return the living processes of a lease, oldest first.

        Raises:
            OSError: no descriptor or memory is free.
        """
        return self.scan().get(name, ())

    def may_be_alive(self, lease: HelperLease) -> bool:
        """Return whether a lease has living processes, or had some and unread processes may belong to it.

        Raises:
            OSError: no descriptor or memory is free.
        """
        if self.living(lease.name):
            return True
        return bool(lease.processes) and self.has_unread(lease.asked.uid)

    def has_unread(self, uid: int) -> bool:
        """Return whether a process of a user was unread in the last scan; any of its leases may have it."""
        return any(process.uid == uid for process in self._machine.processes.unread)

    def fence(self, epoch: int) -> None:
        """Accept only this epoch and newer ones, from now on and after a restart.

        Raises:
            HelperError: a newer epoch has been seen, or this one cannot be written.
        """
        with self._epoch_guard:
            before = self._machine.state.epoch
            try:
                self._machine.state.raise_epoch(epoch)
            except OSError as error:
                raise HelperError(ErrorKind.STATE, f"the epoch cannot be written: {error}") from None
            self._heard_at = time.monotonic()
        if epoch > before:
            log.info("epoch %d->%d", before, epoch)

    def is_unattended(self) -> bool:
        """Return whether no broker has sent a request for `SILENT_S`."""
        return time.monotonic() - self._heard_at >= SILENT_S

    def claim(self, lease: HelperLease, *, by_broker: bool) -> bool:
        """Return whether a held lease may be resumed unrecorded; mark it as `HelperLease.unconfirmed` if so.

        The broker must request it (``by_broker``) or be unreachable.  The limits of the lease must fit beside
        the leases that are on its devices or about to be, and none of those may borrow memory there.
        """
        with self._guard:
            if lease.dropped or not (by_broker or self.is_unattended()):
                return False
            if not self._machine.seats.may_gain(lease.name, lease.limits):
                return False
            beside = self._on_devices(lease.name)
            if any(other.borrows(uuid) for other in beside for uuid in lease.limits):
                return False
            lease.unconfirmed = self._fits(lease.limits, beside)
            return lease.unconfirmed

    def confirm(self, lease: HelperLease) -> None:
        """Note that the broker knows of an unrecorded resume."""
        if not lease.unconfirmed:
            return
        lease.unconfirmed = False
        try:
            self._machine.state.save(lease.record())
        except OSError:
            lease.unsaved = True

    def conflict(self, name: str, limits: Mapping[str, int]) -> str:
        """Return why a lease may not get these limits now; "" if it may.

        It has no connected seat with these devices, or a lease that was resumed unrecorded needs the memory.
        """
        if not self._machine.seats.may_gain(name, limits):
            return f"no seat of lease {name} with its devices is connected on this node"
        with self._guard:
            beside = self._on_devices(name)
        unknown = [
            other.name for other in beside if other.unconfirmed and other.limits.keys() & limits.keys()
        ]
        if not unknown or self._fits(limits, beside):
            return ""
        return f"lease {unknown[0]} was resumed on its device while no broker answered"

    def _on_devices(self, name: str) -> list[HelperLease]:
        """Return the other leases that hold device memory, may hold it soon, or are being moved."""
        leases = self._leases.values()
        awake = [each for each in leases if each.phase is not Phase.SUSPENDED or each.moving.locked()]
        # The limit of a host that counts includes the memory of its guest.
        hosts = {each.name: each.limits for each in leases if each in awake or each.name == name}
        guests = [each for each in awake if each.is_guest and each.asked.guest_of in hosts]
        within = [each for each in guests if each.limits.keys() & hosts[each.asked.guest_of].keys()]
        return [each for each in awake if each.name != name and each not in within]

    def _fits(self, limits: Mapping[str, int], beside: list[HelperLease]) -> bool:
        """Return whether these limits fit beside those of the other leases on each device."""
        grantable = {
            gpu.uuid: gpu.memory_bytes - self._devices.reserve_bytes(gpu) for gpu in self._machine.nvml.gpus
        }
        taken = {uuid: sum(other.limits.get(uuid, 0) for other in beside) for uuid in limits}
        return all(
            not taken[uuid] or taken[uuid] + count <= grantable.get(uuid, 0) for uuid, count in limits.items()
        )

    @contextmanager
    def hold(self, lease: HelperLease, epoch: int) -> Iterator[None]:
        """Hold a lease; the epoch is checked again after the wait.

        Raises:
            HelperError: the lease is being moved (``busy``) or was dropped, or the epoch is stale by now.
        """
        if not lease.moving.acquire(timeout=HOLD_WAIT_S):
            raise HelperError(ErrorKind.BUSY, f"lease {lease.name} is being moved")
        try:
            self.fence(epoch)
            if lease.dropped:
                raise HelperError(ErrorKind.BUSY, f"lease {lease.name} was dropped or replaced meanwhile")
            yield
        finally:
            lease.moving.release()

    def set_limit(self, request: SetLimit, epoch: int) -> LeaseFiles:
        """Create a lease, or change its limits; return its files.

        Raises:
            InvalidRequest: a limit is invalid on this machine.
            HelperError: the lease cannot be changed now, or the state directory cannot be written.
        """
        check_limits(request, self._machine.nvml.gpus)
        try:
            with self._guard:
                lease = self._leases.get(request.lease)
                created = lease is None
                if not request.suspended and (reason := self.conflict(request.lease, request.limits)):
                    raise HelperError(ErrorKind.CONFLICT, reason)
                lease = lease or self._create(request)
            if created:
                self._machine.state.holders.add(request.uid)
                log.info("lease=%s created uid=%d phase=%s", lease.name, request.uid, lease.phase)
                self._enforce(lease)
                self.admit_users()
                self.suspended.set()
                return LeaseFiles(directory=str(lease.files.path))
            with self.hold(lease, epoch):
                self._change(lease, request)
            self.admit_users()
        except OSError as error:
            raise HelperError(ErrorKind.STATE, f"the lease cannot be written: {error}") from None
        return LeaseFiles(directory=str(lease.files.path))

    def enforce_on(self, uuid: str) -> None:
        """Have the driver limit the leases that were created before the self-test of their device passed."""
        if self._devices.offers(uuid, Level.CGROUP):
            for lease in self.all():
                if uuid in lease.limits and not lease.in_cgroup:
                    self._enforce(lease)

    def admit_users(self) -> None:
        """Let only the users of leases open the devices of their leases (`gpu.os.device_files`)."""
        with self._access_guard:
            users: dict[str, set[int]] = {}
            for lease in self.all():
                for uuid in lease.limits:
                    users.setdefault(uuid, set()).add(lease.asked.uid)
            self._machine.files.admit(users)

    def phase_changed(self, lease: HelperLease) -> None:
        """Adapt the limits of a lease to its new phase, and wake the wake detector."""
        if not lease.is_guest:
            self.end_pair(lease.name)
        if lease.in_cgroup:
            cgroup_limits.limit(lease, self._cgroups)
        if lease.phase is Phase.SUSPENDED:
            self.suspended.set()

    def guests_of(self, host: HelperLease) -> dict[str, tuple[str, int]]:
        """Return the guests of a lease and their bytes, by device; a guest may be older than its host."""
        return {
            uuid: (guest.name, guest.asked.guest_bytes)
            for guest in self.all()
            if guest.is_guest and guest.asked.guest_of == host.name
            for uuid in guest.limits
            if uuid in host.limits
        }

    def begin_pair(self, host: HelperLease, uuid: str, guest: str, count: int) -> bool:
        """Keep ``count`` bytes of a host for its guest; return False if the host was replaced or dropped."""
        with self._guard:
            if self._leases.get(host.name) is not host:
                return False
            host.guests = host.guests | {uuid: (guest, count)}
            host.write_kept()
            return True

    def end_pair(self, guest: str) -> None:
        """Give a host back the memory of a guest that has left, and end the guest's reservation."""
        self._machine.host.keep_reserved(guest, 0)
        with self._guard:
            for host in self._leases.values():
                if kept := [uuid for uuid, (name, _) in host.guests.items() if name == guest]:
                    host.guests = {u: each for u, each in host.guests.items() if u not in kept}
                    host.write_kept()

    def put_on(self, lease: HelperLease, devices: Iterable[str]) -> None:
        """Replace the devices of a held lease, with its limits on them.

        Raises:
            OSError: its limit page is missing.
        """
        devices = tuple(devices)
        former = {*lease.limits, *lease.moves_from} - set(devices)
        lease.put_on(devices)
        lease.files.set_devices(devices)
        lease.write_kept()
        if lease.in_cgroup or all(self._devices.offers(uuid, Level.CGROUP) for uuid in devices):
            cgroup_limits.limit(lease, self._cgroups)
            self._cgroups.clear_limits(lease.name, former)

    def place(self, lease: HelperLease) -> None:
        """Move the processes of a lease into its cgroup, if the driver limits it."""
        cgroup_limits.place(lease, self._cgroups, self._machine.processes)

    def drop(self, request: Drop, epoch: int) -> Dropped:
        """Revoke a lease and forget it; an unknown lease is no error.  A guest's pair stays until `end_pair`.

        Raises:
            HelperError: the lease is being moved, or the epoch is stale.
        """
        lease = self.get(request.lease)
        if lease is None:
            return Dropped(known=False)
        with self.hold(lease, epoch):
            # Without their lease no request could resume these processes, and they would wait for ever.
            send = self._machine.processes.signal
            killed = [key for key in lease.parked if send(key, signal.SIGKILL)]
            lease.dropped = True
            lease.files.revoke()
            if request.end_processes:
                killed += self._end_processes(lease)
            self._cgroups.remove(lease.name, lease.limits)
            self._machine.state.forget(lease.name)
            with self._guard:
                self._leases.pop(lease.name, None)
        self.admit_users()
        log.info("lease=%s dropped killed=%d", lease.name, len(killed))
        return Dropped(known=True)

    def _end_processes(self, lease: HelperLease) -> list[tuple[int, int]]:
        """Kill the processes of a lease, for `END_PROCESSES_S` at most; return their keys."""
        processes, killed = self._machine.processes, []
        until = time.monotonic() + END_PROCESSES_S
        while (remaining := self.living(lease.name)) and time.monotonic() < until:
            killed += [each.key for each in remaining if processes.signal(each.key, signal.SIGKILL)]
            time.sleep(0.01)
        return killed

    def adopt(self) -> None:
        """Adopt the leases of the previous helper; `Mover.settle` later ends moves that were in progress."""
        state = self._machine.state
        journal = state.records()
        records = {name: record for name, record in journal.items() if record is not None}
        owners = {name: record.asked.uid for name, record in records.items()}
        living = self._machine.processes.scan(owners, FIRST_SCAN_S)
        for name, record in records.items():
            files, asked = LeaseDirectory(state.leases, name), record.asked
            if files.phase() in (None, PagePhase.REVOKED):
                if not living[name] and not self.has_unread(asked.uid):
                    # Its creation or its drop was not finished.
                    files.revoke()
                    state.forget(name)
                    continue
                log.error(
                    "lease=%s its files were removed while its processes live: they are created again, and "
                    "processes that run keep the limit that they had",
                    name,
                )
                files.create(asked.uid, asked.limits, PAGE[record.phase], names=record.names)
            self._leases[name] = HelperLease(record, files)
            state.holders.add(asked.uid)
        self._remove_stale(journal.keys() - records.keys())
        self._cgroups.sweep(self._leases)
        living = self.scan()
        for lease in self.all():
            lease.processes = living[lease.name]
            lease.lived = bool(lease.processes)
            lease.files.reopen()
        self.admit_users()

    def _remove_stale(self, stale: Collection[str]) -> None:
        """Remove the directories and ``stale`` records of earlier boots, self-tests and half-dropped leases.

        A lease that has a directory but no record keeps its limit, and no process of its user
        is stopped.
        """
        state = self._machine.state
        for path in list(state.leases.iterdir()):
            if path.name in self._leases:
                continue
            with contextlib.suppress(InvalidRequest, OSError):
                files = LeaseDirectory(state.leases, path.name)
                is_stale = path.name in stale or path.name.startswith(SELF_TEST_PREFIX)
                if is_stale or files.phase() in (None, PagePhase.REVOKED):
                    files.revoke()
                    continue
                state.holders.lose_record(uid := files.owner())
                log.error(
                    "lease=%s has no record in %s: processes of uid %d are left alone and its limit stays in "
                    "force, until the broker asks for it again or this folder is removed",
                    path.name, state.path, uid,
                )  # fmt: skip
        for name in stale:
            state.forget(name)

    def _enforce(self, lease: HelperLease) -> None:
        if all(self._devices.offers(uuid, Level.CGROUP) for uuid in lease.limits):
            cgroup_limits.limit(lease, self._cgroups)

    def _create(self, request: SetLimit) -> HelperLease:
        """Create a lease; the caller holds the guard, so that two requests create only one.

        Raises:
            HelperError: `MAX_LEASES` exist.
            OSError: the lease cannot be written; nothing of it is left.
        """
        if len(self._leases) >= MAX_LEASES:
            raise HelperError(ErrorKind.CONFLICT, f"{MAX_LEASES} leases exist: drop some first")
        state, record = self._machine.state, _record_of(request)
        lease = HelperLease(record, LeaseDirectory(state.leases, request.lease))
        lease.guests = self.guests_of(lease)
        try:
            state.save(record)
            lease.create_files(self._devices.contexts(lease.limits))
        except OSError:
            lease.files.revoke()
            state.forget(lease.name)
            raise
        lease.files.reopen()
        self._leases[lease.name] = lease
        return lease

    def _change(self, lease: HelperLease, request: SetLimit) -> None:
        if lease.asked.uid != request.uid:
            raise HelperError(ErrorKind.CONFLICT, f"lease {lease.name} belongs to uid {lease.asked.uid}")
        if not self.may_be_alive(lease):
            self._replace(lease, request)
            return
        if list(lease.limits) != list(request.limits):
            raise HelperError(
                ErrorKind.CONFLICT, f"processes carry lease {lease.name}: its devices cannot change"
            )
        before, lease.asked = lease.asked, request
        try:
            self._machine.state.save(lease.record())
        except OSError:
            lease.asked = before
            raise
        lease.peak_limits = {
            uuid: max(lease.peak_limits.get(uuid, 0), count) for uuid, count in lease.limits.items()
        }
        self._enforce(lease)
        for index, limit_bytes in enumerate(lease.limits.values()):
            lease.files.set_limit(index, limit_bytes)
        lease.write_kept()

    def _replace(self, lease: HelperLease, request: SetLimit) -> None:
        """Replace the limits, devices and phase of a lease that no process carries."""
        record = _record_of(request)
        same = replace(lease.asked, suspended=request.suspended) == request
        if (
            same
            and list(lease.limits) == list(request.limits) == list(lease.names)
            and lease.phase is record.phase
            and not lease.parked
        ):
            return
        new = HelperLease(record, lease.files)
        new.moving = lease.moving
        # Calls that earlier processes counted must not wake later ones.
        new.baseline = counters_of(new.files.account())
        self._machine.state.save(new.record())
        with self._guard:  # no pair begins or ends meanwhile
            guests = lease.guests | self.guests_of(new)
            new.guests = {uuid: each for uuid, each in guests.items() if uuid in new.limits}
            new.create_files(self._devices.contexts(new.limits))
            new.files.reopen()
            self._cgroups.remove(lease.name, lease.limits)
            self._enforce(new)
            self._leases[lease.name] = new
        lease.dropped = True
        self.suspended.set()
        log.info("lease=%s replaced phase=%s", new.name, new.phase)


def _record_of(request: SetLimit) -> JournalRecord:
    return JournalRecord(asked=request, phase=Phase.SUSPENDED if request.suspended else Phase.RUNNING)
