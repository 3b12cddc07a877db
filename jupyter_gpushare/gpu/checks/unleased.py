"""Processes that use a managed device without a lease: reported, and stopped under narrow conditions.

Each is reported in the first sample that shows it, and again each hour.  It is stopped
(SIGTERM, SIGKILL `GRACE_S` later) when all of this holds:

* its user is no system user (`StopRules.first_uid`) and holds a lease here, or held one since boot;
* the device is leased to another user;
* it held memory in the last two samples, and was reported `NOTICE_S` before;
* its environment could be read: it names no lease;
* it runs in the pid namespace of the helper: a container without the host's pids is not ours;
* no record of a lease was lost since boot (`Holders`): it might have been in that lease.

Never stopped: processes of root, MPS servers, and names or cgroups of ``--watchdog-ignore``.
A process chooses its own name, so a name only spares what need not be stopped; a cgroup
is given by root.  Ended leases leave no process behind: `LeaseRegistry.drop` kills them.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.driver.nvml import Usage
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.holders import Holders
from jupyter_gpushare.gpu.leases.lease import Key, Lease
from jupyter_gpushare.gpu.leases.processes import Process, Processes
from jupyter_gpushare.protocol.helper import EventKind

log = logging.getLogger(__name__)

NOTICE_S = 30.0
REPEAT_S = 3600.0
GRACE_S = 5.0
# nvidia-cuda-mps-server and nvidia-cuda-mps-control, as /proc/PID/comm cuts them (15 characters).
MPS_NAME = "nvidia-cuda-mps"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """Which processes without a lease may be stopped."""

    stops: bool = True  # False: they are only reported
    first_uid: int = 1000  # of the users that are no system users (login.defs(5), UID_MIN)
    ignore: tuple[str, ...] = ()  # names of processes; cgroups, if they begin with "/"


@dataclass(slots=True)
class _Seen:
    """A process on a device, over its samples."""

    first_at: float
    reported_at: float
    samples: int = 0  # in a row that show memory
    stopped_at: float | None = None


class UnleasedProcesses:
    """Compares sample after sample; `Watchdog` calls it in the sampler's thread."""

    def __init__(
        self, rules: StopRules, processes: Processes, events: Events, holders: Holders, own_pids: set[int]
    ) -> None:
        """``own_pids`` are ignored: the helper and its self-tests."""
        self._rules = rules
        self._processes = processes
        self._events = events
        self._holders = holders
        self._own_pids = own_pids
        self._seen: dict[tuple[Key, str], _Seen] = {}

    def compare(self, usages: Mapping[str, Usage], leases: Iterable[Lease]) -> None:
        """Report, and where the conditions hold stop, processes without a lease in one sample."""
        now, leases = time.monotonic(), list(leases)
        in_leases = {process.pid for lease in leases for process in lease.processes}
        present: set[tuple[Key, str]] = set()
        for uuid, usage in usages.items():
            holders = {lease.uid for lease in leases if uuid in lease.limits}
            for pid, shown in usage.processes.items():
                if pid in in_leases or pid in self._own_pids:
                    continue
                process = self._processes.find(pid)
                # The driver may list a process that has just ended, or one of another pid namespace.
                if process is not None and self._processes.alive(process.key):
                    present.add((process.key, uuid))
                    self._judge(process, uuid, shown or 0, holders, now)
        for key in [key for key in self._seen if key[1] in usages and key not in present]:
            del self._seen[key]

    def _judge(self, process: Process, uuid: str, used_bytes: int, holders: set[int], now: float) -> None:
        spared = self._spared(process, holders)
        seen = self._seen.get((process.key, uuid))
        if seen is None:
            seen = self._seen[process.key, uuid] = _Seen(now, now)
            self._report(process, uuid, used_bytes, spared)
        elif now - seen.reported_at >= REPEAT_S:
            seen.reported_at = now
            self._report(process, uuid, used_bytes, spared)
        seen.samples = seen.samples + 1 if used_bytes else 0
        if spared:
            seen.stopped_at = None
        elif seen.stopped_at is not None:
            if now - seen.stopped_at >= GRACE_S:
                self._processes.signal(process.key, signal.SIGKILL)
        elif (
            seen.samples >= 2
            and now - seen.first_at >= NOTICE_S
            and self._processes.signal(process.key, signal.SIGTERM)
        ):
            seen.stopped_at = now
            self._report(process, uuid, used_bytes, "", action="stop")

    def _spared(self, process: Process, holders: set[int]) -> str:
        """Return why a process is not stopped; empty: it is, after `NOTICE_S`."""
        rules = self._rules
        if not rules.stops:
            return "the watchdog only reports"
        if process.uid == 0 or process.uid < rules.first_uid:
            return "it belongs to a system user"
        if process.unread:
            return "it does not answer, and may be in a lease"
        if process.uid not in self._holders.uids:
            return "its user held no lease since boot"
        if not holders - {process.uid}:
            return "the device is leased to no other user"
        if self._holders.record_lost:
            return "the record of a lease was lost, which it may have been in"
        if process.name == MPS_NAME or process.name in rules.ignore:
            return f"it is named {process.name}"
        cgroups = procfs.read(process.pid, "cgroup", 8192).decode(errors="replace").splitlines()
        paths = [f"{line.split(':', 2)[-1]}/" for line in cgroups]
        for path in rules.ignore:
            if path.startswith("/") and any(each.startswith(f"{path.rstrip('/')}/") for each in paths):
                return f"its cgroup is below {path}"
        return "" if _shares_pids(process.pid) else "it runs in a container with pids of its own"

    def _report(
        self, process: Process, uuid: str, used_bytes: int, spared: str, *, action: str = "warn"
    ) -> None:
        reason = "a process without a lease uses this device"
        if action == "stop":
            reason += " and was told to end"
        elif spared:
            reason += f"; it is left alone: {spared}"
        else:
            reason += f"; it is stopped in {NOTICE_S:.0f} s, since the device is leased to another user"
        log.warning(
            "%s device=%s pid=%d uid=%d name=%s bytes=%d action=%s reason=%s",
            EventKind.UNLEASED_PROCESS, uuid, process.pid, process.uid, process.name, used_bytes, action,
            reason,
        )  # fmt: skip
        fields = {
            "used_bytes": str(used_bytes),
            "action": action,
            "pid": str(process.pid),
            "uid": str(process.uid),
            "name": process.name,
        }
        self._events.publish(EventKind.UNLEASED_PROCESS, device=uuid, reason=reason, fields=fields)


def _shares_pids(pid: int) -> bool:
    """Whether a process is in the pid namespace of this one; False when the kernel does not say."""
    try:
        return os.readlink(procfs.path(pid, "ns/pid")) == os.readlink(procfs.path(0, "ns/pid"))
    except OSError:
        return False
