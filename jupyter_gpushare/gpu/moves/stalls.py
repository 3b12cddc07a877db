"""Find processes of suspended leases that seem to wait in the driver without a counted call.

The library counts the calls that may wait while a process is suspended.  A driver
function that it does not count, or one that is reached past the library, would wait for
ever.  So a parked process counts as stalled while it has used no CPU time (all threads)
for `STALLED_S` and its main thread is in no system call that sleeps, polls, reads or
waits for a child or a connection: a kernel at rest polls its sockets, ``input()`` and a
slow request poll or read, ``time.sleep`` sleeps.  The broker wakes the lease when its
kernel has been busy for long enough as well.

Sources: /proc/PID/stat and /proc/PID/syscall of proc(5); the numbers are those of
asm/unistd.h.  Where /proc/PID/syscall may not be read, no process is ever stalled.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

from jupyter_gpushare import procfs
from jupyter_gpushare.gpu.leases.lease import Key

STALLED_S = 2.0
_SYSCALL_BYTES = 256

# read, poll, pread64, readv, select, pause, nanosleep, connect, accept, recvfrom, recvmsg, wait4,
# rt_sigtimedwait, clock_nanosleep, epoll_wait, waitid, pselect6, ppoll, epoll_pwait, accept4,
# recvmmsg, epoll_pwait2.
_WAITS = {
    "x86_64": frozenset(
        {0, 7, 17, 19, 23, 34, 35, 42, 43, 45, 47, 61, 128, 230, 232, 247, 270, 271, 281, 288, 299, 441}
    ),
    "aarch64": frozenset({22, 63, 65, 67, 72, 73, 95, 101, 115, 137, 202, 203, 207, 212, 242, 243, 260, 441}),
}


class StallDetector:
    """Remembers since when each process has used no CPU time."""

    def __init__(self) -> None:
        self._since: dict[Key, tuple[int, float]] = {}  # CPU ticks, and the moment they were first seen

    def stalled(self, keys: Iterable[Key], now: float) -> list[Key]:
        """Those of the processes that have been stalled for `STALLED_S`; call it about every second.

        Raises:
            OSError: no descriptor or memory is left to look.
        """
        found = []
        for key in keys:
            ticks = _waiting_elsewhere(key)
            before = self._since.get(key)
            if ticks is None:
                self._since.pop(key, None)
            elif before is None or before[0] != ticks:
                self._since[key] = (ticks, now)
            elif now - before[1] >= STALLED_S:
                found.append(key)
        return found

    def keep(self, keys: Iterable[Key]) -> None:
        """Forget every process but these."""
        kept = set(keys)
        self._since = {key: seen for key, seen in self._since.items() if key in kept}


def _waiting_elsewhere(key: Key) -> int | None:
    """CPU ticks of a process with its main thread in no usual system call; None for any other."""
    fields = procfs.stat_fields(key[0])
    if not fields or int(fields[procfs.START_TICKS]) != key[1] or fields[procfs.STATE] != b"S":
        return None
    # The number first; "running" has none, and without ptrace access the file is empty.
    number = procfs.read(key[0], "syscall", _SYSCALL_BYTES).split(b" ", 1)[0]
    if not number.isdigit() or int(number) in _WAITS.get(platform.machine(), ()):
        return None
    if platform.machine() not in _WAITS:
        return None
    return int(fields[procfs.USER_TICKS]) + int(fields[procfs.SYSTEM_TICKS])
