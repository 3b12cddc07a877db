"""Numbers on the command line of `gpushare simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from jupyter_gpushare.sim import traces


def count(text: str) -> int:
    """Return a whole number of at least 1.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not (text.isascii() and text.isdigit() and int(text[:9]) >= 1 and len(text) <= 8):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Return a number of seconds, 0 or more.

    Raises:
        ArgumentTypeError: it is none.
    """
    return _number(text, 0.0, "a number of seconds, 0 or more")


def positive(text: str) -> float:
    """Return a number above 0.

    Raises:
        ArgumentTypeError: it is none.
    """
    return _number(text, 1e-9, "a number above 0")


def _number(text: str, least: float, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= traces.LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value


def share_and_error(text: str) -> tuple[float, float]:
    """Return a share of jobs and the error of their reports: ``0.5,0.3``.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        share, sigma = map(float, text.split(","))
    except ValueError:
        share, sigma = -1.0, 0.0
    if not (0 <= share <= 1 and 0 <= sigma <= 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share and an error like 0.5,0.3")
    return share, sigma


def seconds_or(word: str) -> Callable[[str], float | None]:
    """Return a parser of seconds, with ``word`` as None."""
    return lambda text: None if text == word else seconds(text)


def numbers(least: int, most: int) -> Callable[[str], list[int]]:
    """Return a parser of a list of whole numbers from ``least`` to ``most``."""

    def parse(text: str) -> list[int]:
        parts = text.split(",")
        if not all(p.isascii() and p.isdigit() and len(p) <= 8 and least <= int(p) <= most for p in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list like {least},1,2")
        return [int(p) for p in parts]

    return parse
