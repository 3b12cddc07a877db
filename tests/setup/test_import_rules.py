"""The import rules of pyproject.toml notice what they are there for: each is broken once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    """A copy of the package whose imports may be spoilt."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "jupyter_gpushare", tmp_path / "jupyter_gpushare", ignore=IGNORED)
    return tmp_path


BREACHES = [
    ("errors.py", "import jupyter_gpushare.core.model", "Layers: processes on top"),
    ("broker/__init__.py", "import jupyter_gpushare.hub", "Layers: processes on top"),
    ("core/model.py", "import time", "core decides"),
    ("core/model.py", "import sqlalchemy", "core decides"),
    ("gpu/__init__.py", "import msgspec", "gpu runs on a bare machine"),
    ("gpu/__init__.py", "import jupyter_gpushare.core.model", "gpu runs on a bare machine"),
    ("demo_gpu.py", "import jupyter_gpushare.core.model", "demo_gpu stands alone"),
    ("hub/__init__.py", "import jupyter_gpushare.gpu.verbs", "Only the broker acts"),
    ("server/__init__.py", "import jupyter_gpushare.backends.base", "Only the broker acts"),
    ("sim/__init__.py", "import jupyter_gpushare.wire", "The simulator needs core"),
    ("broker/__init__.py", "import pynvml", "Each library has one door"),
    ("gpu/verbs.py", "import ctypes", "Each library has one door"),
    ("words.py", "import httpx", "Each library has one door"),
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
