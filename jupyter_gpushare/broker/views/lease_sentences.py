"""The badge and the sentences of a lease: of a session or of a job."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.broker.state.observations import Companion
from jupyter_gpushare.broker.views.lease_view import Consent, LeaseView
from jupyter_gpushare.core.model import WHOLE_GPU, State
from jupyter_gpushare.gibibytes import compared
from jupyter_gpushare.messages import (
    Texts,
    duration_text,
    is_preemption,
    memory,
    printable,
    range_text,
    reason_text,
    reason_texts,
    size_text,
    text,
    time_text,
)
from jupyter_gpushare.protocol.wire import Text

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


# States in which the processes of a lease run or will run again.
_WITH_PROCESSES = frozenset({State.RUNNING, State.SUSPENDING, State.SUSPENDED, State.RESUMING})


def badge(seen: LeaseView) -> Text:
    """Return the two or three words for the status bar."""
    record = seen.record
    match record.state:
        case State.RUNNING if record.is_job and seen.companion is not None:
            return text("badge.running_guest" if seen.companion.role == "guest" else "badge.running_shared")
        case State.RUNNING if record.is_job:
            return text("badge.running_borrowed" if seen.borrowed else "badge.running")
        case State.RUNNING if record.lost:
            return text("badge.lost")
        case State.RUNNING if seen.idle_s is None:
            return text("badge.active")
        case State.RUNNING if seen.lending.warned and seen.lending.lend_in_s is not None:
            return text("badge.warned", duration_text(seen.lending.lend_in_s))
        case State.RUNNING if seen.obstacle:
            return text("badge.held")
        case State.RUNNING:
            return text("badge.idle", duration_text(seen.idle_s or 0.0))
        case State.SUSPENDED if record.is_job:
            return text("badge.paused")
        case State.SUSPENDED if seen.lease.wanted:
            is_held_up = seen.held_up_s is not None or seen.unclaimed or seen.stays_because or seen.retries_at
            return text("badge.waiting_to_wake" if is_held_up else "badge.waking")
        case State.SUSPENDED if seen.lent_to is None:
            return text("badge.asleep")
        case state:
            return text(_BADGES[state])


def sentence(seen: LeaseView) -> Texts:
    """Return the sentences about a lease for the panel."""
    record = seen.record
    texts = _job_sentence(seen) if record.is_job else _session_sentence(seen)
    if seen.drain is not None and not record.is_job:
        by = seen.drain.until
        texts = *texts, text("session.drains_by", time_text(by)) if by else text("session.drains")
    if seen.damaged and not record.lost and record.state in _WITH_PROCESSES:
        texts = *texts, text("job.damaged" if record.is_job else "session.damaged", record.handle)
    return *texts, *_not_granted(seen)


def _not_granted(seen: LeaseView) -> Texts:
    """Return sentences on GPU use without a grant by processes of a lease or of its user."""
    found = [(each.pid, each.name, each.used_bytes, "lease.unleased") for each in seen.unleased]
    texts = []
    for each in seen.over:
        key = "lease.over_lent" if each.device in seen.lease.devices else "lease.over_elsewhere"
        if each.pid:
            key = "lease.over_own" if each.limit_bytes else key
            found.append((each.pid, each.name, each.process_bytes, key))
        elif each.limit_bytes:
            uses, limit = compared(each.used_bytes, each.limit_bytes)
            texts.append(text("lease.over_limit", reason_text(uses), reason_text(limit)))
        else:
            texts.append(text("lease.over_left", memory(each.used_bytes)))
    end = text("part.with_environment")
    named = (text(key, str(pid), printable(name), memory(used), end) for pid, name, used, key in found)
    return *texts, *named


def share(seen: LeaseView) -> Texts:
    """Return a lease's granted and measured share of its devices' time; empty if it has them alone."""
    mode, granted, measured, reason = seen.time_share
    if seen.lease.held_milli == WHOLE_GPU and measured is None:
        return ()
    if granted is None:
        return (text("share.not_in_force", reason_text(reason)),) if reason else ()
    key, percent = f"share.{mode}", [f"{granted:g}"]
    if measured is not None:
        key, percent = f"{key}_measured", [*percent, f"{measured:.0f}"]
    return text(key, *percent), text("share.level")


def _session_sentence(seen: LeaseView) -> Texts:
    used, saved = seen.lease.used_bytes, seen.lease.saved_bytes
    match seen.record.state:
        case State.PENDING | State.GRANTED:
            size, limit = size_text(seen.lease.size), memory(seen.memory_limit_bytes)
            if seen.device_name:
                return (text("session.starting_on", size, limit, seen.device_name),)
            return (text("session.starting", size, limit),)
        case State.RUNNING:
            return _running_sentence(seen)
        case State.SUSPENDING:
            return (text("session.suspending", memory(used)) if used else text("session.suspending_empty"),)
        case State.SUSPENDED if seen.lease.wanted and seen.retries_at:
            return (text("lease.misplaced", seen.retries_at),)
        case State.SUSPENDED if seen.lease.wanted:
            return _waking_sentence(seen), *_back_in(seen)
        case State.SUSPENDED:
            return _asleep_sentence(seen)
        case State.RESUMING:
            copying = text("session.copying", memory(saved)) if saved else text("session.waking_empty")
            return copying, *_back_in(seen)
        case State.STOPPING:
            return (text("session.stopping"),)
        case State.FAILED:
            if seen.record.note:
                return (text("session.failed", reason_text(seen.record.note)),)
            return (text("session.failed_unknown"),)
        case State.RELEASED:
            return (text("session.ended"),)


def _asleep_sentence(seen: LeaseView) -> Texts:
    if not seen.lease.saved_bytes:  # a new server or a restarted kernel has nothing saved
        if seen.lent_to:
            return (text("session.lent_empty", seen.lent_to),)
        return text("session.not_used"), text("session.how_to_wake_empty")
    lent = text("session.lent_to", seen.lent_to) if seen.lent_to else text("session.not_used")
    is_safe = not (seen.damaged or seen.has_lost) and seen.site_end is None
    wake = text("session.how_to_wake" if is_safe else "session.how_to_wake_only")
    if seen.usually_wakes:
        wake = text("session.how_to_wake_usually", seen.usually_wakes)
    elif seen.back and not seen.damaged:
        key = "session.how_to_wake_in" if is_safe else "session.how_to_wake_only_in"
        wake = text(key, range_text(seen.back.low_s, seen.back.high_s))
    return text("session.asleep", time_text(seen.record.since_at)), lent, wake, *_site_end(seen)


def _site_end(seen: LeaseView) -> Texts:
    """Return when a setting of the site may end the lease or its kernels."""
    end = seen.site_end
    if end is None:
        return ()
    kind = "server_ages" if end.is_age else "server_ends" if end.is_server else "kernel_ends"
    when = text("part.some_time")
    if end.at:
        when = text("part.after", time_text(end.at)) if end.at > seen.wall else text("part.any_moment")
    return (text(f"session.{kind}", printable(end.by), when),)


def _waking_sentence(seen: LeaseView) -> Text:
    if seen.stays_because:
        return text("session.waits_for_own", reason_text(seen.stays_because))
    if seen.unclaimed:
        return text("session.waits_for_capacity")
    if seen.held_up_s is not None:
        return text("session.waits_for_checkpoint", duration_text(seen.held_up_s))
    if not seen.lease.saved_bytes:
        if seen.lent_to:
            return text("session.waking_empty_from", seen.lent_to)
        return text("session.waking_empty")
    saved = memory(seen.lease.saved_bytes)
    return text("session.waking_from", seen.lent_to, saved) if seen.lent_to else text("session.waking", saved)


def _back_in(seen: LeaseView) -> Texts:
    back = seen.back
    return (text("session.back_in", range_text(back.low_s, back.high_s)),) if back else ()


def _running_sentence(seen: LeaseView) -> Texts:
    record = seen.record
    if record.lost:
        if record.suspend_reason:
            return (text("session.lost_because", record.handle, reason_text(record.suspend_reason)),)
        return (text("session.lost", record.handle),)
    moved = (text("session.moved"),) if record.moved else ()
    if seen.idle_s is None:
        borrowed = (text("session.borrowed"),) if seen.borrowed else ()
        kept = (text("session.kept", seen.kept_until),) if seen.kept_until else ()
        active = text("session.active", size_text(seen.lease.size))
        return active, *_processor_only(seen), *borrowed, *kept, *moved
    idle = _idle_sentence(seen, duration_text(seen.idle_s))
    # The sentence that its variables stay holds only while it is suspended.
    end = _site_end(seen) if seen.cluster.waiting or seen.lease.lend_now else ()
    return *_processor_only(seen), idle, *moved, *end


def _processor_only(seen: LeaseView) -> Texts:
    """Return that kernels of a session compute on the CPU only, if that keeps it busy for a bounded time."""
    if seen.processor_only is None:
        return ()
    since = duration_text(seen.processor_only.since_s)
    if seen.holds_until is None:
        return (text("session.processor_only", since),)
    return (text("session.processor_until", since, seen.holds_until),)


def _idle_sentence(seen: LeaseView, idle: Text) -> Text:
    if seen.obstacle:
        return text("session.held", idle, reason_text(seen.obstacle))
    lending, waiting = seen.lending, seen.cluster.waiting
    if lending.warned and lending.lend_in_s is not None:
        jobs, lend_in = text("part.jobs_waiting", waiting), duration_text(lending.lend_in_s)
        if not seen.lease.used_bytes:
            return text("session.warned_empty", idle, jobs, lend_in)
        return text("session.warned", idle, jobs, lend_in, memory(seen.lease.used_bytes))
    if seen.stays_until:
        return text("session.stays", idle, seen.stays_until)
    if waiting:
        return text("session.overdue", idle, text("part.jobs_waiting", waiting))
    return text("session.lend_now" if seen.lease.lend_now else "session.idle", idle)


def _job_sentence(seen: LeaseView) -> Texts:
    record, size = seen.record, size_text(seen.lease.size)
    match record.state:
        case State.PENDING:
            return *seen.waits, *_consent(seen)
        case State.GRANTED:
            return (text("job.starting", size),)
        case State.RUNNING if seen.companion is not None and seen.companion.role == "guest":
            return text("guest.runs"), *_keeps(seen.companion), *_run_details(seen)
        case State.RUNNING if seen.borrowed:
            owner = text("part.another_project")
            if seen.taken_back_by:
                owner = text("part.project", seen.taken_back_by)
            return text("job.running_borrowed", size, owner), *_hosts(seen), *_run_details(seen)
        case State.RUNNING:
            return text("job.running", size), *_hosts(seen), *_run_details(seen)
        case State.SUSPENDING:
            return (text("job.pausing", seen.because),)
        case State.SUSPENDED:
            number = (text("job.number", seen.position),) if seen.position else ()
            since = time_text(record.since_at)
            paused = text("job.requeued" if seen.damaged else "job.paused", since, seen.because)
            if seen.retries_at:
                return paused, *number, text("lease.misplaced", seen.retries_at)
            if seen.stays_because:
                return paused, *number, text("job.waits_for_own", reason_text(seen.stays_because))
            return paused, *number, *_consent(seen)
        case State.RESUMING:
            return (text("job.resuming"),)
        case State.STOPPING if seen.is_timed_out:
            return (text("job.stopping_time"),)
        case State.STOPPING if is_preemption(record.why):
            return (text("job.stopping_because", seen.because),)
        case State.STOPPING:
            return (text("job.stopping"),)
        case State.RELEASED | State.FAILED:
            return reason_texts(record.note) or (text("job.ended"),)


def _consent(seen: LeaseView) -> Texts:
    """Return the effect of the consent to share a GPU on a waiting job."""
    if seen.consent is Consent.SHARE:
        return text("guest.may_come"), text("guest.may_share")
    return (text(f"guest.{seen.consent}"),) if seen.consent else ()


def _hosts(seen: LeaseView) -> Texts:
    """Return that a running job shares its own GPU with a guest, or may share it."""
    companion = seen.companion
    if companion is None:
        return (text("guest.may_share"),) if seen.consent in (Consent.SHARE, Consent.HOST) else ()
    if companion.kept is None:
        return (text("guest.host"),)
    return (text("guest.host_keeps", f"{100 * companion.kept:.0f}"),)


def _keeps(companion: Companion) -> Texts:
    """Return the part of its speed that a guest keeps, if known."""
    return () if companion.kept is None else (text("guest.keeps", f"{100 * companion.kept:.0f}"),)


def _run_details(seen: LeaseView) -> Texts:
    """Return the expected end of a running job, and that it was moved."""
    return *seen.progress, *((text("job.moved"),) if seen.record.moved else ())
