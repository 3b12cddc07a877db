"""The documentation as a site: it builds without a warning, and a dead link fails the build."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


def build(root: Path, builder: str) -> subprocess.CompletedProcess[str]:
    options = ["--builder", builder, "--fail-on-warning", "--keep-going", "--nitpicky", "--quiet"]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *options, root / "docs", root / "site"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_site_builds_without_a_warning_and_its_pictures_are_there(copy):
    result = build(copy, "html")
    assert result.returncode == 0, result.stderr
    for page in (copy / "site").glob("*.html"):
        for name in page.read_text().split('src="images/')[1:]:
            assert (copy / "site" / "images" / name.partition('"')[0]).is_file(), page.name
    assert (copy / "site" / "architecture.html").is_file()


def test_a_dead_link_fails_the_build(copy):
    links = {"quickstart.md": "[x](nowhere.md)", "jobs.md": "[x](concepts.md#no-such-heading)"}
    for name, link in links.items():
        page = copy / "docs" / name
        page.write_text(f"{page.read_text()}\n{link}\n")
    result = build(copy, "dummy")
    assert result.returncode != 0
    assert len(result.stderr.splitlines()) == len(links), result.stderr
    for name, said in zip(links, ("nowhere.md", "no-such-heading"), strict=True):
        assert any(name in line and said in line for line in result.stderr.splitlines()), result.stderr


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text().split()
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs).with_suffix("")) for page in docs.rglob("*.md")}
    assert {page for page in pages if not page.startswith("_")} - {"index"} <= set(index)


def test_read_the_docs_builds_what_make_docs_builds():
    settings = yaml.safe_load((ROOT / ".readthedocs.yaml").read_text())
    assert settings["version"] == 2
    assert settings["sphinx"] == {"configuration": "docs/conf.py", "fail_on_warning": True}
    (install,) = settings["python"]["install"]
    assert install == {"method": "pip", "path": ".", "extra_requirements": ["docs"]}
