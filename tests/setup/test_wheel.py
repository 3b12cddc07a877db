"""The wheel that a site installs: compiled, tagged for its machine, announced to Jupyter."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.setup.conftest import ROOT, build

LIBRARIES = ("libgpushare_preload.so", "sim/libcuda.so.1", "sim/libnvidia-ml.so.1")
LABEXTENSION = ".data/data/share/jupyter/labextensions/jupyter-gpushare/"
ARM_COMPILER = "aarch64-linux-gnu-gcc"
# e_machine of the ELF header (elf.h), at offset 18.
ELF_MACHINE = {"x86_64": 62, "aarch64": 183}


@pytest.fixture(scope="session")
def names(wheel: Path) -> frozenset[str]:
    with zipfile.ZipFile(wheel) as archive:
        return frozenset(archive.namelist())


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with the wheel alone in it."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    venv.create(folder, with_pip=False)
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", wheel], check=True, timeout=120)
    return folder


def run_in(environment: Path, code: str) -> str:
    return subprocess.run(
        [environment / "bin" / "python", "-I", "-c", code],
        cwd=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def newest_glibc(library: Path) -> tuple[int, int]:
    command = ["objdump", "-p", library]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", said))


def test_its_tag_names_no_python_and_the_oldest_glibc_that_loads_its_libraries(wheel, installed):
    libraries = installed / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    libraries /= "jupyter_gpushare/native/lib"
    newest = max(newest_glibc(libraries / name) for name in LIBRARIES)
    machine = os.uname().machine
    expected = f"manylinux_{newest[0]}_{newest[1]}_{machine}"
    if newest <= (2, 17):
        expected = f"manylinux2014_{machine}.manylinux_2_17_{machine}"
    assert wheel.stem.endswith(f"-py3-none-{expected}")


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_dynamic_linker_loads_its_libraries(installed, library):
    code = (
        "import ctypes, jupyter_gpushare, pathlib;"
        f"path = pathlib.Path(jupyter_gpushare.__file__).parent / 'native/lib/{library}';"
        "ctypes.CDLL(str(path)); print(path)"
    )
    assert run_in(installed, code).startswith(str(installed))


def test_type_checkers_use_its_annotations(names):
    assert "jupyter_gpushare/py.typed" in names


def test_it_brings_the_messages_of_the_kubelet_and_the_kernel_of_demo_gpu(names):
    assert {"jupyter_gpushare/gpu/os/pod_resources.binpb", "jupyter_gpushare/demo_gpu.ptx"} <= names


def test_it_brings_the_migrations_of_the_database(names):
    assert any(name.startswith("jupyter_gpushare/broker/state/migrations/versions/v1_") for name in names)


def test_jupyter_server_finds_the_extension(installed):
    config = installed / "etc/jupyter/jupyter_server_config.d/jupyter_gpushare.json"
    assert json.loads(config.read_text())["ServerApp"]["jpserver_extensions"]


def test_kernels_of_its_environment_have_the_magics(installed):
    config = json.loads((installed / "etc/ipython/ipython_config.json").read_text())
    assert config == {"InteractiveShellApp": {"extra_extensions": ["jupyter_gpushare"]}}


def test_jupyterlab_finds_the_extension_and_every_file_that_it_loads_at_start(installed):
    folder = installed / "share/jupyter/labextensions/jupyter-gpushare"
    package = json.loads((folder / "package.json").read_text())
    assert (folder / package["jupyterlab"]["_build"]["load"]).is_file()
    assert json.loads((folder / "install.json").read_text())["packageName"] == "jupyter-gpushare"
    assert (folder / "schemas/jupyter-gpushare/model.json").is_file()


def test_it_announces_its_command_and_its_spawners(installed):
    assert (installed / "bin" / "gpushare").is_file()
    code = (
        "from importlib.metadata import entry_points;"
        "print(*sorted(each.name for each in entry_points(group='jupyterhub.spawners')))"
    )
    assert {"gpushare-local", "gpushare-simple"} <= set(run_in(installed, code).split())


def test_it_brings_the_licence_of_what_the_bundle_took_from_others(wheel, names):
    (path,) = (name for name in names if name.endswith(f"{LABEXTENSION}static/third-party-licenses.json"))
    with zipfile.ZipFile(wheel) as archive:
        packages = {each["name"]: each for each in json.loads(archive.read(path))["packages"]}
    assert "JS Foundation" in packages["css-loader"]["extractedText"]


def test_what_only_building_needs_stays_out(names):
    unwanted = ("jupyter_gpushare/ui/", "jupyter_gpushare/labextension/", "tests/")
    assert not any("/node_modules/" in name or name.startswith(unwanted) for name in names)
    assert not any(name.endswith((".ts", ".tsx", ".map", "hatch_build.py")) for name in names)


def test_its_contents_are_those_of_a_package(wheel):
    check = [Path(sys.executable).parent / "check-wheel-contents", wheel]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_links_and_pictures_of_its_description_lead_to_the_repository(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(path).decode()
    (source,) = re.findall(r"^Project-URL: Source, (\S+)$", metadata, re.M)
    text = metadata.partition("\n\n")[2]
    addresses = re.findall(r'\]\(([^)]+)\)|(?:src|srcset|href)="([^"]+)"', text)
    found = [markdown or html for markdown, html in addresses]
    assert len(found) > 10
    for address in found:
        assert address.startswith(f"{source}/"), address
        path = address.partition("#")[0].removeprefix(f"{source}/").split("/", 2)[2]
        assert (ROOT / path).exists(), address


# In `make test` tests/native/test_arm.py compiles for Arm, and test_build.py reads the machine and the tag.
@pytest.mark.long
@pytest.mark.skipif(
    shutil.which(ARM_COMPILER) is None,
    reason="needs a compiler for Arm: apt-get install gcc-aarch64-linux-gnu",
)
def test_a_compiler_for_arm_makes_a_wheel_for_arm(source_tree, tmp_path):
    done = build("wheel", source_tree, tmp_path / "dist", **{**os.environ, "CC": ARM_COMPILER})
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "dist").glob("*.whl")
    assert re.search(r"-py3-none-manylinux2014_aarch64\.manylinux_2_17_aarch64$", made.stem)
    with zipfile.ZipFile(made) as archive:
        for name in LIBRARIES:
            header = archive.read(f"jupyter_gpushare/native/lib/{name}")[:20]
            assert int.from_bytes(header[18:20], "little") == ELF_MACHINE["aarch64"]
