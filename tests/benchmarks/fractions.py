"""Fill the openb cluster with parts of GPUs: ten seeds, four placements."""

from __future__ import annotations

from statistics import mean

from jupyter_gpushare.sim.fractions import best_fit, fgd, fill, planner
from jupyter_gpushare.sim.traces import read_nodes, read_pods
from tests.benchmarks.report import print_table
from tests.traces import public as trace

SEEDS = range(42, 52)
PUBLISHED = {"planner": "", "fgd": 95.23, "best-fit": 92.86, "random": 86.3}


def main() -> None:
    nodes, pods = (
        read_nodes(trace("fractions_openb_gpu_nodes")),
        read_pods(trace("fractions_openb_pods_default")),
    )
    placements = {"planner": planner, "fgd": fgd(pods), "best-fit": best_fit, "random": None}
    rows = []
    for name, placement in placements.items():
        got = [fill(nodes, pods, placement, seed).allocated_at(100) for seed in SEEDS]
        rows.append([name, f"{mean(got):.2f}", f"{min(got):.2f}-{max(got):.2f}", f"{PUBLISHED[name]}"])
    print_table("tests.benchmarks.fractions", ["placement", "mean %", "range %", "published mean %"], rows)


if __name__ == "__main__":
    main()
