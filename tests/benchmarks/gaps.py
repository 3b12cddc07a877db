"""Measure how much speed a host keeps, and how much of its gaps a guest gets, with turns of 9 to 1.

``.venv/bin/python -m tests.benchmarks.gaps [runs]``

A device helper and two processes run on the simulated driver: a host that computes and pauses in turn, and
a guest that mostly computes without end.  Each is measured alone, then both together.  A speed is the time
that the driver gave to a process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.report import print_table
from tests.benchmarks.turns import LAUNCHER, cell
from tests.gpu.machine import GIB, Machine, machine_in

BEGIN_S = 1.5
CYCLES = 20  # of the host are measured, and at least `MEASURE_S`
MEASURE_S = 4.0
FLOOD = (5, 4, 0)
# Of the host, then of the guest: kernels (ms), after how many it waits for them, and its pause then (ms).
CASES = {
    "25 ms, then 25 ms": ((1, 25, 25), FLOOD),
    "100 ms, then 100 ms": ((5, 20, 100), FLOOD),
    "the same, as the guest does": ((5, 20, 100), (5, 20, 100)),
    "150 ms, then 50 ms": ((5, 30, 50), FLOOD),
    "400 ms, then 400 ms": ((5, 80, 400), FLOOD),
}
HOST, GUEST = ("host", 0.9), ("guest", 0.1)


def speeds(
    machine: Machine, commands: dict[tuple[str, float], tuple[float, ...]], for_s: float
) -> list[float]:
    """Return the part of the device's time that each of these processes gets."""
    workers = []
    for (name, share), words in commands.items():
        machine.lease(name, int(64 * GIB * share), compute_share="fair", share=share)
        command = (sys.executable, str(LAUNCHER), *(str(word) for word in words))
        workers.append(machine.worker(name, command=command))
    time.sleep(BEGIN_S)
    began_at, before = time.monotonic(), [machine.sim.served_s(each.pid) for each in workers]
    time.sleep(for_s)
    passed_s = time.monotonic() - began_at
    after = [machine.sim.served_s(each.pid) for each in workers]
    for (name, _), worker in zip(commands, workers, strict=True):
        worker.kill()
        machine.ask("drop", lease=name)
    return [(b - a) / passed_s for a, b in zip(before, after, strict=True)]


def measure(
    machine: Machine, host: tuple[float, int, float], guest: tuple[float, int, float]
) -> tuple[float, float, float, float]:
    """Return in percent: the host's gaps, its kept speed, the guest's part of its speed and of the gaps."""
    for_s = max(MEASURE_S, CYCLES * (host[0] * host[1] + host[2]) / 1000)
    (host_alone,) = speeds(machine, {HOST: host}, for_s)
    (guest_alone,) = speeds(machine, {GUEST: guest}, MEASURE_S)
    host_beside, guest_beside = speeds(machine, {HOST: host, GUEST: guest}, for_s)
    gaps, gets = 1 - host_alone, guest_beside / guest_alone
    return 100 * gaps, 100 * host_beside / host_alone, 100 * gets, 100 * gets / gaps


def main(runs: int) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for machine in machine_in(Path(folder)):
            machine.start()
            for name, case in CASES.items():
                found = [measure(machine, *case) for _ in range(runs)]
                rows.append([name, *(cell(list(each)) for each in zip(*found, strict=True))])
    head = ["the host computes, then pauses", "gaps", "host keeps", "guest gets", "of the gaps"]
    print_table("tests.benchmarks.gaps", head, rows)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
