"""What webhooks and mails say of a job: one line, without control characters."""

from __future__ import annotations

from jupyter_gpushare.messages.units import one_line, printable

_CHARS = 500
_EVENTS = {
    "started": "started",
    "stopping": "is being stopped",
    "paused": "is paused",
    "attention": "needs attention",
}
_STATES = {
    "queued": "is back in the queue",
    "succeeded": "is done",
    "failed": "has failed",
    "cancelled": "was cancelled",
    "timed_out": "has timed out",
}


def news_line(text: str) -> str:
    """Return a text as data for others: one line of at most 500 characters, all of them printable."""
    return printable(one_line(text))[:_CHARS]


def job_news(name: str, event: str, state: str, reason: str = "") -> str:
    """Return a sentence such as ``train.py has failed. It ended with exit code 1.``"""
    said = _EVENTS.get(event) or _STATES.get(state, "has ended")
    return f"{news_line(name)} {said}. {news_line(reason)}".rstrip()
