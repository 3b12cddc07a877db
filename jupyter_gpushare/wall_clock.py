"""Times for people and for the database: ISO 8601, UTC, milliseconds (``2026-11-22T03:05:09.123Z``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

# Times of another day show no day within the first span, and a weekday within the second.
_NEAR, _THIS_WEEK = timedelta(hours=12), timedelta(days=6)


def iso(moment: datetime) -> str:
    """Return an aware time as text, which sorts like the times."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def exact(moment: datetime | None) -> str:
    """Return a time with its microseconds, to be compared: one without a zone is UTC, None an empty text."""
    if moment is None:
        return ""
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return aware.isoformat(timespec="microseconds").replace("+00:00", "Z")


def is_whole_second(moment: str) -> bool:
    """Return whether a text of `exact` has no part of a second."""
    return moment.endswith(".000000Z")


def is_same(one: str, other: str) -> bool:
    """Return whether two texts of `exact` are one moment.

    Some databases keep whole seconds, cut off (MariaDB) or rounded (MySQL): within 1 s of one is the same.
    """
    if is_whole_second(one) == is_whole_second(other) or not (one and other):
        return one == other
    return seconds_between(one, other) + seconds_between(other, one) <= 1.0


def iso_now() -> str:
    """Return the present time as text."""
    return iso(datetime.now(UTC))


def before(at: str, **ago: float) -> str:
    """Return the time that is so long before ``at``: ``days=``, ``hours=``, ... of `timedelta`."""
    return iso(datetime.fromisoformat(at) - timedelta(**ago))


def seconds_between(start: str, end: str) -> float:
    """Return the seconds from ``start`` to ``end``; 0 when ``end`` is earlier."""
    return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())


def seconds_to_midnight(at: str) -> float:
    """Return the seconds from ``at`` to the next midnight, UTC."""
    moment = datetime.fromisoformat(at).astimezone(UTC)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    return (midnight - moment).total_seconds()


def by_day(until: str, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield each day (UTC) of the ``seconds`` before ``until``, the oldest first, with its seconds."""
    end = datetime.fromisoformat(until).astimezone(UTC)
    begin = end - timedelta(seconds=max(0.0, seconds))
    while begin < end:
        midnight = begin.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        yield begin.date().isoformat(), (min(end, midnight) - begin).total_seconds()
        begin = midnight


def clock_time(at: str, now: str = "") -> str:
    """Return a time in the zone of this process, ``14:20``; ``14:20:05`` where ``at`` has seconds.

    A time of another day than ``now`` (empty: the present) has its day, ``Fri 14:20`` or
    ``6 Nov 14:20``, unless it is within `_NEAR`.
    """
    moment, seen = (datetime.fromisoformat(each).astimezone() for each in (at, now or iso_now()))
    apart = abs(seen - moment)
    time = f"{moment:%H:%M:%S}" if re.search(r"T\d\d:\d\d:", at) else f"{moment:%H:%M}"
    if moment.date() == seen.date() or apart < _NEAR:
        return time
    return f"{moment:%a} {time}" if apart < _THIS_WEEK else f"{moment.day} {moment:%b} {time}"
