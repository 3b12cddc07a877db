"""What a process does for the one that started it: it ends with its parent, and reports to systemd.

The kernel signals a process when its parent ends, if the process has asked for that before
(PR_SET_PDEATHSIG, prctl(2)).  A parent that ended earlier is noticed by its pid: the process asks first,
then compares.  The request survives execve(2), except into a program with a set-user-ID or set-group-ID
bit or with capabilities.

    python -IS parent.py PID SIGNAL COMMAND [ARGUMENT ...]

becomes COMMAND, which gets SIGNAL when the process PID ends: `bound` makes that command line.  The kernel
signals when the *thread* ends that started the process, so the main thread has to start it.

Standard library only, and no other module of this package: it runs by its path.
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
# As shells count them.
_CANNOT_USE, _NOT_FOUND = 126, 127
# Python ignores these, and a program that it becomes would inherit that.
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
    """Return the command line under which ``command`` gets signal ``number`` when this process ends."""
    return [sys.executable, "-IS", __file__, str(os.getpid()), str(int(number)), *command]


def bind(parent: int, number: int = signal.SIGKILL) -> None:
    """Let this process get signal ``number`` when ``parent`` ends, which started it; exit if it has ended."""
    prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def release() -> int | None:
    """Let this process outlive its parent from now on, and return the parent's pid; None: it was not bound.

    The pid is that of the process that started this one: had that ended, this one would have been signalled.
    """
    number = ctypes.c_int()
    _LIBC.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    if not number.value:
        return None
    parent = os.getppid()
    prctl(_PR_SET_PDEATHSIG, 0)
    return parent


def _become(parent: int, number: int, command: list[str]) -> int:
    """Become ``command``; return the exit status of a shell that cannot run it."""
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


# ---- messages to systemd about a service's own state (sd_notify(3)); nothing where systemd did not ask


class Notifier:
    """The address to which a service of ``Type=notify`` writes."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take the address out of the environment, so that no child of the service writes there."""
        self._address = environment.pop("NOTIFY_SOCKET", "")
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environment.pop(name, None)

    def ready(self) -> None:
        """Tell that the service answers, or works with its new settings."""
        self.send("READY=1")

    def reloading(self) -> None:
        """Tell that settings are read again; `ready` ends it."""
        self.send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """Tell that the service ends in order."""
        self.send("STOPPING=1")

    def send(self, state: str) -> None:
        """Write ``state`` without waiting."""
        if not self._address:
            return
        # An address with @ is in the abstract namespace (unix(7)).
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.setblocking(False)
            systemd.sendto(state.encode(), path)
