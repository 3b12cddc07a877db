"""What the parsers of all verbs share: options of every verb, and readers of values."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from jupyter_gpushare.cli.output import wrapped

_INVALID_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")
# As JupyterLab's dialog reads them (`ui/src/times.ts`).
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the closest choice for a misspelt one."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2, the usage and the message, in a terminal wrapped at words."""
        if unknown := _INVALID_CHOICE.search(message):
            choices = re.findall(r"[\w-]+", unknown[2])
            near = difflib.get_close_matches(unknown[1], choices, 1)
            advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"
            message = f"{message[: unknown.start()]}{unknown[1]!r} is not known: {advice}"
        self.print_usage(sys.stderr)
        self.exit(2, wrapped(f"{self.prog}: error: {message}", sys.stderr) + "\n")


def add_verb(
    verbs: argparse._SubParsersAction[Parser],
    name: str,
    does: Callable[[argparse.Namespace], int],
    text: str,
    *examples: str,
    usage: str | None = None,
    json_help: str = "print JSON",
) -> argparse.ArgumentParser:
    """Return the parser of a new verb, with its examples and the options of every verb."""
    verb = verbs.add_parser(
        name,
        help=text,
        usage=usage,
        description=text[0].upper() + text[1:] + ".",
        epilog="examples:\n  " + "\n  ".join(examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("--json", action="store_true", help=json_help)
    verb.add_argument("--url", help="of the Hub or its broker (default: $GPUSHARE_API_URL)")
    verb.add_argument("--token", help="default: $GPUSHARE_API_TOKEN, else $JUPYTERHUB_API_TOKEN")
    verb.set_defaults(run=does, parser=verb, command=[])
    return verb


def count(low: int, high: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def seconds(text: str) -> float:
    """Return the seconds of a time with its unit.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time with its unit, like 30m, 4h or 2d")
    return float(found[1]) * _UNITS[found[2]]


def limit(text: str) -> float:
    """Return the seconds of a time with its unit; 0 for ``none``.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    return 0.0 if text == "none" else seconds(text)


def pair(text: str) -> tuple[str, str]:
    """Return name and value of ``NAME=VALUE``.

    Raises:
        argparse.ArgumentTypeError: it is no such pair.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value
