"""The parent of a managed broker: restarts it, and the helper, within a second.

It holds the broker's listening sockets all that time, so that no other process
can take their port while the broker restarts.

A broker that sends no sign of life for 10 s hangs: it is killed and replaced.

The Hub itself looks after its services only every 30 s.  This process holds
no state.  It goes when its own parent, the Hub, goes, and the broker with it
(`parent`): a new Hub starts a new broker, which could not take the database
over from an old one.

The device helper is started in a session of its own when no process listens
on its socket.  Once it serves it outlives both, and ends by itself when it is
not needed (`gpu.service.helper`).  It is terminated when the Hub itself ends
this service in order (then no lease is left).
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


# ---- signs of life of the broker's event loop, for the parent that replaces a broker that hangs
# * systemd (``Type=notify``, ``WatchdogSec=``): ``READY=1`` once the broker answers, then
#   ``WATCHDOG=1`` every `EVERY_S` to the socket ``NOTIFY_SOCKET`` (sd_notify(3)).
# * ``gpushare broker --respawn``: a byte every `EVERY_S` into the pipe ``GPUSHARE_HEARTBEAT_FD``.

EVERY_S = 1.0
# A broker without a sign of life for so long hangs.  Before the first one it opens its database.
HANGS_S = 10.0
STARTS_S = 60.0
FD_VARIABLE = "GPUSHARE_HEARTBEAT_FD"
_DRAIN_BYTES = 4096


class Heartbeat:
    """The broker's end."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take the addresses out of the environment, so that no child of the broker sends signs."""
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
    """The end of a parent: whether its child still sends signs of life."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._silent_at = time.monotonic() + STARTS_S

    def hangs(self) -> bool:
        """Return whether the child was silent for `HANGS_S`, or never said anything for `STARTS_S`."""
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            if os.read(self._reading, _DRAIN_BYTES):
                self._silent_at = now + HANGS_S
        return now >= self._silent_at

    def close(self) -> None:
        """Close both ends of the pipe."""
        os.close(self._reading)
        os.close(self.writing)


# ---- the parent --------------------------------------------------------------

# Exit status of a broker that a newer one has followed: started again, it would take the devices back.
SUPERSEDED_STATUS = 3
# Signals that a broker takes as a request to reload, once it can.
RELOAD = frozenset({signal.SIGHUP})

_LOOK_S = 0.2
# The broker survives SIGKILL at any moment, so it need not be waited for.
_STOP_S = 2.0
# A child that ends sooner is started again only after this pause, and then at most once a second.
_PAUSE_S = 0.5
# What Python, the driver and its simulation read.
_HELPER_NAMES = frozenset({"HOME", "LANG", "PATH", "TMPDIR", "TZ", "VIRTUAL_ENV"})
_HELPER_PREFIXES = ("CUDA_", "GPUSHARE_SIM", "GPUSHARE_TEST_", "LC_", "LD_", "NVIDIA_", "PYTHON")


def helper_pid(path: Path) -> int | None:
    """Return the process that listens on the helper's socket; None: no process does."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    return int(struct.unpack("3i", credentials)[0])


class _Child:
    """One process that is kept running, bound to this one (`parent`)."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        own_session: bool,
        sockets: Sequence[socket.socket] = (),
        is_watched: bool = False,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """``is_watched``: it sends signs of life, and is killed when it hangs."""
        self._environment = environment
        self._is_watched = is_watched
        self._command = list(command)
        self._own_session = own_session
        self._sockets = sockets
        self._process: subprocess.Popen[bytes] | None = None
        self._heartbeat: Monitor | None = None
        self._not_before = 0.0
        self.is_superseded = False

    def look(self) -> None:
        """Start it if it is not running, its pause is over, and no newer broker has followed it."""
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
            held_back = RELOAD if self._is_watched else frozenset[signal.Signals]()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, held_back)  # a child inherits it
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
    addresses: Addresses,
    *,
    state_dir: Path,
    helper_socket: Path | None,
    helper_state_dir: Path,
    arguments: Sequence[str],
) -> int:
    """Keep a broker running with ``arguments``, and a helper if there is a socket for one.

    Returns the exit status once the Hub is gone or ends this service.
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
            helper.look()
        broker.look()
        time.sleep(_LOOK_S)
    # The Hub gives its services 5 s: the helper, which waits for no other process, gets SIGTERM first.
    pid = None
    if asked_to_stop and os.getppid() == hub and helper_socket is not None:
        pid = helper_pid(helper_socket)  # one that does not listen yet ends with this process
        _signal(pid, signal.SIGTERM)
    broker.stop()
    until = time.monotonic() + _STOP_S
    while helper_socket is not None and helper_pid(helper_socket) == pid is not None:
        if time.monotonic() > until:
            log.warning("the device helper (pid %d) does not end: killing it", pid)
            _signal(pid, signal.SIGKILL)
            break
        time.sleep(_LOOK_S)
    return SUPERSEDED_STATUS if broker.is_superseded else 0


def _helper_environment(given: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in given.items()
        if name in _HELPER_NAMES or name.startswith(_HELPER_PREFIXES)
    }


def _bound(addresses: Addresses) -> list[socket.socket]:
    """Return the sockets that every broker of this process listens on; empty, after a pause: not yet."""
    try:
        sockets = Sockets.take(addresses, os.environ)
    except StoreError as error:
        log.warning("%s", error)  # the last Hub's broker may still be there
        time.sleep(_PAUSE_S)
        return []
    return [*sockets.unix, *sockets.http, *sockets.tls]


def _signal(pid: int | None, number: signal.Signals) -> None:
    """Signal a process that may be gone; the helper leaves what sleeps asleep, however it ends."""
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
