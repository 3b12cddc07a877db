"""No file imports itself in a circle, and `core` stays low.

`make check` runs the import rules of pyproject.toml.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jupyter_gpushare"


def python_imports() -> dict[Path, set[Path]]:
    """Imports between Python files, those for the type checker and those inside functions included."""
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    modules = {
        name.removesuffix(".__init__"): p for name, p in modules.items() if "node_modules" not in p.parts
    }

    def named(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                yield inner if inner in modules else node.module

    def imported(path: Path) -> set[Path]:
        names = (name for node in ast.walk(ast.parse(path.read_text())) for name in named(node))
        return {modules[name] for name in names if name in modules} - {path}

    return {path: imported(path) for path in modules.values()}


def named_files(pattern: str, folder: Path, suffixes: tuple[str, ...]) -> dict[Path, set[Path]]:
    """Imports between files that name each other by a path."""
    files = [p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file()]

    def imported(path: Path) -> set[Path]:
        bases = [b / n for n in re.findall(pattern, path.read_text()) for b in (path.parent, folder)]
        found = [Path(os.path.normpath(f"{base}{end}")) for base in bases for end in ("", *suffixes)]
        return {each for each in found if each in files} - {path}

    return {path: imported(path) for path in files}


def test_core_has_at_most_8_floors():
    """A module stands one floor above the highest of core that it imports; a package is one module."""
    core = PACKAGE / "core"

    def module(path: Path) -> str:
        return path.relative_to(core).parts[0].removesuffix(".py")

    graph: dict[str, set[str]] = {}
    for path, imported in python_imports().items():
        if path.is_relative_to(core):
            below = {module(each) for each in imported if each.is_relative_to(core)}
            graph.setdefault(module(path), set()).update(below - {module(path)})
    floors: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        floors[name] = 1 + max((floors[each] for each in graph[name]), default=0)
    assert max(floors.values()) <= 8, sorted(floors, key=floors.__getitem__)


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param(python_imports, id="python"),
        pytest.param(
            lambda: named_files(r"from '(\.[^']+)'", PACKAGE / "ui/src", (".ts", ".tsx")), id="typescript"
        ),
        pytest.param(
            lambda: named_files(r'#\s*include "([^"]+)"', PACKAGE / "native", (".c", ".h", ".S")), id="c"
        ),
    ],
)
def test_no_file_imports_itself_through_others(imports):
    graph = imports()
    assert sum(map(len, graph.values())) > len(graph) / 2, "imports are read"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(str(p.relative_to(PACKAGE)) for p in error.args[1]))
