"""The documentation as a site: it builds without a warning, which a dead link is, and an orphan page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="no Sphinx; install it with: make docs")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the documentation that may be changed."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "__pycache__"))
    for linked in (*ROOT.glob("*.md"), ROOT / "jupyterhub_config.py"):
        shutil.copy(linked, tmp_path)
    shutil.copytree(ROOT / "helm-values", tmp_path / "helm-values")
    (tmp_path / "jupyter_gpushare").mkdir()
    shutil.copy(ROOT / "jupyter_gpushare" / "__init__.py", tmp_path / "jupyter_gpushare")
    return tmp_path


def test_the_site_builds_without_a_warning_and_its_pictures_are_there(copy):
    options = ["--builder", "html", "--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, copy / "docs", copy / "site"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for page in (copy / "site").glob("*.html"):
        for name in page.read_text().split('src="images/')[1:]:
            assert (copy / "site" / "images" / name.partition('"')[0]).is_file(), page.name
    assert (copy / "site" / "architecture.html").is_file()
