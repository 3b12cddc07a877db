"""When an idle session's devices may be lent.

Fixed: after ``idle_timeout_s`` without activity.  Adaptive: by how likely the
owner is to return.  Lending too early delays a cell; waiting wastes what the
session holds.  Per second of waiting the waste is ``gpus``, and the chance that
waiting spares a cell its delay is the rate of return; so the devices are lent
when

    rate of return  <=  gpus / price_gpu_s

where the price says how many idle GPU-seconds one undelayed cell is worth.

Pauses are heavy-tailed (Pareto): after t seconds the rate of return is k / t.
An owner with many breaks lately returns soon; after a long cell the owner
stays away for longer:

    k  =  0.38 (1 + breaks) ** 0.4 / (1 + minutes of the last cell) ** 0.2

A break is a pause that was not short; it counts the less the longer ago it
was.  Short pauses, between one cell and the next, say nothing about breaks and
are never worth a suspension.

The constants are fitted to the pauses of 337 notebook sessions (Adobe, June
2021); docs/benchmarks-archive.md says how well they do elsewhere, and why more features
would hardly do better.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp2

from jupyter_gpushare.core.model import Kind, Lease, Settings, State

# At this price 7.5 % of those sessions' cells are delayed, and 94.5 % of their idle GPU-hours can be lent.
PRICE_GPU_S = 46_500.0

# Pauses up to this are short, and no timeout is shorter.
_SHORT_S = 600.0
# No timeout is longer.
_MOST_S = 4 * 3600.0
# After so long a break counts half.
_HALF_LIFE_S = 24 * 3600.0
# The rate of return as above.
_RATE, _BREAKS_POWER, _CELL_POWER = 0.38, 0.4, 0.2


@dataclass(frozen=True, slots=True)
class PauseHistory:
    """Breaks of a session so far, and its last work."""

    breaks: float = 0.0  # pauses that were not short, each decayed by the time since
    busy_s: float = 0.0  # the last cell (or cells without a pause) ran for so long

    def after(self, pause_s: float, busy_s: float) -> PauseHistory:
        """Return the history after one more pause and the work that followed it."""
        breaks = _faded(self.breaks, pause_s) + (pause_s > _SHORT_S)
        return PauseHistory(_faded(breaks, busy_s), busy_s)


def _faded(breaks: float, age_s: float) -> float:
    return breaks * exp2(-age_s / _HALF_LIFE_S)


def adaptive_timeout_s(past: PauseHistory, gpus: float, price_gpu_s: float = PRICE_GPU_S) -> float:
    """Return the idle timeout, in seconds, of a session with this history and so many GPUs."""
    rate: float = _RATE * (1 + past.breaks) ** _BREAKS_POWER / (1 + past.busy_s / 60) ** _CELL_POWER
    return min(_MOST_S, max(_SHORT_S, price_gpu_s * rate / gpus))


def idle_timeout_s(lease: Lease, settings: Settings) -> float:
    """Idle timeout of a session, in seconds: its own, else the site's."""
    return settings.idle_timeout_s if lease.idle_timeout_s is None else lease.idle_timeout_s


def notice_s(lease: Lease, settings: Settings) -> float:
    """Seconds between the notice to a session's owner and its suspension, at most a third of its timeout."""
    own_s = settings.notice_s if lease.notice_s is None else lease.notice_s
    return min(own_s, idle_timeout_s(lease, settings) / 3)


def eligible_at(lease: Lease, settings: Settings) -> float | None:
    """Time from which a running session may be suspended to lend its devices; None: not in this state."""
    if lease.kind is not Kind.BUILD or lease.state is not State.RUNNING or not lease.suspendable:
        return None
    if not lease.lend_now and lease.idle_since_at is None:
        return None
    idle_at = 0.0 if lease.lend_now else (lease.idle_since_at or 0.0) + idle_timeout_s(lease, settings)
    return max(idle_at, lease.keep_until_at, lease.retry_at)


def eligible(lease: Lease, settings: Settings, now: float) -> bool:
    """Whether this session may be suspended now to lend its devices."""
    at = eligible_at(lease, settings)
    return at is not None and now >= at


def warn_at(lease: Lease, settings: Settings) -> float | None:
    """Time from which the owner is warned while a lease waits for capacity; None: not in this state."""
    at = eligible_at(lease, settings)
    return None if at is None else at - min(300.0, idle_timeout_s(lease, settings) / 3)
