"""Identify a process by pid, start time and boot id, because pids are reused.

`PidCheckedSpawner` keeps a `LocalProcessSpawner` correct across restarts of the
Hub: the stock class takes any process with the remembered pid for the user's
server, and signals it.
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
# ip(7): first and last port of connections and of sockets that name none.
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_TRIES = 100
# The newest that were given: servers that start side by side get different ones.
_given: deque[int] = deque(maxlen=1_000)
_STATE_KEY = "gpushare_process"
_ENVIRON_BYTES = 2 << 20  # a quarter of the default stack limit: the most that execve(2) takes


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, distinct from every other that had or will have its pid."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The identity of the process that has this pid now; None when there is none."""
        started_ticks = procfs.start_ticks(pid) if pid > 0 else -1
        return cls(pid, started_ticks, procfs.boot_id()) if started_ticks >= 0 else None

    def alive(self) -> bool:
        """Whether this process runs (a zombie does not)."""
        return procfs.is_running(self.pid, self.start_ticks) and self.boot_id == procfs.boot_id()

    def signal(self, number: int) -> bool:
        """Send a signal to this process; False when it has ended.

        Raises:
            PermissionError: it belongs to another user.
        """
        return self.alive() and procfs.send_signal(self.pid, self.start_ticks, number)


def started_for(pid: int, user: str, server: str) -> bool:
    """Return whether the environment of a process names this user and server.

    It lies in the process's own memory, and a process can keep its readers waiting for ever: one that
    does not answer within `ENVIRON_S` is not taken for the server.
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
    """Return a free port below those that the kernel gives to connections; 0: there is none.

    The stock class takes one of the kernel's, and binds it seconds later: a kernel of another
    server may have it by then, and the Hub waits for a server that cannot start.
    """
    beyond = int(_KERNELS_PORTS.read_text(encoding="ascii").split()[0])
    for _ in range(_TRIES if beyond > _FIRST_PORT else 0):
        port = random.randrange(_FIRST_PORT, beyond)  # noqa: S311
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("", port))
            if port not in _given:
                _given.append(port)
                return port
    return 0


class JobGrace(_SpawnerBase):
    """Mixin in front of a class of local processes: a training job is stopped with its grace period."""

    # Seconds from the first signal to the next stronger one; 0: the delays of the base class.
    stop_grace_s: float = 0.0

    async def stop(self, now: bool = False) -> None:
        """Stop the server; a job gets its grace period before stronger signals."""
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
        """Start the server and remember which process it is; returns its address."""
        if self.port == 0:
            self.port = free_port()
        address = await super().start()
        self._process_identity = ProcessIdentity.of(self.pid)
        return address

    def get_state(self) -> dict[str, Any]:
        """Return what the Hub stores, with the identity of the process."""
        state: dict[str, Any] = super().get_state()
        if self._process_identity is not None:
            state[_STATE_KEY] = [
                self._process_identity.pid,
                self._process_identity.start_ticks,
                self._process_identity.boot_id,
            ]
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what the Hub stored; a process of another identity is not taken for the server."""
        super().load_state(state)
        match state.get(_STATE_KEY):
            case [int(pid), int(start_ticks), str(boot_id)] if pid == self.pid:
                self._process_identity = ProcessIdentity(pid, start_ticks, boot_id)
            case _ if self.pid and started_for(self.pid, self.user.name, self.name):
                # A server from before this class was configured.
                self._process_identity = ProcessIdentity.of(self.pid)
            case _:
                self._process_identity = None

    def clear_state(self) -> None:
        """Forget the process."""
        super().clear_state()
        self._process_identity = None

    async def poll(self) -> int | None:
        """Return the exit status; None while the server's own process runs."""
        if self.proc is not None:
            status: int | None = await super().poll()  # a child keeps its pid until it is reaped
            return status
        if self._process_identity is not None and self._process_identity.alive():
            return None
        self.clear_state()
        return 0

    async def _signal(self, sig: int) -> bool:
        if self.proc is not None and self.pid > 0:
            there: bool = await super()._signal(sig)
            return there
        return self._process_identity is not None and self._process_identity.signal(sig)

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        """Return what the new process runs first: the site's own, then signals as by default."""
        inner = super().make_preexec_fn(name)

        def preexec() -> None:
            # Children inherit an ignored SIGINT (a Hub started in the background of a script);
            # then every stop would take `interrupt_timeout`.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            inner()

        return preexec
