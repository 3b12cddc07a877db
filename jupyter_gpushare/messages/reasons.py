"""Reasons of the device helper, which sends English, by key for translation."""

from __future__ import annotations

import re
from functools import cache, reduce

from jupyter_gpushare.messages.templates import TEMPLATES, text
from jupyter_gpushare.protocol.wire import Text

_USES = "it uses "


def reason_text(reason: str) -> Text:
    """Return why a lease or a device cannot be suspended, by key where the reason is known.

    The English of the result is always ``reason``.
    """
    if reason.startswith(_USES):
        words = reason.removeprefix(_USES).split(", ")
        return text("reason.uses", reduce(lambda a, b: text("part.list", a, b), map(_known, words)))
    return _known(reason)


def _known(reason: str) -> Text:
    for key, pattern in _patterns():
        if found := pattern.fullmatch(reason):
            return text(key, *(reason_text(each) for each in found.groups()))
    return text("verbatim", reason)


@cache
def _patterns() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Keys of fixed reasons, and what their English text matches."""
    return tuple(
        (key, re.compile(re.escape(template).replace("%1", "(.+)"), re.DOTALL))
        for key, template in TEMPLATES.items()
        if key.startswith(("reason.", "taint.")) and key != "reason.uses" and isinstance(template, str)
    )
