"""Start a command, and end it together with all of its descendants.

The runner is the *subreaper* of its descendants (prctl(2)): a process that
daemonizes with a double fork becomes a child of the runner instead of init.
The process tree below the runner is therefore complete, and `end_all` can kill
all of it.  Only this module reaps children: no other code of this process may
call wait.

Outside facts: PR_SET_DUMPABLE = 4 and PR_SET_CHILD_SUBREAPER = 36 (linux/prctl.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import time
from collections.abc import Mapping

from jupyter_gpushare import procfs
from jupyter_gpushare.parent import bind, prctl

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36

# Killed processes must vanish within this time; those that do not are stuck in the kernel.
KILL_PATIENCE_S = 10.0

_LIBC = ctypes.CDLL(None)
_LIBC.getenv.restype = ctypes.c_void_p


def hide_environment(*names: str) -> None:
    """Hide the values of ``names`` from the user's other processes; ``os.environ`` keeps them.

    /proc/PID/environ shows the memory in which the kernel put the environment at exec, so the values are
    overwritten there.  A process that is not dumpable shows neither its environment nor its memory to
    other processes of its user (ptrace(2), proc(5)).  The command becomes dumpable again by its exec.

    Raises:
        OSError: the kernel refuses.
    """
    for name in names:
        if address := _LIBC.getenv(name.encode()):
            ctypes.memset(address, ord("x"), len(ctypes.string_at(address)))
    prctl(_PR_SET_DUMPABLE, 0)


def become_subreaper() -> None:
    """Make every orphaned descendant a child of this process.

    Raises:
        OSError: the kernel is older than 3.4.
    """
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Command:
    """A started command, which leads its own session, and its descendants."""

    def __init__(self, argv: list[str], *, cwd: str, env: Mapping[str, str], output: int) -> None:
        """Start the command; its standard output and error go to ``output``.

        Raises:
            OSError: the command cannot be executed.
            ValueError: an argument or variable contains a NUL byte.
        """
        self._process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # The command dies with its runner: no other process would collect its result.
            # The hook is one call of prctl(2), so it waits for no lock of another thread.
            preexec_fn=functools.partial(bind, os.getpid()),
        )
        self.pid = self._process.pid
        self.exit_code: int | None = None

    def reap(self) -> int | None:
        """Reap ended children; return the command's exit code if it has ended (negative: a signal)."""
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

    def can_notice(self, number: int) -> bool:
        """Return whether a signal may do more to the command than end it.

        A single process that neither catches nor blocks the signal is ended by it, or ignores it.
        """
        fields = procfs.stat_fields(self.pid)
        if len(fields) <= procfs.CAUGHT_SIGNALS or descendants() not in ([], [self.pid]):
            return True
        masks = int(fields[procfs.CAUGHT_SIGNALS]) | int(fields[procfs.BLOCKED_SIGNALS])
        return bool(masks & 1 << number - 1)

    def signal_group(self, number: int) -> None:
        """Send a signal to the command's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def signal_all(self, number: int) -> None:
        """Send a signal to every living descendant of this process."""
        for pid in descendants():
            # Only this process reaps them, so these pids cannot have been reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def end_all(self) -> list[int]:
        """Kill every descendant; return those that did not vanish in `KILL_PATIENCE_S`."""
        until = time.monotonic() + KILL_PATIENCE_S
        while True:
            self.signal_all(signal.SIGKILL)
            self.reap()
            remaining = descendants()
            if not remaining or time.monotonic() >= until:
                return remaining
            time.sleep(0.01)


def descendants(root: int | None = None) -> list[int]:
    """Return the living processes below ``root`` (default: this process), without zombies."""
    children: dict[int, list[tuple[int, bytes]]] = {}
    for pid in procfs.pids():
        if fields := procfs.stat_fields(pid):
            children.setdefault(int(fields[procfs.PARENT]), []).append((pid, fields[procfs.STATE]))
    found: list[int] = []
    pending = [os.getpid() if root is None else root]
    while pending:
        for pid, state in children.get(pending.pop(), ()):
            pending.append(pid)
            if state not in (b"Z", b"X"):
                found.append(pid)
    return found
