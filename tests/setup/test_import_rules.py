"""The import rules of pyproject.toml notice what they are there for; no file imports itself in a circle."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IGNORED = shutil.ignore_patterns("ui", "lib", "labextension", "__pycache__")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package for tests that break its imports."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "jupyter_gpushare", tmp_path / "jupyter_gpushare", ignore=IGNORED)
    return tmp_path


BREACHES = [
    ("errors.py", "import jupyter_gpushare.core.model", "Layers: processes on top"),
    ("broker/__init__.py", "import jupyter_gpushare.hub", "Layers: processes on top"),
    ("broker/views/history.py", "import jupyter_gpushare.core.planner", "Only the engine asks"),
    ("broker/state/store.py", "import jupyter_gpushare.broker.engine", "Layers of the broker"),
    ("gpu/driver/nvml.py", "import jupyter_gpushare.gpu.leases.registry", "Layers of the device layer"),
    ("core/reclaim/victims.py", "import jupyter_gpushare.core.reclaim.search", "Layers of reclaim"),
    ("core/model.py", "import time", "core decides"),
    ("core/model.py", "import sqlalchemy", "core decides"),
    ("gpu/__init__.py", "import msgspec", "gpu runs on a bare machine"),
    ("gpu/__init__.py", "import jupyter_gpushare.core.model", "gpu runs on a bare machine"),
    ("demo_gpu/__init__.py", "import jupyter_gpushare.core.model", "demo_gpu stands alone"),
    ("hub/__init__.py", "import jupyter_gpushare.protocol.helper", "Only the broker acts"),
    ("server/__init__.py", "import jupyter_gpushare.backends.base", "Only the broker acts"),
    ("sim/__init__.py", "import jupyter_gpushare.protocol.wire", "The simulator needs core"),
    ("broker/__init__.py", "import pynvml", "Each library has one door"),
    ("protocol/helper.py", "import ctypes", "Each library has one door"),
    ("messages/__init__.py", "import httpx", "Each library has one door"),
    ("broker/control/loop.py", "import tornado", "Each library has one door"),
    ("broker/state/policy.py", "import traitlets", "Each library has one door"),
    ("server/watch.py", "import msgspec", "Each library has one door"),
    ("broker/views/views.py", "import jinja2", "Each library has one door"),
    ("gpu/leases/processes.py", "import psutil", "Each library has one door"),
    ("stray.py", "", "Layers: processes on top"),
]


def test_the_package_keeps_its_rules(copy):
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("module", "line", "rule"), BREACHES)
def test_a_forbidden_import_breaks_its_rule(copy, module, line, rule):
    path = copy / "jupyter_gpushare" / module
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode != 0
    assert any(text.startswith(rule) and " BROKEN" in text for text in result.stdout.splitlines())


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
