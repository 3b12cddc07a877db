"""The state of each device beyond its properties: self-test, service, reserve, failures.

The checks write here; the moves and the registry read.  Verdicts, hidden bytes and deaths hold for one
boot and one driver (`saved`, `load`).  A helper that is stopped, not killed, forgets the deaths.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.gpu.driver.ladder import level_of, margin_bytes, reserve_bytes, strongest, weakest
from jupyter_gpushare.gpu.driver.nvml import LEFT_OUT, DeviceReading, DriverGpu
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.os.device_files import DeviceFiles, FileAccess
from jupyter_gpushare.protocol import helper
from jupyter_gpushare.protocol.helper import Level, Rung

# One process may have ended in Lock, Checkpoint or Restore for another reason.
DEATHS_TOLERATED = 1
# Bytes that no process explains, beyond 1/HIDDEN_PART of the device, belong to a tenant that the driver
# does not list.
HIDDEN_PART = 8
# After a free, used bytes and the list of processes may disagree this long (`canary.SHOWN_TIMEOUT_S`).
HIDDEN_SETTLES_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the self-test of one device."""

    suspendable: bool
    reason: str = ""
    works: bool = True  # a process could use the device at all
    blind: bool = False  # the driver does not report the bytes of processes on this device
    ladder: tuple[Rung, ...] = ()
    suspend_bytes_per_s: int = 0
    resume_bytes_per_s: int = 0
    grown_bytes: int = 0  # bytes that the child held after the cycle in addition to those before
    context_bytes: int = 0  # bytes that the driver showed of the child beyond what the library counted
    final: bool = True  # False: it could not be tested now and must be tested again
    denied: bool = False  # the driver denied this helper a call; the next helper tests again
    movable: bool = False  # the child was also restored on another device of the same model
    move_reason: str = ""  # why it is not movable
    move_final: bool = True  # False: a move could not be tested now and must be tested again

    @property
    def level(self) -> Level:
        """The strongest level for a part of the device."""
        return strongest(self.ladder)

    @property
    def is_complete(self) -> bool:
        """Whether nothing needs to be tested again."""
        return self.final and self.move_final

    @property
    def is_kept(self) -> bool:
        """Whether the next helper on the same boot and driver adopts it."""
        return self.final and not self.denied

    def offers(self, level: Level) -> bool:
        """Return whether a level passed its test."""
        return any(rung.level is level and rung.offered for rung in self.ladder)


_NOT_FINISHED = "the self-test has not finished"
UNTESTED = Verdict(suspendable=False, reason=_NOT_FINISHED, move_reason=_NOT_FINISHED)


class DeviceStates:
    """State of every device by UUID; safe to read from several threads."""

    def __init__(self, gpus: tuple[DriverGpu, ...], files: DeviceFiles | None = None) -> None:
        self._files = files
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._verdicts: dict[str, Verdict] = {}
        self._out_of_service: dict[str, str] = {}
        self._hidden_bytes: dict[str, int] = {}
        # Devices that show fewer hidden bytes: since when, and the maximum since then.
        self._fewer_hidden: dict[str, tuple[float, int]] = {}
        self._deaths: dict[str, int] = {}
        self._doubted: set[str] = set()
        self._key = ""
        # Set when a device has to be tested.
        self.test_due = threading.Event()

    # Self-test

    def verdict(self, uuid: str) -> Verdict:
        """Return the last verdict on a device; `UNTESTED` before its first self-test has ended."""
        return self._verdicts.get(uuid, UNTESTED)

    def set_verdict(self, uuid: str, verdict: Verdict) -> None:
        """Replace the verdict on a device."""
        self._verdicts[uuid] = verdict
        self._doubted.discard(uuid)

    def ladder(self, uuid: str) -> tuple[Rung, ...]:
        """Return all levels of a device, by its self-test and by the current access to its file."""
        rungs = self.verdict(uuid).ladder
        return with_access(rungs, self._files.access(uuid)) if self._files else rungs

    def all_complete(self) -> bool:
        """Return whether no tested device waits for another test."""
        return all(verdict.is_complete for verdict in self._verdicts.values())

    def offers(self, uuid: str, level: Level) -> bool:
        """Return whether a level passed its test on a device."""
        return self.verdict(uuid).offers(level)

    def turns_obstacle(self, lease: HelperLease, *, proves_end: bool) -> str:
        """Return why a lease cannot share the time of its devices in turns; "" if it can.

        ``proves_end`` is `Checkpoint.proves_end`.
        """
        if not proves_end:
            return "its driver cannot tell when a process has nothing left to run (before CUDA 12.5)"
        if not all(self.offers(uuid, Level.PRELOAD) for uuid in lease.limits):
            return "its device has no library that could hold calls"
        if lease.bypasses_library:
            return "a process of it runs without the library that holds calls"
        return ""

    def is_blind(self, uuid: str) -> bool:
        """Return whether the driver does not report the bytes of processes on a device."""
        return self.verdict(uuid).blind

    def doubt(self, uuid: str) -> None:
        """Have a device tested again after the driver failed on it."""
        self._doubted.add(uuid)
        self.test_due.set()

    def is_doubted(self, uuid: str) -> bool:
        """Return whether the driver failed on a device since its last self-test."""
        return uuid in self._doubted

    # Service

    def out_of_service(self, uuid: str) -> str:
        """Return why a device is out of service; "" if it is not."""
        if uuid in self._out_of_service:
            return self._out_of_service[uuid]
        # A lease of an earlier helper may have a device that is gone.
        return "" if uuid in self._gpus else LEFT_OUT

    def set_out_of_service(self, uuid: str, reason: str) -> None:
        """Take a device out of service, or return it to service if ``reason`` is empty."""
        if reason:
            self._out_of_service[uuid] = reason
        else:
            self._out_of_service.pop(uuid, None)
        self.test_due.set()

    # Suspension

    def count_death(self, uuid: str) -> int:
        """Count a process that ended in a driver call of a move on a device; return the number so far."""
        self._deaths[uuid] = self._deaths.get(uuid, 0) + 1
        return self._deaths[uuid]

    def forget_deaths(self) -> None:
        """Forget the counted deaths, because an administrator stopped the helper."""
        self._deaths.clear()

    def suspend_blocker(self, uuid: str) -> str:
        """Return why nothing on a device can be suspended; "" if it can."""
        if reason := self.out_of_service(uuid):
            return f"the device is out of service: {reason}"
        if (deaths := self._deaths.get(uuid, 0)) > DEATHS_TOLERATED:
            return (
                f"{deaths} processes ended while the driver suspended or resumed them on this device; "
                "stop and start the device helper to try again"
            )
        return self.verdict(uuid).reason

    def move_obstacle(self, uuid: str) -> str:
        """Return why a suspended lease cannot move to or from a device; "" if it can."""
        if self._files and self._files.are_closed:
            return "only the users of leases may open the device files (--own-device-files)"
        if reason := self.out_of_service(uuid):
            return f"the device is out of service: {reason}"
        verdict = self.verdict(uuid)
        return "" if verdict.movable else verdict.move_reason or "it is not tested"

    # Memory

    def measure_hidden(self, uuid: str, usage: DeviceReading, at: float) -> bool:
        """Note the hidden bytes of a device: neither free nor held by a listed process.

        On an idle H100 they belong to the driver itself and to graphics sessions.  The first sample
        may also count memory of a process that has ended.  So the number falls to the maximum of the
        samples of `HIDDEN_SETTLES_S`, and never rises.  ``at`` is the time of this sample, in seconds.
        Return whether the number fell.
        """
        if None in usage.processes.values() or usage.unexplained_bytes < 0:
            self._fewer_hidden.pop(uuid, None)
            return False
        found = min(usage.unexplained_bytes, self._gpus[uuid].memory_bytes // HIDDEN_PART)
        if found >= self._hidden_bytes.setdefault(uuid, found):
            self._fewer_hidden.pop(uuid, None)
            return False
        since, maximum = self._fewer_hidden.get(uuid, (at, found))
        self._fewer_hidden[uuid] = since, max(maximum, found)
        if at - since < HIDDEN_SETTLES_S:
            return False
        _, self._hidden_bytes[uuid] = self._fewer_hidden.pop(uuid)
        return True

    def reserve_bytes(self, gpu: DriverGpu) -> int:
        """Return the bytes of a device that are never granted, so that a full lease can be restored."""
        return reserve_bytes(gpu, self.hidden_bytes(gpu.uuid))

    def grantable_bytes(self, gpu: DriverGpu) -> int:
        """Return the bytes of a device that all leases together may get."""
        return gpu.memory_bytes - self.reserve_bytes(gpu)

    def hidden_bytes(self, uuid: str) -> int:
        """Return the bytes that a device shows as used when it is empty."""
        # On a blind device the bytes of processes would count too, but nothing is restored there.
        return 0 if self.is_blind(uuid) else self._hidden_bytes.get(uuid, 0)

    def margin_bytes(self, uuid: str, saved_bytes: int) -> int:
        """Return the bytes that must be free in addition to the saved ones before a restore."""
        return margin_bytes(saved_bytes, self.verdict(uuid).grown_bytes)

    # Limits

    def contexts(self, uuids: Iterable[str]) -> dict[str, int]:
        """Return the bytes of one context on each device, from its self-test; 0 while that is unknown."""
        return {uuid: self.verdict(uuid).context_bytes for uuid in uuids}

    def level_of(self, lease: HelperLease) -> Level:
        """Return the level that enforces the limits of a lease now: the weakest of its devices."""
        levels = []
        for uuid, limit_bytes in lease.limits.items():
            if gpu := self._gpus.get(uuid):
                whole = limit_bytes >= gpu.memory_bytes - self.reserve_bytes(gpu)
                levels.append(level_of(self.ladder(uuid), whole=whole, in_cgroup=lease.in_cgroup))
        return weakest(levels)

    # What outlives the helper

    def saved(self) -> dict[str, Any]:
        """Return the state that `load` adopts on the same boot and driver."""
        return {
            "key": self._key,
            "devices": {uuid: asdict(each) for uuid, each in list(self._verdicts.items()) if each.is_kept},
            "hidden_bytes": dict(self._hidden_bytes),
            "deaths": dict(self._deaths),
        }

    def load(self, saved: dict[str, Any], key: str) -> None:
        """Adopt the state of an earlier helper if its ``key`` (boot and driver) is the same."""
        self._key = key
        if saved.get("key") != key:
            return
        for uuid in self._gpus:
            if (verdict := _verdict(saved, uuid)) is not None:
                self._verdicts[uuid] = verdict
            for name, counts in (("hidden_bytes", self._hidden_bytes), ("deaths", self._deaths)):
                by_uuid = saved.get(name)
                count = by_uuid.get(uuid) if isinstance(by_uuid, dict) else None
                if type(count) is int and count >= 0:
                    counts[uuid] = count


def with_access(rungs: tuple[Rung, ...], access: FileAccess) -> tuple[Rung, ...]:
    """Return the rungs of a device; the one for whole GPUs is offered only if the device file is closed."""
    return tuple(
        replace(rung, offered=not access.reason, reason=access.reason, by=access.by)
        if rung.level is Level.WHOLE_GPU and rung.offered
        else rung
        for rung in rungs
    )


def _verdict(saved: dict[str, Any], uuid: str) -> Verdict | None:
    try:
        verdict = helper.build(Verdict, saved["devices"][uuid])
    except (KeyError, TypeError, InvalidRequest):
        return None
    tested_moves = "movable" in saved["devices"][uuid]  # not by an older helper
    return replace(verdict, final=True, move_final=verdict.move_final and tested_moves)
