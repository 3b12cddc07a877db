"""Report kernel and terminal activity to the broker when it changes.

| change                                                | report                     |
|-------------------------------------------------------|----------------------------|
| a cell began or ended, a kernel started or ended, or  | at once (every `SAMPLE_S`) |
| a request other than a cell begins or ends to be long |                            |
| a cell ran between two samples, a terminal changed,   | at most every `REPORT_S`   |
| or a kernel runs a cell                               |                            |
| none                                                  | every `HEARTBEAT_S`        |

A lost report is not repeated: the next one carries the current state.  While the
broker is unreachable the interval grows from `REPORT_S` to `HEARTBEAT_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jupyter_core.utils import ensure_async

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, RequestError
from jupyter_gpushare.protocol.wire import ActivityReport, KernelActivity
from jupyter_gpushare.server.kernels import MAX_KERNELS, Kernels, KernelState

SAMPLE_S = 1.0
REPORT_S = 5.0
HEARTBEAT_S = 60.0
MAX_SESSIONS = 1_000
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """One sample of kernels and terminals, comparable with the next."""

    kernels: tuple[KernelState, ...]
    terminals: int

    def states(self) -> frozenset[tuple[str, int, bool]]:
        """Return each kernel's id, its cell (-1: it runs none), and whether it handles a request."""
        return frozenset((k.id, k.cells if k.runs_cell else -1, k.handles_request) for k in self.kernels)

    def any_busy(self) -> bool:
        """Return whether any kernel runs a cell."""
        return any(kernel.runs_cell for kernel in self.kernels)


def look(kernel_manager: Any, terminal_manager: Any, kernels: Kernels) -> Seen:
    """Return what the kernels do, for all clients, and how many terminals there are.

    Of more than `MAX_KERNELS` kernels those that run a cell come first.
    """
    states = sorted(kernels.look(kernel_manager), key=lambda each: (not each.runs_cell, each.id))
    terminals = 0 if terminal_manager is None else len(terminal_manager.list())
    return Seen(tuple(states[:MAX_KERNELS]), terminals)


async def notebooks_of(session_manager: Any) -> dict[str, str]:
    """Return the path of the notebook by kernel id, where there is one."""
    sessions = await ensure_async(session_manager.list_sessions())
    return {
        str(session["kernel"]["id"]): str(session.get("path") or session.get("name") or "")
        for session in sessions[:MAX_SESSIONS]
        if session.get("kernel")
    }


def report_of(seen: Seen, names: Mapping[str, str], now: float) -> ActivityReport:
    """Return the message for the broker.

    ``names``: kernel id to the path of its notebook; ``now``: on the clock of ``seen``.
    """
    return ActivityReport(
        kernels=[
            KernelActivity(
                id=each.id,
                busy=each.runs_cell,
                handles_request=each.handles_request,
                idle_s=0.0 if each.runs_cell else max(0.0, now - each.last_cell_at),
                name=(names.get(each.id) or each.name)[:MAX_NAME],
                runs=each.cells,
            )
            for each in seen.kernels
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
                if await self._send(report_of(seen, await self._names(), now)):
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
