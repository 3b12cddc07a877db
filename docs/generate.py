"""Write the pages that are drawn from the code: ``python docs/generate.py``.

`PAGES` says which page comes from which function.  ``tests/docs`` compares the
files with what the functions return, so a page cannot fall behind the code.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from traitlets import DefaultHandler, HasTraits, TraitType

from jupyter_gpushare import wire
from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.handlers import ROUTES
from jupyter_gpushare.core.model import HOLDS_ROOM, TRANSITIONS, Event, State
from jupyter_gpushare.hub import GPUShareMixin

DOCS = Path(__file__).resolve().parent
# An event that is possible in so many states is told in a sentence, or the drawing is all arrows.
EVERYWHERE = 5
# Above it a page is written by hand, below it by this script.
MARKER = "<!-- From here on written by docs/generate.py; do not edit. -->"

MEANINGS: Mapping[State, str] = {
    State.PENDING: "waits for room",
    State.GRANTED: "room is reserved; its processes are being started",
    State.RUNNING: "has its room, whether it computes or idles",
    State.SUSPENDING: "its GPU memory is being copied to RAM",
    State.SUSPENDED: "asleep: its processes live, its GPU memory lies in RAM, its room is lent or free",
    State.RESUMING: "its room is free again; its GPU memory is being copied back",
    State.STOPPING: "told to end, within its time of grace; its room is on its way out",
    State.RELEASED: "over",
    State.FAILED: "could not be started, or was given up",
}


def lease_page() -> str:
    """``docs/lease.md``: every state and every arrow of `TRANSITIONS`."""
    ways: dict[Event, list[tuple[State, State]]] = defaultdict(list)
    for (state, event), after in TRANSITIONS.items():
        ways[event].append((state, after))
    drawn = {event: pairs for event, pairs in ways.items() if len(pairs) < EVERYWHERE}
    told = {event: pairs for event, pairs in ways.items() if len(pairs) >= EVERYWHERE}
    arrows = [
        f"    {before} --> {after}: {event}"
        for event in Event
        for before, after in sorted(drawn.get(event, ()))
    ]
    sentences = []
    for event, pairs in told.items():
        targets = " or ".join(f"`{state}`" for state in sorted({after for _, after in pairs}))
        sources = ", ".join(f"`{state}`" for state in State if state in {before for before, _ in pairs})
        sentences.append(f"* `{event}` leads to {targets}; it is possible in {sources}.")
    rows = [
        f"| `{state}` | {MEANINGS[state]} | {'yes' if state in HOLDS_ROOM else 'no'} |" for state in State
    ]
    final = [
        f"    {state} --> [*]" for state in State if not any(before == state for before, _ in TRANSITIONS)
    ]
    return "\n".join(
        [
            "<!-- Written by docs/generate.py from jupyter_gpushare.core.model.TRANSITIONS; do not edit. -->",
            "# The life of a lease",
            "",
            "A lease is the right of one workload, a build session or a training job, to a part of the GPUs.",
            "Whatever is not drawn or listed here cannot happen: the broker refuses it.",
            "",
            "```mermaid",
            "stateDiagram-v2",
            f"    [*] --> {State.PENDING}",
            *arrows,
            *final,
            "```",
            "",
            "Left out of the drawing, because they are possible almost everywhere:",
            "",
            *sentences,
            "",
            "| state | meaning | holds device memory |",
            "|---|---|---|",
            *rows,
            "",
            "A suspended lease holds host memory instead of device memory. A build session within its",
            "project's quota keeps its claim on the device in every state but the last two.",
            "",
        ]
    )


def api_page() -> str:
    """``docs/api.md``: every route, with its messages."""
    rows = []
    for route in ROUTES:
        for method, answer in route.answers.items():
            takes = route.takes.get(method)
            what = _markdown((route.handler.__doc__ or "").strip().splitlines()[0])
            body = f"`{takes.__name__}`" if takes is not None else ""
            reply = "" if answer is None else "" if answer is dict else f"`{answer.__name__}`"
            rows.append(f"| `{method.upper()} {route.path}` | {what} | {body} | {reply} |")
    messages = []
    for kind in _messages():
        # A class without a text of its own inherits the base's, or msgspec's.
        doc = _markdown(inspect.cleandoc(vars(kind).get("__doc__") or "").split("\n\n")[0])
        messages += [f"### {kind.__name__}", "", *([doc, ""] if doc else []), *_fields(kind), ""]
    return _below_marker(
        "api.md",
        [
            "| | what | body | answer |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Messages",
            "",
            *messages,
        ],
    )


def _below_marker(name: str, lines: list[str]) -> str:
    """The page with what a person wrote above `MARKER` and ``lines`` below it."""
    written, marker, _ = (DOCS / name).read_text().partition(MARKER)
    if not marker:
        raise SystemExit(f"docs/{name} has lost the line {MARKER}")
    return "\n".join([written + MARKER, "", *lines])


def _markdown(text: str) -> str:
    """A docstring's words in one line, with Markdown's way to write code."""
    return " ".join(text.split()).replace("``", "`")


def _messages() -> list[type[msgspec.Struct]]:
    """Every message that a route takes or answers, and those inside them, in the order of `wire`."""
    return [
        kind
        for kind in vars(wire).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == wire.__name__
        and kind not in (wire.Message, wire.Answer)
    ]


def _fields(kind: type[msgspec.Struct]) -> list[str]:
    comments = dict(
        re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(kind), re.MULTILINE),
    )
    hints = typing.get_type_hints(kind)
    rows = []
    for field in msgspec.structs.fields(kind):
        needed = field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
        rows.append(
            f"| `{field.name}` | {_type_name(hints[field.name])} | {'yes' if needed else ''} "
            f"| {comments.get(field.name, '')} |"
        )
    return ["| field | type | needed | |", "|---|---|---|---|", *rows]


def _type_name(hint: object) -> str:
    """A type as JSON people say it: `string or null`, `list of Offer`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_name(kind) for kind in inner)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is list:
        return f"list of {_type_name(inner[0])}"
    if origin is dict:
        return f"object of {_type_name(inner[1])}"
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return ", ".join(f"`{value}`" for value in hint)
    names = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
    return names.get(typing.cast("type", hint)) or str(getattr(hint, "__name__", hint))


def configuration_page() -> str:
    """``docs/configuration.md``: every trait of the Hub's mixin and of the broker."""
    lines = []
    for kind, where in ((GPUShareMixin, "in the Hub"), (GPUShareBroker, "in the broker")):
        doc = _markdown((kind.__doc__ or "").strip().split("\n\n")[0])
        lines += [f"## {kind.__name__}: {where}", "", doc, ""]
        for name, trait in sorted(kind.class_own_traits(config=True).items()):
            lines += [
                f"### `c.{kind.__name__}.{name}`",
                "",
                f"{type(trait).__name__}, {_default(kind, name, trait)}.",
                "",
                _markdown_paragraphs(str(trait.help)),
                "",
            ]
    return _below_marker("configuration.md", lines)


def _default(kind: type[HasTraits], name: str, trait: TraitType[typing.Any, typing.Any]) -> str:
    if any(isinstance(each, DefaultHandler) and each.trait_name == name for each in vars(kind).values()):
        return "default depends on other settings"
    value = trait.default()
    if isinstance(value, list):
        value = [word if word != sys.executable else "python" for word in value]
    return f"default `{json.dumps(value)}`"


def _markdown_paragraphs(text: str) -> str:
    """A help text as Markdown: paragraphs and lists keep their lines apart."""
    return "\n".join(line.rstrip() for line in inspect.cleandoc(text).splitlines()).replace("``", "`")


PAGES: Mapping[str, Callable[[], str]] = {
    "lease.md": lease_page,
    "api.md": api_page,
    "configuration.md": configuration_page,
}


def main() -> int:
    """Write every page that differs and name it; exit code 0."""
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(DOCS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
