"""Draw one-line mutants of the product: ``python -m tests.mutants.draw SEED`` prints them for mutants.toml.

A mutant changes one operator, one ``not``, one constant or one of ``min`` and ``max``.  Its line has a
unique text in the package, so that it is found again after code has moved.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Packages to draw from, and the tests that have to notice.
PACKAGES = {
    "core": "tests/core",
    "broker/control": "tests/broker",
    "gpu/moves": "tests/gpu",
    "hub": "tests/hub",
    "job": "tests/job",
    "server": "tests/server",
}
PER_PACKAGE = 5
_SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is",
    "in": "not in", "not in": "in", "and": "or", "or": "and", "+": "-", "-": "+", "*": "/",
    "min": "max", "max": "min", "True": "False", "False": "True",
}  # fmt: skip

Span = tuple[int, int, int, str]  # line, first column, column behind, what stands there then


def _between(lines: list[str], left: ast.expr, right: ast.expr) -> Iterator[Span]:
    """The operator between two operands of one line."""
    if left.end_lineno == right.lineno and left.end_col_offset is not None:
        text = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
        if (word := text.strip(" ()")) in _SWAPS:
            at = left.end_col_offset + text.index(word)
            yield right.lineno, at, at + len(word), _SWAPS[word]


def _spans(tree: ast.AST, lines: list[str]) -> Iterator[Span]:
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=[right]):
                yield from _between(lines, left, right)
            case ast.BinOp(left=left, right=right):
                yield from _between(lines, left, right)
            case ast.BoolOp(values=values):
                for left, right in pairwise(values):
                    yield from _between(lines, left, right)
            case ast.UnaryOp(op=ast.Not(), operand=operand) if operand.lineno == node.lineno:
                yield node.lineno, node.col_offset, operand.col_offset, ""
            case ast.Call(func=ast.Name(id="min" | "max" as name) as func):
                yield func.lineno, func.col_offset, func.col_offset + 3, _SWAPS[name]
            case ast.Constant(value=bool() as value) if node.end_col_offset is not None:
                yield node.lineno, node.col_offset, node.end_col_offset, str(not value)
            case ast.Constant(value=int() as value) if node.end_col_offset is not None:
                yield node.lineno, node.col_offset, node.end_col_offset, str(value + 1)


def candidates(path: Path) -> list[tuple[str, str]]:
    """Return the lines of a module that can change, without indentation, each with its replacement."""
    source = path.read_text()
    lines = source.splitlines()
    found = set()
    for number, begin, end, new in _spans(ast.parse(source), lines):
        line = lines[number - 1]
        if line.isascii():
            found.add((line.strip(), (line[:begin] + new + line[end:]).strip()))
    return sorted(found)


def draw(seed: int) -> Iterator[dict[str, str]]:
    """Yield `PER_PACKAGE` mutants of each package."""
    chance, product = random.Random(seed), ROOT / "jupyter_gpushare"
    written = Counter(
        line.strip() for path in product.rglob("*.py") for line in path.read_text().splitlines()
    )
    for package, tests in PACKAGES.items():
        every = [
            (path, line, becomes)
            for path in sorted((product / package).rglob("*.py"))
            for line, becomes in candidates(path)
            if written[line] == 1
        ]
        for path, line, becomes in chance.sample(every, PER_PACKAGE):
            name = path.relative_to(ROOT).as_posix()
            yield {"file": name, "line": line, "becomes": becomes, "tests": tests}


if __name__ == "__main__":
    for mutant in draw(int(sys.argv[1])):
        print("[[mutant]]", *(f"{key} = {json.dumps(value)}" for key, value in mutant.items()), "", sep="\n")
