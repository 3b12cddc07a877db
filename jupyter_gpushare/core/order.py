"""Who comes first.

* Build sessions before training jobs: a person waits.
* Between projects: those below quota first, then the one that is least over
  quota for its weight (`quota.Account.turn`).
* Inside a project, `level` first: priority, then what the chosen order says.

  `Order.LAS`, discretized two-dimensional least attained service (Tiresias,
  NSDI'19): the GPU-seconds that a job has attained put it into queue 0, 1, ...
  (`Settings.las_thresholds_gpu_s`).  A job of an earlier queue may take the
  room of one of a later queue.  Inside a queue running jobs come first, the
  longest there before the others; then those that ran in this queue already,
  the last to stop first; then by the moment of entering it.  So equals do not
  swap, but for the moment of a demotion, when a running job enters its new
  queue at the end.
  A job that has waited for ``guard_s`` without a break comes before all queues
  until it runs.  Promotion alone makes jobs thrash: without a minimum run time
  there is none.

  `Order.FIFO`: first come first served; who cannot start blocks those behind.

  `Order.BACKFILL`: first come first served; who cannot start is skipped, and
  after ``skip_wait_s`` nobody takes its room any more (`plan`).

  `Order.SRTF`: the fewest GPU-seconds that are left, known in simulation only;
  preempts as LAS does.

* Inside a level: a suspended job before a waiting one (its state takes host
  memory), then by the moment of entering the queue (`Lease.queued_at`), which
  a preempted job keeps.

What a lease has attained is counted up to `Lease.attained_at`; while it runs
it grows, and nobody has to write that down before it stops (`served`).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import inf

from jupyter_gpushare.core.model import WHOLE_GPU, Lease, Order, Settings, State

Level = tuple[float, float]
Rank = tuple[Level, bool, bool, float, str]

# Before queue 0: jobs that have waited for so long that everybody else makes way.
STARVED = -1.0
# Less attained service than this is none: moments are rounded.
_NOTHING_GPU_S = 1e-3
# For so long a job that was demoted counts as new in its queue.
DEMOTED_S = 1.0


def session_rank(lease: Lease) -> tuple[int, float, str]:
    """Sorts build sessions: priority, then first come first served."""
    return -lease.priority, lease.queued_at, lease.id


def gpus(lease: Lease) -> float:
    """How many GPUs the lease uses, or asks for."""
    return (lease.held_milli or lease.fraction_milli) * lease.device_count / WHOLE_GPU


def attained_gpu_s(lease: Lease, now: float) -> float:
    """GPU-seconds that a job has received until ``now``."""
    if lease.state is not State.RUNNING or lease.attained_at is None:
        return lease.attained_gpu_s
    return lease.attained_gpu_s + gpus(lease) * max(0.0, now - lease.attained_at)


def served(lease: Lease, now: float, settings: Settings) -> Lease:
    """Return a job with what it has received until ``now`` counted, and its entry into its queue."""
    attained = attained_gpu_s(lease, now)
    entered_at = _entered_at(lease, now, settings)
    return replace(lease, attained_gpu_s=attained, attained_at=now, queued_at=entered_at)


def queue_of(attained: float, settings: Settings) -> int:
    """The LAS queue of a job that has received so many GPU-seconds: how many thresholds it has reached."""
    return bisect_right(settings.las_thresholds_gpu_s, attained + _NOTHING_GPU_S)


def _entered_at(lease: Lease, now: float, settings: Settings) -> float:
    """When a job came into its present queue: the moment of its last demotion, if that is not written yet."""
    if settings.order is not Order.LAS or lease.attained_at is None or lease.state is not State.RUNNING:
        return lease.queued_at
    queue = queue_of(attained_gpu_s(lease, now), settings)
    if queue == queue_of(lease.attained_gpu_s, settings):
        return lease.queued_at
    reached = settings.las_thresholds_gpu_s[queue - 1]
    return lease.attained_at + (reached - lease.attained_gpu_s) / gpus(lease)


def is_waiting(lease: Lease) -> bool:
    """Whether a job has no room and wants some."""
    return lease.state is State.PENDING or lease.state is State.SUSPENDED


def level(lease: Lease, now: float, settings: Settings) -> Level:
    """Sorts the jobs of a project into groups; who waits may preempt who runs in a later one."""
    group = 0.0
    if settings.order is Order.SRTF:
        left = inf if lease.duration_s is None else lease.duration_s * gpus(lease)
        group = left - attained_gpu_s(lease, now)
    elif settings.order is Order.LAS:
        group = queue_of(attained_gpu_s(lease, now), settings)
        if is_just_demoted(lease, now, settings):
            group += 0.5
    if is_starved(lease, now, settings):
        group = STARVED
    return -lease.priority, group


def is_just_demoted(lease: Lease, now: float, settings: Settings) -> bool:
    """Whether a job has just come to the end of a later queue, behind whoever waits there."""
    if settings.order is not Order.LAS:
        return False
    if now - _entered_at(lease, now, settings) >= DEMOTED_S:
        return False
    return queue_of(attained_gpu_s(lease, now), settings) > 0


def has_guard(settings: Settings) -> bool:
    """Whether jobs that have waited for long come before all others."""
    if settings.guard_s is None or settings.min_run_s <= 0:
        return False
    return settings.order is Order.LAS or settings.order is Order.SRTF


def is_starved(lease: Lease, now: float, settings: Settings) -> bool:
    """Whether a waiting job comes before everybody else of its priority."""
    guard_s = settings.guard_s
    if guard_s is None or now < lease.waits_since_at + guard_s:
        return False
    return is_waiting(lease) and has_guard(settings)


def rank(lease: Lease, now: float, settings: Settings) -> Rank:
    """Sorts the waiting jobs of a project."""
    group, ran_here, moment = 0.0, False, lease.queued_at
    if settings.order is Order.LAS:
        if attained := lease.attained_gpu_s:
            thresholds = settings.las_thresholds_gpu_s
            queue = bisect_right(thresholds, attained + _NOTHING_GPU_S)
            here = attained - (thresholds[queue - 1] if queue else 0.0)
            ran_here = here > DEMOTED_S * gpus(lease) + _NOTHING_GPU_S  # or it stopped when it was demoted
            moment = -lease.waits_since_at if ran_here else moment
            group = queue + 0.5 * (queue > 0 and now - lease.queued_at < DEMOTED_S)
    elif settings.order is Order.SRTF:
        group = level(lease, now, settings)[1]
    guard_s = settings.guard_s
    if guard_s is not None and now >= lease.waits_since_at + guard_s and is_starved(lease, now, settings):
        group, ran_here, moment = STARVED, False, lease.waits_since_at
    return (-lease.priority, group), lease.state is State.PENDING, not ran_here, moment, lease.id


def seniority(lease: Lease, now: float, settings: Settings) -> float:
    """Sorts the running jobs of a level: who is there for longest is preempted last."""
    return max(lease.granted_at, _entered_at(lease, now, settings))


def long_waits(settings: Settings) -> list[float]:
    """After how many seconds of waiting a job is served in another way, ascending."""
    guard_s = settings.guard_s if has_guard(settings) else None
    return sorted(wait_s for wait_s in (settings.skip_wait_s, guard_s) if wait_s is not None)


def demoted_at(lease: Lease, now: float, settings: Settings) -> float | None:
    """The next moment at which a running job falls into a later queue."""
    if settings.order is Order.LAS and lease.state is State.RUNNING and lease.attained_at is not None:
        queue = queue_of(attained_gpu_s(lease, now), settings)
        if queue < len(settings.las_thresholds_gpu_s):
            left = settings.las_thresholds_gpu_s[queue] - lease.attained_gpu_s
            return lease.attained_at + left / gpus(lease)
    return None


def gain_gpu_s(lease: Lease, now: float, settings: Settings) -> float:
    """GPU-seconds that a waiting job may run before it ends or falls back: what preempting for it is for."""
    if settings.order is Order.SRTF:
        return level(lease, now, settings)[1] if lease.duration_s is not None else 0.0
    if is_starved(lease, now, settings):
        return settings.min_run_s * gpus(lease)
    queue = queue_of(lease.attained_gpu_s, settings)
    ends = settings.las_thresholds_gpu_s
    return ends[queue] - lease.attained_gpu_s if queue < len(ends) else inf
