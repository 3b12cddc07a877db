"""Report kernel and terminal activity to the broker when it changes.

| change                                                | report                     |
|-------------------------------------------------------|----------------------------|
| a kernel became busy or idle, started or ended        | at once (every `SAMPLE_S`) |
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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jupyter_gpushare.client import BrokerClient
from jupyter_gpushare.errors import BrokerUnavailable, RequestError
from jupyter_gpushare.protocol.wire import ActivityReport, KernelActivity

SAMPLE_S = 1.0
REPORT_S = 5.0
HEARTBEAT_S = 60.0
MAX_KERNELS = 200
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """One sample of kernels and terminals, comparable with the next."""

    kernels: tuple[tuple[str, bool, datetime, str], ...]  # id, busy, last activity, kernel's name
    terminals: int

    def states(self) -> frozenset[tuple[str, bool]]:
        """Each kernel's id and whether it computes."""
        return frozenset((id_, busy) for id_, busy, _, _ in self.kernels)

    def any_busy(self) -> bool:
        """Whether any kernel computes."""
        return any(busy for _, busy, _, _ in self.kernels)


def look(kernel_manager: Any, terminal_manager: Any) -> Seen:
    """Return the state that the kernel manager tracks, with the activity of all clients.

    Of more than `MAX_KERNELS` kernels the busy ones come first.
    """
    kernels = []
    for id_ in kernel_manager.list_kernel_ids():
        kernel = kernel_manager.get_kernel(id_)
        busy = getattr(kernel, "execution_state", "") == "busy"
        last = getattr(kernel, "last_activity", None) or datetime.now(UTC)
        kernels.append((str(id_), busy, last, str(getattr(kernel, "kernel_name", ""))))
    kernels.sort(key=lambda seen: (not seen[1], seen[0]))
    terminals = 0 if terminal_manager is None else len(terminal_manager.list())
    return Seen(tuple(kernels[:MAX_KERNELS]), terminals)


def report_of(seen: Seen, names: Mapping[str, str], now: datetime) -> ActivityReport:
    """Return the message for the broker; ``names``: kernel id to the path of its notebook."""
    return ActivityReport(
        kernels=[
            KernelActivity(
                id=id_,
                busy=busy,
                idle_s=0.0 if busy else max(0.0, (now - last).total_seconds()),
                name=(names.get(id_) or kernel_name)[:MAX_NAME],
            )
            for id_, busy, last, kernel_name in seen.kernels
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
