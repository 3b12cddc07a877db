"""Shortest remaining service first: needs durations, which only a trace has."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from jupyter_gpushare.core.model import JobOrder, Lease, Settings
from jupyter_gpushare.core.order import attained_gpu_s, gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob(Lease):
    """A job with a known duration."""

    duration_s: float


class ShortestRemaining(JobOrder):
    """Order by remaining GPU-seconds; a job of unknown duration comes last."""

    __slots__ = ()

    def group(self, lease: Lease, now: float, settings: Settings) -> float:
        if not isinstance(lease, TraceJob):
            return inf
        return lease.duration_s * gpus(lease) - attained_gpu_s(lease, now)

    def place(self, lease: Lease, settings: Settings) -> tuple[float, bool, float]:
        return self.group(lease, 0.0, settings), False, lease.queued_at

    def gain_gpu_s(self, lease: Lease, now: float, settings: Settings) -> float:
        return self.group(lease, now, settings) if isinstance(lease, TraceJob) else 0.0


SRTF = ShortestRemaining(preempts=True, drifts=True)
