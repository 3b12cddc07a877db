"""Measure what `gpushare-simple` adds to the start of a server.

``.venv/bin/python -m tests.benchmarks.spawn_latency [starts]``

Two demo Hubs run side by side and differ only in the spawner class: JupyterHub's own
`SimpleLocalProcessSpawner`, and ours with half a GPU.  A stub replaces JupyterLab.
They start servers in turns, so that other work on the machine affects both.  Hub CPU
is the user and system time of the Hub's process during a start.
"""

from __future__ import annotations

import statistics
import sys

import httpx

from tests.benchmarks.demo_hub import DemoHub, demo_hub, until
from tests.benchmarks.report import percentile, print_table

STOCK = 'c.JupyterHub.spawner_class = "simple"\n'
HALF: dict[str, object] = {"gpushare": {"fraction": "0.5"}}
SIMULATE = "2xH100-80GB,host=512GiB"


def one_start(hub: DemoHub, broker: httpx.Client, options: dict[str, object]) -> tuple[float, float]:
    """Return (seconds until ready, seconds of the Hub's CPU)."""
    # A start right after a stop also waits until the last server has released its GPU.
    until(lambda: not broker.get("leases").json()["leases"], "the last lease has ended")
    before = hub.process.cpu_times()
    took_s = hub.start("ada", options)
    after = hub.process.cpu_times()
    hub.stop("ada")
    return took_s, after.user + after.system - before.user - before.system


def main(starts: int) -> None:
    stock: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
    with (
        demo_hub(simulate=SIMULATE, extra=STOCK) as plain,
        demo_hub(simulate=SIMULATE) as shared,
        plain.broker("ada") as plain_broker,
        shared.broker("ada") as shared_broker,
    ):
        for turn in range(starts + 2):
            found = one_start(plain, plain_broker, {}), one_start(shared, shared_broker, HALF)
            if turn >= 2:  # the first ones fill caches and pools
                stock.append(found[0])
                ours.append(found[1])
    rows = []
    for name, values in (("stock", stock), ("`gpushare-simple`", ours)):
        times_ms = [1000 * took_s for took_s, _ in values]
        cpu_ms = 1000 * statistics.mean(cpu_s for _, cpu_s in values)
        p50, p95 = statistics.median(times_ms), percentile(times_ms, 95)
        rows.append([name, f"{p50:.0f} ms", f"{p95:.0f} ms", f"{cpu_ms:.1f} ms"])
    added = statistics.median(1000 * (b[0] - a[0]) for a, b in zip(stock, ours, strict=True))
    cpu = 1000 * statistics.mean(b[1] - a[1] for a, b in zip(stock, ours, strict=True))
    rows.append(["added, pair by pair", f"{added:.0f} ms", "", f"{cpu:.1f} ms"])
    print_table(
        "tests.benchmarks.spawn_latency",
        [f"spawner ({starts} starts)", "p50", "p95", "Hub CPU per spawn"],
        rows,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
