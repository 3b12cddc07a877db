"""Processes that use a managed device without a lease: reported, and stopped under narrow conditions.

Each is reported in the first sample that shows it, and again each hour.  It is stopped
(SIGTERM, SIGKILL `GRACE_S` later) when all of this holds:

* its user is no system user (`StopRules.first_uid`) and holds a lease here, or held one since boot;
* the device is leased to another user;
* it held memory in the last two samples, and it or another of its user on that device was first reported
  `NOTICE_S` before (`QUIET_S` without any begin a new notice: a relay of short processes gains no time);
* it belongs to no lease (`processes`);
* it is in no container, or in one that has or had a lease (`containers`);
* no record of a lease of its user was lost since boot (`Holders`): it might have been in that lease.

While a process of a user of leases holds memory in two samples in a row and is not left alone, its device
takes no new lease (`UnleasedProcesses.closes`), where the device is leased to another user, and elsewhere
until the notice is over.  A lease that begins there then has it stopped.

A process in a user namespace, which may give it another uid, also belongs to the maker of that namespace.
All users of containers may have one uid.  So what runs in a container that had a lease is never of a
system user, and every lease on the device is another user's.

A process whose environment does not answer (`processes`: unread) may be in a lease of its user
on that device.  It is stopped only if it cannot be, or if that lease is to end: its user has no lease
there, or processes there hold more than the leases allow, or the broker had all processes of
such a lease killed, which then does not end before this one (the device counts as leased to another).

Never stopped: processes of root, MPS servers of root's control daemon, and what runs below a cgroup of
``--watchdog-ignore``.  All of that root decides: what a process says of itself, its name and its
environment, spares none.  Ended leases leave no process behind: `LeaseRegistry.drop` kills them.

An administrator may have a process ended (`UnleasedProcesses.end`) that the watchdog would only
report; never one of those, nor one of a container, nor one that may be in a lease.
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
# Of a device, in a sample.
SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """Which processes without a lease may be stopped."""

    stops: bool = True  # False: they are only reported
    first_uid: int = 1000  # of the users that are no system users (login.defs(5), UID_MIN)
    ignore: tuple[str, ...] = ()  # cgroups


@dataclass(slots=True)
class _Seen:
    """A process on a device, over its samples."""

    reported_at: float = float("-inf")
    held: int = 0  # samples in a row that show memory
    samples: int = 0  # of these, those in a row without a reason to leave it alone
    stopped_at: float | None = None


@dataclass(slots=True)
class _Notice:
    """When processes of one user, or of one container, were first and last seen on a device."""

    first_at: float
    last_at: float


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
        self._notices: dict[tuple[int | str, str], _Notice] = {}  # by user or container, and device
        self._unread: set[Key] = set()  # in the last sample
        # For other threads: by device, the last sample's processes with the reasons to keep them.
        self._shown: dict[str, tuple[tuple[Process, UnleasedProcess], ...]] = {}
        self._closed: set[str] = set()  # devices that take no new lease; replaced as a whole
        self._asked: dict[Key, float] = {}  # to be ended by request, since

    def shown(self, uuid: str) -> tuple[UnleasedProcess, ...]:
        """The processes without a lease on a device in the last sample, `SHOWN` at most; in any thread."""
        return tuple(
            replace(told, ending=process.key in self._asked) for process, told in self._shown.get(uuid, ())
        )

    def closes(self, uuid: str) -> bool:
        """Return whether a process keeps new leases from a device, by the last samples; in any thread."""
        return uuid in self._closed

    def end(self, uuid: str, name: str, leases: Iterable[HelperLease]) -> None:
        """End a process of `shown`: SIGTERM now, SIGKILL `GRACE_S` later; in any thread.

        Raises:
            HelperError: the last sample shows no such process, it may not be ended, or it cannot be.
        """
        found = next((each for each in self._shown.get(uuid, ()) if each[1].process == name), None)
        if found is None or any(found[0].key == x.key for lease in leases for x in lease.processes):
            raise HelperError(ErrorKind.UNKNOWN_PROCESS, "no such process without a lease uses this GPU")
        process, told = found
        if told.kept:
            raise HelperError(ErrorKind.CONFLICT, f"this process is left alone: {told.kept}")
        try:
            was_sent = self._processes.signal(process.key, signal.SIGTERM)
        except OSError as error:
            raise HelperError(
                ErrorKind.NOT_ALLOWED, f"the device helper cannot end it: {error.strerror}"
            ) from None
        if not was_sent:
            raise HelperError(ErrorKind.UNKNOWN_PROCESS, "this process has ended")
        self._asked.setdefault(process.key, time.monotonic())
        self._report(process, uuid, told.used_bytes, "", action="stop")

    def compare(self, usages: Mapping[str, DeviceReading], leases: Iterable[HelperLease]) -> None:
        """Report, and where the conditions hold stop, processes without a lease in one sample."""
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
            here = [lease for lease in leases if uuid in lease.limits]
            for pid, used in usage.processes.items():
                if pid in in_leases or pid in self._own_pids:
                    continue
                process = self._processes.find(pid)
                # The driver may list a process that has just ended, or one of another pid namespace.
                # One that does not answer may only be late, once.
                if process is not None and process.unread:
                    unread.add(process.key)
                    if process.key not in self._unread:
                        continue
                if process is not None and self._processes.alive(process.key):
                    present.add((process.key, uuid))
                    kept = self._kept(process) or self._may_be_leased(process, uuid, usage, here)
                    if kept:
                        kept_alone.add(process.key)
                    self._judge(process, uuid, used or 0, self._spared(process, here, kept), now)
                    closes = not kept and self._closes(process, uuid, here, now)
                    found.append((closes, process, self._told(process, used or 0, kept)))
            if any(closes for closes, _, _ in found):
                closed.add(uuid)
            found.sort(key=lambda each: not each[0])
            shown[uuid] = [(process, told) for _, process, told in found[:SHOWN]]
        for key in [key for key in self._seen if key[1] in usages and key not in present]:
            del self._seen[key]
        self._unread, self._closed = unread, closed
        self._shown = {**self._shown, **{uuid: tuple(found) for uuid, found in shown.items()}}
        self._kill_asked({key for key, _ in present} - kept_alone, now)

    def _kill_asked(self, present: set[Key], now: float) -> None:
        """Kill what was to end by request and is still here without a lease; forget what has ended."""
        for key, since in list(self._asked.items()):
            if not self._processes.alive(key):
                del self._asked[key]
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

    def _spared(self, process: Process, here: Iterable[HelperLease], kept: str) -> str:
        """Return why the watchdog stops no process without a lease; empty: it does, after `NOTICE_S`."""
        if not self._rules.stops:
            return "the watchdog only reports"
        if kept:
            return kept
        if not self._is_of_a_holder(process):
            return "its user held no lease since boot"
        if not self._is_on_anothers(process, here):
            return "the device is leased to no other user"
        return ""

    def _closes(self, process: Process, uuid: str, here: Iterable[HelperLease], now: float) -> bool:
        """Return whether a process that is not left alone keeps new leases from its device."""
        if self._seen[process.key, uuid].held < 2 or not self._is_of_a_holder(process):
            return False
        first_at = self._notice(process, uuid, now).first_at
        return self._is_on_anothers(process, here) or now - first_at < NOTICE_S

    def _notice(self, process: Process, uuid: str, now: float) -> _Notice:
        key = process.container if self._processes.had_lease(process) else process.uid
        return self._notices.setdefault((key, uuid), _Notice(now, now))

    def _is_of_a_holder(self, process: Process) -> bool:
        """Return whether a process is in a container of ours, or of a user who held a lease since boot."""
        return self._processes.had_lease(process) or bool(_users(process) & self._holders.uids)

    def _is_on_anothers(self, process: Process, here: Iterable[HelperLease]) -> bool:
        """Return whether a lease of another user is on the device of a process; ``here`` has all of them."""
        had_lease, users = self._processes.had_lease(process), _users(process)
        return any(had_lease or x.asked.uid not in users or (x.killed and process.unread) for x in here)

    def _kept(self, process: Process) -> str:
        """Return why a process without a lease is ended neither by the watchdog nor by request."""
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
        """Whether a process is the MPS control daemon of root, by its executable: a user names no file so."""
        process = self._processes.find(pid)
        if process is None or process.uid != 0 or self._processes.is_contained(process):
            return False
        try:
            return os.path.basename(os.readlink(procfs.path(pid, "exe"))) == _MPS_CONTROL
        except OSError:
            return False

    def _may_be_leased(
        self, process: Process, uuid: str, usage: DeviceReading, here: Iterable[HelperLease]
    ) -> str:
        """Return why a process that does not answer may be in a lease on this device that goes on; or ""."""
        if not process.unread or process.lease or self._processes.had_lease(process):
            return ""
        if process.start_ticks < self._holders.since_ticks:
            return "it does not answer, and is older than the record of leases"
        own = [lease for lease in here if lease.asked.uid == process.uid]
        if not own or any(lease.killed for lease in own):
            return ""
        unread = {each.pid for each in self._processes.unread if each.uid == process.uid}
        theirs = unread.union(each.pid for lease in own for each in lease.processes)
        used = sum(usage.processes.get(pid) or 0 for pid in theirs)
        if used > sum(lease.allowed_bytes(uuid) for lease in own) + TOLERANCE_BYTES:
            return ""
        return f"it does not answer, and may be in lease {own[0].name}"

    def _told(self, process: Process, used_bytes: int, kept: str) -> UnleasedProcess:
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
    """The user of a process, and the maker of its user namespace."""
    maker = procfs.maker(process.pid, "user")
    return {process.uid} if maker in (None, 0) else {process.uid, maker}
