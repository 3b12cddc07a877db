"""A sentence about a session, for a reader other than its owner."""

from __future__ import annotations

import re
from collections.abc import Mapping

# In this order; every sentence of a session is covered by a test.
_OF_OTHERS: Mapping[str, str] = {
    r"\bIf you run a cell\b": "If {owner} runs a cell",
    r"\bRun any GPU cell to wake it\b": "Any GPU cell of {owner} wakes it",
    r"\bcheck your results, or restart the kernel\b": "{owner} should check results, or restart the kernel",
    r"\bYou keep\b": "{owner} keeps",
    r"\bwith you\b": "with {owner}",
    r"\b[Yy]ours?\b": "{owner}'s",
}


def about(sentence: str, owner: str) -> str:
    """Return a sentence that addresses the owner of a session, for another reader."""
    for pattern, words in _OF_OTHERS.items():
        sentence = re.sub(pattern, words.format(owner=owner).replace("\\", r"\\"), sentence)
    return sentence
