"""The TypeScript that follows from Python code."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

UI = Path(__file__).resolve().parents[2] / "jupyter_gpushare" / "ui"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ui_generate", UI / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_error_that_reaches_a_page_has_a_template():
    """A page cannot translate a text that was put together before."""
    made = generator()
    put_together = [
        f"{path.name}:{node.lineno}"
        for path in made._sources_of_errors()
        if path.name != "policy.py"  # of the configuration file
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(made.template_of(node), ast.JoinedStr)
    ]
    assert put_together == []
    assert "only a session that is asleep can be woken" in made.refusals()
    assert "The disk of the GPU service is full" in " ".join(made.refusals())
