"""Compare the memory that the driver shows with what was granted.

The preload library is cooperative, so this check does not rely on it.  Two things are
reported and stopped, the first only with ``--watchdog stop``:

* a lease with more memory on a device than its limit, in two samples in a row
  (any memory while it is suspended, or on a device that is not its own);
* a process without a lease on a device (`unleased`).

Until this is over, the device takes no new lease (`Watchdog.closed`).

In a lease over its limit one process is stopped, through its pidfd: the one with the most
memory beyond what the library counts for it, and only if that is more than contexts
explain.  The owner can write the account, but can only shift the blame within the lease.
Never stopped are the leader of a lease (the server or the job itself), a process with saved memory, and
a process of another lease.  The process gets SIGTERM, and SIGKILL if it still runs `GRACE_S` later.
``warn`` only reports; ``off`` does nothing.

If the driver does not report the bytes of processes on a device, nothing can be compared.
The watchdog is blind there, and the sample says so (`DeviceSample.blind`).
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
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.processes import Process, Processes, leader
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import EventKind, Overuse, Phase, WatchdogAction

log = logging.getLogger(__name__)

# A context holds 0.3-0.6 GiB on H100/H200; memory beyond that was not counted by the library.
CONTEXT_BYTES = 1 << 30
GRACE_S = 5.0
REPEAT_S = 60.0
MAX_REMEMBERED = 1024


class Watchdog:
    """Compares each sample with what was granted."""

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
        """Return what a lease held beyond its limits in the last two samples; callable from any thread."""
        return self._shown.get(lease, ())

    def closed(self, uuid: str) -> str:
        """Return why a device takes no new lease, by the last two samples; empty if it does.

        Contexts of a lease on its own device do not close it; the library counts everything else there.
        Callable from any thread.
        """
        for found in self._shown.values():
            if any(each.device == uuid and (each.pid or not each.limit_bytes) for each in found):
                return "a lease uses memory of it that it was not granted"
        return "a process uses memory of it without a lease" if self.unleased.closes(uuid) else ""

    def compare(self, usages: Mapping[str, DeviceReading], leases: Iterable[HelperLease]) -> None:
        """Compare one sample: the usage of each device, and the leases with their processes."""
        if self.action is WatchdogAction.OFF:
            return
        now = time.monotonic()
        leases = list(leases)
        owner = {process.pid: lease.name for lease in leases for process in lease.processes}
        # A device that has not answered keeps its last values.
        names = {lease.name for lease in leases}
        over = {key: used for key, used in self._over.items() if key[0] in names and key[1] not in usages}
        shown = {name: tuple(x for x in self.over(name) if x.device not in usages) for name in names}
        for uuid, usage in usages.items():
            by_lease = Counter[str]()
            for pid, held in usage.processes.items():
                by_lease[owner.get(pid, "")] += held or 0
            for lease in leases:
                used = by_lease[lease.name] + lease.leftover_bytes.get(uuid, 0)
                if used > lease.allowed_bytes(uuid) + TOLERANCE_BYTES:
                    over[lease.name, uuid] = used
                    if (lease.name, uuid) in self._over:
                        shown[lease.name] += (self._over_limit(lease, uuid, used, usage, now),)
        self._over, self._shown = over, shown
        self.unleased.compare(usages, leases)
        self._kill_overdue(leases, now)
        if len(self._reported) > MAX_REMEMBERED:
            self._reported = {key: at for key, at in self._reported.items() if now - at < REPEAT_S}

    def _over_limit(
        self, lease: HelperLease, uuid: str, used: int, usage: DeviceReading, now: float
    ) -> Overuse:
        """Report a lease over its limit, and stop a process with ``--watchdog stop``; return the overuse."""
        if lease.phase in (Phase.SUSPENDED, Phase.SUSPENDING):
            reason = f"uses {gibibytes(used)} of a device that is lent"
        else:
            uses, limit = compared(used, lease.allowed_bytes(uuid))
            reason = f"uses {uses}, its limit is {limit}"
        first, unexplained = leader(lease.processes), _unexplained(lease, uuid, usage)
        victim = next((process for process in unexplained if process is not first), None)
        named, action = victim or next(iter(unexplained), None), "warn"
        found = Overuse(
            device=uuid,
            used_bytes=used,
            limit_bytes=lease.allowed_bytes(uuid),
            pid=named.pid if named else 0,
            name=named.name if named else "",
            process_bytes=(usage.processes.get(named.pid) or 0) if named else 0,
        )
        is_to_stop = self.action is WatchdogAction.STOP and victim and victim.key not in self._stopping
        if is_to_stop and victim and self._processes.signal(victim.key, signal.SIGTERM):
            action = "stop"
            self._stopping[victim.key] = now
            log.warning("lease=%s pid=%d was told to end", lease.name, victim.pid)
        if self._is_due((lease.name, uuid), now):
            self._report(lease, found, victim, action, reason)
        return found

    def _report(
        self, lease: HelperLease, found: Overuse, victim: Process | None, action: str, reason: str
    ) -> None:
        log.warning(
            "%s lease=%s device=%s pid=%s bytes=%d action=%s reason=%s",
            EventKind.OVER_LIMIT, lease.name, found.device, victim.pid if victim else "-", found.used_bytes,
            action, reason,
        )  # fmt: skip
        fields = {"used_bytes": str(found.used_bytes), "action": action}
        if victim is not None:
            fields |= {"pid": str(victim.pid), "name": victim.name}
        self._events.publish(
            EventKind.OVER_LIMIT, lease=lease.name, device=found.device, reason=reason, fields=fields
        )

    def _is_due(self, key: tuple[str, str], now: float) -> bool:
        reported_at = self._reported.get(key)
        if reported_at is not None and now - reported_at < REPEAT_S:
            return False
        self._reported[key] = now
        return True

    def _kill_overdue(self, leases: Iterable[HelperLease], now: float) -> None:
        # A process that was suspended since then has its memory in RAM; a moving one may have it there soon.
        saved = {key for lease in leases for key in (*lease.parked, *lease.lost)}
        moving = {
            process.key for lease in leases if lease.phase is Phase.SUSPENDING for process in lease.processes
        }
        for key, since in list(self._stopping.items()):
            if key in saved or not self._processes.alive(key):
                del self._stopping[key]
            elif now - since >= GRACE_S and key not in moving:
                self._processes.signal(key, signal.SIGKILL)
                del self._stopping[key]


def _unexplained(lease: HelperLease, uuid: str, usage: DeviceReading) -> list[Process]:
    """Return the processes of a lease with memory that neither the library nor contexts explain.

    The process with the most such memory comes first.  A process with saved memory is left out, because
    the driver may show its memory too late.
    """
    counted = lease.counted_bytes(lease.account, uuid, (process.key for process in lease.processes))
    saved = {*lease.parked, *lease.lost}
    beyond = {
        process: (usage.processes.get(process.pid) or 0) - counted.get(process.key, 0)
        for process in lease.processes
        if process.key not in saved
    }
    found = [p for p in beyond if beyond[p] > (CONTEXT_BYTES if p.key in counted else 0)]
    return sorted(found, key=beyond.__getitem__, reverse=True)
