"""Measure the code: ``python tests/setup/figures.py [root] [--list]``, also ``make figures``.

Size of the product and the tests, folders and the imports between them, length of functions and
modules, constructor arguments, and what the public docstrings say.  Standard library only, so a
checkout of any age can be measured: the root need not be this one.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "jupyter_gpushare"
SUFFIXES = frozenset({".py", ".c", ".h", ".S", ".ts", ".tsx"})
# Downloaded or built, so not written by a developer; `ui/lib` and `native/lib` included.
_SKIPPED = frozenset({"node_modules", "lib", "labextension", "__pycache__", "build", "dist"})

Function = ast.FunctionDef | ast.AsyncFunctionDef
MODULE_LINES = 450
# In the head of a file that a program writes: its length is that of its source.
GENERATED = "Written by jupyter_gpushare/ui/generate.py; do not edit."
FUNCTION_LINES = 50
CONSTRUCTOR_ARGUMENTS = 7
# Methods that a library's base class calls and documents: Tornado's handlers, Alembic's scripts.
_MIGRATION = frozenset({"upgrade", "downgrade"})
_HANDLER = frozenset({"get", "post", "put", "delete", "initialize", "prepare", "on_close", "write_error"})
_LIBRARY_HOOKS = _HANDLER | {"log_exception", "handle_stream"}


@dataclass(slots=True)
class Figures:
    """What was measured; the lists name the places behind a figure."""

    product_lines: int = 0
    test_lines: int = 0
    files: int = 0
    modules: list[tuple[int, str]] = field(default_factory=list)
    functions: list[tuple[int, str]] = field(default_factory=list)
    constructors: list[tuple[int, str]] = field(default_factory=list)
    public: int = 0
    undocumented: list[str] = field(default_factory=list)
    raising: int = 0
    silent: list[str] = field(default_factory=list)
    imports: set[tuple[str, str]] = field(default_factory=set)
    between: set[tuple[str, str]] = field(default_factory=set)
    # Per class: the names of its bases and of the methods that it documents itself.
    classes: dict[str, tuple[list[str], set[str]]] = field(default_factory=dict)

    def inherits_docstring(self, owner: str, method: str) -> bool:
        """Whether a base class of ``owner``, of this package or a library, documents the method."""
        bases, _ = self.classes.get(owner, ([], set()))
        known = [base for base in bases if base in self.classes]
        if method in _LIBRARY_HOOKS and len(known) < len(bases):
            return True
        return any(method in self.classes[base][1] or self.inherits_docstring(base, method) for base in known)

    @property
    def p95(self) -> int:
        """Lines of the function that is longer than 95 % of the others; 0 without functions."""
        lengths = sorted(length for length, _ in self.functions)
        return lengths[int(0.95 * (len(lengths) - 1))] if lengths else 0


def measure(root: Path) -> Figures:
    """The figures of the checkout at ``root``.

    Raises:
        SyntaxError: a Python file does not parse.
    """
    found = Figures()
    modules: list[tuple[str, ast.Module]] = []
    for path in _paths(root):
        name = str(path.relative_to(root))
        code = path.read_text(encoding="utf-8")
        lines = code.count("\n")
        if name.startswith("tests/") or "/ui/test" in name:
            found.test_lines += lines
        elif name.startswith(f"{PACKAGE}/"):
            if GENERATED in code[:200]:
                continue
            found.product_lines += lines
            found.files += 1
            found.modules.append((lines, name))
            if path.suffix == ".py":
                modules.append((name, ast.parse(code)))
    for _, tree in modules:
        for each in tree.body:
            if isinstance(each, ast.ClassDef):
                # Classes of one name in two modules count as one, with the bases and docstrings of both.
                bases, documented = found.classes.get(each.name, ([], set()))
                more_bases, more_documented = _class_outline(each)
                found.classes[each.name] = bases + more_bases, documented | more_documented
    for name, tree in modules:
        _measure_module(found, name, tree)
    return found


def _paths(root: Path) -> Iterator[Path]:
    """Source files below ``root`` in sorted order, without hidden, downloaded and built folders."""
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(each for each in inner if each not in _SKIPPED and not each.startswith("."))
        for name in sorted(names):
            if Path(name).suffix in SUFFIXES:
                yield Path(folder, name)


def _class_outline(node: ast.ClassDef) -> tuple[list[str], set[str]]:
    bases = [ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases]
    return bases, {each.name for each in node.body if isinstance(each, Function) and ast.get_docstring(each)}


def _measure_module(found: Figures, name: str, tree: ast.Module) -> None:
    for owner, node in _definitions(tree, ""):
        place = f"{name}:{node.lineno} {owner}{node.name}"
        if isinstance(node, ast.ClassDef):
            _judge_docstring(found, node, place, owner)
            continue
        found.functions.append(((node.end_lineno or node.lineno) - node.lineno + 1, place))
        if node.name == "__init__":
            found.constructors.append((_argument_count(node) - 1, place))
        else:
            _judge_docstring(found, node, place, owner)
    module = _module_name(name)
    for imported in _imports(tree, module):
        here, there = _package_of(module), _package_of(imported)
        found.imports.add((here, there))
        if here != there:
            found.between.add((module, imported))


def _judge_docstring(found: Figures, node: Function | ast.ClassDef, place: str, owner: str) -> None:
    """Public means: no part of the name begins with an underscore, nor is it inside a function."""
    if "()" in owner or any(part.startswith("_") for part in f"{owner}{node.name}".split(".")):
        return
    found.public += 1
    text = ast.get_docstring(node) or ""
    migration = "/migrations/" in place and node.name in _MIGRATION
    if not (text or migration or found.inherits_docstring(owner.removesuffix("."), node.name)):
        found.undocumented.append(place)
    if not isinstance(node, ast.ClassDef) and _raises(node):
        found.raising += 1
        if "Raises" not in text:
            found.silent.append(place)


def _definitions(node: ast.AST, owner: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, child
            mark = "" if isinstance(child, ast.ClassDef) else "()"
            yield from _definitions(child, f"{owner}{child.name}{mark}.")
        else:
            yield from _definitions(child, owner)


def _raises(function: Function) -> bool:
    """Whether it raises something itself that it does not catch itself, as far as can be read."""

    def escapes(node: ast.AST) -> bool:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef():
                return False
            case ast.Raise(exc=ast.Name(id="NotImplementedError")):
                return False
            case ast.Raise(exc=exception):
                return exception is not None
            case ast.Try():
                # What the body raises may be what its own handlers catch.
                kept = [*node.handlers, *node.orelse, *node.finalbody, *([] if node.handlers else node.body)]
                return any(escapes(child) for child in kept)
            case _:
                return any(escapes(child) for child in ast.iter_child_nodes(node))

    return any(escapes(child) for child in function.body)


def _argument_count(function: Function) -> int:
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)


def _module_name(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith(f"{PACKAGE}."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            if node.module == PACKAGE:
                yield from (f"{PACKAGE}.{each.name}" for each in node.names)
            else:
                yield str(node.module)


def _layers(root: Path) -> str:
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = [each for each in contracts if each["type"] == "layers"]
    return f"{sum(len(each['layers']) for each in layered)} in {len(layered)} contracts"


def table(root: Path, found: Figures) -> str:
    """The figures as a Markdown table."""
    longest_function = max(found.functions, default=(0, "none"))
    longest_module = max(found.modules, default=(0, "none"))
    widest = max(found.constructors, default=(0, "none"))
    documented = found.public - len(found.undocumented)
    folders = {name.rpartition("/")[0] for _, name in found.modules}
    rows = [
        ("lines of product code (Python, C, TypeScript)", f"{found.product_lines:,}"),
        ("lines of test code", f"{found.test_lines:,}"),
        ("files and folders of the product", f"{found.files} in {len(folders)}"),
        ("layers", _layers(root)),
        ("imports between top folders: pairs", str(len({p for p in found.imports if p[0] != p[1]}))),
        ("imports between top folders: modules", str(len(found.between))),
        ("longest module", f"{longest_module[0]} lines ({longest_module[1]})"),
        (f"modules above {MODULE_LINES} lines", str(_above(found.modules, MODULE_LINES))),
        ("Python functions: 95th percentile", f"{found.p95} lines of {len(found.functions)} functions"),
        ("longest Python function", f"{longest_function[0]} lines ({longest_function[1]})"),
        (f"functions above {FUNCTION_LINES} lines", str(_above(found.functions, FUNCTION_LINES))),
        ("most arguments of a constructor", f"{widest[0]} ({widest[1]})"),
        (
            f"constructors above {CONSTRUCTOR_ARGUMENTS}",
            str(_above(found.constructors, CONSTRUCTOR_ARGUMENTS)),
        ),
        ("public classes and functions with docstrings", _share(documented, found.public)),
        (
            "of those that raise, with `Raises`",
            _share(found.raising - len(found.silent), found.raising),
        ),
    ]
    return "\n".join(["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _above(measured: Sequence[tuple[int, str]], limit: int) -> int:
    return sum(value > limit for value, _ in measured)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.0f} % ({part} of {whole})"


def places(found: Figures) -> Iterator[str]:
    """One line for each place behind a figure: the longest, the widest, those without a docstring."""
    for what, measured, limit in (
        ("module", found.modules, MODULE_LINES),
        ("function", found.functions, FUNCTION_LINES),
        ("constructor", found.constructors, CONSTRUCTOR_ARGUMENTS),
    ):
        yield from (
            f"{what}: {value} {name}" for value, name in sorted(measured, reverse=True) if value > limit
        )
    yield from (f"no docstring: {place}" for place in found.undocumented)
    yield from (f"no Raises: {place}" for place in found.silent)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, with ``--list`` the places too; always 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--list", action="store_true", help="print the places behind the figures")
    options = parser.parse_args(arguments)
    found = measure(options.root)
    print(table(options.root, found))
    if options.list:
        print("\n".join(places(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
