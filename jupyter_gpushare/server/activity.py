"""Report kernel and terminal activity to the broker when it changes.

| change                                                | report                     |
|-------------------------------------------------------|----------------------------|
| a cell began or ended, a kernel started or ended, or  | at the next sample         |
| a request other than a cell became long or ended      | (every `SAMPLE_S`)         |
| a cell ran between two samples, a terminal changed,   | at most every `REPORT_S`   |
| or a kernel runs a cell                               |                            |
| none                                                  | every `HEARTBEAT_S`        |

A lost report is not repeated: the next one has the current state.  While the broker is
unreachable, the interval grows from `REPORT_S` to `HEARTBEAT_S`.
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
class Sample:
    """The state of all kernels and terminals at one moment, comparable with a later one."""

    kernels: tuple[KernelState, ...]
    terminals: int
    ended: tuple[Ended, ...] = ()
    ends_in_s: Mapping[str, float] = field(default_factory=dict, compare=False)

    def states(self) -> frozenset[tuple[str, int, bool]]:
        """Return each kernel's id, the number of its running cell (-1: none), and whether a request runs."""
        return frozenset((k.id, k.cells if k.runs_cell else -1, k.handles_request) for k in self.kernels)

    def any_busy(self) -> bool:
        """Return whether any kernel runs a cell."""
        return any(kernel.runs_cell for kernel in self.kernels)


def take_sample(kernel_manager: Any, terminal_manager: Any, kernels: Kernels, ends: Ends) -> Sample:
    """Return the states of the kernels, the recent ends of kernels, and the number of terminals.

    Of more than `MAX_KERNELS` kernels, those that run a cell are preferred.
    """
    states = sorted(kernels.sample(kernel_manager), key=lambda each: (not each.runs_cell, each.id))
    terminals = 0 if terminal_manager is None else len(terminal_manager.list())
    ended = ends.sample(kernel_manager)
    return Sample(tuple(states[:MAX_KERNELS]), terminals, ended, ends.ends_in_s())


async def notebooks_of(session_manager: Any) -> dict[str, str]:
    """Return the paths of the notebooks by kernel id."""
    sessions = await ensure_async(session_manager.list_sessions())
    return {
        str(session["kernel"]["id"]): str(session.get("path") or session.get("name") or "")
        for session in sessions[:MAX_SESSIONS]
        if session.get("kernel")
    }


def report_of(
    sample: Sample, names: Mapping[str, str], now: float, reported: Sample | None = None
) -> ActivityReport:
    """Return the message for the broker.

    ``names`` has the paths of notebooks by kernel id; ``now`` is on the clock of ``sample``; ``reported``
    is the last sample that the broker accepted.
    """
    reported_ends = () if reported is None else reported.ended
    return ActivityReport(
        kernels=[
            KernelActivity(
                id=each.id,
                busy=each.runs_cell,
                handles_request=each.handles_request,
                idle_s=0.0 if each.runs_cell else max(0.0, now - each.last_cell_at),
                name=(names.get(each.id) or each.name)[:MAX_NAME],
                runs=each.cells,
                ends_in_s=sample.ends_in_s.get(each.id),
            )
            for each in sample.kernels
        ],
        terminals=sample.terminals,
        ended=[
            KernelEnd(
                id=each.id,
                how=each.how,
                ago_s=max(0.0, now - each.at),
                name=names.get(each.id, "")[:MAX_NAME],
                code=each.code,
            )
            for each in sample.ended
            if each not in reported_ends
        ],
    )


def is_due(sample: Sample, reported: Sample | None, since_s: float) -> bool:
    """Return whether to send a report, ``since_s`` after ``reported`` was sent (see the module's table)."""
    if reported is None or since_s >= HEARTBEAT_S:
        return True
    if sample.states() != reported.states() or set(sample.ended) - set(reported.ended):
        return True
    if sample.ends_in_s.keys() != reported.ends_in_s.keys():
        return True
    return since_s >= REPORT_S and (sample != reported or sample.any_busy())


class Reporter:
    """Takes a sample every `SAMPLE_S`, and reports it when a report is due."""

    def __init__(
        self,
        client: BrokerClient,
        take_sample: Callable[[], Sample],
        names: Callable[[], Awaitable[Mapping[str, str]]],
        log: logging.Logger,
    ) -> None:
        self._client = client
        self._take_sample = take_sample
        self._names = names
        self._log = log
        self._refusal_logged = False
        self._notebooks: Mapping[str, str] = {}  # also of kernels that have just ended

    async def run(self) -> None:
        """Report activity until cancelled."""
        reported: Sample | None = None
        reported_at = 0.0
        pause_s = 0.0
        while True:
            sample = self._take_sample()
            now = time.monotonic()
            if now - reported_at >= pause_s and is_due(sample, reported, now - reported_at):
                known = {each.id for each in sample.kernels} | {each.id for each in sample.ended}
                names = {**self._notebooks, **await self._names()}
                self._notebooks = {id_: name for id_, name in names.items() if id_ in known}
                if await self._send(report_of(sample, self._notebooks, now, reported)):
                    reported, pause_s = sample, 0.0
                else:
                    reported, pause_s = None, min(max(2 * pause_s, REPORT_S), HEARTBEAT_S)
                reported_at = now
            await asyncio.sleep(SAMPLE_S)

    async def _send(self, report: ActivityReport) -> bool:
        """Send a report; return whether the broker accepted it.  Only the first of its refusals is logged."""
        try:
            await self._client.post("servers/activity", report, type(None))
        except BrokerUnavailable:
            return False  # `watch` logs the outage
        except RequestError as error:
            if not self._refusal_logged:
                self._log.warning("gpushare: the broker refuses activity reports: %s", error)
                self._refusal_logged = True
            return False
        self._refusal_logged = False
        return True
