"""Under musl (Alpine) the preload library loads, every program runs, and a lease gets no GPU memory."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from jupyter_gpushare import native
from tests.native.programs import run
from tests.native.test_glibc import objdump
from tests.simulator import GIB, Lease

COMPILER = "musl-gcc"
UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"

needs_musl = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason="needs a compiler for musl: apt-get install musl-tools"
)

PROGRAM = """
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
static void *run(void *text) { return dlsym(RTLD_DEFAULT, text); }
int main(void)
{
    pthread_t thread;
    void *found = NULL, *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*allocate)(unsigned long long *, size_t) = driver ? dlsym(driver, "cuMemAlloc_v2") : NULL;
    unsigned long long address = 0;
    size_t (*length)(const char *) = dlsym(RTLD_NEXT, "strlen");
    pthread_create(&thread, NULL, run, "puts");
    pthread_join(thread, &found);
    int status = 1;
    pid_t child = fork();
    if (!child)
        _exit(dlsym(RTLD_DEFAULT, "puts") != found);
    waitpid(child, &status, 0);
    printf("%d %d %d %d\\n", found == (void *)puts, length ? (int)length("four") : -1, status,
           allocate ? allocate(&address, 1 << 20) : -1);
    return 0;
}
"""

DRIVER = """
#include <stddef.h>
int cuMemAlloc_v2(unsigned long long *out, size_t bytes) { *out = bytes; return 0; }
int cuCtxGetDevice(int *out) { return *out = 0; }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the program and a driver, both for musl."""
    made = tmp_path_factory.mktemp("musl")
    for name, text, flags in (("program", PROGRAM, []), ("libcuda.so.1", DRIVER, ["-shared", "-fPIC"])):
        source = made / f"{name}.c"
        source.write_text(text)
        command = [COMPILER, "-D_GNU_SOURCE", "-Wall", "-Werror", *flags, str(source), "-o", str(made / name)]
        subprocess.run(command, check=True)
    return made


def outcome(folder: Path, **environment: str) -> tuple[int, str, str]:
    """(exit code, output, error output) of the program with the library."""
    env = {"LD_PRELOAD": str(native.preload_path()), "LD_LIBRARY_PATH": str(folder), **environment}
    done = run(folder / "program", env=env)
    return done.returncode, done.stdout, done.stderr


@needs_musl
def test_a_program_without_a_lease_runs_as_without_the_library(folder: Path) -> None:
    assert outcome(folder) == (0, "1 4 0 0\n", "")


@needs_musl
def test_a_program_of_a_lease_runs_and_gets_no_gpu_memory(folder: Path, tmp_path: Path) -> None:
    """musl and glibc lay a mutex out differently, so the account that both would share stays untouched."""
    lease = Lease(tmp_path / "lease", [(UUID, GIB)])
    before = (lease.folder / "account").read_bytes()
    code, output, errors = outcome(folder, **lease.env())
    assert (code, output) == (0, "1 4 0 2\n")
    assert errors == "gpushare: GPU memory cannot be allocated: the C library of this program: is not glibc\n"
    assert (lease.folder / "account").read_bytes() == before


@needs_musl
def test_a_library_that_needs_another_symbol_would_end_every_program(folder: Path, tmp_path: Path) -> None:
    """Why what musl lacks is weak: musl's loader does not ignore such a library."""
    source, library = tmp_path / "needs.c", tmp_path / "needs.so"
    source.write_text("int only_in_glibc(void); int now(void) { return only_in_glibc(); }\n")
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert outcome(folder, LD_PRELOAD=str(library))[0] == 127
    assert outcome(folder, LD_PRELOAD=str(tmp_path / "missing.so"))[0] == 0


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump: apt-get install binutils")
def test_what_musl_lacks_is_not_required() -> None:
    """The same without a compiler for musl; the others are marks of the compiler's own start files."""
    weak = re.findall(r"^\S+ +w .*\*UND\*.* (\w+)$", objdump(native.preload_path(), "-T"), re.M)
    made = {"__cxa_finalize", "__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}
    made |= {"environ", "_environ"}  # of musl too: other names of __environ, which comes with them
    assert set(weak) - made == {"dlvsym", "__register_atfork", "gnu_get_libc_version", "pthread_atfork"}
