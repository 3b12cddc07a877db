"""Report processes that use a managed device without a lease, and stop some of them.

Each such process is reported in the first sample that shows it, and again each hour.  It is stopped
(SIGTERM, SIGKILL `GRACE_S` later) if all of these hold:

* Its user is no system user (`StopRules.first_uid`), and holds a lease here or held one since boot.
* The device is leased to another user.
* It held memory in the last two samples, and it or another process of its user on that device was first
  reported `NOTICE_S` before.  Only after `QUIET_S` without any such process does a new notice begin, so
  a relay of short processes gains no time.
* It belongs to no lease (`processes`).
* It is in no container, or in a container that has or had a lease (`containers`).
* No record of a lease of its user was lost since boot (`Holders`), because it might be in that lease.

A process closes its device for new leases (`UnleasedProcesses.closes`) if its user held a lease, it holds
memory in two samples in a row, and an administrator could end it (`UnleasedProcess.kept` is empty).  If the
device is leased to another user, it stays closed until the process is gone; otherwise until the notice is
over.  If a lease begins there later, the process is stopped.

A process in a user namespace, which may give it another uid, also belongs to the maker of that namespace.
All users of containers may have one uid.  So a process in a container that had a lease never counts as a
system user's, and every lease on the device counts as another user's.

A process whose environment cannot be read (`processes`: unread) may be in a lease of its user on that
device.  It is stopped only if it cannot be in one or that lease is to end: its user has no lease
there, or processes there hold more than the leases allow, or the broker had all processes of
such a lease killed.  That lease cannot end before this process, so the device counts as leased to another.

Processes of root, MPS servers of root's control daemon, and processes below a cgroup of
``--watchdog-ignore`` are never stopped.  Only root controls these facts: a process cannot spare itself by
its name or its environment.  Ended leases leave no process behind, because `LeaseRegistry.drop` kills them.

An administrator may have a process ended (`UnleasedProcesses.end`) that the watchdog would only report.
That excludes processes that are never stopped, in a container, or possibly in a lease.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jupyter_gpushare import procfs
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.driver.nvml import DeviceReading
from jupyter_gpushare.gpu.events import Events
from jupyter_gpushare.gpu.leases.holders import Holders
from jupyter_gpushare.gpu.leases.lease import HelperLease
from jupyter_gpushare.gpu.leases.processes import Process, Processes
from jupyter_gpushare.gpu.os.processes import Key
from jupyter_gpushare.protocol.helper import ErrorKind, EventKind, UnleasedProcess

log = logging.getLogger(__name__)

NOTICE_S = 30.0
QUIET_S = 600.0
REPEAT_S = 3600.0
GRACE_S = 5.0
# Allocations are rounded up and counted a moment later than made.
TOLERANCE_BYTES = 64 << 20
_MPS_CONTROL = "nvidia-cuda-mps-control"
# Maximum number of processes of a device in a sample.
SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """Defines which processes without a lease may be stopped."""

    stops: bool = True  # False: they are only reported
    first_uid: int = 1000  # lower uids are system users (login.defs(5), UID_MIN)
    ignore: tuple[str, ...] = ()  # cgroups


@dataclass(slots=True)
class _Seen:
    """What the samples showed of a process on a device."""

    reported_at: float = float("-inf")
    held: int = 0  # samples in a row that show memory
    samples: int = 0  # samples in a row that show memory and no reason to spare it
    stopped_at: float | None = None


@dataclass(slots=True)
class _Notice:
    """The times at which processes of one user or container were first and last seen on a device."""

    first_at: float
    last_at: float


class UnleasedProcesses:
    """Checks each sample; `Watchdog` calls this in the sampler's thread."""

    def __init__(
        self, rules: StopRules, processes: Processes, events: Events, holders: Holders, own_pids: set[int]
    ) -> None:
        """``own_pids`` are the helper and its self-tests, which are ignored."""
        self._rules = rules
        self._processes = processes
        self._events = events
        self._holders = holders
        self._own_pids = own_pids
        self._seen: dict[tuple[Key, str], _Seen] = {}
        self._notices: dict[tuple[int | str, str], _Notice] = {}  # by user or container, and device
        self._unread: set[Key] = set()  # in the last sample
        # For other threads: the processes of each device in the last sample, and how they are shown.
        self._shown: dict[str, tuple[tuple[Process, UnleasedProcess], ...]] = {}
        self._closed: set[str] = set()  # devices that take no new lease; replaced as a whole
        self._ending: dict[Key, float] = {}  # when an administrator first had the process ended

    def shown(self, uuid: str) -> tuple[UnleasedProcess, ...]:
        """Return at most `SHOWN` processes without a lease on a device; callable from any thread."""
        return tuple(
            replace(entry, ending=process.key in self._ending) for process, entry in self._shown.get(uuid, ())
        )

    def closes(self, uuid: str) -> bool:
        """Return whether a process keeps new leases from a device; callable from any thread."""
        return uuid in self._closed

    def end(self, uuid: str, name: str, leases: Iterable[HelperLease]) -> None:
        """End a process of `shown`: SIGTERM now, SIGKILL `GRACE_S` later; callable from any thread.

        Raises:
            HelperError: the last sample has no such process, or it may not or cannot be ended.
        """
        found = next((each for each in self._shown.get(uuid, ()) if each[1].process == name), None)
        if found is None or any(found[0].key == x.key for lease in leases for x in lease.processes):
            raise HelperError(ErrorKind.UNKNOWN_PROCESS, "no such process without a lease uses this GPU")
        process, entry = found
        if entry.kept:
            raise HelperError(ErrorKind.CONFLICT, f"this process is left alone: {entry.kept}")
        try:
            was_sent = self._processes.signal(process.key, signal.SIGTERM)
        except OSError as error:
            raise HelperError(
                ErrorKind.NOT_ALLOWED, f"the device helper cannot end it: {error.strerror}"
            ) from None
        if not was_sent:
            raise HelperError(ErrorKind.UNKNOWN_PROCESS, "this process has ended")
        self._ending.setdefault(process.key, time.monotonic())
        self._report(process, uuid, entry.used_bytes, "", action="stop")

    def compare(self, usages: Mapping[str, DeviceReading], leases: Iterable[HelperLease]) -> None:
        """Report the processes without a lease in one sample, and stop those that may be stopped."""
        now, leases = time.monotonic(), list(leases)
        shown: dict[str, list[tuple[Process, UnleasedProcess]]] = {}
        in_leases = {process.pid for lease in leases for process in lease.processes}
        present: set[tuple[Key, str]] = set()
        unread: set[Key] = set()
        kept_alone: set[Key] = set()
        closed = self._closed - usages.keys()
        self._notices = {key: each for key, each in self._notices.items() if now - each.last_at < QUIET_S}
        for uuid, usage in usages.items():
            found: list[tuple[bool, Process, UnleasedProcess]] = []
            on_device = [lease for lease in leases if uuid in lease.limits]
            for pid, used in usage.processes.items():
                if pid in in_leases or pid in self._own_pids:
                    continue
                process = self._processes.find(pid)
                # The driver may list a process that has just ended, or one of another pid namespace.
                # A process that does not answer is ignored once, because it may only be late.
                if process is not None and process.unread:
                    unread.add(process.key)
                    if process.key not in self._unread:
                        continue
                if process is not None and self._processes.alive(process.key):
                    present.add((process.key, uuid))
                    kept = self._kept(process) or self._may_be_leased(process, uuid, usage, on_device)
                    if kept:
                        kept_alone.add(process.key)
                    self._judge(process, uuid, used or 0, self._spared(process, on_device, kept), now)
                    closes = not kept and self._closes(process, uuid, on_device, now)
                    found.append((closes, process, self._entry(process, used or 0, kept)))
            if any(closes for closes, _, _ in found):
                closed.add(uuid)
            found.sort(key=lambda each: not each[0])
            shown[uuid] = [(process, entry) for _, process, entry in found[:SHOWN]]
        for key in [key for key in self._seen if key[1] in usages and key not in present]:
            del self._seen[key]
        self._unread, self._closed = unread, closed
        self._shown = {**self._shown, **{uuid: tuple(found) for uuid, found in shown.items()}}
        self._kill_overdue({key for key, _ in present} - kept_alone, now)

    def _kill_overdue(self, present: set[Key], now: float) -> None:
        """Kill the ``present`` processes that got SIGTERM from `end` `GRACE_S` ago; forget ended ones."""
        for key, since in list(self._ending.items()):
            if not self._processes.alive(key):
                del self._ending[key]
            elif key in present and now - since >= GRACE_S:
                with contextlib.suppress(PermissionError):
                    self._processes.signal(key, signal.SIGKILL)

    def _judge(self, process: Process, uuid: str, used_bytes: int, spared: str, now: float) -> None:
        seen = self._seen.setdefault((process.key, uuid), _Seen())
        notice = self._notice(process, uuid, now)
        notice.last_at = now
        if now - seen.reported_at >= REPEAT_S:
            seen.reported_at = now
            self._report(process, uuid, used_bytes, spared)
        seen.held = seen.held + 1 if used_bytes else 0
        seen.samples = seen.samples + 1 if used_bytes and not spared else 0
        if spared:
            seen.stopped_at = None
        elif seen.stopped_at is not None:
            if now - seen.stopped_at >= GRACE_S:
                self._processes.signal(process.key, signal.SIGKILL)
        elif (
            seen.samples >= 2
            and now - notice.first_at >= NOTICE_S
            and self._processes.signal(process.key, signal.SIGTERM)
        ):
            seen.stopped_at = now
            self._report(process, uuid, used_bytes, "", action="stop")

    def _spared(self, process: Process, on_device: Iterable[HelperLease], kept: str) -> str:
        """Return why the watchdog does not stop a process; empty if it does, after `NOTICE_S`."""
        if not self._rules.stops:
            return "the watchdog only reports"
        if kept:
            return kept
        if not self._is_of_a_holder(process):
            return "its user held no lease since boot"
        if not self._is_on_anothers(process, on_device):
            return "the device is leased to no other user"
        return ""

    def _closes(self, process: Process, uuid: str, on_device: Iterable[HelperLease], now: float) -> bool:
        """Return whether a process that could be ended keeps new leases from its device."""
        if self._seen[process.key, uuid].held < 2 or not self._is_of_a_holder(process):
            return False
        first_at = self._notice(process, uuid, now).first_at
        return self._is_on_anothers(process, on_device) or now - first_at < NOTICE_S

    def _notice(self, process: Process, uuid: str, now: float) -> _Notice:
        key = process.container if self._processes.had_lease(process) else process.uid
        return self._notices.setdefault((key, uuid), _Notice(now, now))

    def _is_of_a_holder(self, process: Process) -> bool:
        """Return whether a process's container or user held a lease since boot."""
        return self._processes.had_lease(process) or bool(_users(process) & self._holders.uids)

    def _is_on_anothers(self, process: Process, on_device: Iterable[HelperLease]) -> bool:
        """Return whether one of the leases on the device of a process counts as another user's."""
        had_lease, users = self._processes.had_lease(process), _users(process)
        return any(had_lease or x.asked.uid not in users or (x.killed and process.unread) for x in on_device)

    def _kept(self, process: Process) -> str:
        """Return why neither the watchdog nor an administrator may end a process without a lease; or ""."""
        cgroups = procfs.read(process.pid, "cgroup", 8192).decode(errors="replace").splitlines()
        paths = [f"{line.split(':', 2)[-1]}/" for line in cgroups]
        for path in self._rules.ignore:
            if any(each.startswith(f"{path.rstrip('/')}/") for each in paths):
                return f"its cgroup is below {path}"
        if _users(process) & self._holders.with_lost_record:
            return "the record of a lease of its user was lost, which it may have been in"
        if self._processes.had_lease(process):
            return ""
        if process.uid == 0 or process.uid < self._rules.first_uid:
            return "it belongs to a system user"
        if self._processes.is_contained(process):
            return "it runs in a container without a lease"
        return "it is an MPS server" if self._is_mps(process.parent) else ""

    def _is_mps(self, pid: int) -> bool:
        """Return whether a process is the MPS control daemon of root, by the name of its executable."""
        process = self._processes.find(pid)
        if process is None or process.uid != 0 or self._processes.is_contained(process):
            return False
        try:
            return os.path.basename(os.readlink(procfs.path(pid, "exe"))) == _MPS_CONTROL
        except OSError:
            return False

    def _may_be_leased(
        self, process: Process, uuid: str, usage: DeviceReading, on_device: Iterable[HelperLease]
    ) -> str:
        """Return why an unread process may be in a lease on this device that is not to end; or ""."""
        if not process.unread or process.lease or self._processes.had_lease(process):
            return ""
        if process.start_ticks < self._holders.since_ticks:
            return "it does not answer, and is older than the record of leases"
        own = [lease for lease in on_device if lease.asked.uid == process.uid]
        if not own or any(lease.killed for lease in own):
            return ""
        unread = {each.pid for each in self._processes.unread if each.uid == process.uid}
        theirs = unread.union(each.pid for lease in own for each in lease.processes)
        used = sum(usage.processes.get(pid) or 0 for pid in theirs)
        if used > sum(lease.allowed_bytes(uuid) for lease in own) + TOLERANCE_BYTES:
            return ""
        return f"it does not answer, and may be in lease {own[0].name}"

    def _entry(self, process: Process, used_bytes: int, kept: str) -> UnleasedProcess:
        return UnleasedProcess(
            process=f"{process.pid}-{process.start_ticks}",
            pid=process.pid,
            uid=process.uid,
            name=process.name,
            used_bytes=used_bytes,
            kept=kept,
            contained=self._processes.is_contained(process),
        )

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
            "contained": str(self._processes.is_contained(process)).lower(),
        }
        self._events.publish(EventKind.UNLEASED_PROCESS, device=uuid, reason=reason, fields=fields)


def _users(process: Process) -> set[int]:
    """Return the user of a process and the maker of its user namespace."""
    maker = procfs.maker(process.pid, "user")
    return {process.uid} if maker in (None, 0) else {process.uid, maker}
