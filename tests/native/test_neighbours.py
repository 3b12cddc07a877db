"""The preload library beside libraries that begin first, and in programs that close the driver."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.calls import CALLS
from tests.native.programs import compiled, run
from tests.native.test_hooks import compile_shared
from tests.native.test_sanitizers import (
    OPTIONS,
    SANITIZERS,
    UUID,
    compile_preload_into,
    flags_of,
    without_aslr,
)
from tests.native.worker import Worker
from tests.simulator import GIB, Lease

HERE = Path(__file__).parent
DRIVER = {"libcuda.so.1": "-DCUDA", "libnvidia-ml.so.1": "-DNVML", "libcupti.so.12": "-DCUPTI"}
STARTS = int(os.environ.get("GPUSHARE_TEST_STARTS", "200"))


def compile_library(source: str, output: Path, *more: str) -> Path:
    """A shared library out of a source beside this file."""
    flags = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", f"-Wl,-soname,{output.name}"]
    return compiled(output, *flags, HERE / source, *more)


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
        done = run(program, env=env)
        if done.returncode or done.stderr:
            bad.append((done.returncode, done.stderr))
    assert bad == []
    assert lease.denied() == (STARTS // 2 * 16 if leased else 0)


@pytest.mark.parametrize("kind", SANITIZERS)
def test_threads_that_begin_before_the_library_is_loaded_race_with_nothing(
    folder: Path, tmp_path: Path, lease: Lease, kind: str
) -> None:
    flags = flags_of(kind, tmp_path)
    program = compile_preload_into(tmp_path / "neighbour", "neighbour.c", flags, str(folder / "libcuda.so.1"))
    env = environment(folder, **lease.env() | {"LD_PRELOAD": ""}, **OPTIONS)
    for _ in range(5):
        done = run(*without_aslr(), program, env=env)
        assert (done.returncode, done.stderr) == (0, "")


# ---- a program that closes the driver and opens it again ----

#: `reopen` closes a library and opens it again.  What is unloaded meanwhile comes to another address.
REOPEN = """
import _ctypes
libc = ctypes.CDLL(None)
def spans(name):
    lines = [line.split() for line in open("/proc/self/maps")]
    return [[int(end, 16) for end in line[0].split("-")] for line in lines if line[-1].endswith("/" + name)]
def reopen(library, *names):
    before = {name: spans(name) for name in names}
    _ctypes.dlclose(library._handle)
    for name in names:
        for start, end in before[name] if not spans(name) else []:  # private, anonymous, at this very place
            libc.mmap(ctypes.c_void_p(start), size(end - start), 0, 0x32, -1, size(0))
    return ctypes.CDLL(names[0])
"""


def test_functions_of_a_driver_that_was_closed_are_limited_and_counted(folder: Path, lease: Lease) -> None:
    with Worker(environment(folder, **lease.env()), open_gpu=False) as kernel:
        kernel.run(CALLS + REOPEN)
        for work in (3, 6, 9):
            assert kernel.ask("[cuda.cuLaunchKernel(1), alloc(2 << 30)[0], alloc(1 << 20)[0]]") == [0, 2, 0]
            assert lease.slots()[kernel.pid].work == work
            kernel.run("cuda = reopen(cuda, 'libcuda.so.1')")


@pytest.mark.parametrize("leased", [True, False], ids=["lease", "no lease"])
def test_a_closed_library_that_is_linked_with_the_driver_finds_it_again(
    folder: Path, tmp_path: Path, lease: Lease, leased: bool
) -> None:
    source = "int cuMemAlloc_v2(long *, long); int take(long n) { long at; return cuMemAlloc_v2(&at, n); }"
    compile_shared(source, tmp_path / "libuser.so", "-Wl,--no-as-needed", str(folder / "libcuda.so.1"))
    env = environment(folder, **(lease.env() if leased else {"LD_PRELOAD": str(native.preload_path())}))
    env["LD_LIBRARY_PATH"] += f":{tmp_path}"
    with Worker(env, open_gpu=False) as kernel:
        kernel.run(CALLS + REOPEN + "_ctypes.dlclose(cuda._handle); user = ctypes.CDLL('libuser.so')")
        for _ in range(2):
            assert kernel.ask("user.take(ctypes.c_long(2 << 30))") == (2 if leased else 0)
            kernel.run("user = reopen(user, 'libuser.so', 'libcuda.so.1')")


def test_nvml_that_was_closed_shows_the_lease_alone(folder: Path, lease: Lease) -> None:
    with Worker(environment(folder, **lease.env()), open_gpu=False) as kernel:
        kernel.run(CALLS + REOPEN + "nvml = ctypes.CDLL('libnvidia-ml.so.1'); sizes = (u64 * 3)()")
        for _ in range(2):
            kernel.run("assert nvml.nvmlDeviceGetMemoryInfo(sizes, sizes) == 0")
            assert kernel.ask("sizes[0]") == GIB
            kernel.run("nvml = reopen(nvml, 'libnvidia-ml.so.1')")


def test_cupti_that_was_closed_still_taints(folder: Path, lease: Lease) -> None:
    with Worker(environment(folder, **lease.env()), open_gpu=False) as kernel:
        kernel.run(CALLS + REOPEN + "cupti = ctypes.CDLL('libcupti.so.12')")
        assert kernel.ask("cupti.cuptiActivityEnable(4)") == 1
        assert lease.slots()[kernel.pid].taints == 0
        kernel.run("cupti = reopen(cupti, 'libcupti.so.12')")
        assert kernel.ask("cupti.cuptiActivityEnable(3)") == 0
        assert lease.slots()[kernel.pid].taints == 16
