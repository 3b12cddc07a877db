"""`core` may import this list and nothing else; extend it with a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import jupyter_gpushare.core

ALLOWED = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "heapq",
    "itertools", "math", "re", "operator", "types", "typing",
    "random",  # only `random.Random(seed)`: replayed futures
}  # fmt: skip
OURS = ("jupyter_gpushare.core", "jupyter_gpushare.errors", "jupyter_gpushare.gibibytes")
FORBIDDEN_CALLS = {"open", "print", "input", "exec", "eval", "__import__", "globals"}
MODULES = sorted(Path(jupyter_gpushare.core.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_core_can_do_no_io(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS
        for name in names:
            assert name.split(".")[0] in ALLOWED or name.startswith(OURS), f"{path.name} imports {name}"
