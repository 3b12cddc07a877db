"""The wheel that people install: compiled, tagged for its machine, announced to Jupyter."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def names(wheel: Path) -> frozenset[str]:
    with zipfile.ZipFile(wheel) as archive:
        return frozenset(archive.namelist())


def test_it_fits_every_python_on_this_kind_of_machine(wheel):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.stem.endswith(f"-py3-none-{platform}")


@pytest.mark.parametrize("library", ["libgpushare_preload.so", "sim/libcuda.so.1", "sim/libnvidia-ml.so.1"])
def test_it_brings_the_compiled_libraries(names, library):
    assert f"jupyter_gpushare/native/lib/{library}" in names


def test_it_brings_the_migrations_of_the_database(names):
    assert any(name.startswith("jupyter_gpushare/broker/migrations/versions/0001") for name in names)


def test_jupyter_server_finds_the_extension(names):
    assert any(name.endswith("/etc/jupyter/jupyter_server_config.d/jupyter_gpushare.json") for name in names)


needs_bundle = pytest.mark.skipif(
    not (ROOT / "jupyter_gpushare" / "labextension" / "package.json").is_file(),
    reason="not built: run `make setup`",
)
FOLDER = ".data/data/share/jupyter/labextensions/jupyter-gpushare/"


@needs_bundle
def test_it_brings_the_bundle_of_the_page_where_jupyterlab_looks_and_no_source(names):
    found = {name.partition(FOLDER)[2] for name in names if FOLDER in name}
    assert {"package.json", "install.json", "schemas/jupyter-gpushare/model.json"} <= found
    assert any(name.startswith("static/remoteEntry.") for name in found)
    assert not any(name.endswith((".ts", ".tsx", ".map")) for name in names)


@needs_bundle
def test_it_brings_the_licence_of_the_library_that_is_in_the_bundle(wheel, names):
    (path,) = (name for name in names if name.endswith(f"{FOLDER}static/third-party-licenses.json"))
    with zipfile.ZipFile(wheel) as archive:
        packages = {each["name"]: each for each in json.loads(archive.read(path))["packages"]}
    assert "Leon Sorokin" in packages["uplot"]["extractedText"]


def test_what_only_building_needs_stays_out(names):
    assert not any(
        "/node_modules/" in name or name.startswith(("jupyter_gpushare/ui/", "tests/")) for name in names
    )
