"""From when the room of an idle session may be lent.

Fixed: after so many seconds of idleness.  Adaptive: by how likely the owner is
to come back just now.  Lending too early makes a cell wait; waiting wastes what
the session holds.  Per second of waiting the waste is ``gpus``, and the chance
that waiting spares a cell its delay is the rate of return; so the room is lent
when

    rate of return  <=  gpus / price_gpu_s

where the price says how many idle GPU-seconds one undelayed cell is worth.

The rate is estimated from the session's own past.  Pauses are heavy-tailed: the
longer one has lasted, the longer it will (Pareto), so that the rate after t
seconds is 1 / (y t), where y is the mean of log(pause / `_SHORT_S`) over the
pauses that were not short (Hill's estimator).  It is learned with less weight
for what is long ago, and begins at what is usual; after a long cell the owner
tends to stay away for longer.  Short pauses between cells teach nothing about
it and are never worth a suspension.

The constants were fitted to the pauses of 337 notebook sessions (Adobe, June
2021); sessions of one half do as well with the constants of the other half.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log1p

from jupyter_gpushare.core.model import Kind, Lease, Settings, State

# At this price 7.4 % of those sessions' cells are delayed, and 94.4 % of their idle GPU-hours can be lent.
PRICE_GPU_S = 42_700.0

# Pauses up to this are short, and no timeout is shorter.
_SHORT_S = 600.0
# No timeout is longer.
_MOST_S = 4 * 3600.0
# What is usual: the mean log of pauses, counted as so many pauses of its own.
_USUAL, _USUAL_COUNT = 1.7, 3.0
# What an observed pause still weighs one pause later: half after 30.
_FADING = 0.5 ** (1 / 30)
# By how much the mean log grows with the log of the last cell's minutes, and for how it is shrunk.
_BASE, _OWN, _AFTER_CELL = 0.17, 0.68, 0.24


@dataclass(frozen=True, slots=True)
class Past:
    """What a session's pauses taught so far."""

    count: float = 0.0  # of pauses that were not short, faded
    log_sum: float = 0.0  # of their lengths over `_SHORT_S`, faded
    busy_s: float = 0.0  # the last cell (or cells without a pause) ran for so long

    def after(self, pause_s: float, busy_s: float) -> Past:
        """What is known after one more pause and the work that followed it."""
        if pause_s <= _SHORT_S:
            return Past(self.count, self.log_sum, busy_s)
        return Past(self.count * _FADING + 1.0, self.log_sum * _FADING + log(pause_s / _SHORT_S), busy_s)


def adaptive_timeout_s(past: Past, gpus: float, price_gpu_s: float = PRICE_GPU_S) -> float:
    """Return the seconds of idleness after which the room of a session with this past may be lent."""
    own = (past.log_sum + _USUAL * _USUAL_COUNT) / (past.count + _USUAL_COUNT)
    mean_log = _BASE + _OWN * own + _AFTER_CELL * log1p(past.busy_s / 60)
    return min(_MOST_S, max(_SHORT_S, price_gpu_s / (gpus * mean_log)))


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
