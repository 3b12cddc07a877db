"""Replay two clusters of the Philly trace under every order, ideal and real, and shares of projects.

Ideal: GPUs are only counted and a preemption is free, as in the simulator that
Tiresias published.  Real: nodes have 8 GPUs, and a preempted job holds its GPUs
for 30 s before it continues.

    python -m tests.benchmarks.philly            orders
    python -m tests.benchmarks.philly shares     four projects with weights 1:1:2:4
"""

from __future__ import annotations

import sys
from dataclasses import replace

from jupyter_gpushare.core.model import DEFAULT_POLICY, Order, Project, Settings
from jupyter_gpushare.sim import report
from jupyter_gpushare.sim.scenario import Fleet, replay_jobs
from jupyter_gpushare.sim.traces import read_jobs
from tests.benchmarks.report import print_table
from tests.traces import public as trace

CLUSTERS = (("training_philly_0e4a51", 40), ("training_philly_first5000", 256))
COST_S = 30.0
GRACE_S = 30.0


def orders() -> None:
    rows = []
    for name, gpus in CLUSTERS:
        jobs = read_jobs(trace(name))
        for how, order in [("ideal", o) for o in Order] + [("real", Order.LAS), ("real", Order.BACKFILL)]:
            if how == "ideal":
                result = replay_jobs(jobs, Fleet(gpus=gpus, nodes=None), Settings(order=order))
            else:
                fleet = Fleet(gpus=gpus, nodes=gpus // 8)
                settings = replace(DEFAULT_POLICY, order=order, grace_s=0.0)
                result = replay_jobs(jobs, fleet, settings, preempt_cost_s=COST_S)
            n = report.job_numbers(result)
            rows.append(
                [
                    f"{name.removeprefix('training_')}, {gpus} GPUs",
                    f"{order}, {how}",
                    f"{n['avg_completion_s']:,.0f}",
                    f"{n['p99_queue_s']:,.0f}",
                    f"{n['preemptions_per_job']:.2f}",
                    f"{n['allocation']:.1%}",
                    f"{n['wall_s']:.1f}",
                ]
            )
    head = ["trace", "order", "avg completion s", "p99 queue s", "preemptions/job", "allocation", "wall s"]
    print_table("tests.benchmarks.philly", head, rows)


def shares() -> None:
    name, gpus = CLUSTERS[0]
    jobs = read_jobs(trace(name))
    rows = []
    for quota in (0, 4):
        weights = (1, 1, 2, 4)
        projects = [Project(name=f"p{n}", quota_milli=quota * 1000, weight=w) for n, w in enumerate(weights)]
        fleet = Fleet(gpus=gpus, nodes=gpus // 8)
        settings = replace(DEFAULT_POLICY, order=Order.LAS, grace_s=GRACE_S)
        result = replay_jobs(jobs, fleet, settings, projects=projects, preempt_cost_s=COST_S)
        for row in report.fairness(result.meter):
            rows.append([str(row[key]) for key in row])
    head = ["project", "quota", "weight", "GPU-hours", "entitled %", "share %", "contested days"]
    head += ["p90 day %", "worst day %", "longest owed s"]
    print_table("tests.benchmarks.philly", head, rows)


if __name__ == "__main__":
    shares() if sys.argv[1:] == ["shares"] else orders()
