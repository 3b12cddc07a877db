"""Numbers as people write them: sizes, memory, durations, times."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.size import Size, fraction_text
from jupyter_gpushare.gibibytes import gibibytes
from jupyter_gpushare.messages.texts import english, text
from jupyter_gpushare.protocol.wire import Text


def size_text(size: Size) -> Text:
    """Return `Size.text` for translation."""
    if size.profile:
        return text("size.profile", size.profile)
    if size.memory_bytes:
        return text("size.memory", memory(size.memory_bytes))
    if size.device_count > 1:
        return text("size.gpus", size.device_count)
    return text("size.fraction", fraction_text(size.fraction_milli))


def memory(count: int) -> Text:
    """Return `gibibytes` for translation."""
    return text("memory", gibibytes(count).removesuffix(" GiB"))


# How the memory limit of a lease is enforced.
LEVELS: Mapping[str, str] = {
    "whole_gpu": "whole device",
    "mig": "enforced by the hardware (MIG)",
    "cgroup": "enforced by the driver",
    "preload": "enforced in software",
    "hints": "not enforced: frameworks are only asked",
}


def time_text(at: str, *, seconds: bool = False) -> Text:
    """Return a time (ISO 8601, UTC; empty: not known), which is shown in the reader's zone."""
    if not at:
        return text("verbatim", "")
    return text("time", f"{at[:19]}Z" if seconds else f"{at[:16]}Z")


def needs_of(lease: Lease) -> Text:
    """Return what a waiting job needs: ``2 GPUs together``."""
    size = size_text(lease.size)
    return text("size.together", size) if lease.size.device_count > 1 else size


def printable(text: str) -> str:
    """Return the text with "?" for what moves a cursor, a line or a column: users choose names."""
    return "".join(c if c.isprintable() else "?" for c in text)


def one_line(text: str) -> str:
    """Return a text for one line: the first line, and of more than one the last."""
    first, *more = text.splitlines() or [""]
    return f"{first} {more[-1].strip()}" if more else first


def duration(seconds: float) -> str:
    """Return ``5 s``, ``6 min``, ``2 h``: one unit, rounded."""
    return english(duration_text(seconds))


_UNITS = ((86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def range_text(low_s: float, high_s: float) -> Text:
    """Return an estimate: ``20 to 50 min``, ``40 s to 3 min``, ``about 5 min``, ``at most 30 s``."""
    high = _rounded(high_s)
    if low_s < 1:
        return text("range.up_to", text(*high))
    low = _rounded(low_s)
    if low == high:
        return text("range.about", text(*high))
    if low[0] == high[0]:
        return text(low[0].replace("duration.", "range."), low[1], high[1])
    return text("range.mixed", text(*low), text(*high))


def _rounded(seconds: float) -> tuple[str, int]:
    """Return template and number of a duration, in the largest unit of which it has at least 1.5."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= 1.5 * size), (1, "seconds"))
    return f"duration.{unit}", max(1, round(seconds / size))


def duration_text(seconds: float) -> Text:
    """Return `duration` for translation."""
    if seconds < 90:
        return text("duration.seconds", max(0, round(seconds)))
    if seconds < 5400:
        return text("duration.minutes", round(seconds / 60))
    return text("duration.hours", round(seconds / 3600))
