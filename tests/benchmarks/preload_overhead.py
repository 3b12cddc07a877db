"""What the preload library adds to allocating GPU memory.

``.venv/bin/python -m tests.benchmarks.preload_overhead [rounds]``

A C program (allocate.c) opens ``libcuda.so.1`` as CUDA programs do, holds one big
allocation and then allocates and frees 1 MiB in a loop.  It runs on the
simulated driver with and without the library, alternating, and each run takes
the fastest of several repetitions; of the runs the fastest counts, so that other
work on the machine does not.
The simulated driver's allocation is far cheaper than a real one, so the
percentage is an upper bound; the nanoseconds are what carries over.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from jupyter_gpushare.gpu.isolation import LeaseDirectory, PagePhase
from jupyter_gpushare.native import preload_path, sim_dir
from tests.benchmarks.report import print_table, spread

PROGRAM = Path(__file__).with_name("allocate.c")


def run(program: Path, loops: int, environment: dict[str, str]) -> str:
    result = subprocess.run(
        [program, str(loops)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if result.returncode != 0:
        raise SystemExit(f"{result.stderr.strip()} (exit code {result.returncode})")
    return result.stdout.strip()


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        program = home / "allocate"
        subprocess.run(["cc", "-O2", "-o", program, PROGRAM, "-ldl"], check=True, timeout=60)
        plain = {
            **os.environ,
            "GPUSHARE_SIMULATE": "1xH100-80GB,host=64GiB",
            "GPUSHARE_SIM_STATE": str(home / "state"),
            "LD_LIBRARY_PATH": str(sim_dir()),
        }
        lease = LeaseDirectory(home, "bench")
        lease.create(os.getuid(), {f"GPU-{run(program, 0, plain)}": 40 << 30}, PagePhase.RUNNING)
        held = {
            **plain,
            "LD_PRELOAD": str(preload_path()),
            "GPUSHARE_LEASE": "bench",
            "GPUSHARE_LEASE_DIR": str(lease.path),
        }
        without, with_library = [], []
        for _ in range(rounds):
            without.append(float(run(program, 20_000, plain)))
            with_library.append(float(run(program, 20_000, held)))
    added_ns = min(with_library) - min(without)
    print_table(
        "tests.benchmarks.preload_overhead",
        ["one allocation and its free, 1 MiB", f"fastest of {rounds} runs", "median (range)"],
        [
            ["simulated driver alone", f"{min(without):.0f} ns", spread(without)],
            ["with the preload library", f"{min(with_library):.0f} ns", spread(with_library)],
            ["added", f"{added_ns:.0f} ns ({100 * added_ns / min(without):.1f} %)", ""],
        ],
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
