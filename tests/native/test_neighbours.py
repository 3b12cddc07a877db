"""The preload library beside libraries that begin before it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpushare import native
from jupyter_gpushare.native import build
from tests.native.test_sanitizers import SANITIZERS, UUID, compile_preload_into, without_aslr, works
from tests.simulator import GIB, Lease
from tests.waiting import PATIENCE_S

HERE = Path(__file__).parent
DRIVER = {"libcuda.so.1": "-DCUDA", "libnvidia-ml.so.1": "-DNVML"}
STARTS = int(os.environ.get("GPUSHARE_TEST_STARTS", "200"))


def compile_library(source: str, output: Path, *more: str) -> Path:
    """A shared library out of a source beside this file."""
    flags = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", f"-Wl,-soname,{output.name}"]
    subprocess.run(
        [*build.compiler(), *flags, str(HERE / source), "-o", str(output), *more, "-ldl"], check=True
    )
    return output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the small driver lies, compiled, and the second library that is preloaded."""
    folder = tmp_path_factory.mktemp("driver")
    for name, part in DRIVER.items():
        compile_library("small_driver.c", folder / name, part)
    compile_library("neighbour.c", folder / "neighbour.so", str(folder / "libcuda.so.1"))
    return folder


@pytest.fixture
def lease(tmp_path: Path) -> Lease:
    return Lease(tmp_path / "lease", [(UUID, GIB)])


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a process with the driver of a folder."""
    ours = ("CUDA_", "GPUSHARE_LEASE", "GPUSHARE_SIM", "LD_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return (
        env | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more
    )


# ---- a library that begins before ours ----


@pytest.mark.long_form
@pytest.mark.parametrize("leased", [True, False], ids=["lease", "no lease"])
def test_threads_that_begin_before_the_library_is_loaded_get_its_answers(
    folder: Path, lease: Lease, leased: bool
) -> None:
    env = environment(folder, **(lease.env() if leased else {"LD_PRELOAD": str(native.preload_path())}))
    env["LD_PRELOAD"] += f":{folder / 'neighbour.so'}"
    program = shutil.which("true")
    assert program
    bad = []
    for _ in range(STARTS // 2):
        done = subprocess.run(
            [program], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if done.returncode or done.stderr:
            bad.append((done.returncode, done.stderr))
    assert bad == []
    assert lease.denied() == (STARTS // 2 * 16 if leased else 0)


@pytest.mark.parametrize("kind", SANITIZERS)
def test_threads_that_begin_before_the_library_is_loaded_race_with_nothing(
    folder: Path, tmp_path: Path, lease: Lease, kind: str
) -> None:
    flags = ["-Werror", "-g", "-O1", "-fno-omit-frame-pointer", *SANITIZERS[kind]]
    if reason := works(flags, tmp_path):
        pytest.skip(reason)
    program = compile_preload_into(tmp_path / "neighbour", "neighbour.c", flags, str(folder / "libcuda.so.1"))
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    env = environment(folder, **lease.env() | {"LD_PRELOAD": ""}, **options)
    for _ in range(5):
        done = subprocess.run(
            [*without_aslr(), str(program)], env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
