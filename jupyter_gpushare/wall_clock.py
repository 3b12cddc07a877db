"""Times for people and for the database: ISO 8601, UTC, milliseconds (``2026-11-22T03:05:09.123Z``)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def iso(moment: datetime) -> str:
    """Return an aware time as text, which sorts like the times."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


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
