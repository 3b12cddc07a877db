"""From when the room of an idle session may be lent."""

from __future__ import annotations

from jupyter_gpushare.core.model import Kind, Lease, Settings, State


def idle_timeout_s(lease: Lease, settings: Settings) -> float:
    """Seconds of idleness after which the room of a session may be lent."""
    return settings.idle_timeout_s if lease.idle_timeout_s is None else lease.idle_timeout_s


def eligible_at(lease: Lease, settings: Settings) -> float | None:
    """The moment from which a running session's room may be lent; None: not while it is as it is."""
    if lease.kind is not Kind.BUILD or lease.state is not State.RUNNING or not lease.suspendable:
        return None
    if not lease.lend_now and lease.idle_since_at is None:
        return None
    idle_at = 0.0 if lease.lend_now else (lease.idle_since_at or 0.0) + idle_timeout_s(lease, settings)
    return max(idle_at, lease.keep_until_at, lease.retry_at)


def eligible(lease: Lease, settings: Settings, now: float) -> bool:
    """Whether the room of this session may be lent now, should anybody need it."""
    at = eligible_at(lease, settings)
    return at is not None and now >= at


def warn_at(lease: Lease, settings: Settings) -> float | None:
    """The moment from which its owner should know, if somebody waits for room."""
    at = eligible_at(lease, settings)
    return None if at is None else at - min(300.0, idle_timeout_s(lease, settings) / 3)
