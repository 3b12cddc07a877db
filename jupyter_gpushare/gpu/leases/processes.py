"""Which processes belong to a lease.

A process belongs to a lease if it runs as the lease's user and

1. one of its cgroups is named ``gpushare-<lease>`` (with or without a systemd suffix), or
2. ``GPUSHARE_LEASE_DIR`` in its environment is the directory of the lease of this helper.  If that is not
   set, ``GPUSHARE_LEASE`` counts; if the environment may not be read, an argument
   ``GPUSHARE_LEASE=<lease>`` does.  The directory counts first because another helper on this machine may
   have leases of the same names.  Or
3. its parent belonged to the lease when the process was first seen, and the process names no lease of its
   user (a child that cleared its environment, or has the environment of an ended server).  This is
   remembered, so that a child that outlives its parent (double fork) stays in the lease.

The user is compared last: whatever a process writes into its environment, it never joins another user's
lease.  A process in a container belongs to the lease of its container, and nothing else counts
(`containers`).

`gpu.os.processes` reads the kernel's facts, and `gpu.os.process_memory` reads the environment and arguments
from a process's own memory.  A process that does not answer there is *unread*.  It belongs
where its cgroup, its parent or `claim` puts it.  If none of them does, it may belong to any lease of its
user, so none of these leases on the same devices may be taken as ended.  A scan waits `ANSWER_S`
unless it is given another time.

A scan runs every second and must be cheap.  One read of /proc gives all pids and inodes.  Only a new
(pid, inode) is opened, or one younger than `SETTLES_S`, which may be between fork and exec.  A process on a
device (`on_devices`) that belongs to no lease is read in each scan.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.leases.containers import Containers
from jupyter_gpushare.gpu.os.process_memory import ANSWER_S, ProcessMemoryReader, Words, words
from jupyter_gpushare.gpu.os.processes import HeldProcesses, Key, ProcessFacts, read_facts

MARK = b"GPUSHARE_LEASE="
MARK_DIR = b"GPUSHARE_LEASE_DIR="
# A younger process may be between fork and exec.
SETTLES_S = 5.0
# By this age the first process of a container has its mounts.
CONTAINER_SETTLES_S = 60.0
# Stands for all users without a lease: their processes are read in the same threads.
_NO_LEASE = -1

_CGROUP = re.compile(rb"/gpushare-([a-z0-9-]{1,64})(?:\.scope|\.service|\.slice)?(?=/|\n|$)")
_KERNEL = re.compile(rb"kernel-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(ProcessFacts):
    """One process as it was first seen, and the lease that it belonged to once it had settled."""

    kernel: str  # id of the Jupyter kernel that it runs, from its arguments
    carries: str  # the lease that its cgroup or environment names
    lease: str  # the lease that it belongs to, if it runs as the lease's user
    inherited: str = ""  # otherwise its parent's lease, under the same condition
    is_runner: bool = False  # the runner of a job: the lease is among its arguments
    unread: bool = False  # its environment and arguments could not be read in time


class _Known(NamedTuple):
    """What the scans found out about a pid."""

    inode: int  # of its directory in /proc
    process: Process
    read_at: float  # when the last read of its memory began, on time.monotonic(); 0 if there was none


class Processes(HeldProcesses):
    """All processes of this machine by lease; safe to use from several threads."""

    def __init__(self, leases: Path, containers: Containers | None = None) -> None:
        """``leases`` is the folder with the directories of this helper's leases.

        Raises:
            HelperError: the kernel gives no pidfds (kind ``kernel``).
        """
        super().__init__()
        # Both spellings of the path.  A path that a process names is never resolved: that may block for ever.
        self._leases = frozenset({leases, leases.resolve()})
        self._known: dict[int, _Known] = {}  # by pid
        self._memory = ProcessMemoryReader(words)
        self._containers = containers or Containers(leases)
        self.on_devices: Collection[int] = ()  # pids that the driver shows
        # Unread processes that belong to no known lease, as of the last scan.
        self.unread: tuple[Process, ...] = ()
        self._scans_begun = 0  # each scan has a number
        self._latest_scan = 0  # the one that `_known` is from

    def scan(self, owners: Mapping[str, int], within_s: float = ANSWER_S) -> dict[str, tuple[Process, ...]]:
        """Return the living processes of each lease in ``owners``, oldest first.

        ``owners`` has the uid of each lease.  The scan waits at most ``within_s`` seconds for processes
        that do not answer.

        Raises:
            OSError: no descriptor or memory is free.
        """
        with self._guard:
            self._scans_begun += 1
            number, present = self._scans_begun, procfs.pids()
            before = {pid: known for pid, known in self._known.items() if known.inode == present.get(pid)}
        fresh = [pid for pid in present if pid not in before or not self._is_settled(before[pid], owners)]
        read = self._read(fresh, before, set(owners.values()), within_s)
        inside = sorted((p for p, _ in read if self.is_contained(p)), key=attrgetter("start_ticks"))
        self._containers.learn([(p.container, p.key) for p in inside], owners)
        with self._guard:
            if number > self._latest_scan:  # otherwise a later scan has already stored its result
                self._latest_scan = number
                self._learn(present, fresh, read, owners)
            return self._find(owners)

    def claim(self, key: Key, lease: str, uid: int) -> bool:
        """Note that a process of a user belongs to a lease; return whether that is new."""
        with self._guard:
            known = self._known.get(key[0])
            if known is None or known.process.key != key or known.process.uid != uid:
                return False
            self._known[key[0]] = known._replace(process=replace(known.process, lease=lease))
            return known.process.lease != lease

    def is_contained(self, process: Process) -> bool:
        """Return whether a process is in a container, which then decides its lease."""
        return self._containers.decides(process.container)

    def had_lease(self, process: Process) -> bool:
        """Return whether a process is in a container that has or had a lease."""
        return self.is_contained(process) and bool(self._containers.lease_of(process.container))

    def find(self, pid: int) -> Process | None:
        """Return the process with this pid, as of the last scan."""
        known = self._known.get(pid)
        return known.process if known else None

    def _read(
        self, fresh: list[int], before: Mapping[int, _Known], users: set[int], within_s: float
    ) -> list[tuple[Process, float]]:
        """Read the ``fresh`` pids; return each process with the time at which the read of its memory began.

        A process that has not answered since ``before`` is unread, and its earlier answer counts.
        ``users`` are the users that have leases.
        """
        now = time.monotonic()
        found = [process for pid in fresh if (process := _first_seen(pid, now, self._containers.own))]
        answers = self._memory.read({p.key: p.uid if p.uid in users else _NO_LEASE for p in found}, within_s)
        read = []
        for process in found:
            known, answer = before.get(process.pid), answers.get(process.key)
            old = known.process if known and known.process.key == process.key else process
            read_at = known.read_at if known and known.process is old else 0.0
            if answer is not None and answer.began_at > read_at:
                read.append((_with_memory(process, answer.value, self._leases), answer.began_at))
            else:
                process = replace(process, carries=old.carries, kernel=old.kernel, is_runner=old.is_runner)
                read.append((replace(process, unread=True), read_at))
        return read

    def _learn(
        self,
        present: Mapping[int, int],
        fresh: list[int],
        read: list[tuple[Process, float]],
        owners: Mapping[str, int],
    ) -> None:
        """Store what a scan read."""
        for pid in (self._known.keys() - present) | (set(fresh) - {process.pid for process, _ in read}):
            self._known.pop(pid, None)
        # Parents first: a new tree of processes then gets its lease in one scan.
        for process, read_at in sorted(read, key=lambda each: each[0].start_ticks):
            self._known[process.pid] = _Known(present[process.pid], self._placed(process, owners), read_at)
        unread = (known.process for known in self._known.values() if known.process.unread)
        self.unread = tuple(each for each in unread if not each.lease and not self.is_contained(each))

    def _is_settled(self, known: _Known, owners: Mapping[str, int]) -> bool:
        """Return whether neither the memory nor the mounts of a process need to be read again."""
        process = known.process
        if process.unread or (process.pid in self.on_devices and not self._owner(process, owners)):
            return False
        # A runner's child has the runner's arguments until it calls exec, and a process may change its user.
        named = bool(process.carries) and not process.is_runner
        named &= owners.get(process.carries, process.uid) == process.uid
        if not named and known.read_at - process.started_at < SETTLES_S:
            return False
        is_new = self.is_contained(process) and not self._containers.lease_of(process.container)
        return not is_new or time.monotonic() - process.started_at >= CONTAINER_SETTLES_S

    def _owner(self, process: Process, owners: Mapping[str, int]) -> str:
        """Return the lease that a process belongs to; empty if none."""
        if self.is_contained(process):
            lease = self._containers.lease_of(process.container)
            return lease if lease in owners else ""
        for lease in (process.lease, process.inherited):
            # The users of different containers may have the same uid.
            if owners.get(lease) == process.uid and not self._containers.has(lease):
                return lease
        return ""

    def _find(self, owners: Mapping[str, int]) -> dict[str, tuple[Process, ...]]:
        """Return the processes of each lease that have not ended, oldest first, and hold them."""
        ended = self._ended()
        found: dict[str, list[Process]] = {lease: [] for lease in owners}
        held: set[Key] = set()
        for known in self._known.values():
            process = known.process
            lease = self._owner(process, owners)
            if not lease or process.key in ended:
                continue
            if self._hold(process.key):
                found[lease].append(process if process.lease == lease else replace(process, lease=lease))
                held.add(process.key)
        self._release(held)
        return {
            lease: tuple(sorted(each, key=lambda p: (p.start_ticks, p.pid))) for lease, each in found.items()
        }

    def _placed(self, process: Process, owners: Mapping[str, int]) -> Process:
        before = self._known.get(process.pid)
        earlier = before.process if before and before.process.key == process.key else None
        if earlier and (earlier.lease or earlier.inherited):
            return replace(
                process, lease=process.carries or earlier.lease, inherited=earlier.inherited or earlier.lease
            )
        parent = self._known.get(process.parent)
        inherited = ""
        if parent and parent.process.uid == process.uid:
            inherited = self._owner(parent.process, owners) or parent.process.lease
        return replace(process, lease=process.carries or inherited, inherited=inherited)


def leader(processes: tuple[Process, ...]) -> Process | None:
    """Return the oldest process that carries the lease and has a parent outside it, else the oldest one."""
    pids = {process.pid for process in processes}
    for process in processes:
        if process.carries == process.lease and process.parent not in pids:
            return process
    return processes[0] if processes else None


def keys_by_inner(processes: Collection[Process]) -> dict[Key, Key]:
    """Return the key of each process by its inner key; none for an inner key that two processes have."""
    count = Counter(process.inner_key for process in processes)
    return {process.inner_key: process.key for process in processes if count[process.inner_key] == 1}


def _first_seen(pid: int, now: float, own_container: str = "") -> Process | None:
    """Return a process as the kernel describes it, with the lease that its cgroup names; None if it ended."""
    if (found := read_facts(pid, now, own_container)) is None:
        return None
    facts, cgroup = found
    # The innermost name counts: a helper may create the cgroups below its own service, gpushare-helper.
    cgroups = _CGROUP.findall(cgroup)
    carries = cgroups[-1].decode() if cgroups else ""
    return Process(**_fields(facts), kernel="", carries=carries, lease=carries)


def _fields(facts: ProcessFacts) -> dict[str, Any]:
    return {field.name: getattr(facts, field.name) for field in fields(facts)}


def _with_memory(process: Process, memory: Words, leases: frozenset[Path]) -> Process:
    """Return a process with what its arguments and its environment name."""
    kernel = _KERNEL.search(memory.command)
    carries = process.carries or _named_in(memory, leases)
    return replace(
        process,
        kernel=kernel.group(1).decode() if kernel else "",
        carries=carries,
        lease=carries,
        is_runner=bool(carries) and MARK + carries.encode() in memory.command.split(b"\0"),
    )


def _named_in(memory: Words, leases: frozenset[Path]) -> str:
    """Return the lease that an environment names; empty if none.

    Its directory below ``leases`` counts, or its name where no directory is set.  A process that hides its
    environment (the runner of a job) has the name among its arguments.
    """
    entries = (memory.environ or memory.command).split(b"\0")
    lease = next((os.fsdecode(e.removeprefix(MARK)) for e in entries if e.startswith(MARK)), "")
    directory = next((os.fsdecode(e.removeprefix(MARK_DIR)) for e in entries if e.startswith(MARK_DIR)), "")
    if not directory:
        return lease
    path = Path(os.path.normpath(directory))
    return path.name if path.parent in leases else ""
