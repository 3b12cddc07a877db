"""Texts: keys of `TEMPLATES` with arguments, their English, and numbers in readable form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, reduce

from jupyter_gpushare.core.model import Lease
from jupyter_gpushare.core.size import Size, fraction_text
from jupyter_gpushare.errors import fill
from jupyter_gpushare.gibibytes import gibibytes
from jupyter_gpushare.messages.templates import TEMPLATES
from jupyter_gpushare.protocol.wire import Answer, Text
from jupyter_gpushare.wall_clock import clock_time

# Sentences in order; they are joined with spaces.
Texts = tuple[Text, ...]


def text(key: str, *args: str | int | Text) -> Text:
    """Return the text of ``key`` with ``args`` for ``%1``, ``%2``, ...

    Raises:
        KeyError: `TEMPLATES` has no such key.
    """
    TEMPLATES[key]
    return Text(key=key, args=[each if isinstance(each, Text) else str(each) for each in args])


def english(texts: Text | Iterable[Text], time: Callable[[str], str] = clock_time) -> str:
    """Return the English of one text, or of several, joined with spaces.

    ``time`` formats the times in it, by default in the time zone of this process.
    """
    if not isinstance(texts, Text):
        return " ".join(english(each, time) for each in texts)
    template = TEMPLATES.get(texts.key, texts.key)  # the key of an error is its template
    args = [each if isinstance(each, str) else english(each, time) for each in texts.args]
    if texts.key == "time":
        return time(args[0])
    if isinstance(template, tuple):
        template = template[0] if args[0] == "1" else template[1]
    return fill(template, args)


def in_english(answer: object) -> object:
    """Return an answer for JSON, with the English of ``sentence_texts`` as ``sentence``, and so on."""
    match answer:
        case list():
            return [in_english(each) for each in answer]
        case Answer() if not isinstance(answer, Text):
            plain = {name: getattr(answer, name) for name in answer.__struct_fields__}
            for name in plain:
                if not plain[name] and (texts := plain.get(f"{name}_texts")):
                    plain[name] = english(texts)
            return {name: in_english(value) for name, value in plain.items()}
        case _:
            return answer


def local(sentence: str, texts: Iterable[Text]) -> str:
    """Return a broker's sentence with times in the time zone of this process.

    Return ``sentence`` unchanged if the broker sent no texts, or if a newer broker sent unknown keys.
    """
    texts = tuple(texts)
    try:
        return english(texts) if texts and all(map(_is_known, texts)) else sentence
    except (IndexError, ValueError):  # the arguments of another version
        return sentence


def _is_known(text: Text) -> bool:
    return text.key in TEMPLATES and all(isinstance(each, str) or _is_known(each) for each in text.args)


# ---- numbers in readable form: sizes, memory, durations, times ---------------


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
    "hints": "not enforced: frameworks are only asked to stay within it",
}


def time_text(at: str, *, seconds: bool = False) -> Text:
    """Return the text of a time (ISO 8601, UTC; empty if unknown), to be shown in the reader's time zone."""
    if not at:
        return text("verbatim", "")
    return text("time", f"{at[:19]}Z" if seconds else f"{at[:16]}Z")


def needs_of(lease: Lease) -> Text:
    """Return the size that a waiting job needs: ``2 GPUs together``."""
    size = size_text(lease.size)
    return text("size.together", size) if lease.size.device_count > 1 else size


def printable(text: str) -> str:
    """Return the text with "?" for unprintable characters, because users choose names."""
    return "".join(c if c.isprintable() else "?" for c in text)


def one_line(text: str) -> str:
    """Return a text in one line: its first line, and its last line if it has several."""
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


def _rounded(seconds: float, units: Sequence[tuple[int, str]] = _UNITS, least: int = 1) -> tuple[str, int]:
    """Return the key and number of a duration, in the largest unit in which it is at least 1.5."""
    size, unit = next(((size, unit) for size, unit in units if seconds >= 1.5 * size), (1, "seconds"))
    return f"duration.{unit}", max(least, round(seconds / size))


def duration_text(seconds: float) -> Text:
    """Return `duration` for translation."""
    return text(*_rounded(seconds, _UNITS[1:], least=0))


# ---- keys for reasons that are sent or stored in English ---------------------
# The device helper, the Hub's errors and the runner give reasons in English, with codes of the driver.
# A reason is parsed with the first template that matches, and so are its parts.

# Groups of templates that are reasons.
FAMILIES = ("reason.", "taint.", "xid.", "recovery.")
_USES = "it uses "
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) GiB")  # `gibibytes`


def reason_text(reason: str) -> Text:
    """Return the text of a reason, with its key if that is known; its English is always ``reason``."""
    if reason.startswith(_USES):
        words = map(_part, reason.removeprefix(_USES).split(", "))
        return text("reason.uses", reduce(lambda a, b: text("part.list", a, b), words))
    return _known(reason) or text("verbatim", reason)


def reason_texts(reason: str) -> Texts:
    """Return `reason_text`, or nothing for an empty reason."""
    return (reason_text(reason),) if reason else ()


def _part(words: str) -> str | Text:
    if amount := _MEMORY.fullmatch(words):
        return text("memory", amount[1])
    return _known(words) or words


def _known(reason: str) -> Text | None:
    for key, pattern in _patterns():
        if found := pattern.fullmatch(reason):
            parts = list(map(_part, found.groups()))
            if key == "reason.last_printed":
                parts[-1] = found.groups()[-1]  # the output of a program is not parsed
            return text(key, *parts)
    return None


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return the keys of reasons, and patterns for their English."""
    return tuple(
        (key, re.compile(re.sub(r"%\d", "(.+)", re.escape(template)), re.DOTALL))
        for key, template in TEMPLATES.items()
        if key.startswith(FAMILIES) and key != "reason.uses" and isinstance(template, str)
    )
