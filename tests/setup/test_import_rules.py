"""No file of TypeScript or C imports itself in a circle; pyproject.toml has the import rules of Python."""

from __future__ import annotations

import os
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jupyter_gpushare"


def named_files(pattern: str, folder: Path, suffixes: tuple[str, ...]) -> dict[Path, set[Path]]:
    """Imports between files that name each other by a path."""
    files = [p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file()]

    def imported(path: Path) -> set[Path]:
        bases = [b / n for n in re.findall(pattern, path.read_text()) for b in (path.parent, folder)]
        found = [Path(os.path.normpath(f"{base}{end}")) for base in bases for end in ("", *suffixes)]
        return {each for each in found if each in files} - {path}

    return {path: imported(path) for path in files}


@pytest.mark.parametrize(
    ("pattern", "folder", "suffixes"),
    [
        pytest.param(r"from '(\.[^']+)'", PACKAGE / "ui/src", (".ts", ".tsx"), id="typescript"),
        pytest.param(r'#\s*include "([^"]+)"', PACKAGE / "native", (".c", ".h", ".S"), id="c"),
    ],
)
def test_no_file_imports_itself_through_others(pattern, folder, suffixes):
    graph = named_files(pattern, folder, suffixes)
    assert sum(map(len, graph.values())) > len(graph) / 2, "imports are read"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(str(p.relative_to(PACKAGE)) for p in error.args[1]))
