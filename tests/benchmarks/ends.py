"""Measure how many running jobs end within the range that they show, on jittered copies of a trace.

A second after the submission of some jobs (seeded), up to ten of the running jobs with measured
progress are sampled.  Jobs run on nodes of 8 GPUs and stop with a checkpoint in 30 s.

    python -m tests.benchmarks.ends
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import mean

from jupyter_gpushare import messages
from jupyter_gpushare.core.model import (
    DEFAULT_POLICY,
    HOLDS_CAPACITY,
    WHOLE_GPU,
    Cluster,
    Lease,
    Project,
    State,
)
from jupyter_gpushare.core.replay import Costs, Replay, ReplayWatcher
from jupyter_gpushare.protocol.wire import Estimate
from jupyter_gpushare.sim.scenario import Fleet, job_lease, some
from jupyter_gpushare.sim.traces import TrainingJob
from tests.benchmarks.jittered import COST_S, copies, error, users_of
from tests.benchmarks.report import print_table

PER_MOMENT = 10
TRACE = "training_philly_0e4a51"
REPORTING = (0.5, 1.0)  # shares of the jobs that report progress
SIGMA = 0.3  # log-normal error of the reports


@dataclass(frozen=True)
class Case:
    """A number of GPUs, with the projects or users that share them."""

    gpus: int
    projects: tuple[tuple[int, int], ...] = ()  # weight and quota of each; none: one project
    users: int = 1
    every: int = 1  # only each n-th job, another first one in each copy


FOUR = ((1, 0), (1, 0), (2, 0))
CASES = {
    "2 GPUs": Case(2, every=20),
    "8 GPUs": Case(8, every=5),
    "8 GPUs, 10 users": Case(8, users=10, every=5),
    "8 GPUs, 4 projects": Case(8, (*FOUR, (4, 2)), every=5),
    "40 GPUs": Case(40),
    "40 GPUs, 4 projects": Case(40, (*FOUR, (4, 8))),
}


class Ends(ReplayWatcher):
    """The times at which jobs ended."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        if after.state is State.RELEASED:
            self.at[after.id] = now


def told(replay: Replay, now: float) -> list[tuple[str, Estimate]]:
    """Return the ranges that the jobs show now, by lease."""
    running = [sim for sim in replay._leases.values() if sim.lease.state in HOLDS_CAPACITY]
    left = [(sim.lease.id, messages.left_s(sim.lease, sim.measure, now)) for sim in running]
    return [(id, messages.ends_in(left_s)) for id, left_s in left if left_s is not None]


def measure(case: Case, share: float, seed: int, jobs: Sequence[TrainingJob], moments: int) -> list[int]:
    """Sample one copy; return -1, 0 or 1 for each end before, within or after the range."""
    random, ends = Random(seed), Ends()
    projects = [
        Project(name=f"p{n}", quota_milli=quota * WHOLE_GPU, weight=weight)
        for n, (weight, quota) in enumerate(case.projects or ((1, case.gpus),))
    ]
    fleet = Fleet(gpus=case.gpus, nodes=max(1, case.gpus // 8))
    empty = Cluster(devices=fleet.devices(), projects=tuple(projects), leases=(), settings=DEFAULT_POLICY)
    replay = Replay(empty, Costs(restart_s=COST_S, grace_s=COST_S), watcher=ends)
    reports, users = some(share, SIGMA, seed), users_of(case.users, seed, len(jobs))
    for n, job in enumerate(jobs):
        lease = job_lease(n, job, projects[n % len(projects)].name, fleet, user=users(n))
        replay.add_job(lease, job.duration_s, reports(n))
    answers = []
    for now in sorted(job.submit_at + 1 for job in random.sample(jobs, min(moments, len(jobs)))):
        replay.run(now)
        found = told(replay, now)
        answers += [(now, *each) for each in random.sample(found, min(PER_MOMENT, len(found)))]
    replay.run()
    took = ((ends.at[id] - asked_at, range_) for asked_at, id, range_ in answers if id in ends.at)
    return [(s > range_.high_s) - (s < range_.low_s) for s, range_ in took]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--copies", type=int, default=5)
    parser.add_argument("--moments", type=int, default=300)
    parser.add_argument("--case", choices=list(CASES), action="append")
    args = parser.parse_args()
    rows = []
    for name in args.case or CASES:
        case = CASES[name]
        for share in REPORTING:
            found = []
            for seed, jobs in enumerate(copies(TRACE, args.copies)):
                fitting = [job for job in jobs[seed % case.every :: case.every] if job.gpus <= case.gpus]
                found.append(measure(case, share, seed, fitting, args.moments))
            inside = [100 * sides.count(0) / len(sides) for sides in found if sides]
            early = mean(100 * sides.count(-1) / len(sides) for sides in found if sides)
            told_of = f"{sum(map(len, found)):,}"
            rows.append(
                [name, f"{share:g}", told_of, f"{mean(inside):.1f} ± {error(inside):.1f} %", f"{early:.1f} %"]
            )
            print(*rows[-1], flush=True)
    print_table("tests.benchmarks.ends", ["trace", "report", "told", "in the range", "earlier"], rows)


if __name__ == "__main__":
    main()
