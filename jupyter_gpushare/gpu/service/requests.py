"""The verbs of the device helper: each request is checked, fenced by its epoch and answered.

Verbs that change something carry the broker's epoch (`protocol.helper`).  The epoch is
on disk before the request takes effect, and is compared again once the lease is held.  So a
delayed request of an old broker does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jupyter_gpushare import __version__
from jupyter_gpushare.errors import HelperError, InvalidRequest
from jupyter_gpushare.gpu.checks.self_tests import SelfTests
from jupyter_gpushare.gpu.checks.watchdog import Watchdog
from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.files import LeaseDirectory, check_lease
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.leftovers import keepers_of
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.processes import leader
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.guests import Guests
from jupyter_gpushare.gpu.moves.suspend import Mover, refusal
from jupyter_gpushare.gpu.moves.wake import resume_unrecorded
from jupyter_gpushare.gpu.service.sampler import Sampler
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper import Device, EndProcess, ErrorKind, Phase, Refusal, Reserve
from jupyter_gpushare.protocol.seats import CountSeats

log = logging.getLogger(__name__)

# `inventory` waits this long for the self-tests at start; if they end later, a `DEVICE` event follows.
CANARY_WAIT_S = 4.0
# The answer to a move waits this long for a sample that shows the move.
REFRESH_WAIT_S = 0.3
SIGNAL_ROUNDS = 3
# Maximum duration of the suspension before a kill.
PARK_TIMEOUT_S = 5.0


class Requests:
    """Answers the requests of the broker; safe to call from several threads."""

    def __init__(
        self,
        machine: Machine,
        registry: LeaseRegistry,
        devices: DeviceStates,
        self_tests: SelfTests,
        mover: Mover,
        guests: Guests,
        sampler: Sampler,
        watchdog: Watchdog,
    ) -> None:
        self._machine = machine
        self._registry = registry
        self._devices = devices
        self._self_tests = self_tests
        self._mover = mover
        self._guests = guests
        self._sampler = sampler
        self._watchdog = watchdog

    def answer(self, verb: str, fields: dict[str, Any]) -> Any:
        """Return the answer to a request, a dataclass of `protocol.helper`.

        Raises:
            InvalidRequest: a field is missing, unknown or wrong.
            HelperError: the verb or lease is unknown, the epoch is stale, or the lease is busy.
            DeviceError: the driver failed.
        """
        epoch = fields.pop("epoch", None)
        if epoch is not None and (type(epoch) is not int or not 0 <= epoch < 1 << 63):
            raise InvalidRequest("an epoch is a whole number of at least 0")
        readers: dict[str, Callable[[], Any]] = {
            "hello": self._hello,
            "inventory": self._inventory,
            "sample": self._sampler.sample,
            "watch": self._sampler.sample,
        }
        changers: dict[str, tuple[type[Any], Callable[[Any, int], Any]]] = {
            "set_limit": (helper.SetLimit, self._set_limit),
            "reserve": (Reserve, self._reserve),
            "suspend": (helper.Suspend, self._suspend),
            "resume": (helper.Resume, self._resume),
            "signal": (helper.Signal, self._signal),
            "drop": (helper.Drop, self._guests.drop),
            "end_process": (EndProcess, self._end_process),
            "count_seats": (CountSeats, self._count_seats),
        }
        if verb in readers:
            if fields:
                raise InvalidRequest(f"{verb} takes no field {next(iter(fields))[:40]!r}")
            if epoch is not None:
                self._registry.fence(epoch)
            return readers[verb]()
        if verb not in changers:
            raise HelperError(ErrorKind.UNKNOWN_VERB, f"no verb {verb[:40]!r}")
        cls, change = changers[verb]
        request = helper.build(cls, fields)
        if not isinstance(request, EndProcess | CountSeats):
            check_lease(request.lease)
        if epoch is None:
            raise InvalidRequest(f"{verb} needs the epoch")
        self._registry.fence(epoch)
        return change(request, epoch)

    def _count_seats(self, request: CountSeats, epoch: int) -> CountSeats:
        self._machine.seats.count(request.by_number)
        return request

    def _hello(self) -> helper.Hello:
        return helper.Hello(
            version=__version__,
            pid=os.getpid(),
            boot_id=self._machine.state.boot_id,
            epoch=self._machine.state.epoch,
            simulated=self._machine.simulated,
            now=time.monotonic(),
        )

    def _inventory(self) -> helper.Inventory:
        self._self_tests.wait_first(CANARY_WAIT_S)
        return helper.Inventory(
            host=socket.gethostname(),
            driver=self._machine.nvml.driver,
            simulated=self._machine.simulated,
            devices=tuple(self._device(gpu) for gpu in self._machine.nvml.gpus),
            host_total_bytes=self._machine.host.total_bytes(),
            host_budget_bytes=self._machine.host.budget_bytes(),
            at=time.monotonic(),
            watchdog=self._watchdog.action,
            left_out=self._machine.nvml.left_out,
        )

    def _device(self, gpu: DriverGpu) -> Device:
        reason = self._devices.out_of_service(gpu.uuid)
        verdict = self._devices.verdict(gpu.uuid)
        move_obstacle = self._devices.move_obstacle(gpu.uuid)
        return Device(
            uuid=gpu.uuid,
            index=gpu.index,
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            reserve_bytes=self._devices.reserve_bytes(gpu),
            healthy=not reason,
            reason=reason,
            level=verdict.level,
            ladder=self._devices.ladder(gpu.uuid),
            profile=gpu.profile,
            suspendable=verdict.suspendable,
            suspend_reason=self._devices.suspend_blocker(gpu.uuid),
            movable=not move_obstacle,
            move_reason=move_obstacle,
            suspend_bytes_per_s=verdict.suspend_bytes_per_s,
            resume_bytes_per_s=verdict.resume_bytes_per_s,
            island=gpu.island,
        )

    def _set_limit(self, request: helper.SetLimit, epoch: int) -> helper.LeaseFiles:
        return replace(self._guests.set_limit(request, epoch), library=self._machine.library)

    def _reserve(self, request: Reserve, _epoch: int) -> helper.LeaseFiles:
        return helper.LeaseFiles(
            directory=str(LeaseDirectory(self._machine.state.leases, request.lease).path)
        )

    def _suspend(self, request: helper.Suspend, epoch: int) -> helper.MoveResult:
        if not 0 < request.timeout_s <= 600:
            raise InvalidRequest("timeout_s is more than 0 and at most 600 seconds")
        return self._move(
            request.lease,
            epoch,
            lambda lease: self._mover.suspend(lease, request.calls, request.timeout_s),
        )

    def _resume(self, request: helper.Resume, epoch: int) -> helper.MoveResult:
        if not 0 <= request.timeout_s <= 3600:
            raise InvalidRequest("timeout_s is at least 0 and at most 3600 seconds")
        return self._move(request.lease, epoch, lambda lease: self._resume_held(lease, request))

    def _resume_held(self, lease: HelperLease, request: helper.Resume) -> helper.MoveResult:
        if request.unrecorded and request.devices:
            raise InvalidRequest("a resume that is not recorded is on the lease's own devices")
        if request.unrecorded:
            return resume_unrecorded(self._registry, self._mover, lease, request.timeout_s, by_broker=True)
        limits = dict(zip(request.devices or lease.limits, lease.limits.values(), strict=False))
        if lease.phase is Phase.SUSPENDED and (reason := self._registry.conflict(lease.name, limits)):
            return refusal(Refusal.NO_MEMORY, reason)
        moved = self._guests.resume(lease, request.timeout_s, request.devices)
        if moved.done or moved.refused is Refusal.LOST:  # otherwise it may still be in progress
            self._registry.confirm(lease)
        return moved

    def _move(
        self, name: str, epoch: int, move: Callable[[HelperLease], helper.MoveResult]
    ) -> helper.MoveResult:
        lease = self._registry.get(name)
        if lease is None:
            return refusal(Refusal.NO_LEASE, f"no lease {name} on this machine")
        try:
            with self._registry.hold(lease, epoch):
                moved = replace(move(lease), devices=tuple(lease.limits))
        except HelperError as error:
            if error.kind != ErrorKind.BUSY:
                raise
            return refusal(Refusal.BUSY, str(error))
        if not moved.done:
            log.info("lease=%s stays %s refused=%s reason=%s", name, lease.phase, moved.refused, moved.reason)
        self._sampler.refresh(REFRESH_WAIT_S)
        return moved

    def _signal(self, request: helper.Signal, epoch: int) -> helper.Signalled:
        if request.to not in ("leader", "all", "others", "keepers"):
            raise InvalidRequest("a signal goes to 'leader', 'all', 'others' or 'keepers'")
        try:
            number = signal.Signals(request.number)
        except ValueError:
            raise InvalidRequest(f"no signal {request.number}") from None
        lease = self._registry.get(request.lease)
        if lease is None:
            raise HelperError(ErrorKind.UNKNOWN_LEASE, f"no lease {request.lease} on this machine")
        if number is signal.SIGKILL and request.to == "all" and self._mover.parks_before_kill:
            self._park(lease, epoch)
        if number is signal.SIGKILL and request.to == "all":
            lease.killed = True
        sent: set[tuple[int, int]] = set()
        # A process may fork while it is signalled; the next round finds the child.
        for _ in range(1 if request.to == "leader" else SIGNAL_ROUNDS):
            targets = self._registry.living(request.lease)
            if request.to == "leader":
                first = leader(targets)
                targets = (first,) if first else ()
            elif request.to == "keepers":
                targets = keepers_of(lease, self._machine.processes)
            elif request.to == "others":
                targets = tuple(each for each in targets if not each.is_runner)
            new = [each.key for each in targets if each.key not in sent]
            if not new:
                break
            sent.update(key for key in new if self._machine.processes.signal(key, number))
        log.info("lease=%s signal=%s to=%s processes=%d", request.lease, number.name, request.to, len(sent))
        return helper.Signalled(count=len(sent))

    def _end_process(self, request: EndProcess, epoch: int) -> helper.Signalled:
        """End a process without a lease for an administrator; see `UnleasedProcesses.end`."""
        self._watchdog.unleased.end(request.device, request.process, self._registry.all())
        return helper.Signalled(count=1)

    def _park(self, lease: HelperLease, epoch: int) -> None:
        """Suspend a lease before it is killed; log a failure, because it is killed in any case."""
        reason = "it is being moved"
        with contextlib.suppress(HelperError), self._registry.hold(lease, epoch):
            reason = self._mover.suspend(lease, "", PARK_TIMEOUT_S).reason
        if reason:
            log.warning("lease=%s is killed without a checkpoint: %s", lease.name, reason)
