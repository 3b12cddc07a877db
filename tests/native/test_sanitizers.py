"""The C sources under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

from __future__ import annotations

import atexit
import functools
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from jupyter_gpushare.native import build
from tests.native.programs import compiled, run
from tests.native.test_hooks import compile_shared
from tests.simulator import GIB, Lease, Simulator

SANITIZERS = {
    "memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "threads": ["-fsanitize=thread"],
}
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}

PLANTED = {
    "overflow": ("memory", "volatile int most = 0x7fffffff; return (most + argc) & 1;"),
    "out of bounds": ("memory", "char *volatile x = malloc(8); x[8 * argc] = 1; return x[0] & 1;"),
    "use after free": ("memory", "char *volatile x = malloc(8); free(x); return x[argc] & 1;"),
    "race": (
        "threads",
        "pthread_t t; pthread_create(&t, 0, add, 0); add(0); return pthread_join(t, 0) + argc - 1;",
    ),
}


#: A driver that holds a call, when it has done what it was asked for, until it may return, but none of the
#: first thread.  Of a handle that is free it makes the next one.
SLOW_DRIVER = """
#define _GNU_SOURCE
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#define API __attribute__((visibility("default"))) int
__attribute__((visibility("default"))) _Atomic int calls_in_driver, driver_may_return;
static int is_first(void) { return syscall(SYS_gettid) == getpid(); }
static int slow(void)
{
    if (is_first())
        return 0;
    for (calls_in_driver++; !driver_may_return;)
        nanosleep(&(struct timespec){0, 1000000}, 0);
    return calls_in_driver--, 0;
}
API cuDeviceGetUuid_v2(char uuid[16], int device) { memset(uuid, 0x11, 16); return device; }
API cuDeviceGetCount(int *count) { return *count = 1, 0; }
API cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{ return *active = is_first(), *flags = 0, slow() + device; }
API cuDevicePrimaryCtxReset_v2(int device) { return device; }
API cuCtxGetDevice(int *device) { return *device = 0; }
API cuCtxGetCurrent(void **context) { return *context = &calls_in_driver, 0; }
API cuCtxCreate_v2(void **context, unsigned flags, int device)
{ return *context = &calls_in_driver, (int)flags + device; }
API cuCtxDestroy_v2(void *context) { return !context + slow(); }
static unsigned long long next, last = 7;
API cuMemAlloc_v2(unsigned long long *at, size_t n) { return *at = next += n, 0; }
API cuMemFree_v2(unsigned long long at) { return !at; }
API cuMemCreate(unsigned long long *out, size_t n, void *p, unsigned long long f)
{ return *out = ++last, (void)n, (void)p, (void)f, 0; }
API cuMemRelease(unsigned long long handle) { return (void)handle, slow(); }
API cuMemMap(unsigned long long at, size_t n, size_t o, unsigned long long h, unsigned long long f)
{ return (void)at, (void)n, (void)o, (void)h, (void)f, slow(); }
API cuMemUnmap(unsigned long long at, size_t n) { return (void)at, (void)n, slow(); }
API cuMemRetainAllocationHandle(unsigned long long *out, void *at) { return (void)at, *out = last, slow(); }
API cuMemExportToShareableHandle(void *out, unsigned long long handle, int type, unsigned long long f)
{ return (void)out, (void)handle, (void)f, slow() + type - 1; }
"""
UUID = "GPU-" + "11" * 16


@pytest.mark.parametrize("kind", SANITIZERS)
def test_calls_that_overlap_end_no_record_in_use_and_give_back_their_own(tmp_path: Path, kind: str) -> None:
    flags = flags_of(kind, tmp_path)
    compile_shared(SLOW_DRIVER, tmp_path / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    program = compile_preload_into(tmp_path / "overlap", "overlap.c", flags, str(tmp_path / "libcuda.so.1"))
    lease = Lease(tmp_path / "lease", [(UUID, GIB)])
    env = {
        "GPUSHARE_LEASE": "test",
        "GPUSHARE_LEASE_DIR": str(lease.folder),
        "LD_LIBRARY_PATH": str(tmp_path),
    }
    done = run(*without_aslr(), program, env=env | OPTIONS)
    assert done.returncode == 0, done.stderr[-6000:]


def compile_preload_into(program: Path, source: str, flags: list[str], *libraries: str) -> Path:
    """A program of a test's source and the preload library's own sources."""
    flags = [*build.STRICT, *flags, "-DGPUSHARE_DLSYM=hooked_dlsym", f"-I{build.NATIVE}"]
    more = ["-pthread", "-Wl,--no-as-needed", *libraries]
    return compiled(program, *flags, *preload_objects(tuple(flags)), Path(__file__).parent / source, *more)


@functools.cache
def preload_objects(flags: tuple[str, ...]) -> list[Path]:
    """Compile the sources of the preload library, once for all tests with these flags."""
    folder = Path(tempfile.mkdtemp(prefix="gpushare-objects-"))
    atexit.register(shutil.rmtree, folder)
    preload = next(library for library in build.LIBRARIES if "preload" in library.output)
    sources = [build.NATIVE / each for each in preload.sources]
    subprocess.run([*build.compiler(), *flags, "-c", *sources], cwd=folder, check=True)
    objects = sorted(folder.glob("*.o"))
    assert len(objects) == len(sources)
    return objects


@functools.cache
def driver_folder(flags: tuple[str, ...]) -> Path:
    """Compile the simulated driver, once for all tests with these flags; return where it is."""
    folder = Path(tempfile.mkdtemp(prefix="gpushare-driver-"))
    atexit.register(shutil.rmtree, folder)
    driver = next(library for library in build.LIBRARIES if library.output == "sim/libcuda.so.1")
    return build.compile_library(driver, folder, flags).parent


def flags_of(kind: str, folder: Path) -> list[str]:
    """The compiler's flags for a sanitizer; skips the test where this compiler or machine has none."""
    flags = ["-Werror", "-g", "-O1", "-fno-omit-frame-pointer", *SANITIZERS[kind]]
    program = folder / "probe"
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    if run(*build.compiler(), *flags, folder / "probe.c", "-o", program).returncode:
        pytest.skip("the compiler has no such sanitizer")
    ran = run(*without_aslr(), program)
    if ran.returncode:
        pytest.skip(ran.stderr.strip())
    return flags


def without_aslr() -> list[str]:
    """ThreadSanitizer's shadow does not fit into every random layout."""
    setarch = shutil.which("setarch")
    return [setarch, platform.machine(), "-R"] if setarch else []


@pytest.mark.parametrize("kind", SANITIZERS)
def test_the_libraries_are_clean(tmp_path: Path, kind: str) -> None:
    flags = flags_of(kind, tmp_path)
    machine = Simulator(tmp_path, "2xH100-80GB,host=512GiB,context=0GiB,free-delay=0")
    lease = Lease(tmp_path / "lease", [(machine.uuid(1), GIB)])
    program = compile_preload_into(tmp_path / "harness", "harness.c", flags)
    env = machine.env(GPUSHARE_LEASE="test", GPUSHARE_LEASE_DIR=str(lease.folder), CUDA_VISIBLE_DEVICES="0,1")
    env |= {"LD_LIBRARY_PATH": str(driver_folder(tuple(flags))), **OPTIONS}
    done = run(*without_aslr(), program, env=env)
    assert done.returncode == 0, done.stderr[-6000:]
    assert machine.device_peak(1) > 0 == machine.device_peak(0) == machine.device_used(1)
    assert sum(slot.used_bytes[0] for slot in lease.slots().values()) == 0
    assert {event.event for event in machine.ledger()} >= {"alloc", "free", "checkpoint", "restore", "unlock"}


@pytest.mark.parametrize("source", ["turns_race", "kept_race"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind == "memory" else ()) for kind in SANITIZERS]
)
def test_threads_are_clean_while_the_limit_page_changes(tmp_path: Path, kind: str, source: str) -> None:
    """Turns beside contexts, captures and children; allocations while memory is kept for another lease."""
    flags = flags_of(kind, tmp_path)
    machine = Simulator(tmp_path, "1xH100-80GB,host=512GiB,context=0GiB,free-delay=0")
    lease = Lease(tmp_path / "lease", [(machine.uuid(0), GIB)])
    lease.set_turn(0)
    program = compile_preload_into(tmp_path / source, f"{source}.c", flags)
    env = machine.env(**lease.env())
    del env["LD_PRELOAD"]  # it is in the program
    env |= {"LD_LIBRARY_PATH": str(driver_folder(tuple(flags))), **OPTIONS}
    done = run(*without_aslr(), program, "2", lease.folder / "limit", env=env)
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_caught(tmp_path: Path, planted: str) -> None:
    kind, body = PLANTED[planted]
    flags = flags_of(kind, tmp_path)
    source = tmp_path / "planted.c"
    source.write_text(
        "#include <pthread.h>\n#include <stdlib.h>\nstatic int n;\n"
        "void *add(void *x);\nvoid *add(void *x) { n++; return x; }\n"
        f"int main(int argc, char **argv) {{ (void)argv; {body} }}\n"
    )
    program = compiled(tmp_path / "planted", *flags, "-pthread", source)
    done = run(*without_aslr(), program, env=OPTIONS)
    assert done.returncode != 0
    assert "planted.c" in done.stderr
