"""What the device helper and the preload library cost, on the simulated driver.

``.venv/bin/python -m tests.benchmarks.gpu_layer [seconds]``

Copies take no time there, so a suspension's time is all overhead; single calls are
timed by calls.c, with and without the library, alternating, best of several runs.
Sixteen processes then race for one lease's memory (the driver's own peak is the
judge), and a helper with 16 devices and 64 processes that hold memory is watched.
"""

from __future__ import annotations

import subprocess
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
from tests.native.calls import in_lease
from tests.native.test_account import RACE
from tests.simulator import Lease, Simulator

ROUNDS = 5
LAUNCHES = "70000"
CYCLES = 30
RACERS = 16


@contextmanager
def machine_with(folder: Path, spec: str) -> Iterator[Machine]:
    yield from machine_in(folder, spec=spec)


def single_calls(folder: Path) -> list[list[str]]:
    program = folder / "calls"
    source = Path(__file__).with_name("calls.c")
    subprocess.run(["cc", "-O2", "-w", "-o", program, source, "-ldl"], check=True, timeout=60)
    machine = Simulator(folder, "1xH100-80GB,host=64GiB")
    lease = Lease(folder / "lease", [(machine.uuid(0), 40 * GIB)])
    best = {"alone": [1e18] * 3, "held": [1e18] * 3}
    for _ in range(ROUNDS):
        for name, env in (("alone", machine.env()), ("held", machine.env(**lease.env()))):
            done = subprocess.run(
                [program, LAUNCHES], env=env, capture_output=True, text=True, check=True, timeout=300
            )
            best[name] = [min(pair) for pair in zip(best[name], map(float, done.stdout.split()), strict=True)]
    names = ("a kernel launch", "`cuMemGetInfo`", "`dlsym` of a driver function")
    return [
        [name, f"{alone:.0f} ns", f"{held:.0f} ns", f"{held - alone:.0f} ns"]
        for name, alone, held in zip(names, best["alone"], best["held"], strict=True)
    ]


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


def race(folder: Path) -> list[str]:
    machine = Simulator(folder, "1xH100-80GB,host=512GiB,context=0GiB")
    lease = Lease(folder / "lease", [(machine.uuid(0), 40 * GIB)])
    kernels = [in_lease(machine, lease) for _ in range(RACERS)]
    try:
        for seed, kernel in enumerate(kernels):
            kernel.run(RACE)
            kernel.start(f"race({seed}, 3)")
        refused = sum(kernel.answer(60) for kernel in kernels)
        while kernels[0].ask("alloc(64 << 20)[0]") == 0:
            pass
        while kernels[0].ask("alloc(2 << 20)[0]") == 0:
            pass
        peak, used = machine.device_peak(0), machine.device_used(0)
    finally:
        for kernel in kernels:
            kernel.kill()
    return [f"{peak / GIB:.6f} GiB", f"{used / GIB:.6f} GiB", "40 GiB", str(refused), str(peak - 40 * GIB)]


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
        for part in ("calls", "moves", "race", "helper"):
            (folder / part).mkdir()
        print_table(
            "tests.benchmarks.gpu_layer",
            ["one call", "simulated driver alone", "with the library", "added"],
            single_calls(folder / "calls"),
        )
        print()
        head = ["overhead of a move", "suspend p50", "max", "resume p50", "max"]
        print_table("tests.benchmarks.gpu_layer", head, moves(folder / "moves"))
        print()
        print_table(
            "tests.benchmarks.gpu_layer",
            [f"{RACERS} racing processes: peak", "in use at the end", "limit", "refused", "bytes over"],
            [race(folder / "race")],
        )
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
