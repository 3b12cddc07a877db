"""Identify a process by pid, start time and boot id, because pids are reused.

`PidCheckedSpawner` keeps a `LocalProcessSpawner` correct when the Hub restarts.  The
stock class mistakes any process with the stored pid for the user's server, and signals it.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any, Self

from traitlets.config import LoggingConfigurable

from jupyter_gpushare import procfs

if TYPE_CHECKING:
    from jupyterhub.spawner import LocalProcessSpawner as _SpawnerBase
else:
    _SpawnerBase = LoggingConfigurable  # the spawner itself may not be the base of a mixin

ENVIRON_S = 1.0
# The first and last port that the kernel gives to sockets without a port of their own (ip(7)).
_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_TRIES = 100
# The ports returned last: servers that start at the same time get different ones.
_recent_ports: deque[int] = deque(maxlen=1_000)
_STATE_KEY = "gpushare_process"
_ENVIRON_BYTES = 2 << 20  # the maximum that execve(2) takes: a quarter of the default stack limit


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies one process, and no earlier or later process with the same pid."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the identity of the process that has this pid now; None if there is none."""
        started_ticks = procfs.start_ticks(pid) if pid > 0 else -1
        return cls(pid, started_ticks, procfs.boot_id()) if started_ticks >= 0 else None

    def alive(self) -> bool:
        """Return whether this process runs (a zombie does not)."""
        return procfs.is_running(self.pid, self.start_ticks) and self.boot_id == procfs.boot_id()

    def signal(self, number: int) -> bool:
        """Send a signal to this process; return False if it has ended.

        Raises:
            PermissionError: the process belongs to another user.
        """
        return self.alive() and procfs.send_signal(self.pid, self.start_ticks, number)


def started_for(pid: int, user: str, server: str) -> bool:
    """Return whether the environment of a process names this user and server.

    The environment is in the process's own memory, and a process can block its readers for ever.  So a
    process whose environment cannot be read within `ENVIRON_S` does not count as the server.
    """
    found: list[bytes] = []

    def read() -> None:
        found.extend(procfs.read(pid, "environ", _ENVIRON_BYTES).split(b"\0"))

    reader = threading.Thread(target=read, name="environ", daemon=True)
    reader.start()
    reader.join(ENVIRON_S)
    named = {f"JUPYTERHUB_USER={user}".encode(), f"JUPYTERHUB_SERVER_NAME={server}".encode()}
    return named <= set(found)


def free_port() -> int:
    """Return a free port below the kernel's ephemeral ports; 0 if none was found.

    The stock class picks an ephemeral port, which the server binds seconds later.  A kernel of another
    server may have it by then, and the Hub would wait for a server that cannot start.
    """
    first_ephemeral = int(_EPHEMERAL_PORTS.read_text(encoding="ascii").split()[0])
    for _ in range(_TRIES if first_ephemeral > _FIRST_PORT else 0):
        port = random.randrange(_FIRST_PORT, first_ephemeral)  # noqa: S311
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("", port))
            if port not in _recent_ports:
                _recent_ports.append(port)
                return port
    return 0


class JobGrace(_SpawnerBase):
    """Mixin in front of a spawner of local processes that gives a training job its grace period."""

    # Seconds from SIGTERM to the signals of the base class; 0: only those.
    stop_grace_s: float = 0.0

    async def stop(self, now: bool = False) -> None:
        """Stop the server; a job gets SIGTERM and its grace period first."""
        if self.stop_grace_s and not now and await self.poll() is None:
            await self._signal(signal.SIGTERM)
            await self.wait_for_death(self.stop_grace_s)
        await super().stop(now)


class PidCheckedSpawner(JobGrace):
    """Mixin in front of `LocalProcessSpawner` that never adopts or signals another process."""

    # From the spawner class that this one is combined with.
    pid: int
    port: int
    proc: Popen[bytes] | None

    _process_identity: ProcessIdentity | None = None

    async def start(self) -> Any:
        """Start the server and store the identity of its process; return its address."""
        if self.port == 0:
            self.port = free_port()
        address = await super().start()
        self._process_identity = ProcessIdentity.of(self.pid)
        return address

    def get_state(self) -> dict[str, Any]:
        """Return the state that the Hub stores, with the identity of the process."""
        state: dict[str, Any] = super().get_state()
        if self._process_identity is not None:
            state[_STATE_KEY] = [
                self._process_identity.pid,
                self._process_identity.start_ticks,
                self._process_identity.boot_id,
            ]
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the state that the Hub stored; a process with another identity is not the server."""
        super().load_state(state)
        match state.get(_STATE_KEY):
            case [int(pid), int(start_ticks), str(boot_id)] if pid == self.pid:
                self._process_identity = ProcessIdentity(pid, start_ticks, boot_id)
            case _ if self.pid and started_for(self.pid, self.user.name, self.name):
                # The server was started before this class was configured.
                self._process_identity = ProcessIdentity.of(self.pid)
            case _:
                self._process_identity = None

    def clear_state(self) -> None:
        """Forget the process."""
        super().clear_state()
        self._process_identity = None

    async def poll(self) -> int | None:
        """Return the exit status; None while the server's process runs."""
        if self.proc is not None:
            status: int | None = await super().poll()  # a child keeps its pid until it is reaped
            return status
        if self._process_identity is not None and self._process_identity.alive():
            return None
        self.clear_state()
        return 0

    async def _signal(self, sig: int) -> bool:
        if self.proc is not None and self.pid > 0:
            signalled: bool = await super()._signal(sig)
            return signalled
        return self._process_identity is not None and self._process_identity.signal(sig)

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        """Return the function that a new process runs first: it resets SIGINT, then runs the site's own."""
        inner = super().make_preexec_fn(name)

        def preexec() -> None:
            # A Hub that a script starts in the background ignores SIGINT, and its children inherit this.
            # Every stop would then take `interrupt_timeout`.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            inner()

        return preexec
