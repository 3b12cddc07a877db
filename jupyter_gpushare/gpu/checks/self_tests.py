"""Run the self-tests of devices and apply the verdicts.

A device is tested at start, unless a verdict of this boot and driver was saved.  It is tested
again if there was no memory for the test, if the driver failed on it, and before it returns
to service (`health`).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

from jupyter_gpushare.gpu.checks.canary import NO_OTHER, Canary
from jupyter_gpushare.gpu.checks.health import HealthChecks
from jupyter_gpushare.gpu.driver.nvml import DriverGpu
from jupyter_gpushare.gpu.leases.devices import UNTESTED, DeviceStates, Verdict
from jupyter_gpushare.gpu.leases.machine import Machine
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.protocol.helper import EventKind

log = logging.getLogger(__name__)

# Pause before a device that could not be tested is tried again; it doubles each time.
RETRY_S = 30.0
MAX_RETRY_S = 600.0
# Devices that are out of service are checked this often.
DRAINED_POLL_S = 1.0


class SelfTests:
    """Tests devices in its own thread (`run`), and writes the verdicts into `DeviceStates`."""

    def __init__(
        self,
        machine: Machine,
        registry: LeaseRegistry,
        devices: DeviceStates,
        health: HealthChecks,
        canary: Canary,
    ) -> None:
        self._machine = machine
        self._registry = registry
        self._devices = devices
        self._health = health
        self._canary = canary
        self._first = threading.Event()

    def wait_first(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for the tests at start."""
        self._first.wait(timeout_s)

    def forget_deaths(self) -> None:
        """Let the next helper test the devices again on which the driver ended processes (`devices`)."""
        self._devices.forget_deaths()
        self._save()

    def load(self) -> None:
        """Load the verdicts that an earlier helper saved."""
        machine = self._machine
        key = f"{machine.state.boot_id} {machine.nvml.driver} {machine.simulated}"
        self._devices.load(machine.state.devices(), key)

    def run(self) -> None:
        """Test the devices that are due, for ever."""
        for gpu in self._machine.nvml.gpus:
            self._registry.enforce_on(gpu.uuid)
        due, devices = self._devices.test_due, self._devices
        wait_s, untested_at = RETRY_S, time.monotonic()
        while True:
            due.clear()
            retries = time.monotonic() >= untested_at
            for gpu in self._machine.nvml.gpus:
                if self._is_due(gpu, retries):
                    self._examine(gpu)
            self._save()
            self._first.set()
            untested = not devices.all_complete()
            if retries:
                untested_at = time.monotonic() + wait_s
                wait_s = min(2 * wait_s, MAX_RETRY_S) if untested else RETRY_S
            drained = any(devices.out_of_service(gpu.uuid) for gpu in self._machine.nvml.gpus)
            due.wait(DRAINED_POLL_S if drained else untested_at - time.monotonic() if untested else None)

    def _is_due(self, gpu: DriverGpu, retries: bool) -> bool:
        if self._devices.out_of_service(gpu.uuid):
            return self._health.due(gpu.uuid, time.monotonic())
        verdict = self._devices.verdict(gpu.uuid)
        if verdict is UNTESTED or self._devices.is_doubted(gpu.uuid):
            return True
        # At the last test the other device may have been out of service.
        other = self._other(gpu)
        if verdict.move_reason == NO_OTHER and other is not None:
            return True
        has_memory = not verdict.final or other is None or self._canary.has_memory(other)
        return retries and not verdict.is_complete and has_memory

    def _other(self, gpu: DriverGpu) -> DriverGpu | None:
        """Return the next equal device in service: each device is then the target of one test."""
        gpus = self._machine.nvml.gpus
        at = gpus.index(gpu)
        for each in gpus[at + 1 :] + gpus[:at]:
            is_equal = (each.name, each.memory_bytes, each.mig) == (gpu.name, gpu.memory_bytes, False)
            if is_equal and not self._devices.out_of_service(each.uuid):
                return each
        return None

    def _examine(self, gpu: DriverGpu) -> None:
        known = self._devices.verdict(gpu.uuid)
        only_move = known.final and not (
            known is UNTESTED or self._devices.is_doubted(gpu.uuid) or self._devices.out_of_service(gpu.uuid)
        )
        verdict = self._canary.examine(gpu, self._other(gpu))
        if only_move:
            # This test changes only what is known about moves, not about the device itself.
            verdict = replace(
                known,
                movable=verdict.movable,
                move_reason=verdict.move_reason,
                move_final=verdict.final and verdict.move_final,
            )
        self._devices.set_verdict(gpu.uuid, verdict)
        if verdict != known:
            self._publish(gpu, verdict)
        if verdict.works and verdict.final:
            self._health.passed(gpu.uuid)
        else:
            self._health.failed(gpu.uuid, verdict.reason)
        self._registry.enforce_on(gpu.uuid)

    def _save(self) -> None:
        try:
            self._machine.state.save_devices(self._devices.saved())
        except OSError as error:
            log.warning("the verdicts of the self-tests cannot be written: %s", error)

    def _publish(self, gpu: DriverGpu, verdict: Verdict) -> None:
        log.info(
            "device=%s suspendable=%s level=%s suspend_bytes_per_s=%d resume_bytes_per_s=%d reason=%s "
            "movable=%s move_reason=%s",
            gpu.uuid, verdict.suspendable, verdict.level,
            verdict.suspend_bytes_per_s, verdict.resume_bytes_per_s, verdict.reason or "-",
            verdict.movable, verdict.move_reason or "-",
        )  # fmt: skip
        self._machine.events.publish(
            EventKind.DEVICE,
            device=gpu.uuid,
            reason=verdict.reason,
            fields={"suspendable": "true" if verdict.suspendable else "false", "level": str(verdict.level)},
        )
