"""Write the pages and the picture that are generated from the code: ``python docs/generate.py``.

`PAGES` maps each page to its function.  ``tests/docs`` compares the files with the
results of the functions, so that a page cannot fall behind the code.
"""

from __future__ import annotations

import enum
import inspect
import json
import sys
import tomllib
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from traitlets import Bool, DefaultHandler, Enum, Float, HasTraits, Integer, List, TraitType, Unicode

from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.http.routes import ROUTES
from jupyter_gpushare.broker.settings import BrokerTraits
from jupyter_gpushare.core.model import HOLDS_CAPACITY, TRANSITIONS, LeaseEvent, State
from jupyter_gpushare.hub import GPUShareMixin
from jupyter_gpushare.hub.limits import LimitedProcesses
from jupyter_gpushare.kube.settings import GPUShareKube
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.server.kernels import MESSAGES
from jupyter_gpushare.ui.generate import comments_of

DOCS = Path(__file__).resolve().parent
# An event that is possible in this many states or more gets a sentence instead of arrows.
EVERYWHERE = 5
# People write a page above this line, this script below it.
MARKER = "<!-- From here on written by docs/generate.py; do not edit. -->"

MEANINGS: Mapping[State, str] = {
    State.PENDING: "waits for capacity",
    State.GRANTED: "devices are reserved; its processes are being started",
    State.RUNNING: "holds its devices, whether it computes or idles",
    State.SUSPENDING: "its GPU memory is being copied to RAM",
    State.SUSPENDED: "its processes live, its GPU memory is in RAM, its devices are lent or free",
    State.RESUMING: "its devices are free again; its GPU memory is being copied back",
    State.STOPPING: "asked to end, within its grace period; its devices are free once the driver says so",
    State.RELEASED: "over",
    State.FAILED: "could not be started, or was given up",
}


def lease_page() -> str:
    """Return ``docs/lease.md``: every state and every arrow of `TRANSITIONS`."""
    ways: dict[LeaseEvent, list[tuple[State, State]]] = defaultdict(list)
    for (state, event), after in TRANSITIONS.items():
        ways[event].append((state, after))
    drawn = {event: pairs for event, pairs in ways.items() if len(pairs) < EVERYWHERE}
    everywhere = {event: pairs for event, pairs in ways.items() if len(pairs) >= EVERYWHERE}
    arrows = [
        f"    {before} --> {after}: {event}"
        for event in LeaseEvent
        for before, after in sorted(drawn.get(event, ()))
    ]
    sentences = []
    for event, pairs in everywhere.items():
        targets = " or ".join(f"`{state}`" for state in sorted({after for _, after in pairs}))
        sources = ", ".join(f"`{state}`" for state in State if state in {before for before, _ in pairs})
        sentences.append(f"* `{event}` leads to {targets}; it is possible in {sources}.")
    rows = [
        f"| `{state}` | {MEANINGS[state]} | {'yes' if state in HOLDS_CAPACITY else 'no'} |" for state in State
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
    """Return ``docs/api.md``: every route, with its messages."""
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
        # A class without a docstring would inherit that of its base or of msgspec.
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


def beside_page() -> str:
    """Return ``docs/beside.md``: every type of kernel message, and whether it keeps a session awake."""
    rows: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for each in MESSAGES:
        name, comma, more = each.name.partition(", ")
        rows[each.channels, each.counts, each.why].append(f"`{name}`{comma}{more}")
    return _below_marker(
        "beside.md",
        [
            "| channel | messages | keeps the session awake | because |",
            "|---|---|---|---|",
            *(
                f"| {channel} | {', '.join(names)} | {counts} | {why} |"
                for (channel, counts, why), names in rows.items()
            ),
            "",
        ],
    )


def _below_marker(name: str, lines: list[str]) -> str:
    """Return a page: the hand-written part above `MARKER`, and ``lines`` below it."""
    written, marker, _ = (DOCS / name).read_text().partition(MARKER)
    if not marker:
        raise SystemExit(f"docs/{name} has lost the line {MARKER}")
    return "\n".join([written + MARKER, "", *lines])


def _markdown(text: str) -> str:
    """Return a docstring as one line of Markdown."""
    return " ".join(text.split()).replace("``", "`")


def _messages() -> list[type[msgspec.Struct]]:
    """Return every message that a route takes or answers, with nested ones, in the order of `wire`."""
    return [
        kind
        for kind in vars(wire).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__.startswith(f"{wire.__name__}.")
        and kind not in (wire.Message, wire.Answer)
    ]


def _fields(kind: type[msgspec.Struct]) -> list[str]:
    comments = comments_of(kind)
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
    """Return the JSON name of a type, such as `string or null` or `list of Offer`."""
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
    """Return ``docs/configuration.md``: every trait of the Hub's mixin and of the broker."""
    lines = []
    for kind, where in (
        (GPUShareMixin, "in the Hub"),
        (LimitedProcesses, "in the Hub, for local processes"),
        (GPUShareBroker, "in the broker"),
        (GPUShareKube, "in the broker, on Kubernetes"),
    ):
        doc = _markdown((kind.__doc__ or "").strip().split("\n\n")[0])
        lines += [f"## {kind.__name__}: {where}", "", doc, ""]
        for name, trait in sorted(kind.class_traits(config=True).items()):
            if not trait.this_class.__module__.startswith("jupyter_gpushare"):
                continue  # a trait of JupyterHub's spawner or of traitlets' application
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
    if any(
        isinstance(each, DefaultHandler) and each.trait_name == name
        for base in kind.__mro__
        for each in vars(base).values()
    ):
        return "default depends on other settings"
    value = trait.default()
    if isinstance(value, list):
        value = [word if word != sys.executable else "python" for word in value]
    return f"default `{json.dumps(value)}`"


def _markdown_paragraphs(text: str) -> str:
    """Return a help text as Markdown, with the line breaks of its paragraphs and lists."""
    return "\n".join(line.rstrip() for line in inspect.cleandoc(text).splitlines()).replace("``", "`")


# ---- the picture of the layers ---------------------------------------------------

PACKAGE = "jupyter_gpushare"
_WIDTH, _GAP, _ROW, _HEAD = 880, 8, 22, 26
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; }
  .inner text { font-size: 11.5px; }
  rect { fill: #eef3f8; stroke: #57606a; }
  .inner rect { fill: #ffffff; stroke: #afb8c1; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    rect { fill: #1b2430; stroke: #8b949e; }
    .inner rect { fill: #0d1117; stroke: #484f58; }
  }
"""


def layers_of(pyproject: Path) -> dict[str, list[list[str]]]:
    """Return the layer contracts of import-linter: by package, the modules of each layer, top layer first."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    return {
        container: [[name.strip("() ") for name in layer.split("|")] for layer in each["layers"]]
        for each in contracts
        if each["type"] == "layers"
        for container in each["containers"]
    }


def layers_picture() -> str:
    """Return ``docs/images/layers.svg``: who may import whom, from the contracts of pyproject.toml."""
    layers = layers_of(DOCS.parent / "pyproject.toml")
    drawn, top = [], _GAP
    for row in layers[PACKAGE]:
        height = max(_box_height(layers, name) for name in row)
        width = (_WIDTH - _GAP * (len(row) + 1)) / len(row)
        for index, name in enumerate(row):
            left = _GAP + index * (width + _GAP)
            drawn += _box(layers, name, (left, top, width, height))
        top += height + _GAP
    label = "Layers of the package: a module imports only from layers below its own"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img"',
            f' aria-label="{label}">',
            "<!-- Written by docs/generate.py from pyproject.toml; do not edit. -->",
            f"<style>{_STYLE}</style>",
            *drawn,
            "</svg>",
            "",
        ]
    )


def _inner(layers: Mapping[str, list[list[str]]], name: str) -> list[tuple[str, list[str]]]:
    """Return the layers inside a module, each with the prefix of its nested package."""
    outer = f"{PACKAGE}.{name}"
    return [
        (container.removeprefix(outer).removeprefix("."), row)
        for container, rows in layers.items()
        if container == outer or container.startswith(f"{outer}.")
        for row in rows
    ]


def _box_height(layers: Mapping[str, list[list[str]]], name: str) -> int:
    inner = _inner(layers, name)
    return _HEAD + (len(inner) * (_ROW + 3) + 4 if inner else 0)


def _box(
    layers: Mapping[str, list[list[str]]], name: str, area: tuple[float, float, float, float]
) -> list[str]:
    left, top, width, _ = area
    lines = [_rectangle(area), _text(left + width / 2, top + 18, name)]
    inner = _inner(layers, name)
    if inner:
        lines.append('<g class="inner">')
        for index, (prefix, row) in enumerate(inner):
            below = top + _HEAD + index * (_ROW + 3)
            names = "  |  ".join(f"{prefix}.{each}" if prefix else each for each in row)
            lines.append(_rectangle((left + 6, below, width - 12, _ROW)))
            lines.append(_text(left + width / 2, below + 15, names))
        lines.append("</g>")
    return lines


def _rectangle(area: tuple[float, float, float, float]) -> str:
    left, top, width, height = area
    return f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"/>'


def _text(middle: float, base: float, text: str) -> str:
    return f'<text x="{middle:.1f}" y="{base:.1f}">{text}</text>'


# ---- helm-values/gpushare/values.schema.json ----------------------------------------

VALUES_SCHEMA = "../helm-values/gpushare/values.schema.json"
# Settings that the chart sets itself, or that apply to a single machine only.
_OF_THE_CHART = frozenset(
    (
        *("config_file", "engine", "projects", "state_dir", "db_url", "api_socket", "tls_address"),
        *("spawner_token_file", "respawn", "with_helper", "helper_socket", "helper_state_dir"),
    )
)


def values_schema() -> str:
    """Return the schema of the chart's values, with the settings of the broker that a site may change."""
    schema = json.loads((DOCS / VALUES_SCHEMA).read_text())
    traits = BrokerTraits.class_own_traits(config=True)
    known = {name: _of_trait(trait) for name, trait in sorted(traits.items()) if name not in _OF_THE_CHART}
    config = schema["properties"]["broker"]["properties"]["config"]["properties"]
    config["GPUShareBroker"]["properties"] = known
    return json.dumps(schema, indent=1) + "\n"


def _of_trait(trait: TraitType[typing.Any, typing.Any]) -> dict[str, typing.Any]:
    if isinstance(trait, Enum):
        return {"enum": list(trait.values)}
    if isinstance(trait, List):
        return {"type": "array", "items": _of_trait(trait._trait)}
    names = {Bool: "boolean", Integer: "integer", Float: "number", Unicode: "string"}
    (name,) = [name for kind, name in names.items() if isinstance(trait, kind)]
    return {"type": [name, "null"] if trait.allow_none else name}


PAGES: Mapping[str, Callable[[], str]] = {
    "images/layers.svg": layers_picture,
    "lease.md": lease_page,
    "api.md": api_page,
    "beside.md": beside_page,
    "configuration.md": configuration_page,
    VALUES_SCHEMA: values_schema,
}


def main() -> int:
    """Write and name every page that differs; return exit code 0."""
    for name, page in PAGES.items():
        path, text = (DOCS / name).resolve(), page()
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(DOCS.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
