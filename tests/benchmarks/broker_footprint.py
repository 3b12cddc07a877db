"""Measure the resources of an idle broker and device helper.

``.venv/bin/python -m tests.benchmarks.broker_footprint [seconds]``

The demo Hub has 16 simulated GPUs.  First, 20 sessions with an eighth of a GPU
each hold GPU memory and idle, for the CPU time of broker and helper.  Then 80
more sessions do not use their GPU, for the resident memory with 100 leases.
"""

from __future__ import annotations

import sys
import time

import psutil

from tests.benchmarks.demo_hub import DemoHub, demo_hub, until
from tests.benchmarks.report import print_table

SIMULATE = "16xH100-80GB,host=512GiB"


def start(hub: DemoHub, numbers: range, *, hold: bool) -> None:
    for number in numbers:
        user = f"user{number}"
        hub.add(user, "vision" if number % 2 else "nlp")
        hub.start(user, {"gpushare": {"fraction": "0.125"}})
        if hold:
            hub.hold(user)


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def main(seconds: int) -> None:
    with demo_hub(simulate=SIMULATE) as hub:
        start(hub, range(20), hold=True)
        watched = [hub.worker("broker"), hub.worker("helper")]
        time.sleep(5)  # until the effects of the last start have settled
        shares = [(process, cpu_s([process])) for process in watched]
        begun = time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - begun
        percents = [100 * (cpu_s([process]) - before) / took_s for process, before in shares]
        start(hub, range(20, 100), hold=False)
        with hub.broker("user0") as broker:
            until(lambda: broker.get("status").status_code == 200, "the broker answers")
        memory = [process.memory_info().rss / 2**20 for process in watched]
    print_table(
        "tests.benchmarks.broker_footprint",
        ["", "broker", "helper", "together"],
        [
            [f"CPU, % of one core, 20 idle sessions ({seconds} s)"]
            + [f"{x:.2f}" for x in (*percents, sum(percents))],
            ["memory (RSS, MiB), 100 leases"] + [f"{x:.0f}" for x in (*memory, sum(memory))],
        ],
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
