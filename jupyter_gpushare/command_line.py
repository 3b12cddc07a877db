"""Command lines as tables of verbs and options, and the parsers that are built from them."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TextIO

Kind = Callable[[str], object] | Sequence[str] | None

_INVALID_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")
_MIN_COLUMNS = 40


class Option:
    """An option or argument of a verb, described by its ``usage``, as in a usage line.

    ``--limit N`` has a value, ``-f --follow`` has none, and ``--env K=V ...`` may be repeated.  ``ID`` is an
    argument, ``[ID]`` an optional one, and ``ID ...`` one or more.  ``kind`` parses the value or lists the
    choices.  ``settings`` are passed to ``argparse`` unchanged.
    """

    def __init__(self, usage: str, help: str = "", kind: Kind = None, **settings: Any) -> None:
        self.usage, self.help, self.kind, self.settings = usage, help, kind, settings

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add the option to a parser or to a group of a parser."""
        words = self.usage.split()
        flags = [word for word in words if word.startswith("-")]
        value = next((word for word in words if word not in (*flags, "...")), "")
        settings: dict[str, Any] = {"help": self.help} if self.help else {}
        if self.kind is not None:
            settings["type" if callable(self.kind) else "choices"] = self.kind
        elif flags and not value:
            settings["action"] = "store_true"
        if words[-1] == "...":
            settings |= {"action": "append", "default": []} if flags else {"nargs": "+"}
        settings |= self.settings
        if not flags:
            name = value.strip("[]")
            flags = [settings.pop("dest", name.lower())]
            settings |= {"nargs": "?"} if name != value else {}
            value = "" if name.islower() else name
        if value:
            settings["metavar"] = value
        parser.add_argument(*flags, **settings)


class OneOf:
    """Options of which at most one may be given; exactly one if it is ``required``."""

    def __init__(self, *options: Option, required: bool = False) -> None:
        self.options, self.required = options, required

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser."""
        group = parser.add_mutually_exclusive_group(required=self.required)
        for each in self.options:
            each.add_to(group)


class Verb:
    """A verb: a function and its options.

    The parsed arguments have the function as ``run``.  Its name is that of the verb by default.  The first
    paragraph of its docstring is the help, the second has the examples.
    """

    def __init__(
        self, run: Callable[..., object], *options: Option | OneOf, name: str = "", usage: str | None = None
    ) -> None:
        self.run, self.options, self.usage = run, options, usage
        self.name = name or run.__name__
        paragraphs = (inspect.getdoc(run) or "").split("\n\n")
        self.description = " ".join(paragraphs[0].split())
        self.examples = paragraphs[1].splitlines() if len(paragraphs) > 1 else []


class Parser(argparse.ArgumentParser):
    """A parser that shows examples in its help, and suggests the closest choice for a misspelt one."""

    def __init__(self, *, examples: Sequence[str] = (), after: str = "", **settings: Any) -> None:
        """Create a parser; ``after`` ends the help, ``settings`` are those of `argparse.ArgumentParser`."""
        shown = "\n  ".join(["examples:", *examples]) if examples else ""
        epilog = "\n\n".join(filter(None, (shown, after)))
        super().__init__(epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def add_verbs(
        self,
        verbs: Iterable[Verb],
        *every: Option,
        metavar: str = "VERB",
        examples: Sequence[str] = (),
    ) -> argparse._SubParsersAction[Parser]:
        """Add verbs, each also with the options ``every``; return the action to which more can be added."""
        added = self.add_subparsers(metavar=metavar, required=True)
        for verb in verbs:
            text = verb.description
            # An acronym keeps its capitals.
            help = text if text[1:2].isupper() else f"{text[:1].lower()}{text[1:]}"
            parser = added.add_parser(
                verb.name,
                help=help.rstrip("."),
                usage=verb.usage,
                description=text,
                examples=verb.examples or examples or [f"{self.prog} {verb.name}"],
            )
            for each in (*every, *verb.options):
                each.add_to(parser)
            parser.set_defaults(run=verb.run, parser=parser)
        return added

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, wrapped at words in a terminal; exit with 2."""
        if unknown := _INVALID_CHOICE.search(message):
            choices = re.findall(r"[\w,-]*\w", unknown[2])
            near = difflib.get_close_matches(unknown[1], choices, 1)
            listed = ", ".join(repr(each) if "," in each else each for each in choices)
            advice = f"did you mean {near[0]}?" if near else f"choose from {listed}"
            message = f"{message[: unknown.start()]}{unknown[1]!r} is not known: {advice}"
        self.print_usage(sys.stderr)
        self.exit(2, wrapped(f"{self.prog}: error: {message}", sys.stderr) + "\n")


def count(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return parse


def wrapped(text: str, stream: TextIO, indent: str = "") -> str:
    """Return a line with an indent, wrapped at words if the stream is a terminal."""
    if not stream.isatty():
        return f"{indent}{text}"
    return textwrap.fill(
        text,
        columns(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def columns(taken: int = 0) -> int:
    """Return the columns of the terminal without ``taken``, but at least enough for readable sentences."""
    return max(_MIN_COLUMNS, shutil.get_terminal_size().columns - taken)
