"""Take devices out of service when they fail, and back after a self-test.

A device is taken out of service (*drained*) when the driver loses it or does not
answer for it, when its count of uncorrectable memory errors grows, when it
reports an XID that requires a reset, or while the driver requests a recovery action
(a reset of the GPU, a reboot).  Nothing new is placed on a drained device, and nothing is
suspended or restored there.  It returns only after the self-test of `canary` has
passed on it.  The test is retried after `RETRY_S`, then after twice as long each time.

XIDs that an application causes, or that need no action, do not drain a device
(`APPLICATION_XIDS`: NVIDIA's catalog, docs.nvidia.com/deploy/xid-errors, "Analyzing Xid
Errors", answers them with RESTART_APP or IGNORE).  All other XIDs do; an unknown XID costs
one self-test.  XID 154 (recovery action changed) may mean that a reset is required, so it
drains too.  While the driver requests an action there is no self-test, because it could pass
on a GPU that the driver does not trust.

A device is also drained while it has a process with which the driver is out of step (`moves.steps`).
It is not tested until that process has ended or runs again.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing

from jupyter_gpushare.errors import DeviceError
from jupyter_gpushare.gpu.driver.nvml import Nvml, XidListener, is_restart
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.devices import DeviceStates
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.registry import LeaseRegistry
from jupyter_gpushare.protocol.helper import EventKind

log = logging.getLogger(__name__)

RETRY_S = 30.0
MAX_RETRY_S = 3600.0
# Duration of one wait for events, after which a restart of the driver is noticed.
EVENT_WAIT_MS = 500
# Pause after an error of the wait itself.
EVENT_RETRY_S = 1.0

APPLICATION_XIDS = frozenset(
    {8, 11, 13, 14, 25, 31, 32, *range(37, 42), 43, 44, 45, 60, 63, *range(66, 73), 75, 76, 77, 80}
    | {*range(82, 87), 88, 89, *range(92, 95), *range(96, 109), 121, *range(126, 136), 137, 139, 141}
    | {152, 153, 157, *range(160, 166)}
)
# nvmlDeviceGpuRecoveryAction_t; 0 is none.
RECOVERY_WORDS = {
    1: "reset the GPU",
    2: "reboot the machine",
    3: "end all peer-to-peer work of the GPU",
    4: "end the work on the GPU, then reset it",
    5: "recover the IMEX domain",
    6: "reset the PCIe bus of the GPU",
    7: "reboot the system",
}
XID_WORDS = {
    46: "GPU stopped processing",
    48: "double-bit memory error",
    62: "internal micro-controller halted",
    64: "memory could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    119: "GPU system processor does not answer",
    120: "GPU system processor failed",
    140: "unrecovered memory error",
    143: "GPU could not be initialized",
}


class HealthChecks:
    """Drains devices (`DeviceStates.out_of_service`); safe to call from several threads."""

    def __init__(self, nvml: Nvml, events: Events, registry: LeaseRegistry, devices: DeviceStates) -> None:
        self._nvml = nvml
        self._events = events
        self._registry = registry
        self._devices = devices
        self._guard = threading.Lock()
        self._drained: dict[str, float] = {}  # time of the next test, by drained device
        self._ecc: dict[str, int] = {}
        self._recovery_actions: dict[str, int] = {}
        self._waits: dict[str, tuple[float, float]] = {}  # length and start of the last wait, by device
        self._restarted = False

    def due(self, uuid: str, now: float) -> bool:
        """Return whether a drained device may be tested now."""
        test_at = self._drained.get(uuid)
        if test_at is None or now < test_at or self._recovery_actions.get(uuid):
            return False
        return not any(uuid in lease.out_of_step for lease in self._registry.all())

    def out_of_step(self, lease: HelperLease) -> None:
        """Drain the devices of a lease's processes with which the driver is out of step."""
        for uuid, pid in lease.out_of_step.items():
            self.drain(uuid, f"the driver fails at every call about process {pid}")

    def errors(self, uuid: str, count: int | None) -> None:
        """Drain a device if its count of uncorrectable memory errors has grown; None if not counted."""
        if count is None:
            return
        before = self._ecc.get(uuid, count)
        self._ecc[uuid] = count
        if count > before:
            self.drain(uuid, f"{count - before} uncorrectable memory error(s)")

    def recovery(self, uuid: str, action: int | None) -> None:
        """Drain a device while the driver requests a recovery action; None if not reported."""
        if action is None or action == self._recovery_actions.get(uuid, 0):
            return
        self._recovery_actions[uuid] = action
        if not action:
            return
        reason = f"the driver asks to {RECOVERY_WORDS.get(action, f'take recovery action {action}')}"
        self.drain(uuid, reason, overrides=True)  # a symptom does not say what to do

    def xid(self, uuid: str, code: int) -> None:
        """Drain a device that reported an XID, unless an application caused it."""
        meaning = XID_WORDS.get(code, "see NVIDIA's catalog of XIDs")
        if code in APPLICATION_XIDS:
            log.warning("device=%s xid=%d of an application, the device stays in service", uuid, code)
        else:
            self.drain(uuid, f"XID {code}: {meaning}")

    def drain(self, uuid: str, reason: str, *, overrides: bool = False) -> None:
        """Take a device out of service; if it already is, only a reason that ``overrides`` is stored."""
        now = time.monotonic()
        with self._guard:
            if uuid not in self._drained:
                wait_s, at = self._waits.get(uuid, (0.0, now))
                # It has failed again soon after the last time, so the wait is longer.
                wait_s = min(2 * wait_s, MAX_RETRY_S) if now - at < 2 * MAX_RETRY_S else 0.0
                self._wait(uuid, max(wait_s, RETRY_S), now)
            elif not overrides:
                return
            self._devices.set_out_of_service(uuid, reason)
        self._publish(uuid, reason, healthy=False)

    def failed(self, uuid: str, why: str) -> None:
        """Schedule the next test of a drained device, after twice the last wait."""
        now = time.monotonic()
        with self._guard:
            if uuid not in self._drained:
                return
            wait_s = min(2 * self._waits[uuid][0], MAX_RETRY_S)
            self._wait(uuid, wait_s, now)
        log.warning("device=%s stays out of service, tried again in %.0f s: %s", uuid, wait_s, why)

    def passed(self, uuid: str) -> None:
        """Take a device back into service."""
        with self._guard:
            was_drained = self._drained.pop(uuid, None) is not None
            self._devices.set_out_of_service(uuid, "")
        if was_drained:
            self._publish(uuid, "", healthy=True)

    def lost(self, uuid: str, error: DeviceError) -> None:
        """Drain a device for which the driver does not answer."""
        if is_restart(error):
            self._restarted = True
        self.drain(uuid, str(error))

    def run(self) -> None:
        """Wait for the devices' events for ever; needs its own thread, because the wait may hang."""
        while True:
            try:
                if self._restarted:
                    self._nvml.reopen()
                    self._restarted = False
                self._listen()
            except DeviceError as error:
                self._restarted = self._restarted or is_restart(error)
                log.warning("the devices' events cannot be waited for: %s", error)
                time.sleep(EVENT_RETRY_S)

    def _wait(self, uuid: str, wait_s: float, now: float) -> None:
        self._waits[uuid] = (wait_s, now)
        self._drained[uuid] = now + wait_s

    def _listen(self) -> None:
        with closing(XidListener(self._nvml.gpus)) as listener:
            if listener.devices:
                log.info("the events of %d device(s) are heard", len(listener.devices))
            else:
                log.info("no device here reports XIDs: losses are noticed by measuring")
            while not self._restarted:
                if not listener.devices:
                    time.sleep(EVENT_WAIT_MS / 1000)
                    continue
                for uuid, code in listener.wait(EVENT_WAIT_MS):
                    self.xid(uuid, code)

    def _publish(self, uuid: str, reason: str, *, healthy: bool) -> None:
        log.warning("device=%s healthy=%s reason=%s", uuid, healthy, reason or "self-test passed")
        value = "true" if healthy else "false"
        self._events.publish(EventKind.DEVICE, device=uuid, reason=reason, fields={"healthy": value})
        for lease in self._registry.all():
            if uuid in lease.limits:
                self._events.publish(
                    EventKind.DEVICE, lease=lease.name, device=uuid, reason=reason, fields={"healthy": value}
                )
