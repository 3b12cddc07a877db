"""Measure the overhead of the preload library on GPU allocations and kernel launches.

``.venv/bin/python -m tests.benchmarks.preload_overhead [rounds]``

C programs open ``libcuda.so.1`` as CUDA programs do, with and without the library,
alternating, on a driver whose functions return at once (`EMPTY_DRIVER`).  Each run takes
the fastest of several repetitions, and the fastest run counts, so that other work on the
machine does not.  allocate.c allocates and frees 1 MiB in a loop, also in the order of a
stream, from a memory pool.  launches.c times launches on that driver, by one thread and by
two that share the counter of their process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jupyter_gpushare.gpu.leases.files import LeaseDirectory, PagePhase
from jupyter_gpushare.native import preload_path
from tests.benchmarks.report import print_table

PROGRAM = Path(__file__).with_name("allocate.c")
LAUNCHES = Path(__file__).with_name("launches.c")
LOOPS = 3_000_000
EMPTY_DRIVER = """
#include <stddef.h>
#include <string.h>
typedef unsigned long long u64;
int cuInit(unsigned flags) { return (int)flags; }
int cuDeviceGet(int *out, int n) { return *out = n; }
int cuDeviceGetCount(int *out) { *out = 1; return 0; }
int cuDeviceGetUuid_v2(unsigned char *out, int n) { memset(out, 0x11, 16); return n; }
int cuDevicePrimaryCtxRetain(void **out, int n) { *out = &cuInit; return n; }
int cuDevicePrimaryCtxGetState(int n, unsigned *flags, int *active) { *flags = 0; *active = 1; return n; }
int cuCtxSetCurrent(void *context) { return !context; }
int cuCtxGetCurrent(void **out) { *out = &cuInit; return 0; }
int cuCtxGetDevice(int *out) { return *out = 0; }
int cuMemAlloc_v2(u64 *out, size_t bytes) { *out = 1 << 21; return !bytes; }
int cuMemFree_v2(u64 at) { return !at; }
int cuMemAllocAsync(u64 *out, size_t bytes, void *stream) { *out = 1 << 22; return !bytes || stream; }
int cuMemFreeAsync(u64 at, void *stream) { return !at || stream; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return stream != 0; }
int cuStreamSynchronize(void *stream) { return stream != 0; }
int cuDeviceGetMemPool(void **out, int n) { *out = &cuMemAllocAsync; return n; }
int cuDeviceGetDefaultMemPool(void **out, int n) { return cuDeviceGetMemPool(out, n); }
int cuDeviceGetGraphMemAttribute(int n, int attribute, u64 *out) { *out = 0; return n || attribute > 9; }
int cuMemPoolGetAttribute(void *pool, int attribute, u64 *out) { *out = 1 << 21; return !pool || !attribute; }
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g,
                   unsigned s, void *stream, void **arguments, void **extra)
{
    (void)f, (void)a, (void)b, (void)c, (void)d, (void)e, (void)g, (void)s;
    return stream || arguments || extra;
}
"""


def run(program: Path, *numbers: int, environment: dict[str, str]) -> str:
    result = subprocess.run(
        [program, *map(str, numbers)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if result.returncode != 0:
        raise SystemExit(f"{result.stderr.strip()} (exit code {result.returncode})")
    return result.stdout.strip()


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        empty = empty_driver(home)
        allocations = time_allocations(home, empty, rounds)
        launches = time_launches(home, empty, rounds)
    print_table(
        "tests.benchmarks.preload_overhead",
        ["one allocation and its free, 1 MiB", "driver alone", "with the preload library", "added"],
        [[name, *in_ns(alone, held_ns)] for name, alone, held_ns in allocations],
    )
    print_table(
        "tests.benchmarks.preload_overhead",
        ["one kernel launch", "driver alone", "with the preload library", "added"],
        [[name, *in_ns(*times)] for name, *times in launches],
    )


def in_ns(alone: float, held_ns: float) -> list[str]:
    """Return the cells of a row."""
    return [f"{alone:.1f} ns", f"{held_ns:.1f} ns", f"{held_ns - alone:.1f} ns"]


def empty_driver(home: Path, ahead_us: int = 0) -> dict[str, str]:
    """Return the environment of a lease on a driver whose functions return at once.

    With ``ahead_us`` above 0 the lease shares time, and is alone.
    """
    driver = home / "empty" / "libcuda.so.1"
    driver.parent.mkdir(parents=True)
    (home / "empty.c").write_text(EMPTY_DRIVER)
    soname = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", "-O2", *soname, "-o", driver, home / "empty.c"], check=True, timeout=60)
    lease = LeaseDirectory(home, "bench")
    lease.create(os.getuid(), {f"GPU-{'11' * 16}": 40 << 30}, PagePhase.RUNNING, ahead_us=ahead_us)
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver.parent),
        "LD_PRELOAD": str(preload_path()),
        "GPUSHARE_LEASE": "bench",
        "GPUSHARE_LEASE_DIR": str(lease.path),
    }


def fastest(
    program: Path, numbers: list[int], environment: dict[str, str], rounds: int
) -> tuple[float, float]:
    """Return (ns alone, ns with the library), each the fastest of several alternating runs."""
    without = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
    alone, held = [], []
    for _ in range(rounds):
        alone.append(float(run(program, *numbers, environment=without)))
        held.append(float(run(program, *numbers, environment=environment)))
    return min(alone), min(held)


def time_allocations(home: Path, environment: dict[str, str], rounds: int) -> list[tuple[str, float, float]]:
    """Return (function, ns alone, ns with the library) for one allocation and its free."""
    program = home / "allocate"
    subprocess.run(["cc", "-O2", "-o", program, PROGRAM, "-ldl"], check=True, timeout=60)
    return [
        ("`cuMemAlloc`", *fastest(program, [200_000], environment, rounds)),
        ("`cuMemAllocAsync`, from a pool", *fastest(program, [200_000, 1], environment, rounds)),
    ]


def time_launches(home: Path, environment: dict[str, str], rounds: int) -> list[tuple[str, float, float]]:
    """Return (case, ns alone, ns with the library) for one launch."""
    program = home / "launches"
    subprocess.run(["cc", "-O2", "-o", program, LAUNCHES, "-ldl", "-pthread"], check=True, timeout=60)
    shares = empty_driver(home / "shares", ahead_us=20_000)
    return [
        ("1 thread", *fastest(program, [1, LOOPS], environment, rounds)),
        ("2 threads", *fastest(program, [2, LOOPS], environment, rounds)),
        ("1 thread, shares time and is alone", *fastest(program, [1, LOOPS], shares, rounds)),
    ]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
