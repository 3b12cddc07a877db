"""Measure the cost of the device helper, on the simulated driver.

``.venv/bin/python -m tests.benchmarks.gpu_layer [seconds]``

Copies take no time there, so the time of a suspension is all overhead.  The last part measures a
helper with 16 devices and 64 processes that hold memory.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from jupyter_gpushare import native
from tests.benchmarks.report import percentile, print_table
from tests.gpu.machine import GIB, MIB, Machine, machine_in

CYCLES = 30


@contextmanager
def machine_with(folder: Path, spec: str) -> Iterator[Machine]:
    yield from machine_in(folder, spec=spec)


def moves(folder: Path) -> list[list[str]]:
    rows = []
    for processes in (1, 8):
        home = folder / str(processes)
        home.mkdir()
        out: list[float] = []
        back: list[float] = []
        with machine_with(home, "1xH100-80GB,host=512GiB") as machine:
            machine.start()
            machine.lease("ada", 70 * GIB)
            for _ in range(processes):
                machine.worker("ada", mib=1024)
            for _ in range(CYCLES):
                out.append(machine.ask("suspend", lease="ada", calls=machine.settled("ada"))["took_s"])
                back.append(machine.ask("resume", lease="ada")["took_s"])
        rows.append(
            [f"a lease of {processes} process(es)"]
            + [f"{1e3 * percentile(each, p):.1f} ms" for each in (out, back) for p in (50, 100)]
        )
    return rows


def waits(folder: Path, runs: int = 10) -> list[str]:
    """Return how long an allocation of a host waits for a guest of this size (GiB), beyond its copy."""
    gib, beyond_s = 8, list[float]()
    copy_s = gib * GIB / 8e9
    folder.mkdir()
    with machine_with(folder, "1xH100-80GB,host=512GiB,copy=8GB/s") as machine:
        machine.start()
        machine.session("host", 70 * GIB, mib=40 * 1024)
        machine.lease("guest", 70 * GIB, guest_of="host", guest_bytes=20 * GIB)
        machine.worker("guest", mib=gib * 1024)
        for _ in range(runs):
            block = machine.worker("host")
            begun = time.monotonic()
            assert block.do(f"alloc {20 * 1024}") == "0"
            beyond_s.append(time.monotonic() - begun - copy_s)
            block.kill()
            assert machine.ask("resume", lease="guest")["done"]
            machine.settled("guest")
    mean, error = statistics.mean(beyond_s), statistics.stdev(beyond_s) / math.sqrt(runs)
    return [
        f"host waits for a guest of {gib} GiB",
        f"{copy_s:.2f} s",
        f"{1e3 * mean:.0f} +- {1e3 * error:.0f} ms",
    ]


def footprint(folder: Path, seconds: int) -> list[str]:
    with machine_with(folder, "16xH100-80GB,host=512GiB") as machine:
        machine.start("--sample-s", "1")
        for device in range(16):
            for half in range(2):
                name = f"lease-{device}-{half}"
                machine.lease(name, 30 * GIB, devices=(device,))
                for _ in range(2):
                    machine.worker(name, device=device, mib=64)
        assert machine.helper
        helper = psutil.Process(machine.helper.pid)
        time.sleep(10)  # the environment of young processes is looked at again
        before, begun = helper.cpu_times(), time.monotonic()
        time.sleep(seconds)
        after, took_s = helper.cpu_times(), time.monotonic() - begun
        cpu = after.user + after.system - before.user - before.system
        threads, memory = helper.num_threads(), helper.memory_info().rss / MIB
    return [f"{100 * cpu / took_s:.2f} %", str(threads), f"{memory:.0f} MiB"]


def main(seconds: int) -> None:
    native.lib_dir()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("moves", "helper"):
            (folder / part).mkdir()
        head = ["overhead of a move", "suspend p50", "max", "resume p50", "max"]
        print_table("tests.benchmarks.gpu_layer", head, moves(folder / "moves"))
        print()
        head = ["on a simulated driver", "copy", "beyond it, 10 runs, mean +- standard error"]
        print_table("tests.benchmarks.gpu_layer", head, [waits(folder / "waits")])
        print()
        print_table(
            "tests.benchmarks.gpu_layer",
            [
                f"helper, 16 devices, 64 processes, samples of 1 s ({seconds} s): CPU of one core",
                "threads",
                "memory",
            ],
            [footprint(folder / "helper", seconds)],
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
