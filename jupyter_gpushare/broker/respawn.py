"""The parent of a managed broker: starts it, and the helper, again within a second.

The Hub itself looks after its services only every 30 s.  This process holds
no state.  It goes when its own parent, the Hub, goes: a new Hub starts a new
broker, which could not take the database over from an old one.

The device helper outlives both: it is started in a session of its own when
nobody listens on its socket, and is told to end only when the Hub itself ends
this service in order (then nothing is left to look after).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

log = logging.getLogger("gpushare.respawn")

# The broker ends by itself when this process is no longer its parent.
PARENT_VARIABLE = "GPUSHARE_PARENT_PID"

_LOOK_S = 0.2
# The broker survives SIGKILL at any moment, so it need not be waited for.
_STOP_S = 2.0
# A child that ends sooner is started again only after this pause, and then at most once a second.
_PAUSE_S = 0.5


def helper_pid(path: Path) -> int | None:
    """Return the process that listens on the helper's socket; None: nobody does."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    return int(struct.unpack("3i", credentials)[0])


class _Child:
    """One process that is kept running."""

    def __init__(self, command: Sequence[str], *, own_session: bool) -> None:
        self._command = list(command)
        self._own_session = own_session
        self._process: subprocess.Popen[bytes] | None = None
        self._not_before = 0.0

    def look(self) -> None:
        """Start it if it is not running and its pause is over."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            log.warning("%s ended with status %d", self._command[3], self._process.returncode)
            self._process = None
            self._not_before = now + _PAUSE_S
        if self._process is None and now >= self._not_before:
            environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
            self._process = subprocess.Popen(
                self._command, start_new_session=self._own_session, env=environment
            )

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL when that does not help."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run(
    *, state_dir: Path, helper_socket: Path | None, helper_state_dir: Path, arguments: Sequence[str]
) -> int:
    """Keep a broker running with ``arguments``, and a helper if there is a socket for one.

    Returns the exit status once the Hub is gone or ends this service.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    module = [sys.executable, "-m", "jupyter_gpushare.cli"]
    broker = _Child([*module, "broker", *arguments], own_session=False)
    helper = _Child(
        [*module, "helper", "--state-dir", str(helper_state_dir), "--socket", str(helper_socket)],
        own_session=True,
    )
    asked_to_stop = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    hub = os.getppid()
    while not asked_to_stop and os.getppid() == hub:
        if helper_socket is not None and helper_pid(helper_socket) is None:
            helper.look()
        broker.look()
        time.sleep(_LOOK_S)
    # The Hub gives its services 5 s: the helper is told first, it needs nobody else to end.
    pid = None
    if asked_to_stop and os.getppid() == hub and helper_socket is not None:
        pid = helper_pid(helper_socket)
        _signal(pid, signal.SIGTERM)
    broker.stop()
    until = time.monotonic() + _STOP_S
    while helper_socket is not None and helper_pid(helper_socket) == pid is not None:
        if time.monotonic() > until:
            log.warning("the device helper (pid %d) does not end: killing it", pid)
            _signal(pid, signal.SIGKILL)
            break
        time.sleep(_LOOK_S)
    return 0


def _signal(pid: int | None, number: signal.Signals) -> None:
    """Signal a process that may be gone; the helper leaves what sleeps asleep, however it ends."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
