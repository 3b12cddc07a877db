"""Commands for a process of a lease, one per line, and its answers: ``alloc 512`` -> ``alloc 0``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress


def sleep(seconds: float) -> int:
    """Sleep, without the GPU."""
    time.sleep(seconds)
    return 0


def serve(**commands: Callable[..., object]) -> None:
    """Report that all is ready, then run commands until the input ends.

    A command gets its words as arguments, numbers as numbers, and returns the answer.
    """
    known: dict[str, Callable[..., object]] = {"sleep": sleep, **commands}
    print("ready 0", flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        print(verb, known[verb](*map(_value, words)) if verb in known else "unknown", flush=True)


def _value(word: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word
