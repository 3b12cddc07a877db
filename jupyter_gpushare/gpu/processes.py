"""Which processes belong to a lease, and signals to them that cannot hit another.

A process belongs to a lease when its user is the lease's user and

1. one of its cgroups is named ``gpushare-<lease>`` (with or without a systemd
   suffix), or
2. its environment has ``GPUSHARE_LEASE=<lease>``, and ``GPUSHARE_LEASE_DIR`` is
   that lease's directory here or is not set (another helper on this machine has
   directories of its own, maybe with leases of the same names), or
3. its parent belonged to the lease when it was first seen (a child that cleared
   its environment).  This is remembered, so that a child whose parent ends
   before it (double fork) stays.

The user is compared first and last: whatever a process writes into its own
environment, it never joins another user's lease.

A pid is never trusted: a process is (pid, start time), held open by a pidfd.
A pidfd that polls readable is an exit, zombies included, so that an exit is
noticed without looking at anything.  Half of the descriptors that the helper may
open are for that: of who starts more processes the others are looked at in each
scan, and nobody can use up what the rest of the helper needs.

"Not found" and "could not look" are different answers.  A process that could not
be looked at for want of descriptors or memory has not ended, so that raises
`OSError`, and whoever asked does nothing.

Looking at all processes must be cheap, because it is done every second: the
names and inodes in /proc are one directory read; only a (pid, inode) that is new
is opened, or one younger than `SETTLES_S`, which may be between fork and exec
and get its environment later.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import select
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import HelperError

log = logging.getLogger(__name__)

MARK = b"GPUSHARE_LEASE="
MARK_DIR = b"GPUSHARE_LEASE_DIR="
SETTLES_S = 5.0
CGROUPS = "/sys/fs/cgroup"
# A larger environment can hide the mark from us; the process tree still finds it.
ENVIRON_BYTES = 256 << 10

_COULD_NOT_LOOK = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
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

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start_ticks


class Processes:
    """All processes of this machine by lease; one reader at a time."""

    def __init__(self, leases: Path) -> None:
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
        # Both ways to write it; what a process says is never looked up, which may take for ever.
        self._leases = frozenset({leases, leases.resolve()})
        self._known: dict[int, tuple[int, Process]] = {}  # pid -> inode, process
        self._guard = threading.Lock()
        self._pidfds: dict[tuple[int, int], int] = {}
        self._exits = select.epoll()
        self._by_fd: dict[int, tuple[int, int]] = {}

    def close(self) -> None:
        """Let go of every pidfd."""
        with self._guard:
            for pidfd in self._pidfds.values():
                os.close(pidfd)
            self._pidfds.clear()
            self._by_fd.clear()
            self._exits.close()

    def scan(self, owners: Mapping[str, int]) -> dict[str, tuple[Process, ...]]:
        """The living processes of each lease, oldest first; ``owners`` says whose each lease is."""
        with self._guard:
            return self._scan(owners)

    def find(self, pid: int) -> Process | None:
        """The process with this pid, as the last scan saw it."""
        known = self._known.get(pid)
        return known[1] if known else None

    def wait_exit(self, timeout_s: float) -> bool:
        """Whether a process of a lease ended; waits for it, bounded."""
        try:
            return bool(self._exits.poll(timeout_s, maxevents=1))
        except (ValueError, OSError):  # closed meanwhile
            time.sleep(timeout_s)
            return False

    def alive(self, key: tuple[int, int]) -> bool:
        """Whether this very process has not ended (a zombie has)."""
        pidfd = self._open(key)
        if pidfd is None:
            return False
        try:
            poll = select.poll()  # select() takes no descriptor beyond 1023
            poll.register(pidfd, select.POLLIN)
            return not poll.poll(0)
        finally:
            os.close(pidfd)

    def signal(self, key: tuple[int, int], number: int) -> bool:
        """Send a signal to this very process; False when it has ended."""
        pidfd = self._open(key)
        if pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True

    def core_filter(self, key: tuple[int, int]) -> int:
        """Which mappings a process writes into a core file (core(5)); -1 when that is not known."""
        try:
            with open(f"/proc/{key[0]}/coredump_filter", encoding="ascii") as file:
                value = int(file.read(), 16)
        except (OSError, ValueError):
            return -1
        return value if self.alive(key) else -1

    def set_core_filter(self, key: tuple[int, int], value: int) -> None:
        """Choose what it writes; 0 is nothing but its own description.  Best effort."""
        try:
            with open(f"/proc/{key[0]}/coredump_filter", "w", encoding="ascii") as file:
                # Opened first: while this very process lives, the file is its own.
                if self.alive(key):
                    file.write(f"{value:#x}")
        except OSError as error:
            log.warning("process %d: what it dumps cannot be set: %s", key[0], error)

    def _scan(self, owners: Mapping[str, int]) -> dict[str, tuple[Process, ...]]:
        now = time.monotonic()
        present = _listing()
        for pid in [pid for pid in self._known if pid not in present]:
            del self._known[pid]
        fresh = [
            (pid, inode)
            for pid, inode in present.items()
            if (known := self._known.get(pid)) is None
            or known[0] != inode
            or (not known[1].carries and now - known[1].started_at < SETTLES_S)
        ]
        read = [(inode, process) for pid, inode in fresh if (process := _read(pid, now, self._leases))]
        # Parents first, so that a whole new tree finds its lease in one scan.
        for pid in {pid for pid, _ in fresh} - {process.pid for _, process in read}:
            self._known.pop(pid, None)
        for inode, process in sorted(read, key=lambda item: item[1].start_ticks):
            self._known[process.pid] = (inode, self._placed(process))
        ended = self._ended()
        found: dict[str, list[Process]] = {lease: [] for lease in owners}
        held: set[tuple[int, int]] = set()
        for _, process in self._known.values():
            if owners.get(process.lease) != process.uid or process.key in ended:
                continue
            if self._hold(process.key):
                found[process.lease].append(process)
                held.add(process.key)
        self._release(held)
        return {
            lease: tuple(sorted(each, key=lambda p: (p.start_ticks, p.pid))) for lease, each in found.items()
        }

    def _placed(self, process: Process) -> Process:
        before = self._known.get(process.pid)
        if before and before[1].key == process.key and before[1].lease and not process.carries:
            return replace(process, lease=before[1].lease)
        parent = self._known.get(process.parent)
        inherited = parent[1].lease if parent and parent[1].uid == process.uid else ""
        return replace(process, lease=process.carries or inherited)

    def _hold(self, key: tuple[int, int]) -> bool:
        """Hold a process open and watch for its exit, while there is room; False when it has ended."""
        if key in self._pidfds:
            return True
        if len(self._pidfds) >= self._most_held:
            return _lives(key)
        pidfd = self._open(key)
        if pidfd is None:
            return False
        self._pidfds[key] = pidfd
        self._by_fd[pidfd] = key
        self._exits.register(pidfd, select.EPOLLIN)
        return True

    def _release(self, held: set[tuple[int, int]]) -> None:
        for key in [key for key in self._pidfds if key not in held]:
            pidfd = self._pidfds.pop(key)
            del self._by_fd[pidfd]
            self._exits.unregister(pidfd)
            os.close(pidfd)

    def _ended(self) -> set[tuple[int, int]]:
        """The held processes that have ended, zombies included."""
        return {self._by_fd[fd] for fd, _ in self._exits.poll(0, maxevents=max(1, len(self._by_fd)))}

    def _open(self, key: tuple[int, int]) -> int | None:
        """A pidfd of this very process; None when it is gone."""
        pid, start_ticks = key
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in _COULD_NOT_LOOK:
                raise
            return None
        # The pidfd holds the process first, then its start time says which it is.
        try:
            is_it = start_of(pid) == start_ticks
        except OSError:
            os.close(pidfd)
            raise
        if not is_it:
            os.close(pidfd)
            return None
        return pidfd


def leader(processes: tuple[Process, ...]) -> Process | None:
    """The oldest process that carries the lease and whose parent does not belong to it."""
    pids = {process.pid for process in processes}
    for process in processes:
        if process.carries == process.lease and process.parent not in pids:
            return process
    return processes[0] if processes else None


def start_of(pid: int) -> int:
    """The start time of a process in ticks since boot; -1 when there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields else -1


def _lives(key: tuple[int, int]) -> bool:
    """Whether this very process has not ended (a zombie has), by looking."""
    fields = _stat(key[0])
    if not fields or int(fields[19]) != key[1]:
        return False
    # proc(5): state, and num_threads: a leader may end before the other threads.
    return fields[0] not in (b"Z", b"X") or int(fields[17]) > 1


def boot_id() -> str:
    """A word that is another after every boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def room_in_cgroup(pid: int) -> int | None:
    """How many bytes the process's cgroup (v2) may still take; None without a limit.

    A cgroup that is the root here may be a container's, and have a limit.  Cached files
    that nobody used lately leave when their room is needed (`inactive_file`, cgroup-v2.rst).
    """
    own = _bytes(f"/proc/{pid}/cgroup", 8192).splitlines()
    room: int | None = None
    for path in [line[3:].decode(errors="replace") for line in own if line.startswith(b"0::/")]:
        for folder in (path, *map(str, Path(path).parents)):
            with contextlib.suppress(OSError, ValueError):
                most, taken = (_cgroup_number(folder, f"memory.{name}") for name in ("max", "current"))
                here = most - taken + _inactive_file(folder)
                room = here if room is None else min(room, here)
    return room


def shares_memory_of_nccl(pid: int) -> bool:
    """Whether a process maps what ranks of NCCL on one host share (as its src/transport/shm.cc names it)."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            return any(b" /dev/shm/nccl-" in line for line in maps)
    except OSError:
        return False


def _cgroup_number(path: str, name: str) -> int:
    with open(f"{CGROUPS}{path}/{name}", encoding="ascii") as file:
        return int(file.read())  # "max" is a ValueError: no limit here


def _inactive_file(path: str) -> int:
    with contextlib.suppress(OSError), open(f"{CGROUPS}{path}/memory.stat", "rb") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(b"inactive_file ")), 0)
    return 0


def _listing() -> dict[int, int]:
    """Pid -> inode of its directory, which is another when the pid is used again."""
    with os.scandir("/proc") as entries:
        return {int(entry.name): entry.inode() for entry in entries if entry.name.isdigit()}


def _read(pid: int, now: float, leases: frozenset[Path]) -> Process | None:
    fields = _stat(pid)
    if not fields:
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS_PER_S
    status = _bytes(f"/proc/{pid}/status", 4096)
    uid = _field(status, b"Uid:")
    if uid < 0:
        return None
    command = _bytes(f"/proc/{pid}/cmdline", 8192)
    kernel = _KERNEL.search(command)
    carries = _named_by(pid, leases)
    return Process(
        pid=pid,
        start_ticks=int(fields[19]),
        started_at=now - age_s,
        uid=uid,
        parent=int(fields[1]),
        name=_bytes(f"/proc/{pid}/comm", 64).decode(errors="replace").strip(),
        kernel=kernel.group(1).decode() if kernel else "",
        carries=carries,
        lease=carries,
    )


def _named_by(pid: int, leases: frozenset[Path]) -> str:
    """The lease below ``leases`` that the cgroup or else the environment of a process names."""
    # The innermost: a helper may make them below its own service, gpushare-helper.
    if cgroups := _CGROUP.findall(_bytes(f"/proc/{pid}/cgroup", 8192)):
        return str(cgroups[-1].decode())
    entries = _bytes(f"/proc/{pid}/environ", ENVIRON_BYTES).split(b"\0")
    lease = next((os.fsdecode(e.removeprefix(MARK)) for e in entries if e.startswith(MARK)), "")
    directory = next((os.fsdecode(e.removeprefix(MARK_DIR)) for e in entries if e.startswith(MARK_DIR)), "")
    ours = not directory or Path(os.path.normpath(directory)) in {path / lease for path in leases}
    return lease if ours else ""


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third (state) on; empty when it is gone."""
    raw = _bytes(f"/proc/{pid}/stat", 2048)
    return raw[raw.rfind(b")") + 2 :].split() if b")" in raw else []


def _field(status: bytes, name: bytes) -> int:
    for line in status.splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return -1


def _bytes(path: str, most: int) -> bytes:
    """The beginning of a file in /proc; nothing when the process is gone or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _COULD_NOT_LOOK:
            raise
        return b""
    try:
        return os.read(fd, most)
    except OSError:
        return b""
    finally:
        os.close(fd)
