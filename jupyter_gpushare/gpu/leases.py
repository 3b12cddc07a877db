"""The leases of this machine: made, changed, dropped, and taken over at start.

Whoever changes or moves a lease holds it (`LeaseBook.turn`), and is fenced by the
broker's epoch once it does: a request of an old broker that waited its turn does
nothing.  A lease is written down before its files are made, and forgotten after
they are gone, so that what a killed helper left half done can be told.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import HelperError, InvalidRequest
from .cgroups import Cgroups
from .isolation import DEVICES, NO_COUNTERS, LeaseDirectory, PagePhase, uuid_bytes
from .journal import Record, StateDirectory
from .lease import PAGE, Lease
from .nvml import Nvml
from .processes import Process, Processes
from .verbs import Drop, Dropped, ErrorKind, LeaseFiles, Phase, SetLimit

log = logging.getLogger(__name__)

MAX_LEASES = 256
# How long a change of a lease waits for a move of it that is under way.
TURN_WAIT_S = 5.0


class LeaseBook:
    """All leases by name."""

    def __init__(
        self,
        state: StateDirectory,
        nvml: Nvml,
        processes: Processes,
        boot_id: str,
        cgroups: Cgroups,
        cgroups_offered: Callable[[str], bool],
    ) -> None:
        """``cgroups_offered`` says whether the driver's own limits passed their test on a device."""
        self._state = state
        self._cgroups = cgroups
        self._cgroups_offered = cgroups_offered
        self._nvml = nvml
        self._processes = processes
        self._boot_id = boot_id
        self._guard = threading.Lock()
        self._epoch_guard = threading.Lock()
        self._leases: dict[str, Lease] = {}
        # Told when a lease may be asleep that was not before.
        self.on_suspended: Callable[[], None] = lambda: None

    def all(self) -> list[Lease]:
        """The leases known now."""
        with self._guard:
            return list(self._leases.values())

    def get(self, name: str) -> Lease | None:
        """The lease of this name, if it is known."""
        with self._guard:
            return self._leases.get(name)

    def living(self, name: str) -> tuple[Process, ...]:
        """The processes that carry a lease, looked up now, oldest first."""
        return self._processes.scan({each.name: each.uid for each in self.all()}).get(name, ())

    def fence(self, epoch: int) -> None:
        """Let in this epoch and newer ones only, from now on and after a restart.

        Raises:
            HelperError: a newer one has been seen, or it cannot be written down.
        """
        with self._epoch_guard:
            before = self._state.epoch
            try:
                self._state.raise_epoch(epoch)
            except OSError as error:
                raise HelperError(ErrorKind.STATE, f"the epoch cannot be written down: {error}") from None
        if epoch > before:
            log.info("epoch %d->%d", before, epoch)

    @contextmanager
    def turn(self, lease: Lease, epoch: int) -> Iterator[None]:
        """Hold a lease; whoever had to wait is fenced again.

        Raises:
            HelperError: it is being moved (``busy``), gone, or the epoch is stale by now.
        """
        if not lease.moving.acquire(timeout=TURN_WAIT_S):
            raise HelperError(ErrorKind.BUSY, f"lease {lease.name} is being moved")
        try:
            self.fence(epoch)
            if lease.dropped:
                raise HelperError(ErrorKind.BUSY, f"lease {lease.name} was dropped or replaced meanwhile")
            yield
        finally:
            lease.moving.release()

    def set_limit(self, request: SetLimit, epoch: int) -> LeaseFiles:
        """Make a lease, or change its limits.

        Raises:
            InvalidRequest, HelperError: it makes no sense, or cannot be done now.
        """
        self._check(request)
        try:
            with self._guard:
                lease = self._leases.get(request.lease)
                created = lease is None
                lease = lease or self._create(request)
            if created:
                log.info("lease=%s created uid=%d phase=%s", lease.name, lease.uid, lease.phase)
                self.enforce(lease)
                self.on_suspended()
                return LeaseFiles(directory=str(lease.files.path))
            with self.turn(lease, epoch):
                self._change(lease, request)
        except OSError as error:
            raise HelperError(ErrorKind.STATE, f"the lease cannot be written down: {error}") from None
        return LeaseFiles(directory=str(lease.files.path))

    def enforce(self, lease: Lease) -> None:
        """Have the driver limit a lease where it was found able to."""
        if all(self._cgroups_offered(uuid) for uuid in lease.limits):
            self._cgroups.limit(lease)

    def drop(self, request: Drop, epoch: int) -> Dropped:
        """Revoke a lease and forget it; unknown ones are fine.

        Raises:
            HelperError: it is being moved, or the epoch is stale.
        """
        lease = self.get(request.lease)
        if lease is None:
            return Dropped(known=False)
        with self.turn(lease, epoch):
            # Nobody could ever resume these: without their lease they would wait for ever.
            killed = [key for key in lease.parked if self._processes.signal(key, signal.SIGKILL)]
            lease.dropped = True
            lease.files.revoke()
            self._cgroups.remove(lease.name, lease.limits)
            self._state.forget(lease.name)
            with self._guard:
                self._leases.pop(lease.name, None)
        log.info("lease=%s dropped killed=%d", lease.name, len(killed))
        return Dropped(known=True)

    def adopt(self, settle: Callable[[Lease], None]) -> None:
        """Take over the leases of the helper before: pages stay, moves are settled."""
        records = {record.lease: record for record in self._state.records(self._boot_id)}
        for path in list(self._state.leases.iterdir()):
            if path.name not in records:
                # A self-test's, of an earlier boot, or dropped half-way.
                with contextlib.suppress(InvalidRequest, OSError):
                    LeaseDirectory(self._state.leases, path.name).revoke()
        for name, record in records.items():
            files = LeaseDirectory(self._state.leases, name)
            if files.phase() in (None, PagePhase.REVOKED):
                # Not finished being made, or not finished being dropped.
                files.revoke()
                self._state.forget(name)
                continue
            self._leases[name] = Lease(record, files)
        self._cgroups.sweep(self._leases)
        living = self._processes.scan({lease.name: lease.uid for lease in self.all()})
        for lease in self.all():
            lease.processes = living[lease.name]
            lease.was_alive = bool(lease.processes)
            lease.files.reopen()
            if lease.phase not in (Phase.RUNNING, Phase.LOST):
                settle(lease)
            lease.files.set_phase(PAGE[lease.phase])
            log.info("lease=%s adopted phase=%s processes=%d", lease.name, lease.phase, len(lease.processes))

    def _check(self, request: SetLimit) -> None:
        if request.uid < 0 or (os.geteuid() != 0 and request.uid != os.geteuid()):
            raise HelperError(
                ErrorKind.NOT_ALLOWED,
                f"a helper of uid {os.geteuid()} cannot make files for uid {request.uid}: run it as root",
            )
        if not 1 <= len(request.limits) <= DEVICES:
            raise InvalidRequest(f"a lease has 1 to {DEVICES} devices")
        memory = {gpu.uuid: gpu.memory_bytes for gpu in self._nvml.gpus}
        for uuid, limit_bytes in request.limits.items():
            if uuid not in memory:
                raise InvalidRequest(f"no device {uuid[:80]!r} here")
            uuid_bytes(uuid)
            if not 0 < limit_bytes <= memory[uuid]:
                raise InvalidRequest(f"a limit on {uuid} is 1 to {memory[uuid]} bytes, not {limit_bytes}")
        for uuid, soft_bytes in request.guaranteed.items():
            if not 0 <= soft_bytes <= request.limits.get(uuid, -1):
                raise InvalidRequest(f"guaranteed on {uuid[:80]!r} is 0 to its limit, not {soft_bytes}")

    def _record(self, request: SetLimit) -> Record:
        return Record(
            boot_id=self._boot_id,
            lease=request.lease,
            uid=request.uid,
            limits=dict(request.limits),
            guaranteed=dict(request.guaranteed),
            phase=Phase.SUSPENDED if request.suspended else Phase.RUNNING,
        )

    def _create(self, request: SetLimit) -> Lease:
        """A new lease; the guard is held, so that two requests make one."""
        if len(self._leases) >= MAX_LEASES:
            raise HelperError(ErrorKind.CONFLICT, f"{MAX_LEASES} leases exist: drop some first")
        record = self._record(request)
        lease = Lease(record, LeaseDirectory(self._state.leases, request.lease))
        try:
            self._state.save(record)
            lease.files.create(lease.uid, lease.limits, PAGE[lease.phase])
        except OSError:
            lease.files.revoke()
            self._state.forget(lease.name)
            raise
        lease.files.reopen()
        self._leases[lease.name] = lease
        return lease

    def _change(self, lease: Lease, request: SetLimit) -> None:
        if lease.uid != request.uid:
            raise HelperError(ErrorKind.CONFLICT, f"lease {lease.name} belongs to uid {lease.uid}")
        if not self.living(lease.name):
            self._begin_again(lease, request)
            return
        if list(lease.limits) != list(request.limits):
            raise HelperError(
                ErrorKind.CONFLICT, f"processes carry lease {lease.name}: its devices cannot change"
            )
        before = lease.limits, lease.guaranteed
        lease.limits, lease.guaranteed = dict(request.limits), dict(request.guaranteed)
        try:
            self._state.save(lease.record(self._boot_id))
        except OSError:
            lease.limits, lease.guaranteed = before
            raise
        lease.most = {uuid: max(lease.most.get(uuid, 0), count) for uuid, count in lease.limits.items()}
        self.enforce(lease)
        for index, limit_bytes in enumerate(lease.limits.values()):
            lease.files.set_limit(index, limit_bytes)

    def _begin_again(self, lease: Lease, request: SetLimit) -> None:
        """No process carries the lease: other limits, other devices, another phase."""
        record = self._record(request)
        same = list(lease.limits.items()) == list(record.limits.items())
        same = same and lease.guaranteed == record.guaranteed
        if same and lease.phase is record.phase and not lease.parked:
            return
        again = Lease(record, lease.files)
        again.moving = lease.moving
        # What processes of before have counted is no wish of those to come.
        account = again.files.account()
        again.baseline = account.counters() if account else NO_COUNTERS
        self._state.save(again.record(self._boot_id))
        again.files.create(again.uid, again.limits, PAGE[again.phase])
        again.files.reopen()
        self._cgroups.remove(lease.name, lease.limits)
        self.enforce(again)
        with self._guard:
            self._leases[lease.name] = again
        lease.dropped = True
        self.on_suspended()
        log.info("lease=%s began again phase=%s", again.name, again.phase)
