"""Measure what jobs gain by silence or by lies about their progress, on jittered copies of a trace.

Every tenth job deviates, a different tenth in each copy, and the others report with a log-normal
error of 0.3.  The mean completion of the deviating jobs is compared with that of the same jobs
with truthful reports:

    python -m tests.benchmarks.lies
    python -m tests.benchmarks.lies --checkpoint sigterm silent "1.96 x done"

*among silent jobs* is the opposite: only a tenth reports, truthfully, and is compared with the same
jobs when no job reports.  Trace, cluster and costs are those of `jittered`, case 0e4a51.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import mean

from jupyter_gpushare.core.model import DEFAULT_POLICY, CheckpointMode, Cluster, Lease, Order, Project, State
from jupyter_gpushare.core.replay import Costs, Replay, ReplayWatcher
from jupyter_gpushare.core.simulated_lease import Reports
from jupyter_gpushare.sim.scenario import DeviceFootprint, Fleet, job_lease, some, with_error
from jupyter_gpushare.sim.traces import TrainingJob
from tests.benchmarks.jittered import COST_S, copies, error
from tests.benchmarks.report import print_table

GPUS = 40
TRUTH = with_error(1.0)


def times(factor: float) -> Reports:
    """Return reports of ``factor`` times the work done."""
    return lambda done: min(1.0, factor * done)


# By name: what the deviating jobs report.
DEVIATIONS: dict[str, Reports | None] = {
    "silent": None,
    **{f"{factor} x done": times(factor) for factor in (1.05, 1.2, 1.5, 1.96, 3)},
    "half of what is left": with_error(0.5),
    "nothing until a half": lambda done: done if done >= 0.5 else 0.0,
    "in 10 steps": lambda done: int(10 * done) / 10,
}
AMONG_SILENT = "among silent jobs"


class Completions(ReplayWatcher):
    """The time to completion of each job."""

    def __init__(self) -> None:
        self.by_id: dict[str, float] = {}

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        if after.state is State.RELEASED:
            self.by_id[after.id] = now - after.submitted_at


def completion_s(
    jobs: Sequence[TrainingJob], survival: CheckpointMode, seed: int, others: float, own: Reports | None
) -> float:
    """Replay a copy; return the mean completion of the tenth that reports ``own``.

    ``others`` is the share of the other jobs that reports.
    """
    fleet = Fleet(gpus=GPUS, nodes=GPUS // 8, movable=True)
    project, footprint = Project(name="p0", quota_milli=GPUS * 1000), DeviceFootprint()
    settings = replace(DEFAULT_POLICY, order=Order.PROGRESS)
    cluster = Cluster(devices=fleet.devices(), projects=(project,), leases=(), settings=settings)
    found = Completions()
    costs = Costs(restart_s=COST_S, copy_bytes_per_s=footprint.copy_bytes_per_s)
    replay = Replay(cluster, costs, watcher=found)
    rest = some(others, 0.3, seed)
    tenth = []
    for n, job in enumerate(jobs):
        lease = job_lease(n, job, "p0", fleet, footprint, survival)
        deviates = n % 10 == seed % 10
        replay.add_job(lease, job.duration_s, own if deviates else rest(n))
        tenth += [lease.id] if deviates else []
    replay.run()
    return mean(found.by_id[id] for id in tenth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--copies", type=int, default=5)
    parser.add_argument("--checkpoint", type=CheckpointMode, default=CheckpointMode.SUSPEND)
    parser.add_argument("names", nargs="*", metavar="DEVIATION", help="only these")
    args = parser.parse_args()
    names = args.names or [*DEVIATIONS, AMONG_SILENT]
    changes: dict[str, list[float]] = {name: [] for name in names}
    for seed, jobs in enumerate(copies("training_philly_0e4a51", args.copies)):
        among = partial(completion_s, jobs, args.checkpoint, seed)
        truth = among(1.0, TRUTH)
        for name, found in changes.items():
            if name == AMONG_SILENT:
                change = among(0.0, TRUTH) / among(0.0, None)
            else:
                change = among(1.0, DEVIATIONS[name]) / truth
            found.append(100 * (change - 1))
            print(seed, name, f"{found[-1]:+.1f} %", flush=True)
    rows = [[name, f"{mean(found):+.1f} ± {error(found):.1f} %"] for name, found in changes.items()]
    print_table("tests.benchmarks.lies", ["every tenth job", "its mean completion"], rows)


if __name__ == "__main__":
    main()
