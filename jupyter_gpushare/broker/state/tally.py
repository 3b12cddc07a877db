"""Counts and durations since the broker started, for metrics; not stored.

Labels are bounded: states, kinds, reasons and phases of the program, and projects as
configured; never users or leases.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from jupyter_gpushare.broker.state.breakdown import GpuBreakdown
from jupyter_gpushare.broker.state.observations import Observation
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.core.model import Kind, State

# Upper bounds in seconds: of moves, and of waiting in the queue.
MOVE_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
WAIT_BOUNDS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0, 72 * 3600.0)
# A longer silence between two measurements counts as this.
_LONGEST_S = 60.0


@dataclass(slots=True)
class Durations:
    """How many durations were within each bound, and their sum in seconds."""

    bounds_s: tuple[float, ...]
    counts: Counter[int] = field(default_factory=Counter)  # by index of the first bound that is not less
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += max(0.0, seconds)

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Yield each bound and how many were within it, as Prometheus has them; the last is +Inf."""
        within = 0
        for index, bound in enumerate((*map(str, self.bounds_s), "+Inf")):
            within += self.counts[index]
            yield bound, within


def _moves() -> Durations:
    return Durations(MOVE_BOUNDS_S)


@dataclass(slots=True)
class Tally:
    """What happened since the broker started."""

    moves: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by kind, old and new state
    spawns: Counter[str] = field(default_factory=Counter)  # "granted", "asleep", or why one was refused
    gpu_s: Counter[str] = field(default_factory=Counter)  # GPU-seconds by use of the machine
    suspend: Durations = field(default_factory=_moves)
    wake: dict[str, Durations] = field(default_factory=lambda: defaultdict(_moves))  # by phase
    start: dict[str, Durations] = field(default_factory=lambda: defaultdict(_moves))  # by kind
    queue: dict[str, Durations] = field(
        default_factory=lambda: defaultdict(lambda: Durations(WAIT_BOUNDS_S))
    )  # of jobs, by project
    _noted_at: float | None = None

    def moved(self, before: LeaseRecord, state: State, now: float, observed: Observation | None) -> None:
        """Count that a lease goes to ``state``."""
        lease = before.lease
        self.moves[lease.kind, before.state, state] += 1
        since_s = now - before.entered_at
        match before.state, state:
            case State.SUSPENDING, State.SUSPENDED:
                self.suspend.add(since_s)
            case State.SUSPENDED, State.RESUMING if observed is not None and observed.wanted_at is not None:
                self.wake["waiting"].add(now - observed.wanted_at)
            case State.RESUMING, State.RUNNING:
                self.wake["copying"].add(since_s)
            case State.PENDING, State.GRANTED if lease.kind is Kind.TRAIN:
                self.queue[lease.project].add(now - lease.waits_since_at)
            case State.GRANTED, State.RUNNING:
                self.start[lease.kind].add(since_s)

    def used(self, share: GpuBreakdown, now: float) -> None:
        """Add the time since the last measurement to the GPU-seconds of each use."""
        passed_s = 0.0 if self._noted_at is None else min(_LONGEST_S, now - self._noted_at)
        self._noted_at = now
        for name in ("computing", "idle", "lent", "free", "broken"):
            self.gpu_s[name] += passed_s * getattr(share, name)
