"""Reasons that are sent or stored in English, by key for translation.

The device helper, the Hub's errors and the runner say reasons in English, with codes of the
driver in them.  A reason is read by the first template that matches; so is each of its parts.
"""

from __future__ import annotations

import re
from functools import cache, reduce

from jupyter_gpushare.messages.templates import TEMPLATES
from jupyter_gpushare.messages.texts import Texts, text
from jupyter_gpushare.protocol.wire import Text

# Groups of templates that are reasons.
FAMILIES = ("reason.", "taint.", "xid.", "recovery.")
_USES = "it uses "
_MEMORY = re.compile(r"(\d+(?:\.\d+)?) GiB")  # `gibibytes`


def reason_text(reason: str) -> Text:
    """Return a reason by key where it is known; its English is always ``reason``."""
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
                parts[-1] = found.groups()[-1]  # a program's words are no reason of ours
            return text(key, *parts)
    return None


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Keys of reasons, and what their English text matches."""
    return tuple(
        (key, re.compile(re.sub(r"%\d", "(.+)", re.escape(template)), re.DOTALL))
        for key, template in TEMPLATES.items()
        if key.startswith(FAMILIES) and key != "reason.uses" and isinstance(template, str)
    )
