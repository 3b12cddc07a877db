"""The order of the jobs inside one project, and of build sessions.

Jobs sort by `level` first: by priority, then jobs of users who are behind
(`fairshare`) if the order preempts, then by the group in the site's order
(`Settings.order`).  If the order preempts, a waiting job may preempt running jobs of
a later level.  `ORDERS` holds one object per order of a site; a simulation may use
another (`model.JobOrder`):

============  =========================================================  ========
order         next job                                                   preempts
============  =========================================================  ========
`PROGRESS`    least remaining work of jobs that report progress, least   yes
              attained service of the others (`LeastRemaining`)
`Order.LAS`   least attained service, in queues (`LeastAttained`)        yes
`Order.FIFO`  first come first served; the first job that does not fit   no
              blocks the jobs behind it
`BACKFILL`    first come first served; a job that does not fit is        no
              bypassed, for at most ``max_bypass_s``
============  =========================================================  ========

Under every order, a job that has waited for ``starvation_guard_s`` without a
break *starves*: it precedes all jobs of its project, whatever their priority.
Once it runs, no job of its project preempts it for the minimum run time, which
doubles at each further turn of this kind (`undisturbed_until`).  With a preemptive
order the guard needs a minimum run time; without one, starving jobs would preempt
each other endlessly.

Attained service is stored up to `Lease.attained_at` and extrapolated while the
job runs; `served` stores it when the job stops.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf, nextafter, sqrt
from types import MappingProxyType

from jupyter_gpushare.core.measure import MIN_GPU_S, rounded
from jupyter_gpushare.core.model import WHOLE_GPU, JobOrder, Lease, Order, Settings, State

Level = tuple[float, bool, float]  # negated priority, whether it is not preferred (`fairshare`), group
Rank = tuple[Level, bool, bool, float, str]

# The level of jobs that have waited for longer than the starvation guard.
STARVED: Level = (-inf, False, -1.0)
# The minimum remaining work that the order assumes for an unmeasured job past the last LAS threshold.
# Measured on jittered copies of Philly traces (docs/benchmarks-archive.md).
UNMEASURED_GPU_S = 3e5
# The maximum number of minimum run times that the loss of a stopped job counts for.
MAX_LOST = 4.0
# Attained service below this counts as zero: event times are floats.
_EPSILON_GPU_S = 1e-3


def session_rank(lease: Lease) -> tuple[int, float, str]:
    """Return the sort key of build sessions: priority, then first come first served."""
    return -lease.priority, lease.queued_at, lease.id


def gpus(lease: Lease) -> float:
    """Return the number of GPUs that the lease holds or requests."""
    return (lease.held_milli or lease.size.fraction_milli) * lease.size.device_count / WHOLE_GPU


def attained_gpu_s(lease: Lease, now: float) -> float:
    """Return the GPU-seconds that a job has received until ``now``."""
    if lease.state is not State.RUNNING or lease.attained_at is None:
        return lease.attained_gpu_s
    return lease.attained_gpu_s + gpus(lease) * max(0.0, now - lease.attained_at)


def is_measured(lease: Lease, attained: float) -> bool:
    """Return whether the measured remaining work of a job counts at ``attained`` GPU-seconds."""
    return lease.left_gpu_s is not None and attained + _EPSILON_GPU_S < lease.trusted_until_gpu_s


def is_waiting(lease: Lease) -> bool:
    """Return whether a job waits for capacity, pending or suspended."""
    return lease.state is State.PENDING or lease.state is State.SUSPENDED


class LeastAttained(JobOrder):
    """Discretized two-dimensional least attained service (Tiresias, NSDI'19).

    The group is the queue: the number of thresholds that the attained GPU-seconds
    have reached.  Inside a queue, running jobs keep running.  Waiting jobs that ran in
    it come first, the last to stop before the others; the rest follow in the order in
    which they entered the queue.
    """

    __slots__ = ()

    def thresholds(self, settings: Settings) -> Sequence[float]:
        """Return the GPU-seconds at which a job enters the next queue, ascending."""
        return settings.las_thresholds_gpu_s

    def group(self, lease: Lease, now: float, settings: Settings) -> float:
        return _reached(attained_gpu_s(lease, now), self.thresholds(settings))

    def place(self, lease: Lease, settings: Settings) -> tuple[float, bool, float]:
        if not lease.attained_gpu_s:
            return 0.0, True, lease.queued_at
        thresholds = self.thresholds(settings)
        queue = _reached(lease.attained_gpu_s, thresholds)
        start = thresholds[queue - 1] if queue else 0.0
        if lease.attained_gpu_s - start > _EPSILON_GPU_S:
            return queue, False, -lease.waits_since_at
        return queue, True, lease.queued_at

    def entered_at(self, lease: Lease, now: float, settings: Settings) -> float:
        if lease.attained_at is None or lease.state is not State.RUNNING:
            return lease.queued_at
        thresholds = self.thresholds(settings)
        queue = _reached(attained_gpu_s(lease, now), thresholds)
        if queue == _reached(lease.attained_gpu_s, thresholds):
            return lease.queued_at
        return lease.attained_at + (thresholds[queue - 1] - lease.attained_gpu_s) / gpus(lease)

    def leaves_at(self, lease: Lease, now: float, settings: Settings) -> float | None:
        if lease.state is not State.RUNNING or lease.attained_at is None:
            return None
        thresholds = self.thresholds(settings)
        queue = _reached(attained_gpu_s(lease, now), thresholds)
        if queue == len(thresholds):
            return None
        return lease.attained_at + (thresholds[queue] - lease.attained_gpu_s) / gpus(lease)

    def gain_gpu_s(self, lease: Lease, now: float, settings: Settings) -> float:
        ends = self.thresholds(settings)
        queue = _reached(lease.attained_gpu_s, ends)
        return ends[queue] - lease.attained_gpu_s if queue < len(ends) else inf


class LeastRemaining(LeastAttained):
    """Least remaining work of jobs whose progress is measured, least attained service of the others.

    The group is a number of GPU-seconds, 0 in the first LAS queue.  After that queue:

    * A measured job has its remaining work (`measure.rounded`).
    * A job that has run for longer than it reported has at least its attained service (`_overdue`).
    * Any other job has the lower threshold of its queue.  From the last LAS threshold on this is
      at least `UNMEASURED_GPU_S`, and it doubles with the attained service.

    The largest group that a job reaches decides when it ends.  That is at least its total work:
    at the start if its reports are true, at the end if it reports too little or nothing.  So
    neither silence nor a lie gains much.
    """

    __slots__ = ()

    def thresholds(self, settings: Settings) -> Sequence[float]:
        return _doubling(settings.las_thresholds_gpu_s)

    def group(self, lease: Lease, now: float, settings: Settings) -> float:
        attained, thresholds = attained_gpu_s(lease, now), self.thresholds(settings)
        queue = _reached(attained, thresholds)
        if not queue:
            return 0.0
        if lease.left_gpu_s is not None:
            return lease.left_gpu_s if is_measured(lease, attained) else _overdue(lease, attained)
        is_long = queue >= len(settings.las_thresholds_gpu_s)
        return max(UNMEASURED_GPU_S, thresholds[queue - 1]) if is_long else rounded(thresholds[queue - 1])

    def place(self, lease: Lease, settings: Settings) -> tuple[float, bool, float]:
        group = self.group(lease, 0.0, settings)
        if group and lease.left_gpu_s is not None:
            return group, False, -lease.waits_since_at
        _, is_new, at = LeastAttained.place(self, lease, settings)
        return group, is_new, at

    def leaves_at(self, lease: Lease, now: float, settings: Settings) -> float | None:
        at, attained = lease.attained_at, attained_gpu_s(lease, now)
        by_queue = lease.left_gpu_s is None or not _reached(attained, self.thresholds(settings))
        if by_queue or at is None or lease.state is not State.RUNNING:
            return LeastAttained.leaves_at(self, lease, now, settings)
        measured = is_measured(lease, attained)
        until = lease.trusted_until_gpu_s if measured else _doubles_at(lease, attained)
        return at + (until - lease.attained_gpu_s) / gpus(lease)

    def gain_gpu_s(self, lease: Lease, now: float, settings: Settings) -> float:
        if is_measured(lease, lease.attained_gpu_s):
            return lease.left_gpu_s or MIN_GPU_S
        if lease.left_gpu_s is not None and _reached(lease.attained_gpu_s, self.thresholds(settings)):
            return _doubles_at(lease, lease.attained_gpu_s) - lease.attained_gpu_s
        return LeastAttained.gain_gpu_s(self, lease, now, settings)


def _overdue(lease: Lease, attained: float) -> float:
    """Return the group of a job that has run for longer than it reported.

    It is the attained service times the factor by which that exceeds the reported work.
    """
    reported = max(lease.trusted_until_gpu_s, MIN_GPU_S)
    return rounded((attained + _EPSILON_GPU_S) ** 2 / reported)


def _doubles_at(lease: Lease, attained: float) -> float:
    """Return the attained service at which `_overdue` grows."""
    reported = max(lease.trusted_until_gpu_s, MIN_GPU_S)
    return sqrt(max(MIN_GPU_S, 2 * _overdue(lease, attained)) * reported)


@lru_cache(maxsize=16)
def _doubling(thresholds: tuple[float, ...]) -> tuple[float, ...]:
    """Return the LAS thresholds, then `UNMEASURED_GPU_S` doubled up to beyond the longest possible job."""
    doubled = (UNMEASURED_GPU_S * 2.0**n for n in range(1, 40))
    return *thresholds, *(x for x in doubled if x > max(thresholds, default=0.0))


def _reached(attained: float, thresholds: Sequence[float]) -> int:
    """Return the number of thresholds that ``attained`` GPU-seconds have reached."""
    return bisect_right(thresholds, attained + _EPSILON_GPU_S)


ORDERS: Mapping[Order, JobOrder] = MappingProxyType(
    {
        Order.PROGRESS: LeastRemaining(preempts=True),
        Order.LAS: LeastAttained(preempts=True),
        Order.FIFO: JobOrder(strict=True),
        Order.BACKFILL: JobOrder(bounds_bypass=True),
    }
)


def order_of(settings: Settings) -> JobOrder:
    """Return the rules of the configured order."""
    return settings.order if isinstance(settings.order, JobOrder) else ORDERS[settings.order]


def queue_of(attained: float, settings: Settings) -> int:
    """Return the LAS queue of a job with ``attained`` GPU-seconds: the number of thresholds reached."""
    return _reached(attained, settings.las_thresholds_gpu_s)


def served(lease: Lease, now: float, settings: Settings) -> Lease:
    """Return a job with its attained service at ``now`` and the time at which it entered its group."""
    entered_at = order_of(settings).entered_at(lease, now, settings)
    return replace(lease, attained_gpu_s=attained_gpu_s(lease, now), attained_at=now, queued_at=entered_at)


def has_guard(settings: Settings) -> bool:
    """Return whether the starvation guard is in force."""
    bounded = settings.min_run_s > 0 or not order_of(settings).preempts
    return settings.starvation_guard_s is not None and bounded


def is_starved(lease: Lease, now: float, settings: Settings) -> bool:
    """Return whether a waiting job has waited for longer than the starvation guard."""
    return _has_waited(lease, now, settings) and is_waiting(lease) and has_guard(settings)


def _has_waited(lease: Lease, at: float, settings: Settings) -> bool:
    """Return whether the last wait of a job had reached the starvation guard at ``at``."""
    guard_s = settings.starvation_guard_s
    return guard_s is not None and at >= lease.waits_since_at + guard_s


def with_turn(lease: Lease, granted_at: float, settings: Settings) -> Lease:
    """Return a job that starts on capacity granted at ``granted_at``, with its `Lease.turns` updated."""
    starved = _has_waited(lease, granted_at, settings) and has_guard(settings)
    return replace(lease, turns=lease.turns + 1) if starved else lease


def share_run_s(settings: Settings) -> float:
    """Return the seconds for which a job keeps borrowed GPUs before another project's share takes them.

    Lags are made up over ``fairness_horizon_s``, so no share needs the GPUs sooner.
    """
    return max(settings.min_run_s, settings.fairness_horizon_s or 0.0)


def undisturbed_until(lease: Lease, settings: Settings) -> float:
    """Return the time until which no job of its project preempts a running job."""
    starved = lease.turns > 1 and _has_waited(lease, lease.granted_at, settings)
    return lease.granted_at + (_turn_s(lease.turns, settings) if starved else settings.min_run_s)


def _turn_s(number: int, settings: Settings) -> float:
    """Return the seconds for which a job runs undisturbed in turn ``number``, counted from 1."""
    return settings.min_run_s * 2.0 ** max(0, number - 1)


def is_bypass_over(lease: Lease, now: float, settings: Settings) -> bool:
    """Return whether capacity is reserved for a waiting job: it was bypassed for too long or starves."""
    wait_s = settings.max_bypass_s if order_of(settings).bounds_bypass else None
    return (wait_s is not None and now >= lease.waits_since_at + wait_s) or is_starved(lease, now, settings)


def long_waits(settings: Settings) -> list[float]:
    """Return the waits, in seconds, after which a job is treated differently, ascending."""
    waits = [settings.max_bypass_s] if order_of(settings).bounds_bypass else []
    waits += [settings.starvation_guard_s] if has_guard(settings) else []
    return sorted(wait_s for wait_s in waits if wait_s is not None)


def level(lease: Lease, now: float, settings: Settings, *, preferred: bool = False) -> Level:
    """Return the sort key of levels; a waiting job may preempt running jobs of a later level.

    ``preferred``: the job comes first because its user is behind (`fairshare`); only an order that
    preempts uses it.
    """
    rules = order_of(settings)
    if rules.preempts and is_starved(lease, now, settings):
        return STARVED
    return -lease.priority, not (preferred and rules.preempts), rules.group(lease, now, settings)


def rank(lease: Lease, now: float, settings: Settings, *, preferred: bool = False) -> Rank:
    """Return the sort key of a project's waiting jobs; suspended jobs precede pending ones of their level.

    A suspended job comes first because its state takes host memory.
    """
    if is_starved(lease, now, settings):
        return STARVED, True, True, lease.waits_since_at, lease.id
    rules = order_of(settings)
    group, is_new, at = rules.place(lease, settings)
    level = -lease.priority, not (preferred and rules.preempts), group
    return level, lease.state is State.PENDING, is_new, at, lease.id


def seniority(lease: Lease, now: float, settings: Settings) -> float:
    """Return the sort key of the running jobs of a level: the time since which a job runs in it."""
    return max(lease.granted_at, order_of(settings).entered_at(lease, now, settings))


def moved(leases: Iterable[Lease], id: str, beside: str, *, behind: bool) -> list[Lease]:
    """Return the waiting jobs that change when job ``id`` moves to the place before or behind ``beside``.

    ``leases`` are the jobs of one level that have not run, including both.  The jobs exchange their
    times, so no other job gets an earlier or a later place.
    """
    places = sorted(leases, key=lambda x: (x.queued_at, x.id))
    by_id = {x.id: x for x in places}
    ids = [x.id for x in places if x.id != id]
    ids.insert(ids.index(beside) + behind, id)
    changed, last_at = [], -inf
    for name, place in zip(ids, places, strict=True):
        # With equal times the ids would decide.
        last_at = place.queued_at if place.queued_at > last_at else nextafter(last_at, inf)
        after = replace(by_id[name], queued_at=last_at, waits_since_at=place.waits_since_at)
        if after != by_id[name]:
            changed.append(after)
    return changed


def gain_gpu_s(lease: Lease, now: float, settings: Settings) -> float:
    """Return the GPU-seconds that a preemption for a waiting job gains before the job ends or is demoted.

    The work that a stopped job without a checkpoint repeats is not a gain.
    """
    if is_starved(lease, now, settings):
        return _turn_s(lease.turns + 1, settings) * gpus(lease)
    again = not lease.survival.has_checkpoint and lease.state is State.PENDING
    return order_of(settings).gain_gpu_s(lease, now, settings) - (lease.attained_gpu_s if again else 0.0)


def lost_s(lease: Lease, now: float) -> float:
    """Return the seconds of its GPUs that a job loses by a stop.

    They are counted from its last start or resume; 0 with a checkpoint of its own.
    """
    return 0.0 if lease.survival.has_checkpoint else now - lease.granted_at
