"""What a process of a lease is told, one command a line, and how it answers: ``alloc 512`` -> ``alloc 0``."""

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
    """Say that all is ready; then do what is told until the input ends.

    A command is called with its words, numbers as such; what it returns is the answer.
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
