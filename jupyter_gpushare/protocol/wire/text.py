"""Sentences as keys and arguments, which readers translate."""

from __future__ import annotations

from jupyter_gpushare.protocol.wire.codec import Answer


class Text(Answer, frozen=True):
    """One sentence or phrase: a key of `messages.TEMPLATES`, and what replaces ``%1``, ``%2``, ...

    The key of an error is its English template.
    """

    key: str
    args: list[str | Text] = []
