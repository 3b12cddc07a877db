"""One command and everything that comes from it: started together, ended together.

The runner makes itself the *subreaper* of its descendants (prctl(2)): a child
that forks twice to get away becomes the runner's own child instead of init's.
So the tree below the runner is complete, however it was made, and `end_all`
can empty it.  Exit codes are collected here, once, for every child: nobody else
in this process may wait for a child.

Outside facts: PR_SET_PDEATHSIG = 1 and PR_SET_CHILD_SUBREAPER = 36
(linux/prctl.h); the fields of /proc/PID/stat (proc(5)): the name in brackets
may hold anything, so they are counted from the last bracket.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

# How long killed processes may take to vanish; longer means stuck in the kernel.
KILL_PATIENCE_S = 10.0

_LIBC = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def become_subreaper() -> None:
    """From now on every orphan below this process becomes its child.

    Raises:
        OSError: a kernel older than 3.4.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Command:
    """A started command, leader of its own session, and its descendants."""

    def __init__(self, argv: list[str], *, cwd: str, env: Mapping[str, str], output: int) -> None:
        """Start it, standard output and error going to ``output``.

        Raises:
            OSError: it cannot be executed.
            ValueError: an argument or variable holds a NUL byte.
        """
        runner = os.getpid()  # no other thread runs yet: the hook below is safe

        def in_child() -> None:
            # A runner that is killed takes its command along: nothing would collect its result.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != runner:
                os._exit(1)

        self._process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=in_child,
        )
        self.pid = self._process.pid
        self.exit_code: int | None = None

    def reap(self) -> int | None:
        """Collect what has ended; return the command's exit code once it has (negative: the signal)."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == self.pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
                self._process.returncode = self.exit_code
        return self.exit_code

    def signal_group(self, number: int) -> None:
        """Send a signal to the command's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def signal_all(self, number: int) -> None:
        """Send a signal to every living descendant of this process."""
        for pid in descendants():
            # Read a moment ago and all below this process, so no stranger can have the number yet.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def end_all(self) -> list[int]:
        """Kill every descendant; return those that did not vanish in `KILL_PATIENCE_S`."""
        until = time.monotonic() + KILL_PATIENCE_S
        while True:
            self.signal_all(signal.SIGKILL)
            self.reap()
            left = descendants()
            if not left or time.monotonic() >= until:
                return left
            time.sleep(0.01)


def descendants(root: int | None = None) -> list[int]:
    """The living processes below ``root`` (default: this process), zombies left out."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append((int(entry), fields[0].decode()))
    found: list[int] = []
    ahead = [os.getpid() if root is None else root]
    while ahead:
        for pid, state in children.get(ahead.pop(), ()):
            ahead.append(pid)
            if state not in "ZX":
                found.append(pid)
    return found
