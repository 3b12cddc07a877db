"""Which processes belong to a lease, and signals to them that cannot hit another.

A process belongs to a lease when its user is the lease's user and

1. one of its cgroups is named ``gpushare-<lease>`` (with or without a systemd suffix), or
2. ``GPUSHARE_LEASE_DIR`` in its environment is the directory of the lease here, as for the preload
   library, or that is not set and ``GPUSHARE_LEASE`` is the lease (another helper on this machine may have
   leases of the same names), or, where the environment may not be read, one of its arguments is
   ``GPUSHARE_LEASE=<lease>``, or
3. its parent belonged to the lease when it was first seen, and it names none of its user (a child that
   cleared its environment, or has that of an ended server).
   This is remembered, so that a child that outlives its parent (double fork) stays.

The user is compared last: whatever a process writes into its own environment, it
never joins another user's lease.  A process in a container belongs to the lease of its container, and
nothing else counts (`containers`).

A process is (pid, start time), held open by a pidfd (`procfs`).  A pidfd that polls readable is an
exit, zombies included, so exits are noticed without a scan.  At most half of the descriptors that the
helper may open are pidfds; processes beyond that are looked up in each scan, so no user can exhaust them.

A process that could not be looked at for want of descriptors or memory has not ended: that raises
`OSError`, and the caller changes nothing.

Environment and arguments lie in the process's own memory, and a process can keep a reader of them
waiting (`own_memory`).  Such a process is *unread*: it belongs where its cgroup, its parent or `claim`
says.  If none of them does, it may belong to any lease of its user, and none of these on the same devices
may be taken as ended.  No scan waits longer than `own_memory.LOOK_S`.

A scan must be cheap, because it runs every second: the names and inodes in /proc are one directory read;
only a (pid, inode) that is new is opened, or one younger than `SETTLES_S`, which may be between fork and
exec.  One on a device (`on_devices`) that belongs to no lease is looked at in each scan.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import select
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from jupyter_gpushare import procfs
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.leases.containers import CGROUP_BYTES, Containers, container_of
from jupyter_gpushare.gpu.leases.own_memory import LOOK_S, Key, OwnMemoryReader, Words, words

log = logging.getLogger(__name__)

MARK = b"GPUSHARE_LEASE="
MARK_DIR = b"GPUSHARE_LEASE_DIR="
SETTLES_S = 5.0
# The first process of a container has its mounts at the latest then.
CONTAINER_SETTLES_S = 60.0
# Processes whose exit status is remembered: a move asks for those that ended within a driver call.
EXITS_KEPT = 1024
# The user in whose threads processes are read of all users that have no lease.
_NO_LEASE = -1

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CGROUP = re.compile(rb"/gpushare-([a-z0-9-]{1,64})(?:\.scope|\.service|\.slice)?(?=/|\n|$)")
_KERNEL = re.compile(rb"kernel-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.json")


@dataclass(frozen=True, slots=True)
class Process:
    """One process as it was when first seen (its lease when it settled)."""

    pid: int
    start_ticks: int  # field 22 of /proc/PID/stat
    started_at: float
    uid: int
    parent: int
    name: str
    kernel: str
    carries: str  # the lease that its cgroup or environment names
    lease: str  # the lease it belongs to, if the user is the lease's
    inherited: str = ""  # else this one, under the same condition: that of its parent
    is_runner: bool = False  # the runner of a job: its lease is among its arguments
    unread: bool = False  # its environment and arguments did not answer
    inner_pid: int = 0  # in the innermost pid namespace that it is in: the pid that it knows itself by
    container: str = ""  # UID of its pod, or id of its container
    image: tuple[int, ...] = ()  # `procfs.image` when first seen: of what it forks too, until exec

    @property
    def inner_key(self) -> Key:
        """The key that it writes into the account of its lease."""
        return self.inner_pid or self.pid, self.start_ticks

    @property
    def key(self) -> Key:
        """Pid and start time, which together name one process of this boot."""
        return self.pid, self.start_ticks


class _Known(NamedTuple):
    """What the scans know about a pid."""

    inode: int  # of its directory in /proc
    process: Process
    read_at: float  # when the read of its memory that was used last began; 0: none was


class Processes:
    """All processes of this machine by lease; one reader at a time."""

    def __init__(self, leases: Path, containers: Containers | None = None) -> None:
        """``leases`` is where the directories of this helper's leases are.

        Raises:
            HelperError: the kernel gives no pidfds (kind ``kernel``).
        """
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            raise HelperError(
                "kernel",
                f"processes cannot be held by a pidfd here ({error.strerror}): "
                "that needs Linux 5.3 or newer, and a container that allows pidfd_open",
            ) from None
        self._most_held = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        # Both spellings of the path; a path that a process names is never resolved, which may block for ever.
        self._leases = frozenset({leases, leases.resolve()})
        self._known: dict[int, _Known] = {}  # by pid
        self._memory = OwnMemoryReader(words)
        self._containers = containers or Containers(leases)
        self.on_devices: Collection[int] = ()  # pids that the driver shows
        # Unread processes of no known lease, in the last scan.
        self.unread: tuple[Process, ...] = ()
        self._guard = threading.Lock()  # held for moments only
        self._begun = 0  # scans; each has a number
        self._latest = 0  # the one that `_known` is of
        self._pidfds: dict[Key, int] = {}
        self._exits = select.epoll()
        self._exit_statuses: dict[Key, int | None] = {}  # the newest `EXITS_KEPT`

    def scan(self, owners: Mapping[str, int], within_s: float = LOOK_S) -> dict[str, tuple[Process, ...]]:
        """The living processes of each lease, oldest first; ``owners`` has the uid of each lease.

        Processes that do not answer are waited for at most ``within_s``.

        Raises:
            OSError: no descriptor or memory is left to look.
        """
        with self._guard:
            self._begun += 1
            number, present = self._begun, procfs.pids()
            before = {pid: known for pid, known in self._known.items() if known.inode == present.get(pid)}
        fresh = [pid for pid in present if pid not in before or not self._is_settled(before[pid], owners)]
        looked = self._look(fresh, before, set(owners.values()), within_s)
        inside = sorted((p for p, _ in looked if self.is_contained(p)), key=attrgetter("start_ticks"))
        self._containers.learn([(p.container, p.key) for p in inside], owners)
        with self._guard:
            if number > self._latest:  # else a scan that began later has seen more
                self._latest = number
                self._learn(present, fresh, looked, owners)
            return self._find(owners)

    def claim(self, key: Key, lease: str, uid: int) -> bool:
        """Note that a process of a user belongs to a lease; return whether it did not before."""
        with self._guard:
            known = self._known.get(key[0])
            if known is None or known.process.key != key or known.process.uid != uid:
                return False
            self._known[key[0]] = known._replace(process=replace(known.process, lease=lease))
            return known.process.lease != lease

    def is_contained(self, process: Process) -> bool:
        """Whether a process is in a container, which alone decides on its lease."""
        return self._containers.decides(process.container)

    def had_lease(self, process: Process) -> bool:
        """Whether a process is in a container of ours: one that has or had a lease."""
        return self.is_contained(process) and bool(self._containers.lease_of(process.container))

    def find(self, pid: int) -> Process | None:
        """The process with this pid, as the last scan saw it."""
        known = self._known.get(pid)
        return known.process if known else None

    def wait_exit(self, timeout_s: float) -> bool:
        """Whether a process of a lease ended within ``timeout_s``; its status is kept for `exit_status`."""
        try:
            if not self._exits.poll(timeout_s, maxevents=1):
                return False
            with self._guard:
                for key in self._ended():
                    self._keep_status(key)
        except OSError:  # no descriptor or memory is left to look
            time.sleep(timeout_s)
            return False
        return True

    def exit_status(self, key: Key) -> int | None:
        """The status of a process of a lease that ended, as wait(2) encodes it; None: not known.

        Raises:
            OSError: no descriptor or memory is left to look.
        """
        with self._guard:
            self._keep_status(key)
            return self._exit_statuses.get(key)

    def alive(self, key: Key) -> bool:
        """Whether this process has not ended (a zombie has)."""
        pidfd = procfs.open_pidfd(*key)
        if pidfd is None:
            return False
        try:
            return not procfs.has_ended(pidfd)
        finally:
            os.close(pidfd)

    def signal(self, key: Key, number: int) -> bool:
        """Send a signal to this process; False when it has ended."""
        return procfs.send_signal(*key, number)

    def image(self, pid: int) -> tuple[int, ...]:
        """`procfs.image` of the process that has a pid now; zeros: it has ended, or that is not shown."""
        fields = procfs.stat_fields(pid)
        return procfs.image(fields) if fields else (0, 0)

    def is_randomized(self, pid: int) -> bool:
        """`procfs.is_randomized`, which may wait for a process: only in a thread of its user."""
        return procfs.is_randomized(pid)

    def core_filter(self, key: Key) -> int:
        """The bit mask of mappings that a process writes into a core file (core(5)); -1 when unknown."""
        try:
            with open(procfs.path(key[0], "coredump_filter"), encoding="ascii") as file:
                value = int(file.read(), 16)
        except (OSError, ValueError):
            return -1
        return value if self.alive(key) else -1

    def set_core_filter(self, key: Key, value: int) -> None:
        """Set the bit mask of core(5); with 0 a core file holds no memory.  A failure is only logged."""
        try:
            with open(procfs.path(key[0], "coredump_filter"), "w", encoding="ascii") as file:
                # Opened first: while this process lives, the file belongs to it.
                if self.alive(key):
                    file.write(f"{value:#x}")
        except OSError as error:
            log.warning("process %d: coredump_filter cannot be set: %s", key[0], error)

    def _look(
        self, fresh: list[int], before: Mapping[int, _Known], users: set[int], within_s: float
    ) -> list[tuple[Process, float]]:
        """These processes as they are now, each with the time of the read that says so.

        One that did not answer since ``before`` is unread; what it said then counts.  ``users`` have leases.
        """
        now = time.monotonic()
        found = [process for pid in fresh if (process := _of_kernel(pid, now, self._containers.own))]
        said = self._memory.read({p.key: p.uid if p.uid in users else _NO_LEASE for p in found}, within_s)
        looked = []
        for process in found:
            known, answer = before.get(process.pid), said.get(process.key)
            old = known.process if known and known.process.key == process.key else process
            read_at = known.read_at if known and known.process is old else 0.0
            if answer is not None and answer.began_at > read_at:
                looked.append((_told(process, answer.value, self._leases), answer.began_at))
            else:
                process = replace(process, carries=old.carries, kernel=old.kernel, is_runner=old.is_runner)
                looked.append((replace(process, unread=True), read_at))
        return looked

    def _learn(
        self,
        present: Mapping[int, int],
        fresh: list[int],
        looked: list[tuple[Process, float]],
        owners: Mapping[str, int],
    ) -> None:
        """Replace what is known by what a scan saw."""
        for pid in (self._known.keys() - present) | (set(fresh) - {process.pid for process, _ in looked}):
            self._known.pop(pid, None)
        # Parents first, so that a whole new tree finds its lease in one scan.
        for process, read_at in sorted(looked, key=lambda each: each[0].start_ticks):
            self._known[process.pid] = _Known(present[process.pid], self._placed(process, owners), read_at)
        unread = (known.process for known in self._known.values() if known.process.unread)
        self.unread = tuple(each for each in unread if not each.lease and not self.is_contained(each))

    def _is_settled(self, known: _Known, owners: Mapping[str, int]) -> bool:
        """Whether neither a process's memory nor its mounts need a further look."""
        process = known.process
        if process.unread or (process.pid in self.on_devices and not self._owner(process, owners)):
            return False
        # A child of a runner has the runner's arguments until it calls exec; a process may change its user.
        named = bool(process.carries) and not process.is_runner
        named &= owners.get(process.carries, process.uid) == process.uid
        if not named and known.read_at - process.started_at < SETTLES_S:
            return False
        is_new = self.is_contained(process) and not self._containers.lease_of(process.container)
        return not is_new or time.monotonic() - process.started_at >= CONTAINER_SETTLES_S

    def _owner(self, process: Process, owners: Mapping[str, int]) -> str:
        """Return the lease that a process belongs to; empty: none."""
        if self.is_contained(process):
            lease = self._containers.lease_of(process.container)
            return lease if lease in owners else ""
        for lease in (process.lease, process.inherited):
            # Users of containers may have one uid.
            if owners.get(lease) == process.uid and not self._containers.has(lease):
                return lease
        return ""

    def _find(self, owners: Mapping[str, int]) -> dict[str, tuple[Process, ...]]:
        """The processes of each lease that have not ended."""
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

    def _keep_status(self, key: Key) -> None:
        """Note how a held process ended; once it was waited for, older kernels have no status."""
        pidfd = self._pidfds.get(key)
        if pidfd is None or self._exit_statuses.get(key) is not None or not procfs.has_ended(pidfd):
            return
        self._exit_statuses[key] = procfs.exit_status(pidfd, *key)
        while len(self._exit_statuses) > EXITS_KEPT:
            del self._exit_statuses[next(iter(self._exit_statuses))]

    def _placed(self, process: Process, owners: Mapping[str, int]) -> Process:
        before = self._known.get(process.pid)
        was = before.process if before and before.process.key == process.key else None
        if was and (was.lease or was.inherited):
            return replace(process, lease=process.carries or was.lease, inherited=was.inherited or was.lease)
        parent = self._known.get(process.parent)
        inherited = ""
        if parent and parent.process.uid == process.uid:
            inherited = self._owner(parent.process, owners) or parent.process.lease
        return replace(process, lease=process.carries or inherited, inherited=inherited)

    def _hold(self, key: Key) -> bool:
        """Open a pidfd to watch for its exit, up to the bound; False when the process has ended."""
        if key in self._pidfds:
            return True
        if len(self._pidfds) >= self._most_held:
            return procfs.is_running(*key)
        pidfd = procfs.open_pidfd(*key)
        if pidfd is None:
            return False
        if procfs.has_ended(pidfd):  # a zombie that an earlier scan has released
            os.close(pidfd)
            return False
        self._pidfds[key] = pidfd
        self._exits.register(pidfd, select.EPOLLIN)
        return True

    def _release(self, held: set[Key]) -> None:
        for key in [key for key in self._pidfds if key not in held]:
            self._keep_status(key)
            pidfd = self._pidfds.pop(key)
            self._exits.unregister(pidfd)
            os.close(pidfd)

    def _ended(self) -> set[Key]:
        """The held processes that have ended, zombies included."""
        ready = {fd for fd, _ in self._exits.poll(0, maxevents=max(1, len(self._pidfds)))}
        return {key for key, pidfd in self._pidfds.items() if pidfd in ready}


def leader(processes: tuple[Process, ...]) -> Process | None:
    """The oldest process that carries the lease, and has a parent outside it."""
    pids = {process.pid for process in processes}
    for process in processes:
        if process.carries == process.lease and process.parent not in pids:
            return process
    return processes[0] if processes else None


def _of_kernel(pid: int, now: float, own_container: str = "") -> Process | None:
    """A process by what the kernel alone answers."""
    fields = procfs.stat_fields(pid)
    status = procfs.read(pid, "status", 4096) if fields else b""
    if not (uids := _field(status, b"Uid:")):
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[procfs.START_TICKS]) / _TICKS_PER_S
    # The innermost: a helper may make them below its own service, gpushare-helper.
    cgroup = procfs.cgroup(pid, fields, CGROUP_BYTES)
    cgroups = _CGROUP.findall(cgroup)
    carries = cgroups[-1].decode() if cgroups else ""
    return Process(
        pid=pid,
        start_ticks=int(fields[procfs.START_TICKS]),
        started_at=now - age_s,
        uid=uids[0],
        parent=int(fields[procfs.PARENT]),
        name=procfs.read(pid, "comm", 64).decode(errors="replace").strip(),
        kernel="",
        carries=carries,
        lease=carries,
        inner_pid=(_field(status, b"NSpid:") or [pid])[-1],
        container=container_of(cgroup, own_container),
        image=procfs.image(fields),
    )


def _told(process: Process, said: Words, leases: frozenset[Path]) -> Process:
    """A process with what its arguments and its environment say."""
    kernel = _KERNEL.search(said.command)
    carries = process.carries or _named_in(said, leases)
    return replace(
        process,
        kernel=kernel.group(1).decode() if kernel else "",
        carries=carries,
        lease=carries,
        is_runner=bool(carries) and MARK + carries.encode() in said.command.split(b"\0"),
    )


def _named_in(said: Words, leases: frozenset[Path]) -> str:
    """The lease that an environment names: by its directory below ``leases``, without one by its name.

    A process that hides its environment (the runner of a job) has the name among its arguments.
    """
    entries = (said.environ or said.command).split(b"\0")
    lease = next((os.fsdecode(e.removeprefix(MARK)) for e in entries if e.startswith(MARK)), "")
    directory = next((os.fsdecode(e.removeprefix(MARK_DIR)) for e in entries if e.startswith(MARK_DIR)), "")
    if not directory:
        return lease
    path = Path(os.path.normpath(directory))
    return path.name if path.parent in leases else ""


def _field(status: bytes, name: bytes) -> list[int]:
    """The numbers of one line of /proc/PID/status that was read whole; none where there is no such line."""
    for line in status[: status.rfind(b"\n") + 1].splitlines():
        if line.startswith(name):
            return [int(word) for word in line.split()[1:]]
    return []
