"""Estimate when waiting jobs start: a range, from replays of running and waiting work.

Durations of jobs are unknown; those of ended jobs are known.  Three futures are
replayed (`core.replay`): every job takes the first quartile, the median, or the
third quartile of comparable jobs.  For a running job only ended jobs count that
took longer than it has run.  With fewer than `LEAST` samples there is no
estimate.

Busy sessions are taken to stay busy, suspended ones to stay suspended, and no
new lease to come: the range is about the work that is there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf

from jupyter_gpushare.core.model import HOLDS_CAPACITY, WHOLE_GPU, Cluster, Kind, Lease, State
from jupyter_gpushare.core.order import attained_gpu_s, gpus
from jupyter_gpushare.core.replay import Replay, Watcher

# Fewer ended jobs than this say nothing.
LEAST = 10
QUARTILES = (25, 50, 75)
# Beyond it an estimate is of no use.
HORIZON_S = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds until a lease starts: ``likely_s``, between ``low_s`` and ``high_s``."""

    low_s: float
    likely_s: float
    high_s: float


def estimates(
    cluster: Cluster,
    now: float,
    durations_s: Sequence[float],
    *,
    most_events: int = 2_000,
) -> Mapping[str, Estimate]:
    """Return the estimates of waiting jobs, by id.

    ``durations_s``: durations of ended jobs.  ``most_events`` bounds the work per
    future; a job that does not start within it, or within `HORIZON_S`, in each
    of them gets no estimate.
    """
    samples = sorted(durations_s)
    waiting = [x for x in cluster.leases if _waits(x)]
    if len(samples) < LEAST or not waiting:
        return {}
    futures = [_starts(cluster, now, samples, percent, most_events) for percent in QUARTILES]
    found = {}
    for lease in waiting:
        moments = sorted(starts[lease.id] - now for starts in futures if lease.id in starts)
        if len(moments) == len(QUARTILES):
            found[lease.id] = Estimate(*moments)
    return found


def _waits(lease: Lease) -> bool:
    waits = lease.state is State.PENDING or lease.state is State.SUSPENDED
    return waits and lease.kind is Kind.TRAIN and not lease.cancelled


class _Starts(Watcher):
    """Notes when each lease first starts, and ends the replay with the last."""

    replay: Replay

    def __init__(self, waiting: int) -> None:
        self.at: dict[str, float] = {}
        self._left = waiting

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        if before is None or not _waits(before) or after.state not in HOLDS_CAPACITY or after.id in self.at:
            return
        self.at[after.id] = now
        self._left -= 1
        self.replay.stopped = not self._left


def _starts(
    cluster: Cluster, now: float, samples: Sequence[float], percent: int, most_events: int
) -> Mapping[str, float]:
    watcher = _Starts(sum(map(_waits, cluster.leases)))
    replay = Replay(cluster, now=now, watcher=watcher)
    watcher.replay = replay
    for lease in cluster.leases:
        left_s = inf
        if lease.kind is Kind.TRAIN:
            left_s = remaining_s(
                attained_gpu_s(lease, now) / max(gpus(lease), 1 / WHOLE_GPU), samples, percent
            )
        replay.adopt(lease, left_s)
    replay.run(now + HORIZON_S, most_events=most_events)
    return watcher.at


def remaining_s(ran_s: float, samples: Sequence[float], percent: float) -> float:
    """Percentile ``percent`` of the remaining seconds of ended jobs that took longer than ``ran_s``.

    ``samples`` ascend.  A job that outlasts them all is taken to be in its middle.
    """
    longer = samples[bisect_right(samples, ran_s) :]
    if not longer:
        return ran_s
    return longer[max(0, ceil(len(longer) * percent / 100) - 1)] - ran_s
