"""When each device is tested, and what is concluded: levels, hindrances, margins, health.

At start, unless a verdict of this boot and driver was kept; again while there was
no room for the test; again when the driver failed on the device; and before a
device that was out of service comes back (`health`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from . import canary
from .canary import Canary, Verdict
from .events import Events
from .health import Health
from .journal import StateDirectory
from .ladder import level_of, weakest
from .lease import Lease
from .nvml import Gpu, Nvml
from .room import MARGIN_BYTES
from .verbs import EventKind, Level

log = logging.getLogger(__name__)

# How long until what could not be tested is tried again; twice as long each time.
RETRY_S = 30.0
MOST_RETRY_S = 600.0
# How often a device that is out of service is looked at.
ILL_S = 1.0


class Examiner:
    """Knows the verdict on every device; `run` makes them."""

    def __init__(
        self,
        *,
        canary: Canary,
        nvml: Nvml,
        health: Health,
        events: Events,
        state: StateDirectory,
        key: str,
        enforce: Callable[[str], None],
    ) -> None:
        """``key`` says for what a kept verdict holds; ``enforce`` is told of devices that limit cgroups."""
        self._canary = canary
        self._nvml = nvml
        self._health = health
        self._events = events
        self._state = state
        self._key = key
        self._enforce = enforce
        self._verdicts: dict[str, Verdict] = {}
        self._doubted: set[str] = set()
        self._wake = threading.Event()
        self._first = threading.Event()
        self._stopped = False
        health.on_drained = self._wake.set

    # What is known

    def verdict(self, uuid: str) -> Verdict | None:
        """The last verdict on a device; None: it has not been tested yet."""
        return self._verdicts.get(uuid)

    def wait_first(self, timeout_s: float) -> None:
        """Wait for the tests at start, bounded."""
        self._first.wait(timeout_s)

    def offers(self, uuid: str, level: Level) -> bool:
        """Whether a level passed its test on a device."""
        verdict = self._verdicts.get(uuid)
        return verdict is not None and verdict.offers(level)

    def hindrance(self, uuid: str) -> str:
        """Why nothing on this device can be suspended; "" if it can."""
        if reason := self._health.reason(uuid):
            return f"the device is out of service: {reason}"
        verdict = self._verdicts.get(uuid)
        return verdict.reason if verdict else "the self-test has not finished"

    def margin_bytes(self, uuid: str) -> int:
        """What a restore may take on a device beyond its bytes: twice what the self-test was seen to."""
        verdict = self._verdicts.get(uuid)
        return max(MARGIN_BYTES, 2 * verdict.grown_bytes if verdict else 0)

    def level_of(self, lease: Lease) -> Level:
        """What enforces the limit of a lease now."""
        levels = []
        for gpu in self._nvml.gpus:
            if gpu.uuid in lease.limits:
                verdict = self._verdicts.get(gpu.uuid)
                rungs = verdict.ladder if verdict else ()
                levels.append(level_of(gpu, rungs, lease.limits[gpu.uuid], in_cgroup=lease.in_cgroup))
        return weakest(levels)

    def doubt(self, uuid: str) -> None:
        """The driver failed on a device: what its test found may not hold any more."""
        self._doubted.add(uuid)
        self._wake.set()

    # The tests

    def stop(self) -> None:
        """End the thread after the test under way."""
        self._stopped = True
        self._wake.set()

    def run(self) -> None:
        """Test what has to be tested, until stopped."""
        kept = self._state.canary()
        for gpu in self._nvml.gpus:
            if verdict := canary.kept(kept, self._key, gpu.uuid):
                self._verdicts[gpu.uuid] = verdict
                self._enforced(gpu.uuid)
        wait_s, untested_at = RETRY_S, time.monotonic()
        while not self._stopped:
            self._wake.clear()
            again = time.monotonic() >= untested_at
            for gpu in self._nvml.gpus:
                if not self._stopped and self._is_open(gpu.uuid, again):
                    self._examine(gpu)
            self._save()
            self._first.set()
            untested = not all(verdict.final for verdict in self._verdicts.values())
            if again:
                untested_at = time.monotonic() + wait_s
                wait_s = min(2 * wait_s, MOST_RETRY_S) if untested else RETRY_S
            ill = any(self._health.reason(gpu.uuid) for gpu in self._nvml.gpus)
            self._wake.wait(ILL_S if ill else untested_at - time.monotonic() if untested else None)

    def _is_open(self, uuid: str, again: bool) -> bool:
        if self._health.reason(uuid):
            return self._health.due(uuid, time.monotonic())
        verdict = self._verdicts.get(uuid)
        return verdict is None or uuid in self._doubted or (again and not verdict.final)

    def _examine(self, gpu: Gpu) -> None:
        known = self._verdicts.get(gpu.uuid)
        self._doubted.discard(gpu.uuid)
        verdict = self._canary.examine(gpu)
        self._verdicts[gpu.uuid] = verdict
        if verdict != known:
            self._tell(gpu, verdict)
        if verdict.works and verdict.final:
            self._health.passed(gpu.uuid)
        else:
            self._health.failed(gpu.uuid, verdict.reason)
        self._enforced(gpu.uuid)

    def _enforced(self, uuid: str) -> None:
        if self.offers(uuid, Level.CGROUP):
            self._enforce(uuid)

    def _save(self) -> None:
        try:
            self._state.save_canary(canary.keep(self._key, self._verdicts))
        except OSError as error:
            log.warning("the verdicts of the self-tests are not written down: %s", error)

    def _tell(self, gpu: Gpu, verdict: Verdict) -> None:
        log.info(
            "device=%s suspendable=%s level=%s suspend_bytes_per_s=%d resume_bytes_per_s=%d reason=%s",
            gpu.uuid, verdict.suspendable, verdict.level,
            verdict.suspend_bytes_per_s, verdict.resume_bytes_per_s, verdict.reason or "-",
        )  # fmt: skip
        self._events.publish(
            EventKind.DEVICE,
            device=gpu.uuid,
            reason=verdict.reason,
            fields={"suspendable": "true" if verdict.suspendable else "false", "level": str(verdict.level)},
        )
