"""Which process a pid means: numbers are used again, (start time, boot) are not.

`KnownProcess` makes a `LocalProcessSpawner` safe to restart the Hub with: the
stock one takes any process with the remembered number for the user's server,
and signals it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any, Self

from traitlets.config import LoggingConfigurable

if TYPE_CHECKING:
    from jupyterhub.spawner import LocalProcessSpawner as _Before
else:
    _Before = LoggingConfigurable  # the spawner itself may not be the base of a mixin

_STATE_KEY = "gpushare_process"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _stat(pid: int) -> tuple[str, int] | None:
    """State and start time (ticks since boot) of a process: fields 3 and 22 of proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process for all time."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return who has this number now; None: nobody."""
        found = _stat(pid)
        return cls(pid, found[1], _BOOT_ID.read_text().strip()) if found and pid > 0 else None

    def alive(self) -> bool:
        """Whether this very process runs (a zombie does not)."""
        found = _stat(self.pid)
        return (
            found is not None
            and found[0] not in "ZX"
            and found[1] == self.start_ticks
            and self.boot_id == _BOOT_ID.read_text().strip()
        )

    def signal(self, number: int) -> bool:
        """Send a signal to this very process; False when it has ended.

        Raises:
            PermissionError: it belongs to another user.
        """
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            # The descriptor holds whoever has the number; then it is certain who that is.
            if not self.alive():
                return False
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True


def started_for(pid: int, user: str, server: str) -> bool:
    """Whether a process was started as this user's server, as its environment tells."""
    try:
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"JUPYTERHUB_USER={user}".encode() in env and f"JUPYTERHUB_SERVER_NAME={server}".encode() in env


class KnownProcess(_Before):
    """Goes before `LocalProcessSpawner`; never adopts or signals a stranger."""

    # From the spawner class that this one is combined with.
    pid: int
    proc: Popen[bytes] | None

    _identity: ProcessIdentity | None = None
    # Between the first signal and the next stronger one, when longer than the class has it.
    stop_grace_s: float = 0.0

    async def start(self) -> Any:
        address = await super().start()
        self._identity = ProcessIdentity.of(self.pid)
        return address

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = super().get_state()
        if self._identity is not None:
            state[_STATE_KEY] = [self._identity.pid, self._identity.start_ticks, self._identity.boot_id]
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        match state.get(_STATE_KEY):
            case [int(pid), int(start_ticks), str(boot_id)] if pid == self.pid:
                self._identity = ProcessIdentity(pid, start_ticks, boot_id)
            case _ if self.pid and started_for(self.pid, self.user.name, self.name):
                # A server from before this class was configured.
                self._identity = ProcessIdentity.of(self.pid)
            case _:
                self._identity = None

    def clear_state(self) -> None:
        super().clear_state()
        self._identity = None

    async def poll(self) -> int | None:
        if self.proc is not None:
            status: int | None = await super().poll()  # our own child: its number is not given away
            return status
        if self._identity is not None and self._identity.alive():
            return None
        self.clear_state()
        return 0

    async def _signal(self, sig: int) -> bool:
        if self.proc is not None and self.pid > 0:
            there: bool = await super()._signal(sig)
            return there
        return self._identity is not None and self._identity.signal(sig)

    async def stop(self, now: bool = False) -> None:
        if self.stop_grace_s and not now and await self.poll() is None:
            await self._signal(signal.SIGTERM)
            await self.wait_for_death(self.stop_grace_s)
        await super().stop(now)

    def make_preexec_fn(self, name: str) -> Callable[[], None]:
        inner = super().make_preexec_fn(name)

        def preexec() -> None:
            # A Hub that was started with SIGINT ignored (in a script's background) would pass that on,
            # and every stop would take as long as `interrupt_timeout`.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            inner()

        return preexec
