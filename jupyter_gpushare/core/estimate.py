"""Estimates that people see: ranges of when jobs start and end, and when GPUs become free.

The work that a job has left is, in this order: what its measured progress says
(`measure`); the median of the ended jobs of its project that took longer than it has
run; the same of all ended jobs.  Fewer than `LEAST` ended jobs say nothing: while a
running job may end at any time, only the ends of measured running jobs are told.

One future (`future`) gives a number of seconds for every question.  `BANDS` says by
which factors outcomes differ from that number in the middle 80 % of the cases, on
jittered copies of the Philly traces (docs/benchmarks-archive.md).  A question with a wider
band has no answer: when a job in a later group of the order starts, when a job
without measured progress ends, when GPUs become free while such a job runs, and
every start where several projects or users share the GPUs (new jobs of another
project move the shares, and no future of the jobs that are there knows them).

The future counts GPUs.  Whether a job starts at all once those before it have ended is
asked of the rules themselves (`explain.obstacle`): none is told a start that never comes.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf
from types import MappingProxyType

from jupyter_gpushare.core.explain import obstacle
from jupyter_gpushare.core.future import replayed
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    WHOLE_GPU,
    Cluster,
    Device,
    Kind,
    Lease,
    Settings,
    State,
    Why,
)
from jupyter_gpushare.core.order import attained_gpu_s, gpus, is_waiting, order_of, rank
from jupyter_gpushare.core.scheduler import BLOCKS_NOTHING

# Fewer ended jobs than this say nothing.
LEAST = 10
# Factors count from here: seconds do not matter where minutes are told.
OFFSET_S = 60.0


class Basis(enum.StrEnum):
    """What the error of an estimate depends on."""

    START = "start"  # of a job in the first group of the order, and of a session
    START_OF_GANG = "start of gang"
    END_OF_RUNNING = "end of running"  # with measured progress, like the next
    END_OF_WAITING = "end of waiting"


Band = tuple[float, float]
# Logarithms of outcome / prediction, both plus `OFFSET_S`, between which 80 % of the outcomes are:
# with one project and user, and where several share the GPUs.
BANDS: Mapping[Basis, tuple[Band, Band | None]] = MappingProxyType(
    {
        Basis.START: ((-0.8, 0.5), None),
        Basis.START_OF_GANG: ((-0.3, 0.9), None),
        Basis.END_OF_RUNNING: ((-0.4, 0.6), (-1.05, 0.75)),
        Basis.END_OF_WAITING: ((-0.3, 1.35), (-0.6, 1.45)),
    }
)
# A wider range is not told; below `OFFSET_S` all is the same.
WIDEST = 8.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds until something happens: in 80 % of the cases between ``low_s`` and ``high_s``."""

    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is known of the work of jobs."""

    left_gpu_s: Mapping[str, float] = field(default_factory=dict)  # by lease, of measured jobs
    ran_s: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of ended jobs, by project
    limit_s: Mapping[str, float] = field(default_factory=dict)  # by lease, until its maximum run time


@dataclass(frozen=True, slots=True)
class Forecast:
    """Estimates by lease, all from one future; leases without one are missing."""

    starts: Mapping[str, Estimate] = field(default_factory=dict)  # of waiting jobs
    ends: Mapping[str, Estimate] = field(default_factory=dict)  # of jobs, their pauses included
    # When so many GPUs are free at once, ascending; None: not known well enough.
    free: tuple[tuple[Estimate | None, float], ...] = ()

    def free_in(self, count: float) -> Estimate | None:
        """Return when ``count`` GPUs are free at once for a session; None: not known well enough."""
        return next((at for at, free in self.free if free >= count - 1 / WHOLE_GPU), None)


def forecast(cluster: Cluster, now: float, work: Work, *, most_events: int = 5_000) -> Forecast:
    """Return the estimates for ``cluster``; ``most_events`` bounds the work.

    No new work comes in the future, and sessions keep what they hold.
    """
    cluster = replace(cluster, leases=tuple(_sized(x, cluster.devices) for x in cluster.leases))
    jobs = [x for x in cluster.leases if x.kind is Kind.TRAIN and not x.cancelled]
    samples = _Samples(work)
    left = {x.id: found for x in jobs if (found := samples.left_gpu_s(x, now)) is not None}
    future = replayed(cluster, now, left, most_events=most_events)
    is_shared = len({x.project for x in jobs}) > 1 or bool(cluster.user_levels)
    running = [x.id for x in jobs if x.state in HOLDS_CAPACITY]
    # A session that waits for its start takes the next GPU, and keeps it for as long as it likes.
    is_open = any(id not in left for id in running) or any(map(_is_new_session, cluster.leases))
    possible = _Possible(cluster, now)
    starts: dict[str, Estimate] = {}
    ends: dict[str, Estimate] = {}
    for lease in jobs:
        start, end = future.starts_at.get(lease.id), future.ends_at.get(lease.id)
        if is_open and is_waiting(lease):
            continue
        if start is not None and _is_first(lease, now, cluster.settings):
            basis = Basis.START_OF_GANG if gpus(lease) > 1 else Basis.START
            estimate = around(start - now, basis, is_shared=is_shared)
            if estimate is not None and possible.starts(lease):
                starts[lease.id] = estimate
        if end is not None and lease.id in work.left_gpu_s:
            basis = Basis.END_OF_WAITING if is_waiting(lease) else Basis.END_OF_RUNNING
            if (estimate := around(end - now, basis, is_shared=is_shared)) is not None:
                ends[lease.id] = estimate
    # What is free now and is not offered lies in parts, or is claimed by a session that sleeps.
    free = [
        (around(at - now, Basis.START, is_shared=is_shared) if at > now else None, count)
        for at, count in future.free_at
    ]
    # The first of many jobs of unknown work ends at any time: the range would be too wide.
    is_known = all(id in work.left_gpu_s for id in running)
    return Forecast(starts, ends, tuple(free) if is_known else ())


def _sized(lease: Lease, devices: Sequence[Device]) -> Lease:
    """Return a lease that says which part of a GPU it gets, although it asks for memory."""
    if lease.held_milli or not lease.size.memory_bytes:
        return lease
    parts = (device.demand_milli(lease.size) for device in devices if device.usable)
    return replace(lease, held_milli=min(parts, default=WHOLE_GPU))


def around(seconds: float, basis: Basis, *, is_shared: bool = False) -> Estimate | None:
    """Return the range around a prediction; None: it is too wide to be told.

    ``is_shared``: several projects share the GPUs, or users decide in one (`fairshare`).
    """
    band = BANDS[basis][is_shared]
    if band is None:
        return None
    low, high = ((seconds + OFFSET_S) * exp(end) - OFFSET_S for end in band)
    return Estimate(max(0.0, low), high) if high <= WIDEST * max(low, OFFSET_S) else None


def _is_new_session(lease: Lease) -> bool:
    return lease.kind is Kind.BUILD and lease.state is State.PENDING


def _is_first(lease: Lease, now: float, settings: Settings) -> bool:
    return order_of(settings).group(lease, now, settings) <= 0


class _Possible:
    """Which jobs start at all once the others have ended."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        sessions = tuple(x for x in cluster.leases if x.kind is Kind.BUILD)
        self._cluster = replace(cluster, leases=sessions)
        self._now = now
        self._is_strict = order_of(cluster.settings).strict
        self._waiting = [x for x in cluster.leases if x.kind is Kind.TRAIN and is_waiting(x)]
        self._known: dict[Lease, Why | None] = {}  # by what jobs have in common that start or fail alike

    def starts(self, job: Lease) -> bool:
        """Return whether a job starts; in a strict order those before it must start or block nothing."""
        if self._obstacle(job) is not None:
            return False
        obstacles = map(self._obstacle, self._before(job) if self._is_strict else ())
        return all(why is None or why in BLOCKS_NOTHING for why in obstacles)

    def _before(self, job: Lease) -> Iterator[Lease]:
        """Yield the waiting jobs that come before ``job`` in its project."""
        place = rank(job, self._now, self._cluster.settings)
        for other in self._waiting:
            if other.project == job.project and rank(other, self._now, self._cluster.settings) < place:
                yield other

    def _obstacle(self, job: Lease) -> Why | None:
        alike = Lease(
            id=job.id if job.devices else "",
            project=job.project,
            kind=job.kind,
            size=job.size,
            state=job.state,
            devices=job.devices,
            held_milli=job.held_milli,
            survival=job.survival,
            suspendable=job.suspendable,
            consolidate=job.consolidate,
            borrow=job.borrow,
            saved_bytes=job.saved_bytes,
        )
        if alike not in self._known:
            self._known[alike] = obstacle(self._cluster, alike, self._now)
        return self._known[alike]


class _Samples:
    """Run times of ended jobs, ascending."""

    def __init__(self, work: Work) -> None:
        self._measured = work.left_gpu_s
        self._limits = work.limit_s
        self._of_all = sorted(seconds for ran_s in work.ran_s.values() for seconds in ran_s)
        self._of = {name: sorted(ran_s) for name, ran_s in work.ran_s.items() if len(ran_s) >= LEAST}

    def left_gpu_s(self, lease: Lease, now: float) -> float | None:
        """Return the GPU-seconds that a job has left; None: nothing is known."""
        left = self._measured.get(lease.id)
        if left is None:
            left = self._median_gpu_s(lease, now)
        return None if left is None else min(left, self._limits.get(lease.id, inf) * gpus(lease))

    def _median_gpu_s(self, lease: Lease, now: float) -> float | None:
        samples = self._of.get(lease.project, self._of_all)
        if len(samples) < LEAST:
            return None
        count = max(gpus(lease), 1 / WHOLE_GPU)
        return count * median_left_s(attained_gpu_s(lease, now) / count, samples)


def median_left_s(ran_s: float, samples: Sequence[float]) -> float:
    """Return the median of the remaining seconds of ended jobs that took longer than ``ran_s``.

    ``samples`` ascend.  A job that outlasts them all is taken to be in its middle.
    """
    first = bisect_right(samples, ran_s)
    longer = len(samples) - first
    return samples[first + longer // 2] - ran_s if longer else ran_s
