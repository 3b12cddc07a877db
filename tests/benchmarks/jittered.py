"""Compare completion times on jittered copies of the training traces in pairs with another tree.

One replay is one sample: constants chosen on it fit noise.  So every submission is
moved by up to 5 minutes, with one seed per copy, and the result is the mean over the
copies with its standard error.  Two trees are compared copy by copy:

    (cd OTHER_TREE && python -m tests.benchmarks.jittered --save /tmp/other.json)
    python -m tests.benchmarks.jittered --against /tmp/other.json

Orders are compared in the same way, and with a share of the jobs reporting progress:

    python -m tests.benchmarks.jittered --order las --save /tmp/las.json
    python -m tests.benchmarks.jittered --progress 0.5,0.3 --against /tmp/las.json

Jobs are suspended, as by default (16 GiB per GPU at 8 GB/s), and resume on any GPUs of their
node; with ``--move off`` only on their own.  With ``--checkpoint sigterm`` they stop and start again
anywhere.  With ``--users N`` the jobs belong to N users at random; the n-th has 1/n as many jobs as
the first.  With ``--gaps 0.5`` or ``--pair-table FILE`` jobs share GPUs, as with
``gpushare simulate jobs --share on``; each copy draws new memory, pauses and commands.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from random import Random
from statistics import mean, stdev

from jupyter_gpushare.core.model import DEFAULT_ORDER, DEFAULT_POLICY, CheckpointMode, Order, Project
from jupyter_gpushare.core.simulated_lease import Reports
from jupyter_gpushare.sim import report
from jupyter_gpushare.sim.scenario import Fleet, replay_jobs, some
from jupyter_gpushare.sim.sharing import Sharing, by_turns, side_by_side
from jupyter_gpushare.sim.traces import TrainingJob, read_jobs, read_pairs
from tests.benchmarks.report import print_table
from tests.traces import public as trace

JITTER_S = 300.0
COST_S = 30.0
# Name, trace, GPUs, weights and quotas of the projects.
CASES = (
    ("0e4a51", "training_philly_0e4a51", 40, ()),
    ("0e4a51, 4 projects", "training_philly_0e4a51", 40, ((1, 0), (1, 0), (2, 0), (4, 8))),
    ("first5000", "training_philly_first5000", 256, ()),
)
FIGURES = ("avg_completion_s", "p95_completion_s", "preemptions_per_job")
OF_GUESTS = ("hosts", "host_speed_p95", "host_speed_beside_p95", "guest_time_percent", "pairs_parted")
Sample = dict[str, float]


def copies(name: str, count: int) -> Iterator[list[TrainingJob]]:
    """Yield ``count`` copies of a trace with every submission moved at random."""
    jobs = read_jobs(trace(name))
    for seed in range(count):
        random = Random(seed)
        moved = [
            replace(job, submit_at=max(0.0, job.submit_at + random.uniform(-JITTER_S, JITTER_S)))
            for job in jobs
        ]
        yield sorted(moved, key=lambda job: job.submit_at)


def measure(
    jobs: Sequence[TrainingJob],
    gpus: int,
    shares: Sequence[tuple[int, int]],
    order: Order,
    reports: Callable[[int], Reports | None],
    users: Callable[[int], str],
    survival: CheckpointMode,
    movable: bool,
    sharing: Sharing | None = None,
    guard_s: float | None = DEFAULT_POLICY.starvation_guard_s,
) -> Sample:
    """Replay one copy with nodes of 8 GPUs and 30 s per preemption."""
    grace_s = COST_S if shares else 0.0
    settings = replace(DEFAULT_POLICY, order=order, starvation_guard_s=guard_s, grace_s=grace_s)
    projects = [
        Project(name=f"p{n}", quota_milli=quota * 1000, weight=weight)
        for n, (weight, quota) in enumerate(shares)
    ]
    fleet = Fleet(gpus=gpus, nodes=gpus // 8, movable=movable)
    result = replay_jobs(
        jobs,
        fleet,
        settings,
        projects=projects,
        preempt_cost_s=COST_S,
        reports=reports,
        users=users,
        survival=survival,
        sharing=sharing,
    )
    numbers = report.job_numbers(result)
    found = {name: float(str(numbers[name])) for name in (*FIGURES, *(OF_GUESTS if sharing else ()))}
    if shares:
        days = [p["worst_day_percent"] for p in report.fairness(result.meter)]
        found["worst_day_percent"] = mean(float(str(day)) for day in days)
    return found


def users_of(count: int, seed: int, jobs: int) -> Callable[[int], str]:
    """Return the user of each job; the n-th user has 1/n as many jobs as the first."""
    names = [f"u{n}" for n in range(count)]
    drawn = Random(f"users {seed}").choices(names, [1 / (n + 1) for n in range(count)], k=jobs)
    return drawn.__getitem__


def sharing_of(gaps: float | None, pair_table: Path | None, seed: int) -> Sharing | None:
    """Return how the jobs of a copy share GPUs, if they do."""
    if pair_table is not None:
        return side_by_side(read_pairs(pair_table), seed)
    return by_turns(gaps, seed) if gaps else None


def error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return stdev(values) / sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--copies", type=int, default=5)
    parser.add_argument("--order", type=Order, default=DEFAULT_ORDER)
    parser.add_argument("--checkpoint", type=CheckpointMode, default=CheckpointMode.SUSPEND)
    parser.add_argument("--move", choices=["on", "off"], default="on")
    parser.add_argument("--progress", default="0,0", metavar="SHARE,SIGMA")
    parser.add_argument("--users", type=int, default=1, metavar="N")
    parser.add_argument("--gaps", type=float)
    parser.add_argument("--pair-table", type=Path, metavar="FILE")
    parser.add_argument("--no-guard", action="store_true")
    parser.add_argument("--case", choices=[case[0] for case in CASES], help="only this one")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the samples")
    parser.add_argument("--against", type=Path, metavar="FILE", help="samples of another tree")
    args = parser.parse_args()
    share, sigma = map(float, args.progress.split(","))
    samples: dict[str, list[Sample]] = {}
    guard_s = None if args.no_guard else DEFAULT_POLICY.starvation_guard_s
    for name, file, gpus, shares in (case for case in CASES if args.case in (None, case[0])):
        samples[name] = [
            measure(
                jobs,
                gpus,
                shares,
                args.order,
                some(share, sigma, seed),
                users_of(args.users, seed, len(jobs)),
                args.checkpoint,
                args.move == "on",
                sharing_of(args.gaps, args.pair_table, seed),
                guard_s,
            )
            for seed, jobs in enumerate(copies(file, args.copies))
        ]
    if args.save:
        args.save.write_text(json.dumps(samples))
    others = json.loads(args.against.read_text()) if args.against else {}
    rows = []
    for name, own in samples.items():
        for figure in own[0]:
            values = [sample[figure] for sample in own]
            row = [name, figure, f"{mean(values):,.2f} ± {error(values):,.2f}"]
            if others and figure in others[name][0]:
                pairs = zip(values, others[name], strict=True)
                changes = [100 * (value / other[figure] - 1) for value, other in pairs]
                row.append(f"{mean(changes):+.2f} ± {error(changes):.2f} %")
            elif others:
                row.append("")
            rows.append(row)
    print_table(
        "tests.benchmarks.jittered", ["trace", "figure", "mean", *(["change"] if others else [])], rows
    )


if __name__ == "__main__":
    main()
