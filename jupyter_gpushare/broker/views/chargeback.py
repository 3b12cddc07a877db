"""GPU-hours for chargeback, by user, project, model of the GPU, and day or month."""

from __future__ import annotations

import re
from datetime import date

from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.rows import MAX_USAGE_DAYS
from jupyter_gpushare.broker.state.usage import Amounts, UsageQuery
from jupyter_gpushare.errors import InvalidRequest
from jupyter_gpushare.protocol import wire

# Rows of one answer.
MAX_ROWS = 50_000
_BY = ("user", "project", "gpu", "day", "month")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_HOUR_S = 3600.0


def query(
    today: str, *, by: str = "", since: str = "", until: str = "", user: str = "", project: str = ""
) -> UsageQuery:
    """Return the query of a request; by default this month by user, project, model and month.

    Raises:
        InvalidRequest: a day that is none, or an unknown or repeated column in ``by``.
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


async def usage(registry: Registry, asked: UsageQuery) -> wire.Usage:
    """Return the use that is asked for, unfinished use included.

    Raises:
        InvalidRequest: it has more than `MAX_ROWS` rows.
        StoreError: the database cannot be read.
    """
    sums, now, until = registry.usage.sums, registry.clock(), registry.iso_now()
    recent = [*sums.values(), *registry.usage.open(registry.leases.values(), now, until)]
    # All of the days in memory are there whole.
    first_in_memory = min((use.day for use in sums.values()), default="9999-12-31")
    found = dict(await registry.store.usage(asked, first_in_memory, MAX_ROWS + 1))
    for use in recent:
        if (group := asked.group(use)) is not None:
            found[group] = found.get(group, Amounts()).plus(Amounts.of(use))
    found = {group: amounts for group, amounts in found.items() if any(amounts)}
    if len(found) > MAX_ROWS:
        raise InvalidRequest("these are more than %1 rows: ask for fewer days or columns", MAX_ROWS)
    total = Amounts()
    for amounts in found.values():
        total = total.plus(amounts)
    return wire.Usage(
        since=asked.since,
        until=asked.until,
        by=list(asked.by),
        rows=[_row(dict(zip(asked.by, group, strict=True)), found[group]) for group in sorted(found)],
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
