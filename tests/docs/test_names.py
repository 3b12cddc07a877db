"""Files and names that pages and docstrings mention exist."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = "py|c|h|ts|tsx|toml|yaml|html|sh|css"
# Files of a site or of its users.
THEIRS = {"broker_config.py", "jupyterhub_config.py", "random.py", "train.py", "data.py", "wrapper.sh"}
# Names of JupyterHub.
OTHERS = {"_track_failure_count", "consecutive_failure_limit", "internal_ssl"}


@cache
def tracked() -> tuple[str, ...]:
    """The paths of the repository."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    ).stdout.split()
    if not listed:
        pytest.skip("no git checkout")
    return tuple(listed)


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def files_named(text: str) -> list[str]:
    """The file names in backticks."""
    return re.findall(rf"`([\w./-]+\.(?:{SUFFIXES}))`", text)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_file_that_a_page_names_exists(page):
    missing = [
        name
        for name in files_named(page.read_text())
        if Path(name).name not in THEIRS
        and not any(f"/{path}".endswith(f"/{name.removeprefix('./')}") for path in tracked())
    ]
    assert missing == []


def test_pages_name_files():
    assert sum(len(files_named(page.read_text())) for page in pages()) > 60


@cache
def known_words() -> frozenset[str]:
    """Every word of the code, and of the names of its files, without what is in backticks."""
    words: set[str] = set()
    for path in tracked():
        if path.endswith((".lock", ".json", ".md")):
            continue
        words.update(re.findall(r"\w+", path))
        if path.startswith(("jupyter_gpushare/", "demo/", "pyproject.toml")) and path.endswith(
            (".py", ".c", ".h", ".ts", ".tsx", ".toml", ".html")
        ):
            words.update(re.findall(r"\w+", re.sub(r"`[^`\n]+`", "", (ROOT / path).read_text())))
    return frozenset(words)


def docstrings(path: str) -> list[str]:
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / path).read_text())
    return [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, holders)]


def names_in(docstring: str) -> list[str]:
    """The names in single backticks, such as `Registry.advance`; double ones quote text."""
    return re.findall(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)", docstring)


def test_a_name_that_a_docstring_refers_to_exists():
    unknown, count = [], 0
    for path in tracked():
        if path.startswith("jupyter_gpushare/") and path.endswith(".py"):
            for name in [name for text in docstrings(path) for name in names_in(text)]:
                count += 1
                if set(name.strip(".").split(".")) - known_words() - OTHERS:
                    unknown.append(f"{path}: {name}")
    assert unknown == []
    assert count > 300
