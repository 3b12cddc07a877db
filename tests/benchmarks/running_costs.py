"""Measure the start of a device helper, and the restart of a killed broker.

``.venv/bin/python -m tests.benchmarks.running_costs``

The demo Hub has 16 simulated GPUs.  The broker is killed, and its parent, which holds its port, restarts it.
No request is refused; the gap that a user sees lasts until `health` is good again.  `units_costs` measures
the daily growth of database and logs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.benchmarks.broker_footprint import SIMULATE
from tests.benchmarks.demo_hub import DemoHub, demo_hub, until
from tests.benchmarks.report import print_table, spread
from tests.simulator import Simulator

RESTARTS = 10


def gaps_s(hub: DemoHub) -> list[float]:
    """Return the seconds from the end of a killed broker to the next good `health`; no request is refused."""
    found = []
    for _ in range(RESTARTS):
        killed = hub.worker("broker")
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(60)
        before = time.perf_counter()
        # 503: it answers, but has no data from the device helper yet.
        until(
            lambda: httpx.get(f"{hub.broker_url}health", timeout=60).status_code == 200,
            "the broker is at work",
            pause_s=0.01,
        )
        found.append(time.perf_counter() - before)
    return found


def helper_starts_s() -> list[float]:
    """Return the seconds from the start of a device helper to its listening socket, without the self-test."""
    found = []
    for _ in range(5):
        with tempfile.TemporaryDirectory(prefix="gpushare-start-") as name:
            socket = Path(name, "helper.sock")
            command = [sys.executable, "-m", "jupyter_gpushare.cli", "helper"]
            command += ["--state-dir", f"{name}/helper", "--socket", str(socket)]
            env = Simulator(Path(name), SIMULATE).env()
            before = time.perf_counter()
            helper = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            until(lambda socket=socket: socket.exists(), "the helper listens", pause_s=0.005)
            found.append(time.perf_counter() - before)
            helper.terminate()
            helper.wait(60)
    return found


def main() -> None:
    helper_s = helper_starts_s()
    with demo_hub(simulate=SIMULATE) as hub:
        gaps = gaps_s(hub)
    print_table(
        "tests.benchmarks.running_costs",
        ["ms", "median and range"],
        [
            ["device helper: start to its socket", spread([1000 * value for value in helper_s])],
            [
                f"broker killed, until its health is good again ({RESTARTS} times)",
                spread([1000 * gap for gap in gaps]),
            ],
        ],
    )


if __name__ == "__main__":
    main()
