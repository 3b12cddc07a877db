"""What the driver shows against what was granted; the preload library is cooperative.

Two things are reported, and by choice (``--watchdog stop``) ended:

* a lease with more memory on a device than its limit in two samples in a row
  (anything at all while it is suspended, or on a device that is not its own);
* a process without a lease on a device.

Stopping hits one process, through its pidfd: of a lease over its limit the one
that holds most beyond what the library counts for it, and only if that is more
than contexts explain.  What the account says is the owner's word: it can only
move the blame inside its own lease.

Never the leader of a lease (the server or the job itself), never a process of
another lease.  First SIGTERM, SIGKILL when it is still there `GRACE_S` later.
``warn`` only tells; ``off`` does not even look.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping

from .events import Events
from .lease import Key, Lease
from .nvml import Usage
from .processes import Process, Processes, leader
from .verbs import EventKind, Phase, WatchdogAction

log = logging.getLogger(__name__)

# Allocations are rounded up and counted a moment later than made.
TOLERANCE_BYTES = 64 << 20
# A context holds 0.3-0.6 GiB on H100/H200; what is beyond is memory nobody counted.
CONTEXT_BYTES = 1 << 30
GRACE_S = 5.0
REPEAT_S = 60.0
# Nobody's limit is at stake: a service of the machine may be there for good.
STRANGER_REPEAT_S = 3600.0
MAX_REMEMBERED = 1024


class Watchdog:
    """Compares one sample after the other with what was granted."""

    def __init__(self, action: WatchdogAction, processes: Processes, events: Events) -> None:
        self._action = action
        self._processes = processes
        self._events = events
        self._over: set[tuple[str, str]] = set()  # (lease, device) in the last sample
        self._told: dict[tuple[Key | str, str], float] = {}
        self._stopping: dict[Key, float] = {}
        # Ours: the helper and its self-test.
        self.own: set[int] = {os.getpid()}

    def look(self, usages: Mapping[str, Usage], leases: Iterable[Lease]) -> None:
        """One sample: what each device shows, and the leases with their processes."""
        if self._action is WatchdogAction.OFF:
            return
        now = time.monotonic()
        leases = list(leases)
        owner = {process.pid: (lease, process) for lease in leases for process in lease.processes}
        over: set[tuple[str, str]] = set()
        for uuid, usage in usages.items():
            by_lease: dict[str, int] = {}
            for pid, count in usage.processes.items():
                if pid in owner:
                    name = owner[pid][0].name
                    by_lease[name] = by_lease.get(name, 0) + count
                elif pid not in self.own:
                    self._stranger(uuid, pid, count, now)
            for lease in leases:
                used = by_lease.get(lease.name, 0)
                if used > _allowed(lease, uuid) + TOLERANCE_BYTES:
                    over.add((lease.name, uuid))
                    if (lease.name, uuid) in self._over:
                        self._over_limit(lease, uuid, used, usage, now)
        self._over = over
        self._kill_late(now)
        if len(self._told) > MAX_REMEMBERED:
            self._told = {key: at for key, at in self._told.items() if now - at < REPEAT_S}

    def _stranger(self, uuid: str, pid: int, count: int, now: float) -> None:
        process = self._processes.find(pid)
        # NVML may show a process that has just ended, or one of another pid namespace.
        if process is None or not self._processes.alive(process.key):
            return
        if not self._news((process.key, uuid), now, STRANGER_REPEAT_S):
            return
        self._tell(EventKind.STRANGER, "", uuid, process, count, "a process without a lease uses this device")

    def _over_limit(self, lease: Lease, uuid: str, used: int, usage: Usage, now: float) -> None:
        if not self._news((lease.name, uuid), now, REPEAT_S):
            return
        victim = _victim(lease, uuid, usage)
        if lease.phase in (Phase.SUSPENDED, Phase.SUSPENDING):
            reason = f"uses {used} bytes of a device that is lent"
        else:
            reason = f"uses {used} bytes, {_allowed(lease, uuid)} are granted"
        self._tell(EventKind.OVER_LIMIT, lease.name, uuid, victim, used, reason)

    def _tell(
        self, kind: EventKind, lease: str, uuid: str, process: Process | None, used: int, reason: str
    ) -> None:
        action = "warn"
        stops = self._action is WatchdogAction.STOP and process is not None
        if stops and process and self._processes.signal(process.key, signal.SIGTERM):
            action = "stop"
            self._stopping[process.key] = time.monotonic()
        log.warning(
            "%s lease=%s device=%s pid=%s bytes=%d action=%s reason=%s",
            kind, lease or "-", uuid, process.pid if process else "-", used, action, reason,
        )  # fmt: skip
        fields = {"used_bytes": str(used), "action": action}
        if process is not None:
            fields |= {"pid": str(process.pid), "name": process.name}
        self._events.publish(kind, lease=lease, device=uuid, reason=reason, fields=fields)

    def _news(self, key: tuple[Key | str, str], now: float, repeat_s: float) -> bool:
        told = self._told.get(key)
        if told is not None and now - told < repeat_s:
            return False
        self._told[key] = now
        return True

    def _kill_late(self, now: float) -> None:
        for key, since in list(self._stopping.items()):
            if not self._processes.alive(key):
                del self._stopping[key]
            elif now - since >= GRACE_S:
                self._processes.signal(key, signal.SIGKILL)
                del self._stopping[key]


def _allowed(lease: Lease, uuid: str) -> int:
    if lease.phase is Phase.SUSPENDED:
        return 0
    return lease.limits.get(uuid, 0)


def _victim(lease: Lease, uuid: str, usage: Usage) -> Process | None:
    """The process with the most memory that nobody counted; None when contexts explain it."""
    first = leader(lease.processes)
    counted = _counted(lease, uuid)
    shown = {process: usage.processes.get(process.pid, 0) for process in lease.processes}
    others = [process for process in lease.processes if process is not first and shown[process]]
    beyond = {process: shown[process] - counted.get(process.key, 0) for process in others}
    unexplained = [
        process for process in others if beyond[process] > (CONTEXT_BYTES if process.key in counted else 0)
    ]
    return max(unexplained, key=beyond.__getitem__, default=None)


def _counted(lease: Lease, uuid: str) -> dict[Key, int]:
    """What the library counts for each process on a device.

    The owner can write anything there.  All together more than the highest limit is
    what the library never counts: then nothing of it is believed.
    """
    if lease.account is None or uuid not in lease.limits:
        return {}
    index = list(lease.limits).index(uuid)
    living = {process.key for process in lease.processes}
    counted = {
        (slot.pid, slot.start_ticks): slot.used_bytes[index]
        for slot in lease.account.slots
        if (slot.pid, slot.start_ticks) in living
    }
    return counted if sum(counted.values()) <= lease.most[uuid] else {}
