"""Why jobs wait, when they start, and why work was preempted."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.core.model import WHOLE_GPU, Why
from jupyter_gpushare.messages.texts import Texts, text
from jupyter_gpushare.protocol.wire import Text

# Reason why a job starts again: the driver could not bring its memory back.
STATE_LOST = "state_lost"

# Reasons why work gave up its GPU.
BECAUSE: Mapping[str, str] = {
    Why.LENDER_RETURNED: "because.lender_returned",
    Why.OVER_QUOTA: "because.over_quota",
    Why.PRIORITY: "because.priority",
    Why.ORDER: "because.order",
    Why.MOVED: "because.moved",
    Why.IDLE: "because.idle",
    Why.LEND_NOW: "because.lend_now",
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


def requeued(since: str | Text, because: str | Text, checkpoint: str, waits: Texts) -> Texts:
    """Return why a job that had run waits again; ``checkpoint`` is its `CheckpointMode`."""
    goes_on = "job.goes_on_sigterm" if checkpoint == "sigterm" else "job.goes_on_none"
    return text("job.requeued", since, because), text(goes_on), *waits


def usually(low_s: float, likely_s: float, high_s: float) -> Text:
    """Return how long something took before: ``usually 8 s (5-12)``."""
    low, likely, high = (max(1, round(s)) for s in (low_s, likely_s, high_s))
    if low < high:
        return text("part.usually_range", likely, low, high)
    return text("part.usually", likely)


# Reasons to wait that name what the job needs.
_NEEDS: Mapping[str, str] = {
    "": "waiting.next",
    Why.QUOTA: "waiting.quota",
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
    position: int | None,
    largest: int | None = None,
    told_until: Text | None = None,
) -> Texts:
    """Return why a job waits: ``Number 3. Needs 2 GPUs together; 1.25 are free.``

    ``largest`` is the number of GPUs of the largest machine; ``told_until``: when the idle session
    gives its GPU whose owner was told of this job.
    """
    number = (text("job.number", position),) if position else ()
    if why == Why.TOO_LARGE:
        has = text("size.less") if largest is None else text("size.gpus", largest)
        return (text("waiting.too_large", needs, has),)
    if why == Why.PROJECT_LIMIT:
        return *number, text("waiting.project_limit")
    if why == Why.BACKING_OFF:
        return *number, text("waiting.backing_off")
    if told_until is not None:
        return *number, text("waiting.told", needs, told_until)
    if why in _NEEDS:
        return (text(_NEEDS[why], needs),) if why == "" else (*number, text(_NEEDS[why], needs))
    if free_milli == WHOLE_GPU:
        return *number, text("waiting.one_free", needs)
    return *number, text("waiting.free", needs, f"{free_milli / WHOLE_GPU:g}")
