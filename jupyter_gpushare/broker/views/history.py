"""History: timelines of jobs, GPU-hours for chargeback, and traces for the simulator."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from datetime import date, timedelta
from math import ceil
from typing import TypeVar

from jupyter_gpushare import messages
from jupyter_gpushare.broker.state import store
from jupyter_gpushare.broker.state.records import BusyStretch, JobRecord, UsageRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.tables import MAX_USAGE_DAYS
from jupyter_gpushare.broker.state.usage import WEEK_DAYS, Amounts, UsageQuery
from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import seconds_between


async def timeline(registry: Registry, job: JobRecord, reader: str) -> wire.JobTimeline:
    """Return all steps of a job with their reasons, oldest first, worded for ``reader``.

    Raises:
        StoreError: the database cannot be read.
    """
    moments = [_moment(job.submitted_at, "submitted", (messages.text("job.submitted"),))]
    for each in await registry.store.decisions_about(job.lease_id):
        texts = messages.to_reader(each.texts, reader)
        moments.append(_moment(each.at, each.action, texts))
    if job.started_at:
        moments.append(_moment(job.started_at, "started", (messages.text("job.started"),)))
    if job.ended_at:
        moments.append(_moment(job.ended_at, "ended", job.reason_texts))
    return wire.JobTimeline(moments=sorted(moments, key=lambda moment: moment.at))


def _moment(at: str, step: str, texts: messages.Texts) -> wire.JobMoment:
    return wire.JobMoment(at=at, what=step, sentence_texts=list(texts))


async def week(registry: Registry, user: str) -> wire.History:
    """Return a user's use and lending in the last `WEEK_DAYS` days, including unfinished use.

    Raises:
        StoreError: the database cannot be read.
    """
    until = registry.iso_now()
    today = until[:10]
    first = (date.fromisoformat(today) - timedelta(days=WEEK_DAYS - 1)).isoformat()
    now = registry.clock()
    stretches: list[UsageRecord] = [
        u for u in registry.usage.sums.values() if u.user == user and u.day >= first
    ]
    stretches += [u for u in registry.usage.open(registry.leases.values(), now, until) if u.user == user]
    by_day: dict[tuple[str, str], list[UsageRecord]] = {}
    for use in stretches:
        by_day.setdefault((use.day, use.project), []).append(use)
    days = [
        wire.DayUse(
            day=day,
            project=project,
            used_gpu_s=round(sum(use.used_gpu_s for use in uses), 1),
            lent_gpu_s=round(sum(use.lent_gpu_s for use in uses), 1),
            saved_gib_s=round(sum(use.saved_gib_s for use in uses), 1),
        )
        for (day, project), uses in sorted(by_day.items())
    ]
    return wire.History(
        days=days,
        used_gpu_s=round(sum(use.used_gpu_s for use in stretches), 1),
        lent_gpu_s=round(sum(use.lent_gpu_s for use in stretches), 1),
        saved_gib_s=round(sum(use.saved_gib_s for use in stretches), 1),
        helped_jobs=await registry.store.helped(user, first),
    )


# ---- GPU-hours for chargeback, by user, project, model of the GPU, and day or month

# Maximum rows of an answer.
MAX_ROWS = 50_000
_BY = ("user", "project", "gpu", "day", "month")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_HOUR_S = 3600.0


def query(
    today: str, *, by: str = "", since: str = "", until: str = "", user: str = "", project: str = ""
) -> UsageQuery:
    """Return the query of a request; by default, this month by user, project, model and month.

    Raises:
        InvalidRequest: a day is invalid, or ``by`` has an unknown or repeated column.
    """
    columns = tuple(filter(None, by.split(","))) or ("user", "project", "gpu", "month")
    if set(columns) - set(_BY) or len(set(columns)) < len(columns) or {"day", "month"} <= set(columns):
        raise InvalidRequest("by is a list of user, project, gpu and one of day and month, like user,month")
    return UsageQuery(
        since=_day(since or f"{today[:7]}-01", "since"),
        until=_day(until or today, "until"),
        by=columns,
        user=user or None,
        project=project or None,
    )


def _day(text: str, name: str) -> str:
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text).isoformat()
    except ValueError:
        pass
    raise InvalidRequest("%1 is a day like 2026-11-22", name)


async def usage(registry: Registry, selection: UsageQuery) -> wire.Usage:
    """Return the selected use, including unfinished use.

    Raises:
        InvalidRequest: the answer has more than `MAX_ROWS` rows.
        StoreError: the database cannot be read.
    """
    sums, now, until = registry.usage.sums, registry.clock(), registry.iso_now()
    recent = [*sums.values(), *registry.usage.open(registry.leases.values(), now, until)]
    # The sums in memory are complete for each of their days.
    first_in_memory = min((use.day for use in sums.values()), default="9999-12-31")
    found = dict(await registry.store.usage(selection, first_in_memory, MAX_ROWS + 1))
    for use in recent:
        if (group := selection.group(use)) is not None:
            found[group] = found.get(group, Amounts()).plus(Amounts.of(use))
    found = {group: amounts for group, amounts in found.items() if any(amounts)}
    if len(found) > MAX_ROWS:
        raise InvalidRequest("these are more than %1 rows: ask for fewer days or columns", MAX_ROWS)
    total = Amounts()
    for amounts in found.values():
        total = total.plus(amounts)
    return wire.Usage(
        since=selection.since,
        until=selection.until,
        by=list(selection.by),
        rows=[_row(dict(zip(selection.by, group, strict=True)), found[group]) for group in sorted(found)],
        total=_row({}, total),
        kept_days=MAX_USAGE_DAYS,
    )


def _row(group: dict[str, str], amounts: Amounts) -> wire.UsageRow:
    return wire.UsageRow(
        **group,
        held_gpu_h=_hours(amounts.used_gpu_s),
        computing_gpu_h=_hours(amounts.computing_gpu_s),
        borrowed_gpu_h=_hours(amounts.borrowed_gpu_s),
        lent_gpu_h=_hours(amounts.lent_gpu_s),
    )


def _hours(gpu_s: float) -> float:
    return round(gpu_s / _HOUR_S, 4)


# ---- traces for the simulator: ended jobs, and the work of sessions ----------
# Users and projects are numbered in the order of their appearance, unless names are
# requested.  A trace never has the names of jobs, servers or commands.

# The simulator starts a new session where the time decreases, so sessions differ by this.
_STEP_S = 0.06
# Rows built without a pause; they take about 2 ms.
_SLICE = 500

T = TypeVar("T")


class _Names:
    """Returns names unchanged, or numbers in their place."""

    def __init__(self, letter: str, shown: bool) -> None:
        self._letter = letter
        self._shown = shown
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        return name if self._shown else self._known.setdefault(name, f"{self._letter}{len(self._known) + 1}")


async def _in_slices(rows: Iterable[T]) -> AsyncIterator[T]:
    """Yield ``rows``, and let other requests run after every `_SLICE` of them."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % _SLICE == 0:
            await asyncio.sleep(0)


async def jobs(registry: Registry, *, names: bool) -> wire.Trace:
    """Return the newest ended jobs that ran, in the order of their submission.

    Raises:
        StoreError: the database cannot be read.
    """
    ended = await store.ended_jobs(registry.store)
    sizes = await store.sizes(registry.store, (job.id for job in ended if job.ran_s > 0))
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
    """Return the GPUs that a job requested; a memory size counts as its part of this site's devices."""
    parts = [device.demand_milli(size) for device in registry.devices.for_planner()]
    milli = min((part for part in parts if part <= WHOLE_GPU), default=size.fraction_milli or WHOLE_GPU)
    return milli * size.device_count / WHOLE_GPU


async def cells(registry: Registry, *, names: bool) -> wire.Trace:
    """Return the newest stretches of work, grouped by session; sessions that began last come first.

    Raises:
        StoreError: the database cannot be read.
    """
    by_lease: dict[str, list[BusyStretch]] = {}
    async for stretch in _in_slices(await store.cells(registry.store)):
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
            # The offset leaves room to shift sessions that began at the same time.
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
