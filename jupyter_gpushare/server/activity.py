"""Report kernel and terminal activity to the broker when it changes.

| change                                                | report                     |
|-------------------------------------------------------|----------------------------|
| a kernel became busy or idle, started or ended, or    | at once (every `SAMPLE_S`) |
| is busy with another cell                             |                            |
| a cell ran between two samples, a terminal changed,   | at most every `REPORT_S`   |
| or a kernel is busy                                   |                            |
| none                                                  | every `HEARTBEAT_S`        |

A lost report is not repeated: the next one carries the current state.  While the
broker is unreachable the interval grows from `REPORT_S` to `HEARTBEAT_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jupyter_core.utils import ensure_async

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, RequestError
from jupyter_gpushare.protocol.wire import ActivityReport, KernelActivity

SAMPLE_S = 1.0
REPORT_S = 5.0
HEARTBEAT_S = 60.0
MAX_KERNELS = 200
MAX_SESSIONS = 1_000
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """One sample of kernels and terminals, comparable with the next."""

    # id, busy, last activity, kernel's name, how often it became busy
    kernels: tuple[tuple[str, bool, datetime, str, int], ...]
    terminals: int

    def states(self) -> frozenset[tuple[str, int]]:
        """Each kernel's id, and which of its cells it computes; -1: it is idle."""
        return frozenset((id_, runs if busy else -1) for id_, busy, _, _, runs in self.kernels)

    def any_busy(self) -> bool:
        """Whether any kernel computes."""
        return any(busy for _, busy, _, _, _ in self.kernels)


class Runs:
    """How often each kernel became busy: one cell may follow another between two samples."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def of(self, id_: str, kernel: Any) -> int:
        """Return the count of a kernel since it was first asked for."""
        if id_ not in self._counts and hasattr(kernel, "observe"):
            self._counts[id_] = int(kernel.execution_state == "busy")
            kernel.observe(lambda change: self._count(id_, change["new"]), "execution_state")
        return self._counts.get(id_, 0)

    def _count(self, id_: str, state: str) -> None:
        if state == "busy" and id_ in self._counts:
            self._counts[id_] += 1

    def keep(self, ids: Iterable[str]) -> None:
        """Forget all other kernels: they have ended."""
        self._counts = {id_: self._counts[id_] for id_ in ids if id_ in self._counts}


def look(kernel_manager: Any, terminal_manager: Any, runs: Runs) -> Seen:
    """Return the state that the kernel manager tracks, with the activity of all clients.

    Of more than `MAX_KERNELS` kernels the busy ones come first.
    """
    kernels = []
    for id_ in kernel_manager.list_kernel_ids():
        kernel = kernel_manager.get_kernel(id_)
        busy = getattr(kernel, "execution_state", "") == "busy"
        last = getattr(kernel, "last_activity", None) or datetime.now(UTC)
        name = str(getattr(kernel, "kernel_name", ""))
        kernels.append((str(id_), busy, last, name, runs.of(str(id_), kernel)))
    runs.keep(id_ for id_, *_ in kernels)
    kernels.sort(key=lambda seen: (not seen[1], seen[0]))
    terminals = 0 if terminal_manager is None else len(terminal_manager.list())
    return Seen(tuple(kernels[:MAX_KERNELS]), terminals)


async def notebooks_of(session_manager: Any) -> dict[str, str]:
    """Return the path of the notebook by kernel id, where there is one."""
    sessions = await ensure_async(session_manager.list_sessions())
    return {
        str(session["kernel"]["id"]): str(session.get("path") or session.get("name") or "")
        for session in sessions[:MAX_SESSIONS]
        if session.get("kernel")
    }


def report_of(seen: Seen, names: Mapping[str, str], now: datetime) -> ActivityReport:
    """Return the message for the broker; ``names``: kernel id to the path of its notebook."""
    return ActivityReport(
        kernels=[
            KernelActivity(
                id=id_,
                busy=busy,
                idle_s=0.0 if busy else max(0.0, (now - last).total_seconds()),
                name=(names.get(id_) or kernel_name)[:MAX_NAME],
                runs=runs,
            )
            for id_, busy, last, kernel_name, runs in seen.kernels
        ],
        terminals=seen.terminals,
    )


def is_due(seen: Seen, reported: Seen | None, since_s: float) -> bool:
    """Return whether to report, ``since_s`` after ``reported`` went out (see the module's text)."""
    if reported is None or since_s >= HEARTBEAT_S:
        return True
    if seen.states() != reported.states():
        return True
    return since_s >= REPORT_S and (seen != reported or seen.any_busy())


class Reporter:
    """Samples every `SAMPLE_S` and reports when due, until it is cancelled."""

    def __init__(
        self,
        client: BrokerClient,
        look: Callable[[], Seen],
        names: Callable[[], Awaitable[Mapping[str, str]]],
        log: logging.Logger,
    ) -> None:
        self._client = client
        self._look = look
        self._names = names
        self._log = log
        self._complained = False

    async def run(self) -> None:
        """Report activity until cancelled: each change, and again at intervals."""
        reported: Seen | None = None
        reported_at = 0.0
        pause_s = 0.0
        while True:
            seen = self._look()
            now = time.monotonic()
            if now - reported_at >= pause_s and is_due(seen, reported, now - reported_at):
                if await self._send(report_of(seen, await self._names(), datetime.now(UTC))):
                    reported, pause_s = seen, 0.0
                else:
                    reported, pause_s = None, min(max(2 * pause_s, REPORT_S), HEARTBEAT_S)
                reported_at = now
            await asyncio.sleep(SAMPLE_S)

    async def _send(self, report: ActivityReport) -> bool:
        """Return whether the report was accepted; the first of repeated refusals is logged."""
        try:
            await self._client.post("servers/activity", report, type(None))
        except BrokerUnavailable:
            return False  # `watch` logs the outage
        except RequestError as error:
            if not self._complained:
                self._log.warning("gpushare: the broker refuses activity reports: %s", error)
                self._complained = True
            return False
        self._complained = False
        return True
