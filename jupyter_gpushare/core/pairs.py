"""Judge by measured speed whether two jobs stay together on one GPU.

The *host* owns the GPU; the *guest* uses the memory and time that the host leaves.  `judge` compares the
rate of the host beside the guest with its rate alone: after `TRIAL_S`, then every `REVIEW_S`.  The guest
stays while the host keeps `KEEPS` of its rate.  If the guest's rate alone is known, the parts that both
keep must also add up to at least `PAYS`.

Evidence is the progress that a job reports; without it, the work that it completed at the library.  The use
of the device is no evidence, because a guest raises it.  Reports come from the jobs, so no rule relies on
one report:

* *Progress* is measured from one change of the counter to another, so its steps may be long.  It counts if
  the time before the first change and after the last is at most 1 - `KEEPS` of the window: about fifteen
  steps.  A counter that stands still, restarts, changes its total or is withdrawn is no evidence.
* *Work* overrules progress that is more than `DOUBT` above it: such a job reports faster than it works.
* *Alone* means the last `ALONE_S`, or the median of the last hour if that is more.  So a job that is slow
  just before a guest comes, or that still loads its data, does not seem fast afterwards.
* A job's own *pauses* (evaluation, a checkpoint) are in both windows on average.  A short window may contain
  a whole pause; as much of it as the longest pause alone lasted is excused.
* A part above 1 counts as 1, so an inflated counter of one job cannot make up for the other.
* A guest that completes no work helps nobody: it must compute by `REVIEW_S`, or it leaves.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

TRIAL_S = 180.0
REVIEW_S = 600.0
# Readings further apart than this say nothing about the time between them.
MAX_GAP_S = 60.0
# The time after which a rate alone is known.
ALONE_S = 600.0
KEEPS = 0.9
PAYS = 1.1
# The maximum by which the kept part may be larger by progress than by work.
DOUBT = 0.15
# The time for which a parted pair is not tried again, and the maximum number of remembered pairs.
PARTED_S = 86_400.0
MAX_PARTED = 1_000
# Length in seconds and number of the spans of a window.
_ALONE_SPANS = 300.0, 12
_BESIDE_SPANS = 60.0, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Counters of one job at one moment; counters only grow."""

    at: float
    attempt: int = 1
    done: float | None = None  # progress, in a unit of the job's own; None: not reported
    total: float = 0.0  # in the same unit
    work: int = -1  # calls that the job completed at the library; -1: not known


@dataclass(slots=True)
class _Span:
    """A period that begins and ends with a change of a counter."""

    seconds: float = 0.0
    amount: float = 0.0
    still_s: float = 0.0  # without a change
    longest_still_s: float = 0.0

    @property
    def still_part(self) -> float:
        return self.still_s / self.seconds

    @property
    def rate_in_motion(self) -> float:
        return self.amount / (self.seconds - self.still_s)


class _Window:
    """Recent history of one counter, in a bounded number of spans."""

    def __init__(self, span_s: float, spans: int) -> None:
        self._span_s = span_s
        self._spans: deque[_Span] = deque(maxlen=spans)
        self._began = False
        self._before_s = self._before = 0.0  # the time until the first change, and that change itself
        self.watched_s = 0.0
        self.still_s = 0.0  # since the last change

    def add(self, seconds: float, amount: float) -> None:
        """Count an interval of ``seconds`` in which the counter grew by ``amount``."""
        self.watched_s += seconds
        if not amount:
            self.still_s += seconds
            return
        if self._began:
            if not self._spans or self._spans[-1].seconds >= self._span_s:
                self._close()
            span = self._spans[-1]
            span.seconds += self.still_s + seconds
            span.amount += amount
            span.still_s += self.still_s
            span.longest_still_s = max(span.longest_still_s, self.still_s)
        else:
            self._began = True
            self._before_s, self._before = self.still_s + seconds, amount
        self.still_s = 0.0

    def _close(self) -> None:
        if len(self._spans) == self._spans.maxlen:
            self._before_s = self._before = 0.0  # no longer in the window
        self._spans.append(_Span())

    def between_changes(self, last_s: float = inf) -> _Span:
        """Return the newest spans that reach back ``last_s``, by default all, as one span."""
        found = _Span()
        for span in reversed(self._spans):
            if found.seconds >= last_s:
                break
            found.seconds += span.seconds
            found.amount += span.amount
            found.still_s += span.still_s
            found.longest_still_s = max(found.longest_still_s, span.longest_still_s)
        return found

    def in_all(self) -> _Span:
        """Return the whole window as one span, with the time before its first change and after its last."""
        found = self.between_changes()
        edges_s = self._before_s + self.still_s
        found.seconds += edges_s
        found.amount += self._before
        found.still_s += self.still_s
        found.longest_still_s = max(found.longest_still_s, self.still_s)
        return found

    def from_change_to_change(self) -> _Span | None:
        """Return the window as one span without its edges; None if the edges are too long."""
        found = self.between_changes()
        edges_s = self._before_s + self.still_s
        return found if found.seconds and edges_s <= (1 - KEEPS) * (found.seconds + edges_s) else None

    def settled_rate(self) -> float | None:
        """Return the rate of the last `ALONE_S`, or the median rate if that is more; None: not known.

        A rate is that of a span in motion, times the part of the whole window in which the counter moved.
        """
        whole = self.between_changes()
        if whole.seconds < ALONE_S:
            return None
        rates = sorted(span.rate_in_motion for span in self._spans if 2 * span.seconds >= self._span_s)
        settled = rates[max(len(rates) // 2, min(len(rates) - 1, 2))]
        last = self.between_changes(ALONE_S).rate_in_motion
        return max(last, settled) * (1 - whole.still_part)


class _Counter:
    """History of one counter of a job: alone, and beside its present companion."""

    def __init__(self) -> None:
        self.alone = _Window(*_ALONE_SPANS)
        self.begin()

    def begin(self) -> None:
        """Begin a new window beside another companion."""
        self.beside = _Window(*_BESIDE_SPANS)

    def kept(self, beside: _Span | None) -> float | None:
        """Return the part of the rate alone that ``beside`` shows, at most 1; None: no evidence."""
        rate = self.alone.settled_rate()
        if rate is None or beside is None or not beside.seconds:
            return None
        alone = self.alone.between_changes()
        usual_s = alone.still_part * beside.seconds
        excused_s = min(beside.still_s, alone.longest_still_s) - usual_s
        return min(1.0, beside.amount / (beside.seconds - max(0.0, excused_s)) / rate)


class Rates:
    """Rates of one job alone and beside its present companion, in at most a few hundred numbers."""

    def __init__(self) -> None:
        self._work, self._progress = _Counter(), _Counter()
        self._companion = ""
        self._last: Reading | None = None  # None: the next reading begins an interval
        self._report: Reading | None = None  # the last reading, if it has progress

    def add(self, reading: Reading, companion: str = "") -> None:
        """Add a reading of the running job; ``companion`` is the id of its guest or host, "" if alone."""
        if companion != self._companion:
            self._companion, self._last = companion, None
            if companion:
                self._work.begin()
                self._progress.begin()
        last, self._last = self._last, reading
        report, self._report = self._report, reading if _has_progress(reading) else None
        progress = _progress_between(report, self._report)
        if progress is None and report is not None:
            # The earlier progress had another unit, or was not the job's.
            self._progress = _Counter()
        if last is None or not 0 < (seconds := reading.at - last.at) <= MAX_GAP_S:
            return
        if 0 <= last.work <= reading.work:
            self._window(self._work).add(seconds, reading.work - last.work)
        if progress is not None and report is last:
            self._window(self._progress).add(seconds, progress)

    def interrupt(self) -> None:
        """Leave out the time until the next reading, because the job does not run."""
        self._last = None

    def _window(self, counter: _Counter) -> _Window:
        return counter.beside if self._companion else counter.alone

    @property
    def is_known(self) -> bool:
        """Whether its rate alone is known; a job without one cannot be judged as a host."""
        return any(c.alone.settled_rate() is not None for c in (self._progress, self._work))

    @property
    def kept(self) -> float | None:
        """The part of its rate alone that it keeps beside its companion, 0 to 1; None: no evidence."""
        by_progress = self._progress.kept(self._progress.beside.from_change_to_change())
        by_work = self._work.kept(self._work.beside.in_all())
        if by_progress is None or (by_work is not None and by_work < by_progress - DOUBT):
            return by_work
        return by_progress

    @property
    def is_idle(self) -> bool:
        """Whether it did nothing beside its companion, by its work, or by its progress if work is unknown."""
        watched = [c.beside for c in (self._work, self._progress) if c.beside.watched_s]
        return bool(watched) and not watched[0].in_all().amount


def _has_progress(reading: Reading) -> bool:
    return reading.done is not None and 0 <= reading.done <= reading.total < inf and reading.total > 0


def _progress_between(before: Reading | None, after: Reading | None) -> float | None:
    """Return the progress between two reports of one series; None if they are not of one series."""
    if before is None or after is None or before.done is None or after.done is None:
        return None
    is_same = (before.attempt, before.total) == (after.attempt, after.total)
    return after.done - before.done if is_same and before.done <= after.done else None


class PairDecision(enum.StrEnum):
    """Decision about a pair."""

    KEEP = "keep"
    PART = "part"  # the guest leaves
    UNDECIDED = "undecided"


class Because(enum.StrEnum):
    """Reason of a decision, and the key of its sentence."""

    TRIAL = "trial"  # it is too early to judge
    GUEST_STARTS = "guest_starts"  # the guest has computed nothing yet
    IT_PAYS = "it_pays"
    HOST_SLOWED = "host_slowed"
    GAINS_TOO_LITTLE = "gains_too_little"  # both together are too slow
    GUEST_IDLE = "guest_idle"  # the guest computes nothing
    HOST_SILENT = "host_silent"  # nothing shows the present rate of the host
    HOST_UNKNOWN = "host_unknown"  # the host's rate alone is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class PairVerdict:
    """Decision about a pair; ``next_at`` is the time of the next.

    ``host``, ``guest``: the part of its rate alone that each keeps, 0 to 1; None: not known.
    """

    decision: PairDecision
    why: Because
    next_at: float
    host: float | None = None
    guest: float | None = None

    @property
    def is_remembered(self) -> bool:
        """Whether the pair must not be tried again for `PARTED_S`."""
        return self.decision is PairDecision.PART and self.why is not Because.HOST_UNKNOWN


def judge(host: Rates, guest: Rates, began_at: float, now: float) -> PairVerdict:
    """Judge a pair that has been together since ``began_at``."""
    if now < began_at + TRIAL_S:
        return PairVerdict(decision=PairDecision.UNDECIDED, why=Because.TRIAL, next_at=began_at + TRIAL_S)
    host_kept, guest_kept = host.kept, guest.kept
    decision, why = _decide(host, guest, host_kept, guest_kept)
    next_at = now + REVIEW_S
    if why is Because.GUEST_STARTS:
        if now < began_at + REVIEW_S:
            next_at = began_at + REVIEW_S
        else:
            decision, why = PairDecision.PART, Because.GUEST_IDLE
    return PairVerdict(decision=decision, why=why, next_at=next_at, host=host_kept, guest=guest_kept)


def _decide(
    host: Rates, guest: Rates, host_kept: float | None, guest_kept: float | None
) -> tuple[PairDecision, Because]:
    if host_kept is None:
        return PairDecision.PART, Because.HOST_SILENT if host.is_known else Because.HOST_UNKNOWN
    if host_kept < KEEPS:
        return PairDecision.PART, Because.HOST_SLOWED
    if guest.is_idle:
        return PairDecision.UNDECIDED, Because.GUEST_STARTS
    if guest_kept is not None and host_kept + guest_kept < PAYS:
        return PairDecision.PART, Because.GAINS_TOO_LITTLE
    return PairDecision.KEEP, Because.IT_PAYS


class Parted:
    """Pairs (`Lease.pair_key` of host and guest) not to try for a while; old pairs are dropped first."""

    def __init__(self, rows: Iterable[tuple[str, str, float]] = ()) -> None:
        """Load the ``rows`` that `rows` returned."""
        by_end = sorted(rows, key=lambda row: row[2])[-MAX_PARTED:]
        self._until_at = {(host, guest): until_at for host, guest, until_at in by_end}
        self._pairs: frozenset[tuple[str, str]] = frozenset(self._until_at)

    def add(self, host: str, guest: str, now: float, *, briefly: bool = False) -> None:
        """Remember a parted pair for `PARTED_S`, or ``briefly`` for `REVIEW_S`, if both jobs have a key."""
        if not (host and guest):
            return
        self._until_at.pop((host, guest), None)
        self._until_at[host, guest] = now + (REVIEW_S if briefly else PARTED_S)
        while len(self._until_at) > MAX_PARTED:
            del self._until_at[next(iter(self._until_at))]
        self._pairs = frozenset(self._until_at)

    def pairs(self, now: float) -> frozenset[tuple[str, str]]:
        """Return the pairs that must not be tried now; the same object while nothing changes."""
        ended = [pair for pair, until_at in self._until_at.items() if until_at <= now]
        for pair in ended:
            del self._until_at[pair]
        if ended:
            self._pairs = frozenset(self._until_at)
        return self._pairs

    def rows(self) -> list[tuple[str, str, float]]:
        """Return (host, guest, end of the ban) of each pair, to be stored."""
        return [(host, guest, until_at) for (host, guest), until_at in self._until_at.items()]
