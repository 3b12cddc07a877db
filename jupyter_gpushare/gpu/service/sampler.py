"""Measure every second, in one thread, and answer `sample` from memory.

A pass queries all devices at once and waits for them only briefly.  A device that is late
keeps its last values; a device that hangs or fails is taken out of service (`health`).  The
pass also finds the processes of each lease and reads each account.  A pass also runs
when a process of a lease has ended, and after each move.

The driver says of each process whether it computed.  Where it cannot (MIG, some vGPUs), a
busy device counts as activity of every lease with memory on it, so that no lease is
suspended while it computes.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.checks.health import HealthChecks
from jupyter_gpushare.gpu.checks.watchdog import Watchdog
from jupyter_gpushare.gpu.driver.nvml import DeviceReading, DriverGpu
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.files import AccountFile, counters_of
from jupyter_gpushare.gpu.leases.lease import HelperLease, added
from jupyter_gpushare.gpu.leases.leftovers import Leftovers
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.processes import Process
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.gpu.moves.suspend import Mover
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import (
    DeviceSample,
    EventKind,
    LeaseSample,
    Phase,
    ProcessSample,
    Sample,
)

log = logging.getLogger(__name__)

# Per lease, and for all leases together, so that a sample stays below `protocol.helper.MAX_LINE_BYTES`.
PROCESSES_SHOWN = 64
PROCESSES_SHOWN_IN_ALL = 2048
# Minimum time between two passes.
PAUSE_S = 0.03
SETTLE_EVERY_S = 5.0
# Smaller changes of the bytes of contexts are not written into the limit page.
CONTEXT_STEP_BYTES = 1 << 20


class Sampler:
    """Keeps the last measurement of devices and leases."""

    def __init__(
        self,
        machine: Machine,
        registry: LeaseRegistry,
        devices: DeviceStates,
        mover: Mover,
        health: HealthChecks,
        watchdog: Watchdog,
        period_s: float,
    ) -> None:
        self._machine = machine
        self._registry = registry
        self._states = devices
        self._mover = mover
        self._health = health
        self._watchdog = watchdog
        self._leftovers = Leftovers(machine.processes, machine.files, devices)
        self._period_s = period_s
        self._pass = threading.Condition()
        self._begun = 0
        self._ended = 0
        self._requested = False
        self._readings: dict[str, DeviceReading] = {}  # the newest reading of each device
        self._last: dict[str, DeviceReading] = {}  # only of devices that have not failed since
        self._late: frozenset[str] = frozenset()  # devices that had not answered when the last pass ended
        self._at = 0.0
        self._host_available_bytes = 0

    # For other threads

    def sample(self) -> Sample:
        """Return the last measurement, without a driver call."""
        leases = list(self._registry.all())
        pods = self._machine.kubelet.pods() if self._machine.kubelet else None
        shown = min(PROCESSES_SHOWN, PROCESSES_SHOWN_IN_ALL // max(1, len(leases)))
        return Sample(
            at=self._at,
            devices=tuple(self._device_sample(gpu.uuid) for gpu in self._machine.nvml.gpus),
            leases=tuple(self._lease_sample(lease, shown) for lease in leases),
            seats=self._machine.seats.sample(),
            seats_by_number=self._machine.seats.by_number,
            gpu_pods=pods or (),
            knows_gpu_pods=pods is not None,
            host_available_bytes=self._host_available_bytes,
            host_saved_bytes=sum(
                sum(lease.kept_bytes.values()) for lease in leases if lease.phase is Phase.SUSPENDED
            ),
        )

    def refresh(self, timeout_s: float) -> None:
        """Request a pass that begins now, and wait at most ``timeout_s`` for its end."""
        with self._pass:
            # A running pass may have measured too early, so the next pass counts.
            wanted = self._begun + 1
            self._requested = True
            self._pass.notify_all()
            self._pass.wait_for(lambda: self._ended >= wanted, timeout_s)

    # Threads

    def run(self) -> None:
        """Measure for ever."""
        while True:
            with self._pass:
                self._requested = False
                self._begun += 1
            try:
                self.measure()
            except Exception:  # the outermost loop: without samples nothing is lent or returned
                log.exception("a sample failed")
            with self._pass:
                self._ended = self._begun
                self._pass.notify_all()
                self._pass.wait_for(lambda: self._requested, self._period_s)
            time.sleep(PAUSE_S)

    def run_exits(self) -> None:
        """Request a pass whenever a process of a lease has ended, for ever."""
        while True:
            if self._machine.processes.wait_exit(30.0):
                self.refresh(self._period_s)

    def run_settle(self) -> None:
        """Settle leases for ever; needs its own thread, because the driver calls may hang."""
        while True:
            try:
                self._settle()
            except Exception:  # the outermost loop
                log.exception("leases could not be settled")
            time.sleep(SETTLE_EVERY_S)

    def measure(self) -> None:
        """Make one pass, which shows the state at its beginning."""
        began_at = time.monotonic()
        answers = self._machine.nvml.usages()
        for gpu in self._machine.nvml.gpus:
            self._device(gpu, answers[gpu.uuid], began_at)
        usages = {uuid: usage for uuid, usage in answers.items() if isinstance(usage, DeviceReading)}
        # A late device keeps its last usage; a failed device has none.
        shown = {uuid: last for uuid, last in self._last.items() if answers[uuid] is None} | usages
        self._last = shown
        self._readings |= usages
        leases = list(self._registry.all())
        self._machine.processes.on_devices = {pid for usage in shown.values() for pid in usage.processes}
        living = self._registry.scan()
        # An answer to a call of an earlier pass may be older than this pass.
        late = self._late.union(uuid for uuid, answer in answers.items() if answer is None)
        self._leftovers.find(leases, living, shown, late, began_at)
        fresh = {uuid: usage for uuid, usage in usages.items() if uuid not in late}
        for lease in leases:
            unread = self._may_hold_unread(lease, fresh)
            lease.unread_since = (lease.unread_since or began_at) if unread else 0.0
            if not lease.limits.keys() & late:
                lease.measured_at = began_at
            self._lease(lease, shown, living.get(lease.name, ()))
        self._host_available_bytes = self._machine.host.available_bytes()
        self._registry.admit_users()  # the driver's tools may have opened the files again
        self._late, self._at = frozenset(self._machine.nvml.pending), began_at
        self._watchdog.compare(fresh, leases)

    # One pass

    def _device(self, gpu: DriverGpu, answer: DeviceReading | DeviceError | None, at: float) -> None:
        if isinstance(answer, DeviceReading):
            self._health.errors(gpu.uuid, answer.uncorrected)
            self._health.recovery(gpu.uuid, answer.recovery_action)
            if self._states.measure_hidden(gpu.uuid, answer, at):
                reserve = str(self._states.reserve_bytes(gpu))
                log.info("device=%s reserve_bytes=%s", gpu.uuid, reserve)
                self._machine.events.publish(
                    EventKind.DEVICE, device=gpu.uuid, fields={"reserve_bytes": reserve}
                )
        elif answer is not None:
            self._health.lost(gpu.uuid, answer)

    def _device_sample(self, uuid: str) -> DeviceSample:
        """Return the newest measurement of a device and the current state of the device."""
        newest, last = self._readings.get(uuid), self._last.get(uuid)
        reason = self._states.out_of_service(uuid)
        return DeviceSample(
            uuid=uuid,
            used_bytes=newest.used_bytes if newest else 0,
            utilization_percent=last.utilization_percent if last else 0,
            healthy=not reason,
            reason=reason,
            blind=last is not None and self._is_blind(uuid, last),
            unleased=self._watchdog.unleased.shown(uuid),
            closed=self._watchdog.closed(uuid),
        )

    def _is_blind(self, uuid: str, usage: DeviceReading) -> bool:
        """Return whether the driver does not report the bytes of each process on a device."""
        return self._states.is_blind(uuid) or None in usage.processes.values()

    def _may_hold_unread(self, lease: HelperLease, usages: dict[str, DeviceReading]) -> bool:
        """Return whether an unread process of its user uses, or may use, a device of a lease."""
        pids = {process.pid for process in self._machine.processes.unread if process.uid == lease.asked.uid}
        return bool(pids) and any(
            # A device without an answer in this pass may be in use.
            (usage := usages.get(uuid)) is None
            or self._is_blind(uuid, usage)
            or pids & usage.processes.keys()
            for uuid in lease.limits
        )

    def _lease(
        self, lease: HelperLease, usages: dict[str, DeviceReading], living: tuple[Process, ...]
    ) -> None:
        before, was_alive = lease.account, bool(lease.processes)
        if lease.unread_since and was_alive and not living:
            return  # it keeps its last values, because an unread process may belong to it
        lease.processes = living
        lease.had_runner |= any(process.is_runner for process in living)
        self._registry.place(lease)
        account = lease.files.account()
        held: dict[Key, dict[str, int]] = {}
        keys = {process.pid: process.key for process in lease.processes}
        computing = False
        for uuid, usage in usages.items():
            for pid, count in self._held(lease, account, uuid, usage).items():
                held.setdefault(keys[pid], {})[uuid] = count
            if usage.computing is not None:
                computing = computing or not usage.computing.isdisjoint(keys)
            elif usage.utilization_percent and uuid in added([*held.values(), lease.leftover_bytes]):
                computing = True
        lease.held, lease.account = held, account
        outside = frozenset(key for key in held if account is None or key not in account.slots)
        lease.count_work(account)
        lease.outside, lease.bypasses_library = outside, bool(outside & lease.outside)
        # The account and the driver's answer match only if no allocation happened in between.
        if account and before and account.held() == before.held() and lease.phase is Phase.RUNNING:
            self._charge_contexts(lease, account)
        if lease.phase is Phase.RUNNING:
            lease.memory_too_small = self._machine.host.too_small(lease.by_process)
        if computing or counters_of(account).worked_since(counters_of(before)):
            lease.active_at = time.monotonic()
        if was_alive and not living:
            log.info("lease=%s ended", lease.name)
            self._machine.events.publish(EventKind.ENDED, lease=lease.name, reason="its last process is gone")
        lease.lived |= bool(living)

    def _held(
        self, lease: HelperLease, account: AccountFile | None, uuid: str, usage: DeviceReading
    ) -> dict[int, int]:
        """Return the bytes on a device by pid, from the driver or, if it does not report them, the library.

        A process without bytes in both only called cuInit and is left out.
        """
        shown = {process.pid: usage.processes.get(process.pid, 0) for process in lease.processes}
        is_blind = self._states.is_blind(uuid)
        hidden = [p for p in lease.processes if shown[p.pid] is None or (is_blind and not shown[p.pid])]
        counted = lease.counted_bytes(account, uuid, (process.key for process in hidden))
        found = {pid: count for pid, count in shown.items() if count}
        return found | {p.pid: counted[p.key] for p in hidden if counted.get(p.key)}

    def _charge_contexts(self, lease: HelperLease, account: AccountFile) -> None:
        """Charge the bytes that the driver shows beyond the account: contexts, at least the first one.

        A rise is charged only after two passes have shown it.  Memory that is allocated after one read of
        the account and freed before the next read appears only in the driver, in one pass.
        """
        keys = {process.key for process in lease.processes}
        limits = lease.limits
        first, used = self._states.contexts(limits), added(lease.held.values())
        for index, uuid in enumerate(limits):
            counted = sum(held[index] for key, held in account.held().items() if key in keys)
            leftover_bytes = lease.leftover_bytes.get(uuid, 0)
            if used.get(uuid):
                charged = lease.contexts.get(uuid, 0) - leftover_bytes
                before = lease.beyond.get(uuid, charged)
                lease.beyond[uuid] = max(0, used[uuid] - counted)
                beyond = leftover_bytes + min(lease.beyond[uuid], max(before, charged))
            else:
                beyond = leftover_bytes or first[uuid]
            if abs(beyond - lease.contexts.get(uuid, 0)) >= CONTEXT_STEP_BYTES:
                with suppress(FileNotFoundError):  # dropped meanwhile
                    lease.charge_context(index, uuid, beyond)

    def _settle(self) -> None:
        """Settle moves that a hung driver call interrupted, and end the LOST phase of leases."""
        for lease in list(self._registry.all()):
            needs = lease.unsettled or lease.unsaved or lease.lost
            if not needs or not lease.moving.acquire(blocking=False):
                continue
            try:
                if lease.dropped:
                    continue
                if lease.unsettled:
                    self._mover.settle(lease)
                if lease.phase is Phase.LOST:
                    self._mover.forget_lost(lease)
                if lease.unsaved:
                    self._mover.save_again(lease)
            finally:
                lease.moving.release()

    def _lease_sample(self, lease: HelperLease, processes_shown: int) -> LeaseSample:
        phase = lease.phase
        suspended = phase is Phase.SUSPENDED
        account = lease.account
        slots = account.slots if account else {}
        by_process, leftover_bytes = lease.by_process, sum(lease.leftover_bytes.values())
        shown = [
            process
            for process in lease.processes
            if process.pid in by_process or process.key in slots or process.key in lease.parked
        ]
        keepers = lease.keepers if leftover_bytes else ()
        shown = [process for process in shown if process not in keepers]
        keys = [process.key for process in shown if process.pid in by_process]
        reason = self._mover.blockers.reason(lease, account, keys, forced=False)
        return LeaseSample(
            lease=lease.name,
            phase=phase,
            measured_at=lease.measured_at,
            devices=tuple(lease.limits),
            used_bytes={} if suspended else lease.used_bytes,
            saved_bytes=lease.kept_bytes if suspended or phase is Phase.RESUMING else {},
            calls=counters_of(account).token(),
            active_at=lease.active_at,
            suspendable=not reason and phase is not Phase.LOST,
            suspend_reason=reason,
            unread_since=lease.unread_since,
            damaged=any(process.key in lease.damaged for process in lease.processes),
            over=self._watchdog.over(lease.name),
            alive=bool(lease.processes),
            runner_ended=lease.had_runner and not any(process.is_runner for process in lease.processes),
            processes=(
                *(
                    _process_sample(
                        each,
                        0 if suspended else by_process.get(each.pid, 0),
                        slots[each.key].calls if each.key in slots else -1,
                    )
                    for each in shown[:processes_shown]
                ),
                *(
                    _process_sample(each, 0 if index else leftover_bytes, -1, keeps=True)
                    for index, each in enumerate(keepers[: max(1, processes_shown - len(shown))])
                ),
            ),
            wanted=lease.wanted,
            queries_only=lease.queries_only,
            stalled=lease.stalled,
            level=self._states.level_of(lease),
            unconfirmed=lease.unconfirmed,
            compute_share=lease.time_share.compute_share,
            share_reason=lease.time_share.reason,
            measured_share=lease.time_share.measured,
            work=lease.work if account else -1,
            guest_of=lease.asked.guest_of if lease.is_guest else "",
            ended_as_guest=lease.ended_as_guest,
        )


def _process_sample(process: Process, used_bytes: int, calls: int, *, keeps: bool = False) -> ProcessSample:
    return ProcessSample(
        pid=process.pid,
        started_at=process.started_at,
        name=process.name,
        used_bytes=used_bytes,
        calls=calls,
        kernel=process.kernel,
        keeps=keeps,
    )
