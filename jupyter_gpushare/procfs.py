"""Files of processes, and the identity of processes: boot id, start time, and signals through pidfds.

A pid is reused after its process has ended; a pair of pid and start time is unique within one boot.  So a
process is identified by its pid and its start time in clock ticks since boot (field 22 of /proc/PID/stat,
proc(5)), and across boots also by the boot id.

"It has ended" and "it cannot be examined" are different answers: if descriptors or memory run out, these
functions raise `OSError`, and do not report the process as ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import select
import signal
import struct
import sys
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RANDOMIZE = Path("/proc/sys/kernel/randomize_va_space")
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_STAT_BYTES = 2048
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

# Indexes in the result of `stat_fields`; proc(5) counts from 1, and pid and name come first.
STATE = 0
PARENT = 1
USER_TICKS = 11
SYSTEM_TICKS = 12
THREADS = 17
START_TICKS = 19
START_CODE = 23
START_STACK = 25
BLOCKED_SIGNALS = 29  # of the first thread; masks of the signals 1 to 31
CAUGHT_SIGNALS = 31
_EXIT_CODE = 49

_ADDR_NO_RANDOMIZE = 0x0040000  # linux/personality.h
# linux/nsfs.h, _IO(0xb7, n): get a descriptor of a namespace's user namespace; get the uid that created it.
_NS_GET_USERNS = 0xB701
_NS_GET_OWNER_UID = 0xB704
# PIDFD_GET_INFO of linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info), 64 bytes in its first version.
# With PIDFD_INFO_EXIT in `mask` (Linux 6.15) it returns the status of a process that was waited for.
_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_PIDFD_INFO = struct.Struct("<Q52xi")  # mask, exit_code
_PIDFD_INFO_EXIT = 1 << 3


def boot_id() -> str:
    """Return a UUID that changes with every boot (random(4))."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def path(pid: int, name: str) -> str:
    """Return the path of a file of a process, such as ``maps``; pid 0 is this process."""
    return f"/proc/{pid or 'self'}/{name}"


def pids() -> dict[int, int]:
    """Return all pids with the inodes of their directories; a reused pid has another inode."""
    with os.scandir("/proc") as entries:
        return {int(entry.name): entry.inode() for entry in entries if entry.name.isdigit()}


def read(pid: int, name: str, limit_bytes: int) -> bytes:
    """Return the first ``limit_bytes`` of a file of a process; empty if it is gone or cannot be read.

    Raises:
        OSError: no descriptor or memory is free.
    """
    found = bytearray()  # several reads may be needed: the kernel returns ``mountinfo`` in parts
    try:
        with open(path(pid, name), "rb", buffering=0) as file:
            while len(found) < limit_bytes and (more := file.read(limit_bytes - len(found))):
                found += more
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise
    return bytes(found)


def descriptors(pid: int, limit: int) -> list[str]:
    """Return at most ``limit`` open descriptors of a process; none if it is gone or cannot be read.

    Raises:
        OSError: no descriptor or memory is free.
    """
    try:
        with os.scandir(path(pid, "fd")) as entries:
            return [entry.name for entry in itertools.islice(entries, limit)]
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise
        return []


def opened(pid: int, descriptor: str) -> str:
    """Return the kernel's path for an open descriptor of a process; empty if it is closed."""
    try:
        return os.readlink(path(pid, f"fd/{descriptor}"))
    except OSError:
        return ""


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third (state) on; empty if the process is gone.

    The name in brackets may contain any byte, so fields are counted from the last bracket.

    Raises:
        OSError: no descriptor or memory is free.
    """
    raw = read(pid, "stat", _STAT_BYTES)
    return raw[raw.rfind(b")") + 2 :].split() if b")" in raw else []


def start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; -1 if it is gone.

    Raises:
        OSError: no descriptor or memory is free.
    """
    fields = stat_fields(pid)
    return int(fields[START_TICKS]) if fields else -1


def image(fields: list[bytes]) -> tuple[int, int]:
    """Return the addresses of the program and of the stack of a process, or zeros.

    The kernel randomizes them at exec (randomize_va_space in sysctl/kernel.rst), and fork keeps them.  They
    are zeros if this process may not read them, or if the kernel does not randomize them, so that they
    distinguish nothing.  ``fields`` are `stat_fields`.

    Raises:
        OSError: no descriptor or memory is free.
    """
    program, stack = int(fields[START_CODE]), int(fields[START_STACK])
    return (program, stack) if stack and int(_RANDOMIZE.read_bytes()) else (0, 0)


def is_randomized(pid: int) -> bool:
    """Return whether the kernel randomizes a process's addresses (no ADDR_NO_RANDOMIZE, personality(2)).

    Blocks while the process is in exec, which the process can prolong.

    Raises:
        OSError: no descriptor or memory is free.
    """
    return not int(read(pid, "personality", 16) or b"0", 16) & _ADDR_NO_RANDOMIZE


def ticks(since_boot_s: float) -> int:
    """Return a time since boot in clock ticks, like `start_ticks`."""
    return int(since_boot_s * _TICKS_PER_S)


def is_running(pid: int, started_ticks: int) -> bool:
    """Return whether the process with this pid and start time has not ended; a zombie has ended.

    This needs no descriptor that stays open; `has_ended` does the same for a pidfd.

    Raises:
        OSError: no descriptor or memory is free.
    """
    fields = stat_fields(pid)
    if not fields or int(fields[START_TICKS]) != started_ticks:
        return False
    # A thread group leader may end before its other threads; then the process has not ended.
    return fields[STATE] not in (b"Z", b"X") or int(fields[THREADS]) > 1


def open_pidfd(pid: int, started_ticks: int) -> int | None:
    """Open a pidfd of the process with this pid and start time; None if it is gone.

    Raises:
        OSError: no descriptor or memory is free.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _OUT_OF_RESOURCES:
            raise
        return None
    # The pidfd pins a process; then the start time shows which process it is.
    try:
        matches = start_ticks(pid) == started_ticks
    except OSError:
        os.close(pidfd)
        raise
    if not matches:
        os.close(pidfd)
        return None
    return pidfd


def has_ended(pidfd: int, within_s: float = 0.0) -> bool:
    """Return whether the process of a pidfd has ended, zombies included (pidfd_open(2): polls readable)."""
    poll = select.poll()  # select() takes no descriptor beyond 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * within_s))


def exit_status(pidfd: int, pid: int, started_ticks: int) -> int | None:
    """Return the status of an ended process as in wait(2); None if its parent has read it on an old kernel.

    A zombie shows the status in its stat (0 without the right to trace it).  From Linux 6.15 on, the pidfd
    of a process that was waited for has it.

    Raises:
        OSError: no descriptor or memory is free.
    """
    fields = stat_fields(pid)
    if fields and fields[STATE] == b"Z" and int(fields[START_TICKS]) == started_ticks:
        return int(fields[_EXIT_CODE])
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    mask, code = _PIDFD_INFO.unpack(info)
    return code if mask & _PIDFD_INFO_EXIT else None


def maker(pid: int, namespace: str) -> int | None:
    """Return the uid that created the owning user namespace of a process's namespace; None if hidden.

    ``namespace`` is ``mnt`` or ``pid``, or ``user`` for the process's user namespace itself.  The kernel
    returns 0 for the initial user namespace; users can only create namespaces in others.

    Raises:
        OSError: no descriptor or memory is free.
    """
    found = bytearray(4)
    with contextlib.ExitStack() as opened:
        try:
            fd = os.open(path(pid, f"ns/{namespace}"), os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            if namespace != "user":
                fd = fcntl.ioctl(fd, _NS_GET_USERNS)
                opened.callback(os.close, fd)
            fcntl.ioctl(fd, _NS_GET_OWNER_UID, found)
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                raise
            return None
    return int.from_bytes(found, sys.byteorder)


def cgroup(pid: int, fields: list[bytes], limit_bytes: int) -> bytes:
    """Return the contents of /proc/PID/cgroup; ``fields`` are `stat_fields`.

    With cgroup v1, a process whose first thread has ended shows no cgroups, but its other threads do.

    Raises:
        OSError: no descriptor or memory is free.
    """
    if fields[STATE] == b"Z" and int(fields[THREADS]) > 1:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ProcessLookupError):
            others = (tid for tid in os.listdir(path(pid, "task")) if tid != str(pid))
            if (tid := next(others, None)) is not None:
                return read(pid, f"task/{tid}/cgroup", limit_bytes)
    return read(pid, "cgroup", limit_bytes)


def send_signal(pid: int, started_ticks: int, number: int) -> bool:
    """Signal the process with this pid and start time, and no other; return False if it has ended.

    Raises:
        PermissionError: the process belongs to another user.
        OSError: no descriptor or memory is free.
    """
    pidfd = open_pidfd(pid, started_ticks)
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True
