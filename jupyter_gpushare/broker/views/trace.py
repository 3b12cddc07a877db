"""What ran on this site, as a trace for the simulator: ended jobs, and the work of sessions.

Users and projects are numbered in the order in which they appear, unless names are asked for;
names of jobs, servers and commands are never part of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from math import ceil
from typing import TypeVar

from jupyter_gpushare.broker.state import exports
from jupyter_gpushare.broker.state.records import BusyStretch
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import seconds_between

# The simulator tells sessions apart by a time that goes back.
_STEP_S = 0.06
# Rows that are made without a pause: about 2 ms.
_SLICE = 500

T = TypeVar("T")


class _Names:
    """Names as they are, or numbered."""

    def __init__(self, letter: str, shown: bool) -> None:
        self._letter = letter
        self._shown = shown
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        return name if self._shown else self._known.setdefault(name, f"{self._letter}{len(self._known) + 1}")


async def _in_slices(rows: Iterable[T]) -> AsyncIterator[T]:
    """Yield ``rows``; other requests are answered after every `_SLICE` of them."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % _SLICE == 0:
            await asyncio.sleep(0)


async def jobs(registry: Registry, *, names: bool) -> wire.Trace:
    """Return the newest ended jobs that ran, by the time of their submission.

    Raises:
        StoreError: the database cannot be read.
    """
    ended = await exports.ended_jobs(registry.store)
    sizes = await exports.sizes(registry.store, (job.id for job in ended if job.ran_s > 0))
    ran = [job for job in ended if job.id in sizes]
    users, projects = _Names("u", names), _Names("p", names)
    rows = []
    async for job in _in_slices(ran):
        gpus = _gpus(registry, sizes[job.id])
        rows.append(
            wire.TraceRow(
                session="",
                user=users.of(job.user),
                project=projects.of(job.project),
                num_gpu=ceil(gpus),
                gpus=gpus,
                submit_s=round(max(0.0, seconds_between(ran[0].submitted_at, job.submitted_at)), 3),
                duration_s=round(job.ran_s, 3),
            )
        )
    return wire.Trace(rows=rows, left_out=len(ended) - len(ran), since=ran[0].submitted_at if ran else "")


def _gpus(registry: Registry, size: Size) -> float:
    """Return the GPUs that a job asked for; of a memory size, its part of the devices here."""
    parts = [device.demand_milli(size) for device in registry.devices.for_planner()]
    milli = min((part for part in parts if part <= WHOLE_GPU), default=size.fraction_milli or WHOLE_GPU)
    return milli * size.device_count / WHOLE_GPU


async def cells(registry: Registry, *, names: bool) -> wire.Trace:
    """Return the newest stretches of work of sessions, session by session, the last to begin first.

    Raises:
        StoreError: the database cannot be read.
    """
    by_lease: dict[str, list[BusyStretch]] = {}
    async for stretch in _in_slices(await exports.cells(registry.store)):
        by_lease.setdefault(stretch.lease, []).append(stretch)
    sessions = [sorted(mine, key=lambda each: each.began_at) for mine in by_lease.values()]
    sessions.sort(key=lambda mine: mine[0].began_at, reverse=True)
    first = sessions[-1][0].began_at if sessions else ""
    rows = [row async for row in _in_slices(_rows(sessions, first, names=names))]
    return wire.Trace(rows=rows, left_out=0, since=first)


def _rows(sessions: list[list[BusyStretch]], first: str, *, names: bool) -> Iterable[wire.TraceRow]:
    users, projects, last_s = _Names("u", names), _Names("p", names), float("inf")
    for number, mine in enumerate(sessions, 1):
        begins_s = 0.0
        for nth, each in enumerate(mine):
            # Times begin late enough that sessions which began at once can be told apart.
            submit_s = seconds_between(first, each.began_at) + len(sessions) * _STEP_S
            submit_s = min(submit_s, last_s - _STEP_S) if nth == 0 else max(submit_s, begins_s)
            begins_s = submit_s
            yield wire.TraceRow(
                session=f"s{number}",
                user=users.of(each.user),
                project=projects.of(each.project),
                num_gpu=ceil(each.gpus),
                gpus=each.gpus,
                submit_s=round(submit_s, 3),
                duration_s=each.duration_s,
            )
        last_s = begins_s
