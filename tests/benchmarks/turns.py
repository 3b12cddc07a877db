"""Measure the shares of two leases that compute on one device, without and with turns, and their cost.

``.venv/bin/python -m tests.benchmarks.turns [runs]``

A device helper and two processes that launch kernels without end run on the simulated driver, which divides
its time between processes as a real one does.  Shares are parts of the time that the driver gave to both;
*used* is this time as a part of the elapsed time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.benchmarks.report import print_table
from tests.gpu.machine import GIB, Machine, machine_in

LAUNCHER = Path(__file__).parents[1] / "gpu" / "launcher.py"
BEGIN_S = 3.0
MEASURE_S = 6.0
# Of each lease: its share, the length of its kernels (ms), and after how many it synchronizes.
CASES = {
    "1/4: 5 ms; 3/4: 5 ms": ((0.25, 5, 10), (0.75, 5, 10)),
    "1/4: 100 ms; 3/4: 1 ms": ((0.25, 100, 1), (0.75, 1, 20)),
    "1/10: 10 ms; 9/10: 0.1 ms": ((0.1, 10, 1), (0.9, 0.1, 200)),
}


def measure(
    machine: Machine, case: tuple[tuple[float, float, int], ...], mode: str
) -> tuple[float, float, float]:
    """Return in percent for one run: the share of the first, the used time, the helper's processor time."""
    workers = []
    for number, (share, kernel_ms, every) in enumerate(case):
        machine.lease(f"l{number}", int(64 * share) * GIB, compute_share=mode, share=share)
        command = (sys.executable, str(LAUNCHER), str(kernel_ms), str(every))
        workers.append(machine.worker(f"l{number}", command=command))
    time.sleep(BEGIN_S)
    assert machine.helper is not None
    helper = psutil.Process(machine.helper.pid)

    def look() -> tuple[float, float, list[float]]:
        used = helper.cpu_times()
        return time.monotonic(), used.user + used.system, [machine.sim.served_s(each.pid) for each in workers]

    at, used_s, before = look()
    time.sleep(MEASURE_S)
    now, now_used_s, after = look()
    got = [b - a for a, b in zip(before, after, strict=True)]
    for number, worker in enumerate(workers):
        worker.kill()
        machine.ask("drop", lease=f"l{number}")
    passed_s = now - at
    return 100 * got[0] / sum(got), 100 * sum(got) / passed_s, 100 * (now_used_s - used_s) / passed_s


def cell(values: list[float]) -> str:
    """Return mean and standard error as text."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {error:.1f} %"


def main(runs: int) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for machine in machine_in(Path(folder)):
            machine.start()
            for name, case in CASES.items():
                for mode in ("off", "fair"):
                    found = [measure(machine, case, mode) for _ in range(runs)]
                    rows.append([name, mode, *(cell(list(each)) for each in zip(*found, strict=True))])
    print_table(
        "tests.benchmarks.turns",
        [
            "share and kernels of two leases",
            "`compute_share`",
            "share of the first",
            "used",
            "helper's processor",
        ],
        rows,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
