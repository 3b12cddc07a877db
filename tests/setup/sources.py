"""Source files of a checkout, split into the prose and the identifiers that developers write.

Python is read with `tokenize` and `ast`, C and TypeScript with a scanner that knows their
comments and literals.  Used by `language.py` and `figures.py`; standard library only.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = frozenset({".py", ".c", ".h", ".S", ".ts", ".tsx"})
PACKAGE = "jupyter_gpushare"
# Downloaded or built, so not written by a developer; `ui/lib` and `native/lib` included.
_SKIPPED = frozenset({"node_modules", "lib", "labextension", "__pycache__", "build", "dist"})

_C_LIKE = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
      | (?P<literal>"(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' | `(?:\\.|[^`\\])*`
      |   (?<=[(=,:?!&|;{}\[\n])\s*/(?![/*])(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+/[a-z]*)
      | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)""",
    re.DOTALL | re.VERBOSE,
)
_COMMENT_MARKS = re.compile(r"^\s*(?:#:?|//+|/\*+|\*(?!/))\s?|\*/\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Text:
    """One piece of prose or one identifier, and the number of its first line."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """One file: comments and docstrings as prose, and each identifier once."""

    path: Path
    folder: str
    prose: tuple[Text, ...]
    identifiers: tuple[Text, ...]


def paths(root: Path) -> Iterator[Path]:
    """Source files below ``root`` in sorted order, without hidden, downloaded and built folders."""
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(each for each in inner if each not in _SKIPPED and not each.startswith("."))
        for name in sorted(names):
            if Path(name).suffix in SUFFIXES:
                yield Path(folder, name)


def read(path: Path, root: Path) -> Source:
    """The file's prose and identifiers.

    Raises:
        SyntaxError: a Python file does not parse.
    """
    code = path.read_text(encoding="utf-8")
    prose, names = _python(code) if path.suffix == ".py" else _c_like(code)
    once: dict[str, int] = {}
    for line, name in names:
        once.setdefault(name, line)
    return Source(
        path,
        folder_of(path.relative_to(root)),
        tuple(Text(line, _COMMENT_MARKS.sub("", text).rstrip()) for line, text in prose),
        tuple(Text(line, name) for name, line in once.items()),
    )


def folder_of(path: Path) -> str:
    """The folder under which a file is counted: two levels below the package, one below tests."""
    parts = path.parent.parts
    depth = 3 if parts[:1] == (PACKAGE,) else 2
    return "/".join(parts[:depth]) or "."


def _python(code: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    prose = [(each.start[0], each.string) for each in tokens if each.type == tokenize.COMMENT]
    names: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append((node.lineno, node.name))
            case ast.arg():
                names.append((node.lineno, node.arg))
            case ast.Name(ctx=ast.Store()):
                names.append((node.lineno, node.id))
            case ast.Attribute(ctx=ast.Store()):
                names.append((node.lineno, node.attr))
            case _:
                pass
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                prose.append((node.body[0].lineno, text))
    return sorted(prose), sorted(names)


def _c_like(code: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    prose, names = [], []
    for match in _C_LIKE.finditer(code):
        line = code.count("\n", 0, match.start()) + 1
        if match.lastgroup == "comment":
            prose.append((line, match.group()))
        elif match.lastgroup == "name":
            names.append((line, match.group()))
    return prose, names
