"""Times for users and for the database: ISO 8601, UTC, milliseconds (``2026-11-22T03:05:09.123Z``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

# A time of another day is shown without a day within `_NEAR`, and with a weekday within `_THIS_WEEK`.
_NEAR, _THIS_WEEK = timedelta(hours=12), timedelta(days=6)


def iso(moment: datetime) -> str:
    """Return an aware time as text; the texts sort like the times."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def exact(moment: datetime | None) -> str:
    """Return a time with microseconds, for comparisons; without a zone it is UTC, and None returns ""."""
    if moment is None:
        return ""
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return aware.isoformat(timespec="microseconds").replace("+00:00", "Z")


def is_whole_second(moment: str) -> bool:
    """Return whether a text of `exact` has no fraction of a second."""
    return moment.endswith(".000000Z")


def is_same(one: str, other: str) -> bool:
    """Return whether two texts of `exact` are the same time.

    Some databases truncate (MariaDB) or round (MySQL) to seconds, so a whole second equals times within 1 s.
    """
    if is_whole_second(one) == is_whole_second(other) or not (one and other):
        return one == other
    return seconds_between(one, other) + seconds_between(other, one) <= 1.0


def iso_now() -> str:
    """Return the current time as text."""
    return iso(datetime.now(UTC))


def before(at: str, **ago: float) -> str:
    """Return the time before ``at`` by ``days=``, ``hours=``, ... of `timedelta`."""
    return iso(datetime.fromisoformat(at) - timedelta(**ago))


def seconds_between(start: str, end: str) -> float:
    """Return the seconds from ``start`` to ``end``; 0 if ``end`` is earlier."""
    return max(0.0, (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())


def seconds_to_midnight(at: str) -> float:
    """Return the seconds from ``at`` to the next midnight (UTC)."""
    moment = datetime.fromisoformat(at).astimezone(UTC)
    midnight = moment.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    return (midnight - moment).total_seconds()


def by_day(until: str, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield each day (UTC) of the ``seconds`` before ``until``, oldest first, with its part of them."""
    end = datetime.fromisoformat(until).astimezone(UTC)
    begin = end - timedelta(seconds=max(0.0, seconds))
    while begin < end:
        midnight = begin.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        yield begin.date().isoformat(), (min(end, midnight) - begin).total_seconds()
        begin = midnight


def clock_time(at: str, now: str = "") -> str:
    """Return a time in the time zone of this process: ``14:20``, or ``14:20:05`` if ``at`` has seconds.

    A time of another day than ``now`` (default: the current time) has its day, ``Fri 14:20`` or
    ``6 Nov 14:20``, unless it is within `_NEAR`.
    """
    moment, seen = (datetime.fromisoformat(each).astimezone() for each in (at, now or iso_now()))
    apart = abs(seen - moment)
    time = f"{moment:%H:%M:%S}" if re.search(r"T\d\d:\d\d:", at) else f"{moment:%H:%M}"
    if moment.date() == seen.date() or apart < _NEAR:
        return time
    return f"{moment:%a} {time}" if apart < _THIS_WEEK else f"{moment.day} {moment:%b} {time}"
