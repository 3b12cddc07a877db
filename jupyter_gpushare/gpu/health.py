"""Which devices are out of service, why, and when they may be tried again.

A device is taken out of service (*drained*) when the driver loses it or does not
answer for it, when its count of uncorrectable memory errors grows, or when it
reports an XID that asks for a reset.  Nothing new is placed on it, nothing is
suspended or restored there.  It comes back only after the self-test of `canary`
passed on it, tried again after `RETRY_S`, then after twice as long each time.

XIDs whose cause is an application, or that ask for nothing, drain nothing
(`APPLICATION_XIDS`: those that NVIDIA's catalog, docs.nvidia.com/deploy/xid-errors,
"Analyzing Xid Errors", answers with RESTART_APP or IGNORE).  All others do: an
unknown XID is rather tested once too often.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import DeviceError
from .events import Events
from .lease import Lease
from .nvml import Nvml, is_restart
from .verbs import EventKind

log = logging.getLogger(__name__)

RETRY_S = 30.0
MOST_RETRY_S = 3600.0
# One wait for events; so long a stop may take to be noticed.
EVENT_WAIT_MS = 500
# After an error of the wait itself, before the events are asked for again.
EVENT_RETRY_S = 1.0

APPLICATION_XIDS = frozenset(
    {8, 11, 13, 14, 25, 31, 32, *range(37, 42), 43, 44, 45, 60, 63, *range(66, 73), 75, 76, 77, 80}
    | {*range(82, 87), 88, 89, *range(92, 95), *range(96, 109), 121, *range(126, 136), 137, 139, 141}
    | {*range(152, 155), 157, *range(160, 166)}
)
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


@dataclass(frozen=True, slots=True)
class Drain:
    """Why a device is out of service, and when it is tried again."""

    reason: str
    test_at: float
    wait_s: float


class Health:
    """Remembers which devices are drained; safe to call from several threads."""

    def __init__(self, nvml: Nvml, events: Events, leases: Callable[[], Iterable[Lease]]) -> None:
        self._nvml = nvml
        self._events = events
        self._leases = leases
        self._guard = threading.Lock()
        self._drained: dict[str, Drain] = {}
        self._ecc: dict[str, int] = {}
        self._waits: dict[str, tuple[float, float]] = {}  # the last wait of each device, and its moment
        self._stopped = False
        self._restarted = False
        # Told when there is something to test.
        self.on_drained: Callable[[], None] = lambda: None

    def reason(self, uuid: str) -> str:
        """Why a device is out of service; "" when it is not."""
        drain = self._drained.get(uuid)
        return drain.reason if drain else ""

    def due(self, uuid: str, now: float) -> bool:
        """Whether a drained device may be tested now."""
        drain = self._drained.get(uuid)
        return drain is not None and now >= drain.test_at

    def errors(self, uuid: str, count: int | None) -> None:
        """The device's uncorrectable memory errors since the driver was loaded; None: not counted."""
        if count is None:
            return
        before = self._ecc.get(uuid, count)
        self._ecc[uuid] = count
        if count > before:
            self.drain(uuid, f"{count - before} uncorrectable memory error(s)")

    def xid(self, uuid: str, code: int) -> None:
        """The device reported an XID."""
        word = XID_WORDS.get(code, "see NVIDIA's catalog of XIDs")
        if code in APPLICATION_XIDS:
            log.warning("device=%s xid=%d of an application, the device stays in service", uuid, code)
        else:
            self.drain(uuid, f"XID {code}: {word}")

    def drain(self, uuid: str, reason: str) -> None:
        """Take a device out of service; one that is already stays so for its first reason."""
        now = time.monotonic()
        with self._guard:
            if uuid in self._drained:
                return
            wait_s, at = self._waits.get(uuid, (0.0, now))
            # In trouble again soon after the last time: wait longer.
            wait_s = min(2 * wait_s, MOST_RETRY_S) if now - at < 2 * MOST_RETRY_S else 0.0
            wait_s = max(wait_s, RETRY_S)
            self._waits[uuid] = (wait_s, now)
            self._drained[uuid] = Drain(reason, now + wait_s, wait_s)
        self._tell(uuid, reason, healthy=False)
        self.on_drained()

    def failed(self, uuid: str, why: str) -> None:
        """The self-test did not pass: it is tried again, later than last time."""
        now = time.monotonic()
        with self._guard:
            drain = self._drained.get(uuid)
            if drain is None:
                return
            wait_s = min(2 * drain.wait_s, MOST_RETRY_S)
            self._waits[uuid] = (wait_s, now)
            self._drained[uuid] = Drain(drain.reason, now + wait_s, wait_s)
        log.warning("device=%s stays out of service, tried again in %.0f s: %s", uuid, wait_s, why)

    def passed(self, uuid: str) -> None:
        """The self-test passed: the device is back in service."""
        with self._guard:
            drain = self._drained.pop(uuid, None)
        if drain is not None:
            self._tell(uuid, "", healthy=True)

    def lost(self, uuid: str, error: DeviceError) -> None:
        """The driver does not answer for the device."""
        if is_restart(error):
            self._restarted = True
        self.drain(uuid, str(error))

    def run(self) -> None:
        """Hear the devices' events until stopped; in a thread of its own, for the wait may hang."""
        while not self._stopped:
            try:
                if self._restarted:
                    self._nvml.reopen()
                    self._restarted = False
                self._listen()
            except DeviceError as error:
                self._restarted = self._restarted or is_restart(error)
                if not self._stopped:
                    log.warning("the devices' events cannot be heard: %s", error)
                    time.sleep(EVENT_RETRY_S)

    def _listen(self) -> None:
        with self._nvml.listen() as listener:
            if listener.devices:
                log.info("the events of %d device(s) are heard", len(listener.devices))
            else:
                log.info("no device here reports XIDs: losses are noticed by measuring")
            while not self._stopped and not self._restarted:
                if not listener.devices:
                    time.sleep(EVENT_WAIT_MS / 1000)
                    continue
                for uuid, code in listener.wait(EVENT_WAIT_MS):
                    self.xid(uuid, code)

    def stop(self) -> None:
        """End the thread, within one wait."""
        self._stopped = True

    def _tell(self, uuid: str, reason: str, *, healthy: bool) -> None:
        log.warning("device=%s healthy=%s reason=%s", uuid, healthy, reason or "self-test passed")
        word = "true" if healthy else "false"
        self._events.publish(EventKind.DEVICE, device=uuid, reason=reason, fields={"healthy": word})
        for lease in self._leases():
            if uuid in lease.limits:
                self._events.publish(
                    EventKind.DEVICE, lease=lease.name, device=uuid, reason=reason, fields={"healthy": word}
                )
