"""Options that several verbs share, and parsers of their values."""

from __future__ import annotations

import argparse
import re

from jupyter_gpushare.command_line import Option, count

JSON = Option("--json", "print JSON")
OF_EVERY_VERB = (
    JSON,
    Option("--url URL", "of the Hub or its broker (default: $GPUSHARE_API_URL)"),
    Option("--token TOKEN", "default: $GPUSHARE_API_TOKEN, else $JUPYTERHUB_API_TOKEN"),
)
YES = Option("--yes", "do not ask")
SERVER = Option("--server NAME", "name of the server (default: this one)")
PROFILE = Option("--profile NAME", "one MIG instance instead, like 1g.10gb")
MEMORY = Option("--memory SIZE", "GPU memory of one device instead, like 20GiB")
PRIORITY = count(-100, 100)
# JupyterLab's dialog reads durations in the same way (`ui/src/times.ts`).
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def job_id(text: str) -> str:
    """Return the id of a job, which is safe in an address and in a path.

    Raises:
        argparse.ArgumentTypeError: the text is not the id of a job.
    """
    if not (text.isascii() and text.isalnum() and len(text) <= 40):
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not the id of a job; `gpushare jobs` lists them")
    return text


def seconds(text: str) -> float:
    """Return the seconds of a duration like ``30m``.

    Raises:
        argparse.ArgumentTypeError: the text is not a number with a unit.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time with its unit, like 30m, 4h or 2d")
    return float(found[1]) * _UNITS[found[2]]


def yes_or_no(text: str) -> bool:
    """Return whether the text is ``yes``.

    Raises:
        argparse.ArgumentTypeError: the text is neither ``yes`` nor ``no``.
    """
    if text not in ("yes", "no"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no")
    return text == "yes"


def pair(text: str) -> tuple[str, str]:
    """Return the name and the value of ``NAME=VALUE``.

    Raises:
        argparse.ArgumentTypeError: the text does not have this form.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value


JOB = Option("ID", "of the job, as `gpushare jobs` shows it", job_id)
