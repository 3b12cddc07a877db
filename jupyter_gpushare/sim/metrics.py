"""Metrics of a replay: completion and queue times, allocation, utilization, lending, fairness.

A `ReplayMeter` receives every change (`core.replay.ReplayWatcher`) and integrates the
held capacity between changes.  Terms:

* *completion*: from submission to the end; *queue*: the part of it without GPUs;
* *allocation*: held GPU time over all GPU time; *utilization*: the part of all
  GPU time in which jobs make progress or cells run;
* *idle*: GPU time of sessions between the end of a cell and the next cell; it is
  *available* once the session may be suspended, needed or not, and *used* while a
  job runs on the devices of a suspended session;
* *delayed*: a cell that found its GPU lent;
* *with a guest*: GPU time in which a guest runs; allocation and utilization count only its host;
* *speed of a host*: its work divided by the time that it ran; *beside*: only while it had a guest;
* *owed*: a project has a waiting job that its quota covers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jupyter_gpushare.core.idle import eligible_at
from jupyter_gpushare.core.model import (
    HOLDS_CAPACITY,
    LEAVING,
    WHOLE_GPU,
    Device,
    Kind,
    Lease,
    Project,
    Settings,
    State,
    held_by,
    size_of,
)
from jupyter_gpushare.core.pairs import PairDecision, PairVerdict
from jupyter_gpushare.core.replay import CellRun, ReplayWatcher

# A job that changes from the first to the second is preempted; a change without duration is one step.
_PRESENT = HOLDS_CAPACITY - LEAVING
_PREEMPTED = LEAVING | {State.PENDING, State.SUSPENDED}
HOUR_S = 3600.0
DAY_HOURS = 24


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


class Curve:
    """A quantity over time with a piecewise constant rate; its integral is kept per hour."""

    def __init__(self) -> None:
        self.rate = 0.0
        self.total = 0.0
        self.hours: list[float] = []

    def advance(self, start_at: float, end_at: float) -> None:
        """Integrate the present rate from ``start_at`` to ``end_at``."""
        self.total += self.rate * (end_at - start_at)
        hour = int(start_at // HOUR_S)
        while start_at < end_at:
            self.hours.extend([0.0] * (hour + 1 - len(self.hours)))
            until = min(end_at, (hour + 1) * HOUR_S)
            self.hours[hour] += self.rate * (until - start_at)
            start_at, hour = until, hour + 1


@dataclass(slots=True)
class ProjectMeter:
    """Use of one project, in GPU-seconds."""

    project: Project
    held: Curve = field(default_factory=Curve)
    waiting: Curve = field(default_factory=Curve)  # rate 1 while one of its jobs waits
    sizes: Counter[int] = field(default_factory=Counter)  # sizes of its waiting jobs, in thousandths
    use_milli: int = 0
    owed_since_at: float | None = None
    longest_owed_s: float = 0.0


class ReplayMeter(ReplayWatcher):
    """Watches a replay on these devices."""

    def __init__(self, devices: Iterable[Device], projects: Iterable[Project], settings: Settings) -> None:
        self.settings = settings
        self.gpus = len(tuple(devices))
        self.now = 0.0
        self.began_at: float | None = None
        self.jobs = 0
        self.completion_s: list[float] = []
        self.queue_s: list[float] = []
        self.preemptions = 0
        self.allocated = Curve()
        self.used = Curve()
        self.projects = {p.name: ProjectMeter(p) for p in projects}
        self.sessions = 0
        self.cells = 0
        self.cells_lent = 0
        self.cells_crowded = 0
        self.waits_s: list[float] = []  # one per cell
        self.idle_gpu_s = 0.0
        self.available_gpu_s = 0.0
        self.lent = Curve()  # GPUs of sleeping sessions that jobs hold
        self.guests = Curve()  # running guests
        self.parted = 0  # number of pairs that their trial parted
        self._hosts: set[str] = set()
        self._beside_s: dict[float, float] = {}  # seconds of hosts with a guest, by the host's speed
        self._ran: dict[str, tuple[float, float]] = {}  # seconds and work of a job, except as a guest
        self._waits_since_at: dict[str, float] = {}
        self._waited_s: dict[str, float] = {}
        self._idle: dict[str, tuple[float, float]] = {}  # start of the idle time, time of eligibility
        self._others: Counter[str] = Counter()  # thousandths held by jobs, per device
        self._asleep: Counter[str] = Counter()  # thousandths of sleeping sessions, per device

    # -- events of the replay

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        """Count a lease that was added (``before`` is None) or changed."""
        self.advance(now)
        if before is None:
            self.began_at = now if self.began_at is None else self.began_at
        self._count_use(before, after)
        if after.kind is Kind.TRAIN:
            self._count_job(now, before, after)
        else:
            self._count_session(now, before, after)
        self._count_lending(before, after)

    def began(self, now: float, run: CellRun) -> None:
        """Count a cell that begins now."""
        self.cells += 1
        self.cells_lent += run.lent
        self.cells_crowded += run.crowded
        self.waits_s.append(run.waited_s)
        since_at, eligible = self._idle.pop(run.lease.id, (run.due_at, math.inf))
        gpus = size_of(run.lease) / WHOLE_GPU
        self.idle_gpu_s += (run.due_at - since_at) * gpus
        self.available_gpu_s += max(0.0, run.due_at - eligible) * gpus

    def ran(self, lease: Lease, seconds: float, speed: float, guest: str) -> None:
        """Count the time and the work of a job that may be a host."""
        if lease.host:
            return
        before_s, work_s = self._ran.get(lease.id, (0.0, 0.0))
        self._ran[lease.id] = before_s + seconds, work_s + seconds * speed
        if guest:
            self._hosts.add(lease.id)
            speed = round(speed, 3)
            self._beside_s[speed] = self._beside_s.get(speed, 0.0) + seconds

    def judged(self, now: float, host: Lease, guest: Lease, verdict: PairVerdict) -> None:
        """Count a pair that is parted."""
        self.parted += verdict.decision is PairDecision.PART

    @property
    def host_speeds(self) -> list[float]:
        """The mean speed of each host over its whole run, as a part of its speed alone."""
        return [work_s / ran_s for ran_s, work_s in map(self._ran.__getitem__, self._hosts) if ran_s]

    def host_speed_beside(self, percent: float) -> float:
        """Return the speed that hosts reach in ``percent`` of their time with a guest; 1 without guests."""
        left_s = sum(self._beside_s.values()) * (1 - percent / 100)
        for speed, seconds in sorted(self._beside_s.items()):
            left_s -= seconds
            if left_s < 0:
                return speed
        return 1.0

    def advance(self, now: float) -> None:
        """Integrate all rates until ``now``."""
        if now <= self.now:
            return
        for curve in (self.allocated, self.used, self.lent, self.guests):
            curve.advance(self.now, now)
        for p in self.projects.values():
            p.held.advance(self.now, now)
            p.waiting.advance(self.now, now)
            quota_left = p.project.quota_milli - p.use_milli
            if quota_left > 0 and p.sizes and min(p.sizes) <= quota_left:
                p.owed_since_at = self.now if p.owed_since_at is None else p.owed_since_at
                p.longest_owed_s = max(p.longest_owed_s, now - p.owed_since_at)
            else:
                p.owed_since_at = None
        self.now = now

    # -- counters

    def _count_use(self, before: Lease | None, after: Lease) -> None:
        held = _holds(after) - _holds(before)
        computing = _computes(after) - _computes(before)
        self.guests.rate += _is_guest(after) - _is_guest(before)
        self.used.rate += computing / WHOLE_GPU
        if held:
            self.allocated.rate += held / WHOLE_GPU
            p = self.projects[after.project]
            p.held.rate += held / WHOLE_GPU
            p.use_milli += held
            if held > 0:
                p.owed_since_at = None  # it got capacity: the wait for the rest begins now

    def _count_job(self, now: float, before: Lease | None, after: Lease) -> None:
        p = self.projects[after.project]
        waited, waits = _waits(before), _waits(after)
        if waits != waited:
            size = after.size.fraction_milli * after.size.device_count
            p.sizes[size] += 1 if waits else -1
            if not p.sizes[size]:
                del p.sizes[size]
            p.waiting.rate = 1.0 if p.sizes else 0.0
        if before is None:
            self.jobs += 1
            self._waited_s[after.id] = 0.0
        if waits and not waited:
            self._waits_since_at[after.id] = now
        elif waited and not waits:
            self._waited_s[after.id] += now - self._waits_since_at.pop(after.id)
        if before is not None and before.state in _PRESENT and after.state in _PREEMPTED:
            self.preemptions += 1
        elif after.state is State.RELEASED:
            self.completion_s.append(now - after.submitted_at)
            self.queue_s.append(self._waited_s.pop(after.id))

    def _count_session(self, now: float, before: Lease | None, after: Lease) -> None:
        if before is None:
            self.sessions += 1
        elif after.idle_since_at == now and before.idle_since_at is None:
            at = eligible_at(after, self.settings)
            self._idle[after.id] = now, math.inf if at is None else at

    def _count_lending(self, before: Lease | None, after: Lease) -> None:
        """Count, by device, the capacity of suspended sessions that jobs hold."""
        change = _holds(after) - _holds(before)
        slept, sleeps = _sleeps(before), _sleeps(after)
        if after.kind is Kind.TRAIN:
            lease, counter, sign = after, self._others, (change > 0) - (change < 0)
        else:
            lease, counter, sign = after, self._asleep, sleeps - slept
        if not sign:
            return
        if before is not None and sign < 0:
            lease = before
        for uuid in lease.devices:
            self.lent.rate -= min(self._others[uuid], self._asleep[uuid]) / WHOLE_GPU
            counter[uuid] += sign * held_by(lease)
            self.lent.rate += min(self._others[uuid], self._asleep[uuid]) / WHOLE_GPU


def _holds(lease: Lease | None) -> int:
    """Return the thousandths of a GPU that a lease holds over all its devices."""
    return size_of(lease) if lease is not None and lease.state in HOLDS_CAPACITY else 0


def _computes(lease: Lease | None) -> int:
    """Return the thousandths of a GPU on which a job makes progress or a cell runs."""
    if lease is None or lease.state is not State.RUNNING or lease.idle_since_at is not None or lease.wanted:
        return 0
    return size_of(lease)


def _is_guest(lease: Lease | None) -> bool:
    return lease is not None and lease.state is State.RUNNING and bool(lease.host)


def _waits(lease: Lease | None) -> bool:
    return lease is not None and lease.state in (State.PENDING, State.SUSPENDED)


def _sleeps(lease: Lease | None) -> bool:
    """Return whether a session is suspended and does not want its devices back."""
    return (
        lease is not None and lease.kind is Kind.BUILD and lease.state is State.SUSPENDED and not lease.wanted
    )
