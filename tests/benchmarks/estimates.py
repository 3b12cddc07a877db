"""How many outcomes are in the ranges that people are told, on jittered copies of the training traces.

Jobs are replayed with every rule.  A second after the submission of every few
jobs up to ten of the jobs that wait or run are asked about (seeded), with what
the broker would know then: measured progress, and the last 500 ended jobs.

    python -m tests.benchmarks.estimates
"""

from __future__ import annotations

import argparse
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean

from jupyter_gpushare.core.estimate import Estimate, Forecast, Work, forecast
from jupyter_gpushare.core.model import (
    DEFAULT_POLICY,
    HOLDS_CAPACITY,
    WHOLE_GPU,
    Cluster,
    Lease,
    Order,
    Project,
    State,
)
from jupyter_gpushare.core.order import attained_gpu_s, gpus, is_waiting
from jupyter_gpushare.core.replay import Costs, Replay, ReplayWatcher
from jupyter_gpushare.sim.scenario import Fleet, job_lease, some
from jupyter_gpushare.sim.traces import TrainingJob
from tests.benchmarks.jittered import copies, error
from tests.benchmarks.report import print_table

COST_S = 30.0
SAMPLES = 500
PER_MOMENT = 10


@dataclass(frozen=True)
class Case:
    """A trace on GPUs in nodes of 8."""

    trace: str
    gpus: int
    projects: tuple[tuple[int, int], ...] = ()  # weight and quota of each; none: one project
    reporting: tuple[float, ...] = (0.0, 1.0)  # shares of the jobs that report progress
    every: int = 1  # only each n-th job, another first one in each copy


FOUR = ((1, 0), (1, 0), (2, 0), (4, 2))
CASES = {
    "2 GPUs": Case("training_philly_0e4a51", 2, reporting=(1.0,), every=20),
    "8 GPUs": Case("training_philly_0e4a51", 8, reporting=(0.0, 0.5, 1.0), every=5),
    "8 GPUs, 4 projects": Case("training_philly_0e4a51", 8, FOUR, every=5),
    "0e4a51": Case("training_philly_0e4a51", 40, reporting=(0.0, 0.5, 1.0)),
    "0e4a51, 4 projects": Case("training_philly_0e4a51", 40, (*FOUR[:3], (4, 8))),
    "first5000": Case("training_philly_first5000", 256),
    "first5000, 64 GPUs": Case("training_philly_first5000", 64),
}
Answer = tuple[str, bool, float, Estimate | None]  # lease, whether about its end, when, the range


class Outcomes(ReplayWatcher):
    """When jobs started, each time, and ended; and how many GPUs became free when."""

    def __init__(self, free: int) -> None:
        self.starts: dict[str, list[float]] = defaultdict(list)
        self.ends: dict[str, float] = {}
        self.ran_s: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.free_at: list[tuple[float, float]] = []
        self._free = float(free)

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        was = before is not None and before.state in HOLDS_CAPACITY
        holds = after.state in HOLDS_CAPACITY
        self._free += gpus(after) * (was - holds)
        if was and after.state is State.RELEASED:  # what a preemption frees is taken at once
            self.free_at.append((now, self._free))
        if before is not None and is_waiting(before) and holds:
            self.starts[after.id].append(now)
        if after.state is State.RELEASED:
            self.ends[after.id] = now
            self.ran_s[after.project].append((now, after.attained_gpu_s / gpus(after)))

    def outcome(self, lease: str, is_end: bool, asked_at: float) -> float | None:
        """Seconds from the question to the outcome; None: there was none."""
        if is_end:
            at = self.ends.get(lease)
        else:
            starts = self.starts[lease]
            later = starts[bisect_right(starts, asked_at) :]
            at = later[0] if later else None
        return None if at is None else at - asked_at

    def freed(self, count: float, asked_at: float) -> float | None:
        """Seconds until ``count`` GPUs were free at once."""
        first = bisect_right(self.free_at, (asked_at, 1e9))
        return next((at - asked_at for at, free in self.free_at[first:] if free >= count), None)


class Questions:
    """One replay with questions; ``every``: how many submissions lie between two moments."""

    def __init__(
        self,
        jobs: Sequence[TrainingJob],
        case: Case,
        share: float,
        order: Order,
        seed: int,
    ) -> None:
        count, shares = case.gpus, case.projects
        self.projects = tuple(
            Project(name=f"p{n}", quota_milli=quota * WHOLE_GPU, weight=weight)
            for n, (weight, quota) in enumerate(shares or ((1, count),))
        )
        self.settings = replace(DEFAULT_POLICY, order=order)
        fleet = Fleet(gpus=count, nodes=max(1, count // 8))
        self.devices = fleet.devices()
        self.seen = Outcomes(count)
        self.random = Random(seed)
        self.cpu_s: list[tuple[int, float]] = []  # waiting jobs, and what the forecast took
        empty = Cluster(devices=self.devices, projects=self.projects, leases=(), settings=self.settings)
        costs = Costs(restart_s=COST_S, grace_s=COST_S if shares else 0.0)
        self.replay = Replay(empty, costs, watcher=self.seen)
        reports = some(share, 0.3, seed)
        for n, job in enumerate(jobs):
            lease = job_lease(n, job, self.projects[n % len(self.projects)].name, fleet)
            self.replay.add_job(lease, job.duration_s, reports(n))

    def asked(self, moments: Sequence[float]) -> list[Answer]:
        """Replay to the end; returns what was answered, with the name "" for a session of one GPU."""
        answers: list[Answer] = []
        for now in moments:
            self.replay.run(now)
            found, leases = self._forecast(now)
            for lease in self.random.sample(leases, min(PER_MOMENT, len(leases))):
                if is_waiting(lease):
                    answers.append((lease.id, False, now, found.starts.get(lease.id)))
                answers.append((lease.id, True, now, found.ends.get(lease.id)))
            if found.free and found.free[0][1] < 1:
                answers.append(("", False, now, found.free_in(1)))
        self.replay.run()
        return answers

    def _forecast(self, now: float) -> tuple[Forecast, list[Lease]]:
        sims = [
            sim
            for sim in self.replay._leases.values()
            if sim.lease.state is not State.PENDING or sim.lease.id in self.replay._waiting
        ]
        leases = [sim.lease for sim in sims]
        measured = {
            sim.lease.id: left
            for sim in sims
            if sim.measure and (left := sim.measure.left_at(attained_gpu_s(sim.lease, now))) is not None
        }
        newest = sorted(e for ended in self.seen.ran_s.values() for e in ended)[-SAMPLES:]
        oldest = newest[0][0] if newest else 0.0
        work = Work(
            left_gpu_s=measured,
            ran_s={name: [s for at, s in ran if at >= oldest] for name, ran in self.seen.ran_s.items()},
        )
        ledger = self.replay._ledger
        cluster = Cluster(
            devices=self.devices,
            projects=self.projects,
            leases=tuple(leases),
            settings=self.settings,
            lags_gpu_s=dict(ledger.lags_gpu_s) if ledger else {},
        )
        began = time.process_time()
        found = forecast(cluster, now, work)
        self.cpu_s.append((sum(map(is_waiting, leases)), time.process_time() - began))
        return found, leases


def measure(
    case: Case, share: float, order: Order, seed: int, jobs: list[TrainingJob], moments: int
) -> Counter[str]:
    """Count the answers of one copy: asked, told, and with their outcome in the range, by kind."""
    questions = Questions(jobs, case, share, order, seed)
    some_of = Random(seed).sample(jobs, min(moments, len(jobs)))
    at = sorted(job.submit_at + 1 for job in some_of)
    counts: Counter[str] = Counter()
    for lease, is_end, asked_at, range_ in questions.asked(at):
        kind = "end" if is_end else "start" if lease else "session"
        seen = questions.seen
        took = seen.outcome(lease, is_end, asked_at) if lease else seen.freed(1, asked_at)
        counts[f"{kind} asked"] += 1
        if range_ is not None and took is not None:
            counts[f"{kind} told"] += 1
            counts[f"{kind} in"] += range_.low_s <= took <= range_.high_s
            counts[f"{kind} early"] += took < range_.low_s
    counts["ms"] = max(round(1000 * cpu) for _, cpu in questions.cpu_s)
    return counts


def _jobs(case: Case, seed: int, jobs: list[TrainingJob]) -> list[TrainingJob]:
    """The jobs of a copy that fit."""
    return [job for job in jobs[seed % case.every :: case.every] if job.gpus <= case.gpus]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--copies", type=int, default=5)
    parser.add_argument("--moments", type=int, default=200)
    parser.add_argument("--order", type=Order, default=Order.PROGRESS)
    parser.add_argument("--case", choices=list(CASES), action="append")
    args = parser.parse_args()
    rows = []
    for name in args.case or CASES:
        case = CASES[name]
        for share in case.reporting:
            found = [
                measure(case, share, args.order, seed, _jobs(case, seed, jobs), args.moments)
                for seed, jobs in enumerate(copies(case.trace, args.copies))
            ]
            for kind in ("start", "end", "session"):
                told = [c for c in found if c[f"{kind} told"]]
                if len(told) < 2:
                    continue
                inside = [100 * c[f"{kind} in"] / c[f"{kind} told"] for c in told]
                early = mean(100 * c[f"{kind} early"] / c[f"{kind} told"] for c in told)
                row = [name, f"{share:g}", kind, str(sum(c[f"{kind} asked"] for c in found))]
                row += [
                    f"{sum(c[f'{kind} told'] for c in found)}",
                    f"{mean(inside):.1f} ± {error(inside):.1f} %",
                ]
                rows.append([*row, f"{early:.1f} %", str(max(c["ms"] for c in found))])
                print(*rows[-1], flush=True)
    head = ["trace", "report", "about", "asked", "told", "in the range", "earlier", "most ms"]
    print_table("tests.benchmarks.estimates", head, rows)


if __name__ == "__main__":
    main()
