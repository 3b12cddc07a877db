"""Sphinx configuration of the documentation: `make docs`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]

project = "jupyter-gpushare"
author = "the jupyter-gpushare contributors"
release = re.findall(r'__version__ = "(.*)"', (_ROOT / "jupyter_gpushare" / "__init__.py").read_text())[0]

extensions = ["myst_parser", "sphinxcontrib.mermaid"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project

# Anchors of headings as on GitHub, so that links work in both places.
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
myst_enable_extensions = ["attrs_inline"]
# A link to a page or a heading that does not exist fails the build (`make docs`).
nitpicky = True


def _copy_pictures(app: Any, error: Exception | None) -> None:
    """Copy the pictures that pages name in HTML; Sphinx copies only those named in Markdown."""
    if error is None:
        shutil.copytree(Path(app.srcdir) / "images", Path(app.outdir) / "images", dirs_exist_ok=True)


def _link_here(app: Any, name: str, source: list[str]) -> None:
    """Point links to a file outside docs/ to the page that includes it; GitHub shows the file itself."""
    source[0] = source[0].replace("](../helm-values/README.md)", "](project/helm-values.md)")


def _measure(app: Any, name: str, source: list[str]) -> None:
    """Insert the table of `make figures` at its marker; a copy without the tests has no table."""
    program = _ROOT / "tests" / "setup" / "figures.py"
    if "<!-- figures -->" in source[0] and program.exists():
        result = subprocess.run([sys.executable, program], check=True, capture_output=True, text=True)
        source[0] = source[0].replace("<!-- figures -->", result.stdout)


def setup(app: Any) -> None:
    """Connect the functions above; Sphinx calls this."""
    app.connect("source-read", _link_here)
    app.connect("source-read", _measure)
    app.connect("build-finished", _copy_pictures)
