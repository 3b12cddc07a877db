"""A process's duties towards its parent: it ends with its parent, and reports its state to systemd.

The kernel signals a process when its parent ends, if the process has requested that before
(PR_SET_PDEATHSIG, prctl(2)).  The process then compares the parent's pid, to notice a parent that ended
before the request.  The request survives execve(2), except into a program with a set-user-ID or
set-group-ID bit or with capabilities.

    python -IS parent.py PID SIGNAL COMMAND [ARGUMENT ...]

becomes COMMAND, which gets SIGNAL when the process PID ends; `bound` returns that command line.  The kernel
sends the signal when the *thread* that started the process ends, so the main thread must start it.

Standard library only, and no other module of this package, because the file is run by its path.
Outside facts: PR_SET_PDEATHSIG = 1 and PR_GET_PDEATHSIG = 2 (linux/prctl.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import MutableMapping, Sequence

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
# Exit codes of shells.
_CANNOT_USE, _NOT_FOUND = 126, 127
# Python ignores these signals, and a program that it becomes would inherit that.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)

_LIBC = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument.

    Raises:
        OSError: the kernel refuses.
    """
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def bound(command: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """Return a command line for ``command`` in which it gets signal ``number`` when this process ends."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), str(int(number)), *command]


def bind(parent: int, number: int = signal.SIGKILL) -> None:
    """Make this process get signal ``number`` when its ``parent`` ends; exit if the parent has ended."""
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def release() -> int | None:
    """Let this process outlive its parent; return the parent's pid, or None if the process was not bound.

    The parent is the process that started this one: if it had ended, this one would have been signalled.
    """
    number = ctypes.c_int()
    _LIBC.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    if not number.value:
        return None
    parent = os.getppid()
    prctl(_PR_SET_PDEATHSIG, 0)
    return parent


def _become(parent: int, number: int, command: list[str]) -> int:
    """Become ``command``; if it cannot be run, return the exit status that a shell uses."""
    bind(parent, number)
    for each in _IGNORED:
        signal.signal(each, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_USE


if __name__ == "__main__":
    sys.exit(_become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))


# ---- messages to systemd about a service's own state (sd_notify(3)) -----------


class Notifier:
    """Sends messages of a service with ``Type=notify`` to systemd; does nothing without systemd's address."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take systemd's address out of the environment, so that children of the service cannot use it."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environment.pop(name, None)

    def ready(self) -> None:
        """Report that the service answers, or that it uses its new settings."""
        self.send("READY=1")

    def reloading(self) -> None:
        """Report that settings are being reloaded, until `ready` is called."""
        self.send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Report that the service is ending as requested."""
        self.send("STOPPING=1")

    def send(self, state: str) -> None:
        """Send ``state`` without waiting."""
        if not self._address:
            return
        # An address with @ is in the abstract namespace (unix(7)).
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.setblocking(False)
            systemd.sendto(state.encode(), path)
