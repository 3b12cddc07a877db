"""Every text that the product reads or writes names its encoding, so that no locale decides about it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "jupyter_gpushare"
TEMPORARY = {"NamedTemporaryFile", "TemporaryFile"}  # binary by default
TEXTS = {"read_text", "write_text"}
# Their `open` opens a GPU, and a driver.
NO_FILES = {"demo_gpu.py", "probe.py"}


def of_the_locale(source: str) -> Iterator[int]:
    """Yield the lines of calls that leave the encoding of a text to the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or any(each.arg == "encoding" for each in node.keywords):
            continue
        name, owner = _name(node.func), _name(getattr(node.func, "value", None))
        values = {
            each.arg: each.value.value for each in node.keywords if isinstance(each.value, ast.Constant)
        }
        words = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
        mode = values.get("mode") or next(
            (each for each in words if re.fullmatch("[rwxabt+]{1,3}", each)), None
        )
        # A method `open` with arguments of which none is a mode is one of our own.
        is_own = isinstance(node.func, ast.Attribute) and name == "open" and bool(node.args) and mode is None
        is_open = (name == "open" and owner != "os") or name == "fdopen" or (name in TEMPORARY and mode)
        # A method of a path may also be handed to a thread.
        methods = {each.attr for each in (node.func, *node.args) if isinstance(each, ast.Attribute)}
        if (
            (is_open and not is_own and "b" not in (mode or ""))
            or methods & TEXTS
            or values.get("text") is True
        ):
            yield node.lineno


def _name(node: ast.AST | None) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


@pytest.mark.parametrize(
    ("call", "is_left"),
    [
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, mode='a')", True),
        ("open(path, 'rb')", False),
        ("open(path, 'w', encoding='ascii')", False),
        ("path.open()", True),
        ("path.open('rb')", False),
        ("os.open(path, flags)", False),
        ("os.fdopen(fd)", True),
        ("open('lib.so')", True),
        ("NamedTemporaryFile()", False),
        ("NamedTemporaryFile('w')", True),
        ("os.fdopen(fd, 'wb')", False),
        ("usage.open(records, now)", False),
        ("path.read_text(errors='replace')", True),
        ("to_thread(path.read_text)", True),
        ("to_thread(path.read_text, encoding='utf-8')", False),
        ("subprocess.run(command, text=True)", True),
        ("Segment(text=text)", False),
    ],
)
def test_a_call_that_leaves_the_encoding_to_the_locale_is_found(call: str, is_left: bool) -> None:
    assert bool(list(of_the_locale(call))) == is_left


def test_no_text_of_the_product_has_the_encoding_of_the_locale() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "node_modules" not in path.parts]
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in files
        if path.name not in NO_FILES
        for line in of_the_locale(path.read_text(encoding="utf-8"))
    ]
    assert not found
