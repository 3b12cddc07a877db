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
from dataclasses import dataclass, field
from typing import Any

from jupyter_core.utils import ensure_async

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, RequestError
from jupyter_gpushare.protocol.wire import ActivityReport, KernelActivity, KernelEnd
from jupyter_gpushare.server.ends import Ended, Ends
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
    ended: tuple[Ended, ...] = ()
    ends_in_s: Mapping[str, float] = field(default_factory=dict, compare=False)

    def states(self) -> frozenset[tuple[str, int, bool]]:
        """Return each kernel's id, its cell (-1: it runs none), and whether it handles a request."""
        return frozenset((k.id, k.cells if k.runs_cell else -1, k.handles_request) for k in self.kernels)

    def any_busy(self) -> bool:
        """Return whether any kernel runs a cell."""
        return any(kernel.runs_cell for kernel in self.kernels)


def look(kernel_manager: Any, terminal_manager: Any, kernels: Kernels, ends: Ends) -> Seen:
    """Return what the kernels do, for all clients, how they ended, and how many terminals there are.

    Of more than `MAX_KERNELS` kernels those that run a cell come first.
    """
    states = sorted(kernels.look(kernel_manager), key=lambda each: (not each.runs_cell, each.id))
    terminals = 0 if terminal_manager is None else len(terminal_manager.list())
    ended = ends.look(kernel_manager)
    return Seen(tuple(states[:MAX_KERNELS]), terminals, ended, ends.ends_in_s())


async def notebooks_of(session_manager: Any) -> dict[str, str]:
    """Return the path of the notebook by kernel id, where there is one."""
    sessions = await ensure_async(session_manager.list_sessions())
    return {
        str(session["kernel"]["id"]): str(session.get("path") or session.get("name") or "")
        for session in sessions[:MAX_SESSIONS]
        if session.get("kernel")
    }


def report_of(
    seen: Seen, names: Mapping[str, str], now: float, reported: Seen | None = None
) -> ActivityReport:
    """Return the message for the broker.

    ``names``: kernel id to the path of its notebook; ``now``: on the clock of ``seen``;
    ``reported``: what the broker was told last.
    """
    told = () if reported is None else reported.ended
    return ActivityReport(
        kernels=[
            KernelActivity(
                id=each.id,
                busy=each.runs_cell,
                handles_request=each.handles_request,
                idle_s=0.0 if each.runs_cell else max(0.0, now - each.last_cell_at),
                name=(names.get(each.id) or each.name)[:MAX_NAME],
                runs=each.cells,
                ends_in_s=seen.ends_in_s.get(each.id),
            )
            for each in seen.kernels
        ],
        terminals=seen.terminals,
        ended=[
            KernelEnd(
                id=each.id,
                how=each.how,
                ago_s=max(0.0, now - each.at),
                name=names.get(each.id, "")[:MAX_NAME],
                code=each.code,
            )
            for each in seen.ended
            if each not in told
        ],
    )


def is_due(seen: Seen, reported: Seen | None, since_s: float) -> bool:
    """Return whether to report, ``since_s`` after ``reported`` went out (see the module's text)."""
    if reported is None or since_s >= HEARTBEAT_S:
        return True
    if seen.states() != reported.states() or set(seen.ended) - set(reported.ended):
        return True
    if seen.ends_in_s.keys() != reported.ends_in_s.keys():
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
        self._named: Mapping[str, str] = {}  # notebooks, also of kernels that have just ended

    async def run(self) -> None:
        """Report activity until cancelled: each change, and again at intervals."""
        reported: Seen | None = None
        reported_at = 0.0
        pause_s = 0.0
        while True:
            seen = self._look()
            now = time.monotonic()
            if now - reported_at >= pause_s and is_due(seen, reported, now - reported_at):
                known = {each.id for each in seen.kernels} | {each.id for each in seen.ended}
                named = {**self._named, **await self._names()}
                self._named = {id_: name for id_, name in named.items() if id_ in known}
                if await self._send(report_of(seen, self._named, now, reported)):
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
