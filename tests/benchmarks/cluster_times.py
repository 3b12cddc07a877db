"""Measure how long an owner on a Kubernetes cluster waits for a lent GPU, with and without faults.

``.venv/bin/python -m tests.benchmarks.cluster_times [returns] [faults]``

The nodes, users and jobs of `tests.kube.test_story`: Ada's idle session has half a GPU, which is lent to a
job that can be suspended.  A return is one cell of hers that uses the GPU, from its request to its answer;
her variable is intact in the same process.  A fault happens while her GPU is lent, and her cell is sent as
soon as the next broker or helper answers.  Times count from the kill, and those of a silent API server from
its end.  API server, KAI-Scheduler, kubelet and driver are models whose copies take no time; with
``GPUSHARE_TEST_ENGINE=kai`` and ``GPUSHARE_KUBE_BIN`` API server and KAI-Scheduler are the real ones.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable

from tests.benchmarks.report import percentile, print_table, spread
from tests.kube.real_engine import real_engine, why_not
from tests.kube.test_story import Lent, come_back, lend, running_story, start_broker, start_helper
from tests.kube.test_story_faults import everything_settles, lease_of
from tests.waiting import until

SILENT_S = 20.0


def seconds(does: Callable[[], object]) -> float:
    """Return the seconds that a call took."""
    begun = time.monotonic()
    does()
    return time.monotonic() - begun


def is_asleep(lent: Lent) -> None:
    """Wait until the session is suspended."""
    until(lambda: lent.story.session("ada")["state"] == "suspended", "the session is suspended")


def is_lent(lent: Lent) -> None:
    """Wait until the borrower has the GPU of the idle session."""
    until(lent.guest.runs, "the GPU is lent", 300)
    is_asleep(lent)


def converged(lent: Lent) -> None:
    """Wait until ``health`` has no reason and no seat is left over."""
    until(lambda: not lent.story.trouble(), "health has nothing to say")
    everything_settles(lent)


def kill_broker(lent: Lent) -> float:
    """Kill the broker and start the next; return when it was killed (monotonic seconds), as all faults do."""
    broker = lent.story.processes.pop()
    at = time.monotonic()
    broker.kill()
    broker.wait()
    start_broker(lent.story)
    return at


def kill_helper(lent: Lent) -> float:
    helper = lent.story.helpers[lent.node]
    at = time.monotonic()
    helper.kill()
    helper.wait()
    start_helper(lent.story, lent.node)
    return at


def silence(lent: Lent) -> float:
    """Freeze the API server for `SILENT_S`; return when that ended."""
    server = lent.story.cluster.server
    server.freeze()
    try:
        time.sleep(SILENT_S)
    finally:
        server.thaw()
    return time.monotonic()


def kill_seat(lent: Lent) -> float:
    """Kill the seat of the working session."""
    come_back(lent)
    seats = lent.story.seats_of(lease_of(lent))
    (seat,) = (pod for pod in seats if "deletionTimestamp" not in pod["metadata"])
    at = time.monotonic()
    lent.story.cluster.kubelet.running[seat["metadata"]["uid"]].process.kill()
    return at


def of_fault(
    lent: Lent, does: Callable[[Lent], float], times: int, first: Callable[[Lent], None] = come_back
) -> list[str]:
    """Return the seconds from a fault until ``first`` returns, and to the end of all its effects."""
    firsts, ends = [], []
    for _ in range(times):
        is_lent(lent)
        begun = does(lent)
        first(lent)
        firsts.append(time.monotonic() - begun)
        converged(lent)
        ends.append(time.monotonic() - begun)
    return [spread(firsts), spread(ends)]


def measure(returns: int, faults: int) -> None:
    """Print both tables."""
    with running_story() as story:
        lent, took = lend(story), []
        for _ in range(returns):
            is_lent(lent)
            took.append(seconds(lambda: come_back(lent)))
        rows = [
            ["broker killed and started", *of_fault(lent, kill_broker, faults)],
            ["device helper killed and started", *of_fault(lent, kill_helper, faults)],
            [f"API server silent for {SILENT_S:g} s", *of_fault(lent, silence, faults)],
            ["seat killed (until the session is suspended)", *of_fault(lent, kill_seat, faults, is_asleep)],
        ]
    module = "tests.benchmarks.cluster_times"
    shown = [f"{x:.2f}" for x in (percentile(took, 50), percentile(took, 95), max(took))]
    print_table(module, [f"s ({returns} returns)", "p50", "p95", "max"], [["cell to its answer", *shown]])
    print()
    head = [f"s after the fault, {faults} times", "answer of a cell", "no seat left over, health clean"]
    print_table(module, head, rows)


def main(returns: int = 20, faults: int = 5) -> None:
    """Measure on the engine that the environment names."""
    is_real = os.environ.get("GPUSHARE_TEST_ENGINE") == "kai"
    if is_real and (why := why_not()):
        sys.exit(f"cluster_times: {why}")
    with real_engine() if is_real else contextlib.nullcontext():
        measure(returns, faults)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
