"""Lines of the decision log, and sentences for readers other than the owner."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jupyter_gpushare.core.model import Kind, Why
from jupyter_gpushare.messages.templates import TEMPLATES
from jupyter_gpushare.messages.texts import Texts, text
from jupyter_gpushare.protocol.wire import Text

# The keys of a subject for its owner: at the beginning of a sentence, and within it.
_OWN: Mapping[str, tuple[str, str]] = {
    "decision.session": ("decision.your_session", "part.your_session"),
    "decision.job": ("decision.your_job", "part.your_job"),
}


def decision(
    action: str, why: str, subject: Text, kind: Kind, beneficiary: Text | None, made_way: Sequence[str] = ()
) -> Text:
    """Return one line of the decision log.

    ``action`` is "grant", "suspend", "resume", "requeue", ...  ``subject`` is the text of ``bo's job train
    (2 GPUs)``.  ``made_way`` has the actions on other leases for this one.
    """
    because: str | Text = why.replace("_", " ")
    if (reason := f"because.{why}") in TEMPLATES:
        because = text(reason)
    if why == Why.FREE_CAPACITY and made_way:
        slept = "suspend" in made_way
        because = text("because.put_to_sleep" if slept else "because.made_way")
    is_job = kind is Kind.TRAIN
    key = {
        "grant": "decision.grant",
        "would_suspend": "decision.would_sleep",
        "suspend": "decision.paused" if is_job else "decision.put_to_sleep",
        "resume": "decision.goes_on" if is_job else "decision.woken",
        "keep": "decision.keeps",
        "requeue": "decision.requeue",
    }.get(action)
    done = text(key) if key else action
    if beneficiary is not None:
        return text("decision.for", subject, done, beneficiary, because)
    return text("decision", subject, done, because)


def to_reader(texts: Texts, reader: str) -> Texts:
    """Return texts of the log for ``reader``: "Your session", not "ada's session"."""
    return tuple(_to_reader(each, reader, is_first=True) for each in texts)


def _to_reader(text: Text, reader: str, *, is_first: bool) -> Text:
    if text.key in _OWN and text.args[:1] == [reader]:
        first, within = _OWN[text.key]
        return Text(key=first if is_first else within, args=text.args[1:])
    template = TEMPLATES.get(text.key)
    begins = is_first and isinstance(template, str) and template.startswith("%1")
    args = [
        each if isinstance(each, str) else _to_reader(each, reader, is_first=begins and not n)
        for n, each in enumerate(text.args)
    ]
    return Text(key=text.key, args=args)


# ---- a sentence about a session, for a reader other than its owner -----------

# The order matters.  A test covers every sentence of a session.
_OF_OTHERS: Mapping[str, str] = {
    r"\bIf you run a cell\b": "If {owner} runs a cell",
    r"\bRun any GPU cell to wake it\b": "Any GPU cell of {owner} wakes it",
    r"\bcheck your results, or restart the kernel\b": "{owner} should check results, or restart the kernel",
    r"\bYou keep\b": "{owner} keeps",
    r"\bwith you\b": "with {owner}",
    r"\b[Yy]ours?\b": "{owner}'s",
}


def about(sentence: str, owner: str) -> str:
    """Return a sentence that addresses the owner of a session, reworded for another reader."""
    for pattern, words in _OF_OTHERS.items():
        sentence = re.sub(pattern, words.format(owner=owner).replace("\\", r"\\"), sentence)
    return sentence
