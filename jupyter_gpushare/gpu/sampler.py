"""Measure every second, in one thread, and answer `sample` from memory.

A pass asks all devices at once and waits for them only briefly (one that is late
keeps its last values, one that hangs or fails is out of service: `health`), finds
the processes of each lease, and reads each account.  The pass also runs at once
when a process of a lease ended and after each move, so that what is reported
follows quickly.

Whether a process computed is asked from the driver per process; where it cannot
say (MIG, some vGPUs), a busy device counts for every lease with memory on it:
rather too active than put to sleep while computing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from ..errors import DeviceError
from .events import Events
from .health import Health
from .host import HostMemory
from .isolation import NO_COUNTERS, Account
from .lease import Lease
from .nvml import Gpu, Nvml, Usage
from .processes import Process, Processes
from .suspend import Mover
from .verbs import DeviceSample, EventKind, LeaseSample, Level, Phase, ProcessSample, Sample
from .watchdog import Watchdog

log = logging.getLogger(__name__)

# Of a lease, and of all leases together: a sample stays below `verbs.MAX_LINE_BYTES`.
PROCESSES_SHOWN = 64
PROCESSES_SHOWN_IN_ALL = 2048
# Passes are at least so far apart, whoever asks.
PAUSE_S = 0.03
SETTLE_EVERY_S = 5.0
# Smaller changes of what contexts take are not written into the limit page.
CONTEXT_STEP_BYTES = 1 << 20


class Sampler:
    """Keeps the last measurement of devices and leases."""

    def __init__(
        self,
        *,
        nvml: Nvml,
        processes: Processes,
        mover: Mover,
        host: HostMemory,
        watchdog: Watchdog,
        health: Health,
        place: Callable[[Lease], None],
        level: Callable[[Lease], Level],
        events: Events,
        leases: Callable[[], Iterable[Lease]],
        period_s: float,
    ) -> None:
        self._nvml = nvml
        self._processes = processes
        self._mover = mover
        self._host = host
        self._watchdog = watchdog
        self._health = health
        self._place = place
        self._level = level
        self._events = events
        self._leases = leases
        self._period_s = period_s
        self._turn = threading.Condition()
        self._begun = 0
        self._ended = 0
        self._asked = False
        self._stopped = False
        self._devices: dict[str, DeviceSample] = {}
        self._last: dict[str, Usage] = {}
        self._at = 0.0
        self._host_available_bytes = 0
        self._end = threading.Event()

    # For other threads

    def sample(self) -> Sample:
        """The last measurement; never asks the driver."""
        leases = list(self._leases())
        shown = min(PROCESSES_SHOWN, PROCESSES_SHOWN_IN_ALL // max(1, len(leases)))
        return Sample(
            at=self._at,
            devices=tuple(self._with_health(device) for device in list(self._devices.values())),
            leases=tuple(self._lease_sample(lease, shown) for lease in leases),
            host_available_bytes=self._host_available_bytes,
            host_saved_bytes=sum(
                sum(lease.kept_bytes.values()) for lease in leases if lease.phase is Phase.SUSPENDED
            ),
        )

    def refresh(self, timeout_s: float) -> None:
        """Ask for a pass that begins now, and wait for its end, bounded."""
        with self._turn:
            # One that runs already may have looked too early: the next one counts.
            wanted = self._begun + 1
            self._asked = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._ended >= wanted or self._stopped, timeout_s)

    def stop(self) -> None:
        """End the threads."""
        self._end.set()
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    # Threads

    def run(self) -> None:
        """Measure until stopped."""
        while not self._stopped:
            with self._turn:
                self._asked = False
                self._begun += 1
            try:
                self.measure()
            except Exception:  # the outermost loop: without samples nothing is lent or returned
                log.exception("a sample failed")
            with self._turn:
                self._ended = self._begun
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._asked or self._stopped, self._period_s)
            time.sleep(max(0.0, self._at + PAUSE_S - time.monotonic()))

    def run_exits(self) -> None:
        """Ask for a pass whenever a process of a lease ended, until stopped."""
        while not self._stopped:
            if self._processes.wait_exit(30.0):
                self.refresh(self._period_s)

    def run_settle(self) -> None:
        """Try again what is left half done, until stopped; apart, for it calls the driver and may hang."""
        while not self._end.wait(SETTLE_EVERY_S):
            try:
                self._settle()
            except Exception:  # the outermost loop
                log.exception("leases could not be settled")

    def measure(self) -> None:
        """One pass."""
        answers = self._nvml.usages()
        for gpu in self._nvml.gpus:
            self._device(gpu, answers[gpu.uuid])
        usages = {uuid: usage for uuid, usage in answers.items() if isinstance(usage, Usage)}
        # One that is late shows what it showed before; one that failed shows nothing.
        shown = {uuid: last for uuid, last in self._last.items() if answers[uuid] is None} | usages
        self._last = shown
        leases = list(self._leases())
        living = self._processes.scan({lease.name: lease.uid for lease in leases})
        for lease in leases:
            self._lease(lease, shown, living.get(lease.name, ()))
        self._host_available_bytes = self._host.available_bytes()
        self._at = time.monotonic()
        self._watchdog.look(usages, leases)

    # One pass

    def _device(self, gpu: Gpu, answer: Usage | DeviceError | None) -> None:
        before = self._devices.get(gpu.uuid)
        used, percent = (before.used_bytes, before.utilization_percent) if before else (0, 0)
        if isinstance(answer, Usage):
            used, percent = answer.used_bytes, answer.utilization_percent
            self._health.errors(gpu.uuid, answer.uncorrected)
        elif answer is not None:
            percent = 0
            self._health.lost(gpu.uuid, answer)
        self._devices[gpu.uuid] = DeviceSample(
            uuid=gpu.uuid, used_bytes=used, utilization_percent=percent, healthy=True
        )

    def _with_health(self, device: DeviceSample) -> DeviceSample:
        """What was measured, with what is known about its health by now."""
        reason = self._health.reason(device.uuid)
        return replace(device, healthy=False, reason=reason) if reason else device

    def _lease(self, lease: Lease, usages: dict[str, Usage], living: tuple[Process, ...]) -> None:
        lease.processes = living
        self._place(lease)
        pids = {process.pid for process in lease.processes}
        used: dict[str, int] = {}
        by_process: dict[int, int] = {}
        computing = False
        for uuid, usage in usages.items():
            for pid in pids & usage.processes.keys():
                used[uuid] = used.get(uuid, 0) + usage.processes[pid]
                by_process[pid] = by_process.get(pid, 0) + usage.processes[pid]
            if usage.computing is not None:
                computing = computing or bool(pids & usage.computing)
            elif usage.utilization_percent and uuid in used:
                computing = True
        before = lease.account
        account = lease.files.account()
        # Only where nothing moved around the driver's answer do the two belong together.
        if account and before and account.held() == before.held() and lease.phase is Phase.RUNNING:
            _charge_contexts(lease, account, used)
        lease.used_bytes, lease.by_process, lease.account = used, by_process, account
        counters = account.counters() if account else NO_COUNTERS
        if computing or counters.calls_since(lease.seen):
            lease.active_at = time.monotonic()
        lease.seen = counters
        if lease.was_alive and not living:
            log.info("lease=%s ended", lease.name)
            self._events.publish(EventKind.ENDED, lease=lease.name, reason="its last process is gone")
        lease.was_alive = bool(living)

    def _settle(self) -> None:
        """Try again what a hung driver call left half done; let leases go on after a loss."""
        for lease in list(self._leases()):
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

    def _lease_sample(self, lease: Lease, processes_shown: int) -> LeaseSample:
        phase = lease.phase
        asleep = phase is Phase.SUSPENDED
        account = lease.account
        slots = {(slot.pid, slot.start_ticks): slot for slot in account.slots} if account else {}
        shown = [
            process
            for process in lease.processes
            if process.pid in lease.by_process or process.key in slots or process.key in lease.parked
        ]
        by_process = lease.by_process
        keys = [process.key for process in shown if process.pid in by_process]
        reason = self._mover.hindrances.reason(lease, account, keys, forced=False)
        return LeaseSample(
            lease=lease.name,
            phase=phase,
            devices=tuple(lease.limits),
            used_bytes={} if asleep else lease.used_bytes,
            saved_bytes=lease.kept_bytes if asleep or phase is Phase.RESUMING else {},
            calls=(account.counters() if account else NO_COUNTERS).token(),
            active_at=lease.active_at,
            suspendable=not reason and phase is not Phase.LOST,
            suspend_reason=reason,
            alive=bool(lease.processes),
            processes=tuple(
                ProcessSample(
                    pid=process.pid,
                    started_at=process.started_at,
                    name=process.name,
                    used_bytes=0 if asleep else by_process.get(process.pid, 0),
                    calls=slots[process.key].calls if process.key in slots else -1,
                    kernel=process.kernel,
                )
                for process in shown[:processes_shown]
            ),
            wanted=lease.wanted,
            queries_only=lease.queries_only,
            level=self._level(lease),
        )


def _charge_contexts(lease: Lease, account: Account, used: dict[str, int]) -> None:
    """What the driver shows beyond the account is contexts: charge it to the limit."""
    keys = {process.key for process in lease.processes}
    for index, uuid in enumerate(lease.limits):
        counted = sum(held[index] for key, held in account.held().items() if key in keys)
        beyond = max(0, used.get(uuid, 0) - counted)
        if abs(beyond - lease.contexts.get(uuid, 0)) >= CONTEXT_STEP_BYTES:
            with suppress(FileNotFoundError):  # dropped meanwhile
                lease.files.set_context(index, beyond)
            lease.contexts[uuid] = beyond
