"""Build the sdist and the wheel once for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(target: str, source: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run hatchling on a source tree, as pip and `python -m build` do, without a build environment."""
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder],
        cwd=source,
        env=environment or None,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    done = build("sdist", ROOT, folder)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.tar.gz")
    return made


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = build("wheel", ROOT, folder)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist into a new folder; return its tree."""
    folder.mkdir(exist_ok=True)
    # tarfile of Python 3.11.0 to 3.11.3 has no filters.
    subprocess.run(["tar", "-xf", sdist, "-C", folder, "--no-same-owner"], check=True)
    (tree,) = folder.iterdir()
    return tree


@pytest.fixture
def source_tree(sdist: Path, tmp_path: Path) -> Path:
    """Return the tree of the unpacked sdist."""
    return unpacked(sdist, tmp_path / "source")
