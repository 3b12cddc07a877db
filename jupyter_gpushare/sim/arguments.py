"""Numbers on the command line of `gpushare simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from jupyter_gpushare import command_line
from jupyter_gpushare.sim import traces

count = command_line.count(1, 99_999_999)


def number(least: float, expected: str) -> Callable[[str], float]:
    """Return a reader of numbers from ``least``; ``expected`` says in an error what they are."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= traces.LARGEST:
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return value

    return parse


seconds = number(0.0, "a number of seconds, 0 or more")
positive = number(1e-9, "a number above 0")


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
    """Return a reader of seconds, with ``word`` as None."""
    return lambda text: None if text == word else seconds(text)


def numbers(least: int, most: int) -> Callable[[str], list[int]]:
    """Return a reader of a list of whole numbers from ``least`` to ``most``, with commas."""
    read = command_line.count(least, most)
    return lambda text: [read(part) for part in text.split(",")]
