"""Sentences as keys and arguments, which readers translate."""

from __future__ import annotations

from jupyter_gpushare.protocol.wire.codec import Answer


class Text(Answer, frozen=True):
    """One sentence or phrase: a key of `messages.TEMPLATES`, and what replaces ``%1``, ``%2``, ...

    The key of an error is its English template.  The argument of the key ``time`` is a moment
    (ISO 8601, UTC), which readers write in their own zone, with seconds where it has them.
    """

    key: str
    args: list[str | Text] = []
