"""The remaining time of jobs, by their progress reports."""

from __future__ import annotations

from jupyter_gpushare.core.measure import Doubt, Measure
from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.order import attained_gpu_s, gpus
from jupyter_gpushare.messages.texts import text
from jupyter_gpushare.messages.units import duration_text
from jupyter_gpushare.protocol.wire import Text


def left_s(lease: Lease, measure: Measure | None, now: float) -> float | None:
    """Return for how many seconds a job still runs on the GPUs that it holds or requests; None: not known."""
    left = None if measure is None else measure.left_at(attained_gpu_s(lease, now))
    return None if left is None or not gpus(lease) else round(left / gpus(lease))


def doubt(lease: Lease, measure: Measure | None, now: float) -> Doubt | None:
    """Return why the progress of a job does not count; None: it may."""
    return None if measure is None else measure.doubt_at(attained_gpu_s(lease, now))


def measured(lease: Lease, before: Measure | None, after: Measure | None) -> tuple[str, Text] | None:
    """Return template and argument of what a report shows for the first time; None: nothing new."""
    if after is None or after == before:
        return None
    if after.doubt is not None:
        return "notice.doubt", text(f"part.doubt_{after.doubt}")
    is_known = before is not None and before.left_gpu_s is not None and before.attempt == after.attempt
    if after.left_gpu_s is None or is_known or not gpus(lease):
        return None
    return "notice.time_left", duration_text(after.left_gpu_s / gpus(lease))
