"""The preload library on 64-bit Arm, where this machine has a compiler (and an emulator) for it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jupyter_gpushare.native import build
from tests.native.programs import run
from tests.simulator import GIB, Lease

COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"
LIBC = "/usr/aarch64-linux-gnu"
UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
CALLS = 1000

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason="needs a compiler for Arm: apt-get install gcc-aarch64-linux-gnu"
)

#: A driver of two functions with arguments in all kinds of registers and on the stack.
DRIVER = """
typedef unsigned long u64;
u64 cuLaunchKernel(u64 a, u64 b, u64 c, u64 d, u64 e, u64 f, u64 g, u64 h, u64 i, u64 j, u64 k)
{ return a + 2*b + 3*c + 4*d + 5*e + 6*f + 7*g + 8*h + 9*i + 10*j + 11*k; }
double cuStreamQuery(double a, double b, double c, double d, double e, double f, double g, double h, u64 i)
{ return a + 2*b + 3*c + 4*d + 5*e + 6*f + 7*g + 8*h + (double)i; }
"""

PROGRAM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
typedef unsigned long u64;
int main(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    u64 (*launch)(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) = dlsym(cuda, "cuLaunchKernel");
    double (*query)(double, double, double, double, double, double, double, double, u64) =
        dlsym(cuda, "cuStreamQuery");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int wrong = 0;
    for (u64 n = 0; n < COUNT; n++) {
        wrong += launch(n, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11) != n + 505;
        wrong += query(1, 2, 3, 4, 5, 6, 7, 8, n) != 204 + (double)n;
    }
    Dl_info where;
    dladdr((void *)launch, &where);
    printf("%d %s", wrong + (driver != cuda), where.dli_fname);
    return 0;
}
"""


def compiled(folder: Path, output: str, *arguments: str) -> Path:
    made = folder / output
    subprocess.run([COMPILER, *arguments, "-o", str(made), "-ldl"], check=True, timeout=120)
    return made


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preload = next(library for library in build.LIBRARIES if "preload" in library.output)
    sources = [str(build.NATIVE / source) for source in preload.sources]
    flags = [*build.STRICT, "-Werror", *build.SHARED, f"-I{build.NATIVE}", *preload.linker]
    return compiled(tmp_path_factory.mktemp("arm"), "libpreload.so", *flags, *sources)


def test_it_compiles_without_a_warning_and_its_dlsym_ends_in_a_jump(library: Path) -> None:
    shown = run(
        "aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", "--disassemble=dlsym", library
    ).stdout
    body = re.findall(r"^ +[0-9a-f]+:\t(.*)$", shown, re.MULTILINE)
    assert [line for line in body if line != "nop"][-1] == "br\tx16"
    assert len([line for line in body if re.match(r"bl\b", line)]) == 1


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason="needs an emulator: apt-get install qemu-user")
def test_its_hooks_count_and_pass_every_argument(tmp_path: Path, library: Path) -> None:
    (tmp_path / "driver.c").write_text(DRIVER)
    (tmp_path / "program.c").write_text(PROGRAM)
    soname = "-Wl,-soname,libcuda.so.1"
    compiled(tmp_path, "libcuda.so.1", "-shared", "-fPIC", soname, str(tmp_path / "driver.c"))
    program = compiled(tmp_path, "program", f"-DCOUNT={CALLS}", str(tmp_path / "program.c"))
    lease = Lease(tmp_path / "lease", [(UUID, GIB)])
    inside = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(tmp_path),
        "GPUSHARE_LEASE": "arm",
        "GPUSHARE_LEASE_DIR": str(lease.folder),
    }
    sets = [word for name, value in inside.items() for word in ("-E", f"{name}={value}")]
    done = run(EMULATOR, "-L", LIBC, *sets, program, check=True)
    assert done.stdout == f"0 {library}", done.stderr
    (slot,) = lease.slots().values()
    assert (slot.work, slot.calls, slot.queries) == (CALLS, CALLS, CALLS)
