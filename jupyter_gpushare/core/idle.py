"""When an idle session's devices may be lent.

A fixed timeout lends them after ``idle_timeout_s`` without activity.  An adaptive
timeout depends on how likely the owner is to return.  Lending too early delays a
cell; waiting wastes the session's capacity.  Each second of waiting wastes ``gpus``
GPU-seconds, and spares a cell its delay with the probability that the rate of
return gives.  So the devices are lent when

    rate of return  <=  gpus / price_gpu_s

where the price is the number of idle GPU-seconds that one undelayed cell is worth.

Pauses are heavy-tailed (Pareto): after t seconds the rate of return is k / t.
An owner with many recent breaks returns soon; after a long cell the owner stays
away for longer:

    k  =  0.38 (1 + breaks) ** 0.4 / (1 + minutes of the last cell) ** 0.2

A break is a pause that was not short; older breaks count less.  Short pauses,
between one cell and the next, do not predict breaks and are never worth a
suspension.

The constants are fitted to the pauses of 337 notebook sessions (Adobe, June 2021).
docs/benchmarks-archive.md shows how well they fit other sessions, and why more
features would hardly help.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2

from jupyter_gpushare.core.model import Kind, Lease, Settings, State

# At this price 7.5 % of the cells of those sessions are delayed, and 94.5 % of their idle GPU-hours can be
# lent.
PRICE_GPU_S = 46_500.0

# The longest short pause, and the minimum timeout.
_SHORT_S = 600.0
# The maximum timeout.
_MAX_S = 4 * 3600.0
# The age at which a break counts half.
_HALF_LIFE_S = 24 * 3600.0
# The constants of the rate of return.
_RATE, _BREAKS_POWER, _CELL_POWER = 0.38, 0.4, 0.2


@dataclass(frozen=True, slots=True)
class PauseHistory:
    """The past breaks of a session, and its last work."""

    breaks: float = 0.0  # pauses that were not short, each decayed by its age
    busy_s: float = 0.0  # duration of the last cell, or of the last cells without a pause between them

    def after(self, pause_s: float, busy_s: float) -> PauseHistory:
        """Return the history after one more pause and the work that followed it."""
        breaks = _faded(self.breaks, pause_s) + (pause_s > _SHORT_S)
        return PauseHistory(_faded(breaks, busy_s), busy_s)


def _faded(breaks: float, age_s: float) -> float:
    return breaks * exp2(-age_s / _HALF_LIFE_S)


def adaptive_timeout_s(past: PauseHistory, gpus: float, price_gpu_s: float = PRICE_GPU_S) -> float:
    """Return the idle timeout, in seconds, of a session with this history that holds ``gpus`` GPUs."""
    rate: float = _RATE * (1 + past.breaks) ** _BREAKS_POWER / (1 + past.busy_s / 60) ** _CELL_POWER
    return min(_MAX_S, max(_SHORT_S, price_gpu_s * rate / gpus))


def idle_timeout_s(lease: Lease, settings: Settings) -> float:
    """Return the idle timeout of a session in seconds: its own, else the site's."""
    return settings.idle_timeout_s if lease.idle_timeout_s is None else lease.idle_timeout_s


def notice_s(lease: Lease, settings: Settings) -> float:
    """Return the seconds between the notice to a session's owner and the suspension of the session.

    It is at most a third of the idle timeout.
    """
    own_s = settings.notice_s if lease.notice_s is None else lease.notice_s
    return min(own_s, idle_timeout_s(lease, settings) / 3)


def eligible_at(lease: Lease, settings: Settings) -> float | None:
    """Return the time from which a session may be suspended to lend its devices.

    None: it may not be suspended in its present state.
    """
    if lease.kind is not Kind.BUILD or lease.state is not State.RUNNING or not lease.suspendable:
        return None
    if not lease.lend_now and lease.idle_since_at is None:
        return None
    idle_at = 0.0 if lease.lend_now else (lease.idle_since_at or 0.0) + idle_timeout_s(lease, settings)
    return max(idle_at, lease.keep_until_at, lease.retry_at)


def eligible(lease: Lease, settings: Settings, now: float) -> bool:
    """Return whether this session may be suspended now to lend its devices."""
    at = eligible_at(lease, settings)
    return at is not None and now >= at


def warn_at(lease: Lease, settings: Settings) -> float | None:
    """Return the time from which the owner is warned while a lease waits for capacity.

    It is None when `eligible_at` is.
    """
    at = eligible_at(lease, settings)
    return None if at is None else at - min(300.0, idle_timeout_s(lease, settings) / 3)
