"""Badge and sentence of a session, or of the job of a lease."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jupyter_gpushare.core.measure import Doubt
from jupyter_gpushare.core.model import Kind, State
from jupyter_gpushare.gibibytes import compared
from jupyter_gpushare.messages.queue import BECAUSE, because_of
from jupyter_gpushare.messages.reasons import reason_text, reason_texts
from jupyter_gpushare.messages.texts import Texts, text
from jupyter_gpushare.messages.units import duration_text, memory
from jupyter_gpushare.protocol.wire import Text

# As the watchdog: allocations are rounded up and counted a moment later than made.
TOLERANCE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseFacts:
    """Inputs of badge and sentence."""

    kind: Kind
    state: State
    size: str | Text
    device_name: str
    memory_limit_bytes: int
    memory_used_bytes: int
    memory_saved_bytes: int
    idle_s: float | None  # None: active
    lend_in_s: float | None  # None: no work waits, or it cannot be lent
    warned: bool
    waiting: int  # number of waiting leases
    why: str  # reason of the last decision (core `Why`)
    note: str  # stored about the lease, in English
    borrowed: bool
    wanted: bool
    since: str | Text  # time of the state
    lent_to: Text | None  # "a training job of project nlp"
    suspendable: bool
    suspend_reason: str
    waits: Texts = ()  # why a queued job waits
    kept_until: str | Text | None = None  # kept by its owner, idle or not
    processor_s: float | None = None  # kernels run without GPU work since; None: not, or for how long is free
    holds_until: str | Text | None = None  # from then on that counts as idle; None: it does already
    unclaimed: bool = False  # suspended, over the quota of its project
    stays_until: str | Text | None = None  # idle, but not lent before, whatever waits
    lend_now: bool = False  # its owner offers it to the next waiting lease
    usually_wakes: Text | None = None  # `usually`
    held_up_s: float | None = None  # longest time until the work on its GPU, which is stopping, has ended
    starts_in: Text | None = None  # estimates (`range_text`); None: not known well enough
    ends_in: Text | None = None
    back_in: Text | None = None  # its GPU, once it is wanted
    asks_again_at: Text | None = None  # the cluster gave it another GPU than its memory returns to
    given_to: str = ""  # the project that its GPU was taken for
    taken_back_by: str = ""  # the project that lends the GPU; empty: several
    position: int | None = None  # in the queue
    reference: str = ""  # finds it in the logs
    lost: bool = False  # its GPU memory could not be brought back
    left_s: float | None = None  # a job still runs for so long, by its progress
    runs_until: str | Text | None = None  # a job with a maximum run time
    is_timed_out: bool = False  # it has run for its maximum
    doubt: Doubt | None = None  # why the progress of a job does not count
    draining: bool = False  # an administrator empties its device
    finish_by: str | Text | None = None  # the administrator asks its owner to finish by this time
    damaged: bool = False  # a failed checkpoint may have damaged one of its processes


_BADGES: Mapping[State, str] = {
    State.PENDING: "badge.queued",
    State.GRANTED: "badge.starting",
    State.RUNNING: "badge.running",
    State.SUSPENDING: "badge.suspending",
    State.SUSPENDED: "badge.asleep_lent",
    State.RESUMING: "badge.waking",
    State.STOPPING: "badge.stopping",
    State.RELEASED: "badge.ended",
    State.FAILED: "badge.failed",
}


# States in which the processes of a lease go on, or will.
_WITH_PROCESSES = frozenset({State.RUNNING, State.SUSPENDING, State.SUSPENDED, State.RESUMING})


def badge(facts: LeaseFacts) -> Text:
    """Return the two or three words of the status bar."""
    match facts.state:
        case State.RUNNING if facts.kind is Kind.TRAIN:
            return text("badge.running_borrowed" if facts.borrowed else "badge.running")
        case State.RUNNING if facts.lost:
            return text("badge.lost")
        case State.RUNNING if facts.idle_s is None:
            return text("badge.active")
        case State.RUNNING if facts.warned and facts.lend_in_s is not None:
            return text("badge.warned", duration_text(facts.lend_in_s))
        case State.RUNNING if not facts.suspendable:
            return text("badge.held")
        case State.RUNNING:
            return text("badge.idle", duration_text(facts.idle_s or 0.0))
        case State.SUSPENDED if facts.kind is Kind.TRAIN:
            return text("badge.paused")
        case State.SUSPENDED if facts.wanted:
            is_held_up = facts.held_up_s is not None or facts.unclaimed or facts.asks_again_at
            return text("badge.waiting_to_wake" if is_held_up else "badge.waking")
        case State.SUSPENDED if facts.lent_to is None:
            return text("badge.asleep")
        case _:
            return text(_BADGES[facts.state])


def sentence(facts: LeaseFacts) -> Texts:
    """Return the sentences of the panel, for a session or for the job of a lease."""
    is_job = facts.kind is Kind.TRAIN
    said = _job_sentence(facts) if is_job else _session_sentence(facts)
    if facts.draining and not is_job:
        by = facts.finish_by
        said = *said, text("session.drains_by", by) if by else text("session.drains")
    if facts.damaged and not facts.lost and facts.state in _WITH_PROCESSES:
        return *said, text("job.damaged" if is_job else "session.damaged", facts.reference)
    return said


def _session_sentence(facts: LeaseFacts) -> Texts:
    saved = memory(facts.memory_saved_bytes)
    match facts.state:
        case State.PENDING | State.GRANTED:
            limit = memory(facts.memory_limit_bytes)
            if facts.device_name:
                return (text("session.starting_on", facts.size, limit, facts.device_name),)
            return (text("session.starting", facts.size, limit),)
        case State.RUNNING:
            return _running_sentence(facts)
        case State.SUSPENDING if not facts.memory_used_bytes:
            return (text("session.suspending_empty"),)
        case State.SUSPENDING:
            return (text("session.suspending", memory(facts.memory_used_bytes)),)
        case State.SUSPENDED if facts.wanted and facts.asks_again_at:
            return (text("lease.misplaced", facts.asks_again_at),)
        case State.SUSPENDED if facts.wanted:
            return _waking_sentence(facts, saved), *_back_in(facts)
        case State.SUSPENDED:
            return _asleep_sentence(facts)
        case State.RESUMING if not facts.memory_saved_bytes:
            return text("session.waking_empty"), *_back_in(facts)
        case State.RESUMING:
            return text("session.copying", saved), *_back_in(facts)
        case State.STOPPING:
            return (text("session.stopping"),)
        case State.FAILED:
            if facts.note:
                return (text("session.failed", reason_text(facts.note)),)
            return (text("session.failed_unknown"),)
        case State.RELEASED:
            return (text("session.ended"),)


def _asleep_sentence(facts: LeaseFacts) -> Texts:
    if not facts.memory_saved_bytes:  # a new server or a restarted kernel: nothing sleeps, nothing is safe
        if facts.lent_to:
            return (text("session.lent_empty", facts.lent_to),)
        return text("session.not_used"), text("session.how_to_wake_empty")
    lent = text("session.lent_to", facts.lent_to) if facts.lent_to else text("session.not_used")
    wake = text("session.how_to_wake_damaged" if facts.damaged else "session.how_to_wake")
    if facts.usually_wakes:
        wake = text("session.how_to_wake_usually", facts.usually_wakes)
    elif facts.back_in and not facts.damaged:
        wake = text("session.how_to_wake_in", facts.back_in)
    return text("session.asleep", facts.since), lent, wake


def _waking_sentence(facts: LeaseFacts, saved: Text) -> Text:
    if facts.unclaimed:
        return text("session.waits_for_capacity")
    if facts.held_up_s is not None:
        return text("session.waits_for_checkpoint", duration_text(facts.held_up_s))
    if not facts.memory_saved_bytes:
        if facts.lent_to:
            return text("session.waking_empty_from", facts.lent_to)
        return text("session.waking_empty")
    if facts.lent_to:
        return text("session.waking_from", facts.lent_to, saved)
    return text("session.waking", saved)


def _back_in(facts: LeaseFacts) -> Texts:
    return (text("session.back_in", facts.back_in),) if facts.back_in else ()


def _running_sentence(facts: LeaseFacts) -> Texts:
    if facts.lost:
        if facts.suspend_reason:
            return (text("session.lost_because", facts.reference, reason_text(facts.suspend_reason)),)
        return (text("session.lost", facts.reference),)
    if facts.idle_s is None:
        borrowed = *_over_limit(facts), *((text("session.borrowed"),) if facts.borrowed else ())
        kept = (text("session.kept", facts.kept_until),) if facts.kept_until else ()
        return text("session.active", facts.size), *_processor_only(facts), *borrowed, *kept
    return *_processor_only(facts), _idle_sentence(facts, duration_text(facts.idle_s)), *_over_limit(facts)


def _processor_only(facts: LeaseFacts) -> Texts:
    """Return that kernels of a session compute on the processor alone, where that is bounded."""
    if facts.processor_s is None:
        return ()
    since = duration_text(facts.processor_s)
    if facts.holds_until is None:
        return (text("session.processor_only", since),)
    return (text("session.processor_until", since, facts.holds_until),)


def _over_limit(facts: LeaseFacts) -> Texts:
    """Return that a lease uses more than its limit, as the driver shows it; nothing within it."""
    used, limit = facts.memory_used_bytes, facts.memory_limit_bytes
    if not limit or used <= limit + TOLERANCE_BYTES:
        return ()
    return (text("lease.over_limit", *map(reason_text, compared(used, limit))),)


def _idle_sentence(facts: LeaseFacts, idle: Text) -> Text:
    if not facts.suspendable:
        return text("session.held", idle, reason_text(facts.suspend_reason))
    waiting = text("part.jobs_waiting", facts.waiting)
    if facts.warned and facts.lend_in_s is not None:
        if not facts.memory_used_bytes:
            return text("session.warned_empty", idle, waiting, duration_text(facts.lend_in_s))
        used = memory(facts.memory_used_bytes)
        return text("session.warned", idle, waiting, duration_text(facts.lend_in_s), used)
    if facts.stays_until:
        return text("session.stays", idle, facts.stays_until)
    if facts.waiting:
        return text("session.overdue", idle, waiting)
    return text("session.lend_now" if facts.lend_now else "session.idle", idle)


def _progress(facts: LeaseFacts) -> Texts:
    """Return what the progress of a running job says, or why it is not counted, and its latest end."""
    until = () if facts.runs_until is None else (text("job.runs_until", facts.runs_until),)
    if facts.doubt is not None:
        return text("job.doubt", text(f"part.doubt_{facts.doubt}")), *until
    if facts.ends_in is not None:
        return text("job.ends_in", facts.ends_in), *until
    return until if facts.left_s is None else (text("job.left", duration_text(facts.left_s)), *until)


def _job_sentence(facts: LeaseFacts) -> Texts:
    is_preempted = facts.why in BECAUSE
    because = because_of(facts.why, facts.given_to)
    if is_preempted and facts.note:
        because = reason_text(facts.note)
    match facts.state:
        case State.PENDING:
            return facts.waits or reason_texts(facts.note) or (text("job.waits", facts.size),)
        case State.GRANTED:
            return (text("job.starting", facts.size),)
        case State.RUNNING if facts.borrowed:
            owner = text("part.another_project")
            if facts.taken_back_by:
                owner = text("part.project", facts.taken_back_by)
            return text("job.running_borrowed", facts.size, owner), *_progress(facts), *_over_limit(facts)
        case State.RUNNING:
            return text("job.running", facts.size), *_progress(facts), *_over_limit(facts)
        case State.SUSPENDING:
            return (text("job.pausing", because),)
        case State.SUSPENDED:
            number = (text("job.number", facts.position),) if facts.position else ()
            paused = text("job.requeued" if facts.damaged else "job.paused", facts.since, because)
            goes_on = (text("job.goes_on_in", facts.starts_in),) if facts.starts_in else ()
            if facts.asks_again_at:
                goes_on = (text("lease.misplaced", facts.asks_again_at),)
            return paused, *number, *goes_on
        case State.RESUMING:
            return (text("job.resuming"),)
        case State.STOPPING if facts.is_timed_out:
            return (text("job.stopping_time"),)
        case State.STOPPING:
            return (text("job.stopping_because", because) if is_preempted else text("job.stopping"),)
        case State.RELEASED | State.FAILED:
            return reason_texts(facts.note) or (text("job.ended"),)
