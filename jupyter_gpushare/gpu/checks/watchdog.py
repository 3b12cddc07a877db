"""Compare the memory that the driver shows with what was granted.

The preload library is cooperative, so this check does not rely on it.  Two things are
reported and, the first by choice (``--watchdog stop``), ended:

* a lease with more memory on a device than its limit in two samples in a row
  (anything at all while it is suspended, or on a device that is not its own);
* a process without a lease on a device (`unleased`).

Until either is over, the device takes no new lease (`Watchdog.closed`).

Stopping hits one process, through its pidfd: of a lease over its limit the one
that holds most beyond what the library counts for it, and only if that is more
than contexts explain.  The account is written by its owner: it can only shift the
blame inside its own lease.

Never the leader of a lease (the server or the job itself), a process with saved memory, or a process of
another lease.  First SIGTERM, SIGKILL when it still runs `GRACE_S` later.
``warn`` only reports; ``off`` does nothing.

On a device where the driver does not say how many bytes a process holds, nothing can
be compared: the watchdog is blind there, which the sample says (`DeviceSample.blind`).
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from jupyter_gpushare.gibibytes import compared, gibibytes
from jupyter_gpushare.gpu.checks.unleased import TOLERANCE_BYTES, UnleasedProcesses
from jupyter_gpushare.gpu.driver.nvml import DeviceReading
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.lease import HelperLease, Key
from jupyter_gpushare.gpu.leases.processes import Process, Processes, leader
from jupyter_gpushare.protocol.helper import EventKind, Overuse, Phase, WatchdogAction

log = logging.getLogger(__name__)

# A context holds 0.3-0.6 GiB on H100/H200; memory beyond that was not counted by the library.
CONTEXT_BYTES = 1 << 30
GRACE_S = 5.0
REPEAT_S = 60.0
MAX_REMEMBERED = 1024


class Watchdog:
    """Compares one sample after the other with what was granted."""

    def __init__(
        self, action: WatchdogAction, processes: Processes, events: Events, unleased: UnleasedProcesses
    ) -> None:
        self.action = action
        self.unleased = unleased
        self._processes = processes
        self._events = events
        self._over: dict[tuple[str, str], int] = {}  # bytes by (lease, device) in the last sample
        self._shown: dict[str, tuple[Overuse, ...]] = {}  # by lease; replaced as a whole, for other threads
        self._reported: dict[tuple[str, str], float] = {}
        self._stopping: dict[Key, float] = {}

    def over(self, lease: str) -> tuple[Overuse, ...]:
        """Return what a lease held beyond its limits in the last two samples; in any thread."""
        return self._shown.get(lease, ())

    def closed(self, uuid: str) -> str:
        """Return why a device takes no new lease, by the last two samples; empty: it does.  In any thread."""
        for found in self._shown.values():
            if any(each.device == uuid for each in found):
                return "a lease uses memory of it that it was not granted"
        return "a process uses memory of it without a lease" if self.unleased.closes(uuid) else ""

    def compare(self, usages: Mapping[str, DeviceReading], leases: Iterable[HelperLease]) -> None:
        """Compare one sample: the usage of each device, and the leases with their processes."""
        if self.action is WatchdogAction.OFF:
            return
        now = time.monotonic()
        leases = list(leases)
        owner = {process.pid: lease.name for lease in leases for process in lease.processes}
        # A device that is late is as it was.
        names = {lease.name for lease in leases}
        over = {key: used for key, used in self._over.items() if key[0] in names and key[1] not in usages}
        shown = {name: tuple(x for x in self.over(name) if x.device not in usages) for name in names}
        for uuid, usage in usages.items():
            by_lease = Counter[str]()
            for pid, held in usage.processes.items():
                by_lease[owner.get(pid, "")] += held or 0
            for lease in leases:
                used = by_lease[lease.name] + lease.left_bytes.get(uuid, 0)
                if used > lease.allowed_bytes(uuid) + TOLERANCE_BYTES:
                    over[lease.name, uuid] = used
                    if (lease.name, uuid) in self._over:
                        shown[lease.name] += (_overuse(lease, uuid, used, usage),)
                        self._over_limit(lease, uuid, used, usage, now)
        self._over, self._shown = over, shown
        self.unleased.compare(usages, leases)
        self._kill_overdue(now)
        if len(self._reported) > MAX_REMEMBERED:
            self._reported = {key: at for key, at in self._reported.items() if now - at < REPEAT_S}

    def _over_limit(self, lease: HelperLease, uuid: str, used: int, usage: DeviceReading, now: float) -> None:
        if not self._is_due((lease.name, uuid), now):
            return
        if lease.phase in (Phase.SUSPENDED, Phase.SUSPENDING):
            reason = f"uses {gibibytes(used)} of a device that is lent"
        else:
            uses, limit = compared(used, lease.allowed_bytes(uuid))
            reason = f"uses {uses}, its limit is {limit}"
        victim, action = _victim(lease, uuid, usage), "warn"
        stops = self.action is WatchdogAction.STOP
        if stops and victim is not None and self._processes.signal(victim.key, signal.SIGTERM):
            action = "stop"
            self._stopping[victim.key] = now
        log.warning(
            "%s lease=%s device=%s pid=%s bytes=%d action=%s reason=%s",
            EventKind.OVER_LIMIT, lease.name, uuid, victim.pid if victim else "-", used, action, reason,
        )  # fmt: skip
        fields = {"used_bytes": str(used), "action": action}
        if victim is not None:
            fields |= {"pid": str(victim.pid), "name": victim.name}
        self._events.publish(
            EventKind.OVER_LIMIT, lease=lease.name, device=uuid, reason=reason, fields=fields
        )

    def _is_due(self, key: tuple[str, str], now: float) -> bool:
        reported_at = self._reported.get(key)
        if reported_at is not None and now - reported_at < REPEAT_S:
            return False
        self._reported[key] = now
        return True

    def _kill_overdue(self, now: float) -> None:
        for key, since in list(self._stopping.items()):
            if not self._processes.alive(key):
                del self._stopping[key]
            elif now - since >= GRACE_S:
                self._processes.signal(key, signal.SIGKILL)
                del self._stopping[key]


def _overuse(lease: HelperLease, uuid: str, used: int, usage: DeviceReading) -> Overuse:
    most = max(lease.processes, key=lambda process: usage.processes.get(process.pid) or 0, default=None)
    return Overuse(
        device=uuid,
        used_bytes=used,
        limit_bytes=lease.allowed_bytes(uuid),
        pid=most.pid if most and usage.processes.get(most.pid) else 0,
        name=most.name if most else "",
    )


def _victim(lease: HelperLease, uuid: str, usage: DeviceReading) -> Process | None:
    """Return the process with the most memory that the library did not count; None: contexts explain it.

    Never one that has memory saved: what the driver shows of it is late, and its state is safe in RAM.
    """
    first = leader(lease.processes)
    counted = lease.counted_bytes(lease.account, uuid, (process.key for process in lease.processes))
    shown = {process: usage.processes.get(process.pid) or 0 for process in lease.processes}
    spared = {*lease.parked, *lease.lost, *(each.key for each in (first,) if each)}
    others = [process for process in lease.processes if process.key not in spared and shown[process]]
    beyond = {process: shown[process] - counted.get(process.key, 0) for process in others}
    unexplained = [
        process for process in others if beyond[process] > (CONTEXT_BYTES if process.key in counted else 0)
    ]
    return max(unexplained, key=beyond.__getitem__, default=None)
