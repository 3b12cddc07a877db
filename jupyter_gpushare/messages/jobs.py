"""Sentences about jobs: why they wait, when they end, and the texts of webhooks and mails."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.core.measure import Measure
from jupyter_gpushare.core.model import WHOLE_GPU, CheckpointMode, Lease, Why
from jupyter_gpushare.core.order import attained_gpu_s, gpus
from jupyter_gpushare.messages.texts import Texts, duration_text, one_line, printable, text
from jupyter_gpushare.protocol.wire import Estimate, Text

# ---- why jobs wait, and why work was preempted --------------------------------

# The reason for a new start of a job whose memory the driver could not restore.
STATE_LOST = "state_lost"

# The reasons for which work gives up its GPU.
BECAUSE: Mapping[str, str] = {
    Why.LENDER_RETURNED: "because.lender_returned",
    Why.OVER_QUOTA: "because.over_quota",
    Why.PRIORITY: "because.priority",
    Why.ORDER: "because.order",
    Why.MOVED: "because.moved",
    Why.IDLE: "because.idle",
    Why.LEND_NOW: "because.lend_now",
    Why.HOST_LEFT: "because.host_left",
    Why.PAIR_PARTED: "because.pair_parted",
    Why.CANNOT_YIELD: "because.cannot_yield",
    Why.HOST_MEMORY_WANTED: "because.host_memory_wanted",
    Why.OWN_MEMORY_WANTED: "because.own_memory_wanted",
    STATE_LOST: "because.state_lost",
}


def because_of(why: str, project: str = "") -> Text:
    """Return why work gave up its GPU, as part of a sentence; ``project`` has the GPU now."""
    if why == Why.OVER_QUOTA and project:
        return text("because.over_quota_of", project)
    return text(BECAUSE.get(why, "because.needed"))


def is_preemption(why: str) -> bool:
    """Return whether work gives up its GPU for this reason."""
    return why in BECAUSE


def requeued(since: str | Text, because: str | Text, checkpoint: CheckpointMode, waits: Texts) -> Texts:
    """Return why a job waits again that has run before."""
    goes_on = "job.goes_on_sigterm" if checkpoint.has_checkpoint else "job.goes_on_none"
    return text("job.requeued", since, because), text(goes_on), *waits


def usually(low_s: float, likely_s: float, high_s: float) -> Text:
    """Return the usual duration of something: ``usually 8 s (5-12)``."""
    low, likely, high = (max(1, round(s)) for s in (low_s, likely_s, high_s))
    if low < high:
        return text("part.usually_range", likely, low, high)
    return text("part.usually", likely)


# Reasons to wait that name what the job needs.
_NEEDS: Mapping[str, str] = {
    "": "waiting.next",
    Why.QUOTA: "waiting.quota",
    Why.OWN_DEVICES: "waiting.own_devices",
    Why.AWAITING_RELEASE: "waiting.being_freed",
    Why.HOST_MEMORY: "waiting.host_memory",
    Why.JOB_HOST_MEMORY: "waiting.job_host_memory",
    Why.RESERVED: "waiting.reserved",
    Why.NOT_BYPASSED: "waiting.not_bypassed",
    Why.IN_LINE: "waiting.in_order",
    Why.NOT_WORTH_IT: "waiting.not_worth_it",
    Why.DEVICE_BROKEN: "waiting.device_broken",
    Why.DRAINING: "waiting.draining",
}


def waiting(
    why: str,
    *,
    needs: str | Text,
    free_milli: int,
    position: int | None = None,
    largest: int | None = None,
    notified_until: Text | None = None,
) -> Texts:
    """Return why a job waits: ``Number 3. Needs 2 GPUs together; 1.25 are free.``

    ``largest`` is the number of GPUs of the largest machine.  ``notified_until`` is the time at which an idle
    session gives its GPU to this job; its owner has been notified.
    """
    number = (text("job.number", position),) if position else ()
    if why == Why.TOO_LARGE:
        has = text("size.less") if largest is None else text("size.gpus", largest)
        return (text("waiting.too_large", needs, has),)
    if why == Why.PROJECT_LIMIT:
        return *number, text("waiting.project_limit")
    if why == Why.BACKING_OFF:
        return *number, text("waiting.backing_off")
    if notified_until is not None:
        return *number, text("waiting.told", needs, notified_until)
    if why in _NEEDS:
        return (text(_NEEDS[why], needs),) if why == "" else (*number, text(_NEEDS[why], needs))
    if free_milli == WHOLE_GPU:
        return *number, text("waiting.one_free", needs)
    return *number, text("waiting.free", needs, f"{free_milli / WHOLE_GPU:g}")


# ---- the remaining time of jobs, by their progress reports -------------------

# In about 80 % of the cases a running job ends between these multiples of the remaining time by its progress
# (docs/benchmarks.md), with `_OFFSET_S` added to both times, because seconds hardly matter to users.
_ENDS = (0.75, 2.7)
_OFFSET_S = 60.0


def left_s(lease: Lease, measure: Measure | None, now: float) -> float | None:
    """Return the seconds that a job still runs on the GPUs that it holds or requests; None if unknown."""
    left_gpu_s = None if measure is None else measure.remaining_at(attained_gpu_s(lease, now))
    return None if left_gpu_s is None or not gpus(lease) else round(left_gpu_s / gpus(lease))


def ends_in(left_s: float) -> Estimate:
    """Return the estimated seconds until a running job ends, pauses included.

    ``left_s`` are the remaining seconds by its progress.
    """
    earliest, latest = ((left_s + _OFFSET_S) * factor - _OFFSET_S for factor in _ENDS)
    return Estimate(low_s=round(max(0.0, earliest)), high_s=round(latest))


def measured(lease: Lease, before: Measure | None, after: Measure | None) -> tuple[str, Text] | None:
    """Return the key and argument of a notice when a report first shows the remaining time, else None."""
    if after is None or after == before:
        return None
    is_known = before is not None and before.left_gpu_s is not None and before.attempt == after.attempt
    if after.left_gpu_s is None or is_known or not gpus(lease):
        return None
    return "notice.time_left", duration_text(after.left_gpu_s / gpus(lease))


# ---- texts of webhooks and mails: one line, without control characters --------

_CHARS = 500
_EVENTS = {
    "started": "started",
    "stopping": "is being stopped",
    "paused": "is paused",
    "attention": "needs attention",
}
_STATES = {
    "queued": "is back in the queue",
    "succeeded": "is done",
    "failed": "has failed",
    "cancelled": "was cancelled",
    "timed_out": "has timed out",
}


def news_line(text: str) -> str:
    """Return a text for a webhook or mail: one line of at most 500 printable characters."""
    return printable(one_line(text))[:_CHARS]


def job_news(name: str, event: str, state: str, reason: str = "") -> str:
    """Return a sentence such as ``train.py has failed. It ended with exit code 1.``"""
    verb = _EVENTS.get(event) or _STATES.get(state, "has ended")
    return f"{news_line(name)} {verb}. {news_line(reason)}".rstrip()
