"""The parent of a managed broker: restarts the broker and the helper within a second.

It holds the broker's listening sockets, so that no other process can take their
port while the broker restarts.

A broker that sends no sign of life for 10 s hangs; it is killed and replaced.

The Hub itself checks its services only every 30 s.  This process has no state.  It
ends with its own parent, the Hub, and the broker ends with it (`parent`), because a
new Hub starts a new broker, which could not take the database over from an old one.

The device helper starts in a session of its own when no process listens on its
socket.  A helper that serves outlives both processes and ends by itself when it is
not needed (`gpu.service.helper`).  This process terminates the helper when the Hub
ends the service in an orderly way, because no lease is left then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType

from jupyter_gpushare.broker.http.sockets import Addresses, Sockets, pass_on
from jupyter_gpushare.errors import StoreError
from jupyter_gpushare.parent import Notifier, bound

log = logging.getLogger("gpushare.respawn")


# ---- signs of life of the broker's event loop, for a parent that replaces a broker that hangs
# * systemd (``Type=notify``, ``WatchdogSec=``): ``READY=1`` when the broker answers, then
#   ``WATCHDOG=1`` every `EVERY_S` to the socket ``NOTIFY_SOCKET`` (sd_notify(3)).
# * ``gpushare broker --respawn``: a byte every `EVERY_S` into the pipe ``GPUSHARE_HEARTBEAT_FD``.

EVERY_S = 1.0
# A broker hangs if it is silent for HANGS_S, or for STARTS_S at its start, when it opens its database.
HANGS_S = 10.0
STARTS_S = 60.0
FD_VARIABLE = "GPUSHARE_HEARTBEAT_FD"
_DRAIN_BYTES = 4096


class Heartbeat:
    """The sender in the broker."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Remove the addresses from the environment, so that no child of the broker sends signs of life."""
        self.systemd = Notifier(environment)
        self._pipe = int(environment.pop(FD_VARIABLE, "-1"))

    async def run(self) -> None:
        """Send signs of life until cancelled."""
        self.systemd.ready()
        while True:
            self.systemd.send("WATCHDOG=1")
            if self._pipe >= 0:
                with contextlib.suppress(OSError):  # full, or the parent is gone
                    os.write(self._pipe, b".")
            await asyncio.sleep(EVERY_S)


class Monitor:
    """The receiver in the parent."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._hangs_at = time.monotonic() + STARTS_S

    def hangs(self) -> bool:
        """Return whether the child was silent for `HANGS_S`, or for `STARTS_S` since its start."""
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            if os.read(self._reading, _DRAIN_BYTES):
                self._hangs_at = now + HANGS_S
        return now >= self._hangs_at

    def close(self) -> None:
        """Close both ends of the pipe."""
        os.close(self._reading)
        os.close(self.writing)


# ---- the parent --------------------------------------------------------------

# Exit status of a broker that a newer one has superseded; if restarted, it would take the devices back.
SUPERSEDED_STATUS = 3
# Signals that request a reload; blocked until the broker can reload.
RELOAD = frozenset({signal.SIGHUP})

_POLL_S = 0.2
# Time before SIGKILL, which the broker survives at any time.
_STOP_S = 2.0
# Pause before a restart.
_PAUSE_S = 0.5
# Environment variables that Python, the driver and its simulation read.
_HELPER_NAMES = frozenset({"HOME", "LANG", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV"})
_HELPER_PREFIXES = ("CUDA_", "GPUSHARE_SIM", "GPUSHARE_TEST_", "LC_", "LD_", "NVIDIA_", "PYTHON")


def helper_pid(path: Path) -> int | None:
    """Return the pid of the process that listens on the helper's socket, or None if none does."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    return int(struct.unpack("3i", credentials)[0])


class _Child:
    """A child process that is kept running and ends with this process (`parent`)."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        own_session: bool,
        sockets: Sequence[socket.socket] = (),
        is_watched: bool = False,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """``is_watched``: the child sends signs of life, and is killed when it hangs."""
        self._environment = environment
        self._is_watched = is_watched
        self._command = list(command)
        self._own_session = own_session
        self._sockets = sockets
        self._process: subprocess.Popen[bytes] | None = None
        self._heartbeat: Monitor | None = None
        self._not_before = 0.0
        self.is_superseded = False

    def keep_running(self) -> None:
        """Start the child if it does not run, its pause is over, and no newer broker has superseded it."""
        now = time.monotonic()
        if self._process is not None and self._heartbeat is not None and self._heartbeat.hangs():
            log.critical("%s hangs: killing it", self._command[3])
            self._process.kill()
            self._process.wait()
        if self._process is not None and self._process.poll() is not None:
            log.warning("%s ended with status %d", self._command[3], self._process.returncode)
            self.is_superseded = self._process.returncode == SUPERSEDED_STATUS
            self._process = None
            self._not_before = now + _PAUSE_S
            if self._heartbeat is not None:
                self._heartbeat.close()
                self._heartbeat = None
        if self._process is None and now >= self._not_before and not self.is_superseded:
            environment = dict(self._environment)
            passed = pass_on(self._sockets, environment) if self._sockets else ()
            if self._is_watched:
                self._heartbeat = Monitor()
                environment[FD_VARIABLE] = str(self._heartbeat.writing)
                passed = (*passed, self._heartbeat.writing)
            blocked = RELOAD if self._is_watched else frozenset[signal.Signals]()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # a child inherits the mask
            try:
                self._process = subprocess.Popen(
                    bound(self._command),
                    start_new_session=self._own_session,
                    pass_fds=passed,
                    env=environment,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def stop(self) -> None:
        """End the child with SIGTERM, and with SIGKILL if it still runs after `_STOP_S`."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run(
    addresses: Addresses,
    *,
    state_dir: Path,
    helper_socket: Path | None,
    helper_state_dir: Path,
    arguments: Sequence[str],
) -> int:
    """Keep a broker running with ``arguments``, and a helper if ``helper_socket`` is given.

    Return the exit status when the Hub has ended or ends this service.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    module = [sys.executable, "-m", "jupyter_gpushare.cli"]
    helper = _Child(
        [*module, "helper", "--state-dir", str(helper_state_dir), "--socket", str(helper_socket)],
        own_session=True,
        environment=_helper_environment(os.environ),
    )
    asked_to_stop = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    hub = os.getppid()
    sockets: list[socket.socket] = []
    while not sockets and not asked_to_stop and os.getppid() == hub:
        sockets = _bound(addresses)
    broker = _Child([*module, "broker", *arguments], own_session=False, sockets=sockets, is_watched=True)
    while not asked_to_stop and not broker.is_superseded and os.getppid() == hub:
        if helper_socket is not None and helper_pid(helper_socket) is None:
            helper.keep_running()
        broker.keep_running()
        time.sleep(_POLL_S)
    # The Hub gives its services 5 s.  The helper waits for no other process, so it gets SIGTERM first.
    pid = None
    if asked_to_stop and os.getppid() == hub and helper_socket is not None:
        pid = helper_pid(helper_socket)  # a helper that does not listen yet ends with this process
        _signal(pid, signal.SIGTERM)
    broker.stop()
    until = time.monotonic() + _STOP_S
    while helper_socket is not None and helper_pid(helper_socket) == pid is not None:
        if time.monotonic() > until:
            log.warning("the device helper (pid %d) does not end: killing it", pid)
            _signal(pid, signal.SIGKILL)
            break
        time.sleep(_POLL_S)
    return SUPERSEDED_STATUS if broker.is_superseded else 0


def _helper_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name in _HELPER_NAMES or name.startswith(_HELPER_PREFIXES)
    }


def _bound(addresses: Addresses) -> list[socket.socket]:
    """Return the sockets for all brokers of this process; if they are in use, pause and return none."""
    try:
        sockets = Sockets.take(addresses, os.environ)
    except StoreError as error:
        log.warning("%s", error)  # the last Hub's broker may still hold them
        time.sleep(_PAUSE_S)
        return []
    return [*sockets.unix, *sockets.http, *sockets.tls]


def _signal(pid: int | None, number: signal.Signals) -> None:
    """Signal a process that may be gone; suspended leases stay suspended however the helper ends."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
