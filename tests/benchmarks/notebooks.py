"""Replay notebook sessions that lend their idle GPUs to training jobs that always wait.

337 sessions (Adobe, June 2021) run on 8-GPU nodes that hold every session's
guarantee; the jobs of a Philly cluster repeat.  The state of a GPU has 16 GiB,
copied at 8 GB/s.

    python -m tests.benchmarks.notebooks [TIMEOUT ...]     seconds or "adaptive"; default 900 adaptive
"""

from __future__ import annotations

import sys

from jupyter_gpushare.core.model import DEFAULT_POLICY, Settings
from jupyter_gpushare.sim import report
from jupyter_gpushare.sim.scenario import Fleet, replay_notebooks
from jupyter_gpushare.sim.traces import read_cells, read_jobs
from tests.benchmarks.report import print_table
from tests.traces import public as trace

NODES = 145
KEYS = (
    "cells_delayed_percent", "idle_available_percent", "idle_used_percent", "p99_delay_s", "max_delay_s",
    "cells_waiting_for_cells", "allocation", "utilization", "rounds", "wall_s",
)  # fmt: skip


def main(timeouts: list[str]) -> None:
    sessions = read_cells(trace("notebooks_adobe_june2021_60s"))
    jobs = read_jobs(trace("training_philly_0e4a51"))
    rows = []
    for timeout in timeouts:
        adaptive = timeout == "adaptive"
        settings = Settings(
            idle_timeout_s=0.0 if adaptive else float(timeout),
            notice_s=DEFAULT_POLICY.notice_s,
            min_run_s=DEFAULT_POLICY.min_run_s,
            starvation_guard_s=DEFAULT_POLICY.starvation_guard_s,
            max_bypass_s=DEFAULT_POLICY.max_bypass_s,
        )
        fleet = Fleet(gpus=8 * NODES, nodes=NODES)
        result = replay_notebooks(sessions, jobs, fleet, settings, adaptive=adaptive, saturate=True)
        numbers = report.job_numbers(result) | report.notebook_numbers(result)
        rows.append([timeout, *(f"{numbers[key]:,}" for key in KEYS)])
    print_table("tests.benchmarks.notebooks", ["idle timeout", *(k.replace("_", " ") for k in KEYS)], rows)


if __name__ == "__main__":
    main(sys.argv[1:] or ["900", "adaptive"])
