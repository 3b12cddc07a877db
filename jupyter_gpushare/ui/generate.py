"""Generate TypeScript from Python code: ``python jupyter_gpushare/ui/generate.py``.

`FILES` maps each generated file to its function.  `build` and the Makefile run this module before they read
the sources.  The generated files are not in git.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from jupyter_gpushare import errors
from jupyter_gpushare.core.size import GPUS_PATTERN, MEMORY_PATTERN
from jupyter_gpushare.gibibytes import GIB, TENTHS_BELOW
from jupyter_gpushare.messages import TEMPLATES
from jupyter_gpushare.protocol import wire

UI = Path(__file__).resolve().parent
SOURCES = UI / "src"
HEADER = "/* eslint-disable */\n// Written by jupyter_gpushare/ui/generate.py; do not edit.\n"
# Messages that the page sends or receives; the messages inside them are added.
ROOTS: tuple[type[msgspec.Struct], ...] = (
    wire.Status,
    wire.JobList,
    wire.JobTimeline,
    wire.History,
    wire.Offers,
    wire.LaunchForm,
    wire.LaunchRequest,
    wire.JobChange,
    wire.JobPlace,
    wire.SizeRequest,
    wire.SizedLease,
    wire.ErrorAnswer,
)
# Names of the unions of string literals in `wire`.
_ALIASES = {value: name for name, value in vars(wire).items() if typing.get_origin(value) is typing.Literal}
_PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", types.NoneType: "null"}


def wire_module() -> str:
    """Return ``src/wire.ts``: an interface for each message, a union for each set of strings."""
    kinds: dict[str, str] = {}
    for root in ROOTS:
        _declare(root, kinds)
    names = " | ".join(f"'{name}'" for name in ("project", *wire.REQUESTED_TERMS))
    kinds["IOffersQuery"] = (
        "/** The query about a job that is not submitted yet; an empty value is the broker's default. */\n"
        f"export type IOffersQuery = {{ readonly [name in {names}]: string }};\n"
    )
    intro = (
        "/**\n * Messages of the broker and of the user's server, from `jupyter_gpushare/protocol/wire`.\n"
        " * Senders include every field, also those with a default.\n */\n"
    )
    return HEADER + intro + "".join(f"\n{kinds[name]}" for name in sorted(kinds))


def _declare(kind: type[msgspec.Struct], kinds: dict[str, str]) -> None:
    """Add the declarations of ``kind`` and of all types inside it."""
    name = f"I{kind.__name__}"
    if name in kinds:
        return
    kinds[name] = ""  # also ends the recursion of a message that holds itself
    comments = comments_of(kind)
    hints = typing.get_type_hints(kind)
    lines = [_comment((kind.__doc__ or "").strip().split("\n\n")[0], "")] if kind.__doc__ else []
    base = next((each for each in kind.__bases__ if getattr(each, "__struct_fields__", ())), None)
    lines.append(f"export interface {name} {f'extends {_type(base, kinds)} ' if base else ''}{{")
    inherited = () if base is None else msgspec.structs.fields(base)
    for field in msgspec.structs.fields(kind)[len(inherited) :]:
        if field.name in comments:
            lines.append(_comment(comments[field.name], "  "))
        lines.append(f"  readonly {field.name}: {_type(hints[field.name], kinds)};")
    kinds[name] = "\n".join([*lines, "}", ""])


def comments_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comment after each field of a message, by field."""
    kinds = [each for each in reversed(kind.__mro__) if issubclass(each, msgspec.Struct)]
    source = "".join(inspect.getsource(each) for each in kinds if each is not msgspec.Struct)
    return dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.MULTILINE))


def _comment(text: str, indent: str) -> str:
    words = " ".join(text.split()).replace("``", "`")
    return f"{indent}/** {words} */"


def _type(hint: object, kinds: dict[str, str]) -> str:
    """Return the TypeScript of a type, and declare the types that it names."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(_type(kind, kinds) for kind in inner)
    if origin is typing.Literal:
        union = " | ".join(f"'{value}'" for value in inner)
        if (alias := _ALIASES.get(hint)) is None:
            return union
        kinds[alias] = f"export type {alias} = {union};\n"
        return alias
    if origin is list:
        item = _type(inner[0], kinds)
        return f"readonly ({item})[]" if " | " in item else f"readonly {item}[]"
    if origin is dict:
        return f"{{ readonly [name: string]: {_type(inner[1], kinds)} }}"
    assert isinstance(hint, type)
    if issubclass(hint, enum.StrEnum):
        union = " | ".join(f"'{value}'" for value in hint)
        kinds[hint.__name__] = f"export type {hint.__name__} = {union};\n"
        return hint.__name__
    if issubclass(hint, msgspec.Struct):
        _declare(hint, kinds)
        return f"I{hint.__name__}"
    return _PLAIN[hint]


def catalogue_module() -> str:
    """Return ``src/catalogue.ts``: a translated template for each key of `messages.TEMPLATES`.

    Templates are literals in calls of ``trans.__`` and ``trans._n``, because the tools that collect
    strings for translators look there.
    """
    refusal_texts = refusals()
    lines = [
        HEADER + "\nimport type { TranslationBundle } from '@jupyterlab/translation';",
        "\nimport { isoText } from './locale';",
        "\n/** Sentences by key (`jupyter_gpushare/messages/templates.py`), errors by English template. */",
        "export const CATALOGUE: {",
        "  readonly [key: string]: (trans: TranslationBundle, args: readonly string[]) => string;",
        "} = {",
    ]
    for key, template in [*TEMPLATES.items(), *zip(refusal_texts, refusal_texts, strict=True)]:
        if isinstance(template, tuple):
            one, many = map(_quoted, template)
            call = f"trans._n({one}, {many}, Number(args[0]))"
        elif key in ("verbatim", "time"):
            call = "args[0] ?? ''" if key == "verbatim" else "isoText(args[0] ?? '')"
            lines.append(f"  '{key}': (_, args) => {call},")
            continue
        else:
            call = f"trans.__({_quoted(template)}, ...args)"
        lines.append(f"  {_quoted(key)}: (trans, args) => {call},")
    return "\n".join([*lines, "};", ""])


def refusals() -> list[str]:
    """Return the English templates of the errors that reach a page, from the calls that make them."""
    found = {errors.DISK_FULL: None}
    for path in _sources_of_errors():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            template = template_of(node)
            if isinstance(template, ast.Constant) and isinstance(template.value, str):
                found[template.value] = None
    return sorted(found)


def _sources_of_errors() -> list[Path]:
    """Return the modules that make the errors in answers of a user's server or the broker."""
    package = UI.parent
    folders = (package / name for name in ("broker", "protocol/wire", "server"))
    return [
        package / "client.py",
        package / "core" / "size.py",
        *(p for f in folders for p in f.rglob("*.py")),
    ]


def template_of(node: ast.AST) -> ast.expr | None:
    """Return the template argument of ``node`` if it makes an error that reaches a page."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return None
    if node.func.id == "Refused":
        return node.args[2] if len(node.args) > 2 else None
    kind = getattr(errors, node.func.id, None)
    is_ours = isinstance(kind, type) and issubclass(kind, errors.RequestError | errors.BrokerUnavailable)
    is_ours = is_ours or kind is errors.GpuShareError
    return node.args[0] if is_ours and node.args else None


def sizes_module() -> str:
    """Return ``src/sizes.ts``: the sizes that `core.size` accepts and the memory format of `gibibytes`."""
    return (
        f"{HEADER}\n/** `0.5`, `1/2` or `2` GPUs; the broker checks minimum and maximum. */\n"
        f"export const GPUS = {_expression(GPUS_PATTERN)};\n"
        "\n/** An amount of memory: 20GiB, 500MB or a number of bytes. */\n"
        f"export const MEMORY = {_expression(MEMORY_PATTERN)};\n"
        f"\n/** Bytes of the unit in which memory is shown. */\nexport const GIB = {GIB};\n"
        "\n/** Amounts below this many GiB have one digit after the point. */\n"
        f"export const TENTHS_BELOW = {TENTHS_BELOW};\n"
    )


def _expression(pattern: str) -> str:
    return f"/^({pattern.replace('/', chr(92) + '/')})$/"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


FILES: Mapping[str, Callable[[], str]] = {
    "wire.ts": wire_module,
    "catalogue.ts": catalogue_module,
    "sizes.ts": sizes_module,
}


def main() -> int:
    """Write every file that differs and print its path; return exit code 0."""
    for name, text_of in FILES.items():
        path, text = SOURCES / name, text_of()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
