"""Processes of this machine: facts from the kernel, signals that cannot hit a wrong process, exits.

A process is named by its pid and its start time (`Key`), as `procfs` explains.  A process that is watched
for its exit is held open by a pidfd: that polls readable when the process has ended, zombies included, so
an exit is noticed without a scan.  At most half of the descriptors that this process may open are such
pidfds, so that no user can exhaust them.  Processes beyond that are looked up in each scan.

"It has ended" and "it could not be read" are different answers.  Without a free descriptor or memory
`read_facts`, `alive`, `signal` and `exit_status` raise `OSError`, and the caller must change nothing.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import time
from dataclasses import dataclass
from threading import Lock

from jupyter_gpushare import procfs
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.gpu.os.containers import CGROUP_BYTES, container_of

log = logging.getLogger(__name__)

# Exit statuses that are remembered; a move needs those of processes that ended during a driver call.
EXITS_KEPT = 1024

Key = tuple[int, int]  # pid, start ticks

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """What the kernel says about one process, without a read of the process's memory."""

    pid: int
    start_ticks: int  # field 22 of /proc/PID/stat
    started_at: float  # on time.monotonic()
    uid: int
    parent: int
    name: str
    inner_pid: int = 0  # its pid in its innermost pid namespace; 0: unknown
    container: str = ""  # UID of its pod, or id of its container
    image: tuple[int, ...] = ()  # `procfs.image`: a forked process has its parent's until it calls exec

    @property
    def key(self) -> Key:
        """Pid and start time, which together name one process of this boot."""
        return self.pid, self.start_ticks

    @property
    def inner_key(self) -> Key:
        """The key by which the process knows itself."""
        return self.inner_pid or self.pid, self.start_ticks


def read_facts(pid: int, now: float, own_container: str = "") -> tuple[ProcessFacts, bytes] | None:
    """Return what the kernel says about a process, and its /proc/PID/cgroup; None if it has ended.

    ``now`` is the time on time.monotonic(); ``own_container`` is the container of this process.

    Raises:
        OSError: no descriptor or memory is free.
    """
    fields = procfs.stat_fields(pid)
    status = procfs.read(pid, "status", 4096) if fields else b""
    if not (uids := _numbers(status, b"Uid:")):
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[procfs.START_TICKS]) / _TICKS_PER_S
    cgroup = procfs.cgroup(pid, fields, CGROUP_BYTES)
    facts = ProcessFacts(
        pid=pid,
        start_ticks=int(fields[procfs.START_TICKS]),
        started_at=now - age_s,
        uid=uids[0],
        parent=int(fields[procfs.PARENT]),
        name=procfs.read(pid, "comm", 64).decode(errors="replace").strip(),
        inner_pid=(_numbers(status, b"NSpid:") or [pid])[-1],
        container=container_of(cgroup, own_container),
        image=procfs.image(fields),
    )
    return facts, cgroup


def _numbers(status: bytes, name: bytes) -> list[int]:
    """Return the numbers of one complete line of /proc/PID/status; empty if there is no such line."""
    for line in status[: status.rfind(b"\n") + 1].splitlines():
        if line.startswith(name):
            return [int(word) for word in line.split()[1:]]
    return []


class HeldProcesses:
    """Signals processes, and watches those that it holds for their exit; safe to use from several threads."""

    def __init__(self) -> None:
        """Hold no process yet.

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
        self._max_held = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._guard = Lock()  # held for moments only
        self._pidfds: dict[Key, int] = {}
        self._exits = select.epoll()
        self._exit_statuses: dict[Key, int | None] = {}  # the newest `EXITS_KEPT`

    def alive(self, key: Key) -> bool:
        """Return whether this process has not ended; a zombie has.

        Raises:
            OSError: no descriptor or memory is free.
        """
        pidfd = procfs.open_pidfd(*key)
        if pidfd is None:
            return False
        try:
            return not procfs.has_ended(pidfd)
        finally:
            os.close(pidfd)

    def signal(self, key: Key, number: int) -> bool:
        """Send a signal to this process; return False if it has ended.

        Raises:
            OSError: it belongs to another user, or no descriptor or memory is free.
        """
        return procfs.send_signal(*key, number)

    def wait_exit(self, timeout_s: float) -> bool:
        """Wait until a held process ends, and keep its status for `exit_status`; return whether one did."""
        try:
            if not self._exits.poll(timeout_s, maxevents=1):
                return False
            with self._guard:
                for key in self._ended():
                    self._keep_status(key)
        except OSError:  # no descriptor or memory is free
            time.sleep(timeout_s)
            return False
        return True

    def exit_status(self, key: Key) -> int | None:
        """Return the status of a held process that ended, as wait(2) encodes it; None if it is not known.

        Raises:
            OSError: no descriptor or memory is free.
        """
        with self._guard:
            self._keep_status(key)
            return self._exit_statuses.get(key)

    def image(self, pid: int) -> tuple[int, ...]:
        """Return `procfs.image` of the process that has this pid now; zeros if it has ended or is hidden."""
        fields = procfs.stat_fields(pid)
        return procfs.image(fields) if fields else (0, 0)

    def is_randomized(self, pid: int) -> bool:
        """Return `procfs.is_randomized`.  It may wait for the process: call it in a thread of that user."""
        return procfs.is_randomized(pid)

    def core_filter(self, key: Key) -> int:
        """Return the bit mask of mappings that a process writes into a core file (core(5)); -1 if unknown."""
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

    def _hold(self, key: Key) -> bool:
        """Open a pidfd of a process to watch for its exit, up to the maximum; return False if it has ended.

        The caller of this method and of those below has the guard.
        """
        if key in self._pidfds:
            return True
        if len(self._pidfds) >= self._max_held:
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
        """Close the pidfds of all processes except ``held``; their exit statuses are kept."""
        for key in [key for key in self._pidfds if key not in held]:
            self._keep_status(key)
            pidfd = self._pidfds.pop(key)
            self._exits.unregister(pidfd)
            os.close(pidfd)

    def _ended(self) -> set[Key]:
        """Return the held processes that have ended, zombies included."""
        ready = {fd for fd, _ in self._exits.poll(0, maxevents=max(1, len(self._pidfds)))}
        return {key for key, pidfd in self._pidfds.items() if pidfd in ready}

    def _keep_status(self, key: Key) -> None:
        """Note how a held process ended; older kernels have no status once its parent has waited for it."""
        pidfd = self._pidfds.get(key)
        if pidfd is None or self._exit_statuses.get(key) is not None or not procfs.has_ended(pidfd):
            return
        self._exit_statuses[key] = procfs.exit_status(pidfd, *key)
        while len(self._exit_statuses) > EXITS_KEPT:
            del self._exit_statuses[next(iter(self._exit_statuses))]
