"""How kernels ended, and the seconds until a setting of the server ends them.

A suspended kernel loses its variables if its process ends.  Only its server can tell why it ended: the
kernel's restarter reports a process that died, and a kernel that disappears when its
``cull_idle_timeout`` is over was ended by that setting.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

# Ends are kept, to be reported: this number of them, and this long.
MAX_ENDS = 100
KEPT_S = 120.0
_NEVER_S = 1e9  # this long or longer means never


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one process of a kernel."""

    id: str
    how: Literal["idle", "died", "shut_down", "restarted"]
    code: int | None  # exit code of a process that died
    at: float  # on the clock of `Ends`


@dataclass(slots=True)
class _Life:
    """One process of a kernel, since the first sample with it."""

    kernel: Any
    process: Any  # a `subprocess.Popen`, or a provisioner's equivalent
    ends_in_s: float | None = None  # at the last sample
    died: bool = False  # the kernel's restarter reported its death
    code: int | None = None  # exit code, if the process is dead and the kernel is not being shut down


class Ends:
    """Follows the processes of all kernels of a server, from sample to sample."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock, self._wall = clock, wall
        self._lives: dict[str, _Life] = {}
        self._subscribed: dict[str, Any] = {}  # kernels whose restarters report deaths
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDS)

    def sample(self, manager: Any) -> tuple[Ended, ...]:
        """Sample the kernels of a kernel manager; return the ends of the last `KEPT_S`."""
        kernels = {str(id_): manager.get_kernel(id_) for id_ in manager.list_kernel_ids()}
        now = self._clock()
        for id_, life in list(self._lives.items()):
            if how := _how_ended(life, kernels.get(id_)):
                code = life.code if how == "died" else None
                self._ended.append(Ended(id_, how, code, now))
                del self._lives[id_]
        self._subscribed = {id_: each for id_, each in self._subscribed.items() if kernels.get(id_) is each}
        for id_, kernel in kernels.items():
            if id_ not in self._subscribed and getattr(kernel, "_restarter", True) is not None:
                self._subscribed[id_] = kernel
                self._subscribe_to_deaths(id_, kernel)
            process = _process(kernel)
            if id_ not in self._lives and process is not None and _code(process) is None:
                self._lives[id_] = _Life(kernel, process)
            if (known := self._lives.get(id_)) is not None:
                known.ends_in_s = self._ends_in_s(manager, id_, kernel)
                if process is known.process and not getattr(kernel, "shutting_down", False):
                    known.code = _code(known.process)
        while self._ended and now - self._ended[0].at > KEPT_S:
            self._ended.popleft()
        return tuple(self._ended)

    def ends_in_s(self) -> dict[str, float]:
        """Return, at the last sample, the seconds until a setting may end each kernel that stays idle."""
        return {id_: life.ends_in_s for id_, life in self._lives.items() if life.ends_in_s is not None}

    def _subscribe_to_deaths(self, id_: str, kernel: Any) -> None:
        """Have a kernel's restarter report a dead process before it starts another."""

        def died() -> None:
            if (life := self._lives.get(id_)) is not None and life.kernel is kernel:
                life.died, life.code = True, _code(life.process)

        if callable(add := getattr(kernel, "add_restart_callback", None)):
            add(died, "restart")

    def _ends_in_s(self, manager: Any, id_: str, kernel: Any) -> float | None:
        """Return the seconds until the server culls a kernel; None if it never does or that is unknown."""
        try:
            seconds = self._rule_s(manager, id_, kernel)
        except (TypeError, ValueError, OverflowError):
            return None
        return None if seconds is None or not abs(seconds) < _NEVER_S else seconds

    def _rule_s(self, manager: Any, id_: str, kernel: Any) -> float | None:
        """Apply the rule of ``MappingKernelManager.cull_kernel_if_idle`` (jupyter_server 2)."""
        site_s = getattr(manager, "cull_idle_timeout", 0)
        last_activity = getattr(kernel, "last_activity", None)
        if not site_s or site_s <= 0 or last_activity is None:
            return None
        state = getattr(kernel, "execution_state", None)
        if state == "busy" and not getattr(manager, "cull_busy", False):
            return None
        pages = getattr(manager, "_kernel_connections", {}).get(id_, 0)  # `kernel_model` may be a coroutine
        if pages and not getattr(manager, "cull_connected", False):
            return None
        metadata = getattr(getattr(kernel, "kernel_spec", None), "metadata", None) or {}
        timeout_s = float(metadata.get("cull_idle_timeout", site_s))
        return timeout_s - float((self._wall() - last_activity).total_seconds())


def _how_ended(life: _Life, kernel: Any) -> Literal["idle", "died", "shut_down", "restarted", ""]:
    """Return how a process ended; empty if it runs.  ``kernel`` is the one that has its kernel id now."""
    if life.died or life.code is not None:
        return "died"
    if kernel is not life.kernel:
        return "idle" if life.ends_in_s is not None and life.ends_in_s <= 0 else "shut_down"
    process = _process(kernel)
    return "restarted" if process is not None and process is not life.process else ""


def _process(kernel: Any) -> Any:
    return getattr(getattr(kernel, "provisioner", None), "process", None)


def _code(process: Any) -> int | None:
    poll = getattr(process, "poll", None)
    code = poll() if callable(poll) else None
    if isinstance(code, Coroutine):  # from another kind of provisioner
        code.close()
    return code if isinstance(code, int) else None
