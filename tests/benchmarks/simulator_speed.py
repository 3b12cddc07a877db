"""Measure the time of a replay: the 5,000-job Philly replay, and its growth with load.

    python -m tests.benchmarks.simulator_speed [--plot FILE.svg]
    python -m tests.benchmarks.simulator_speed --long [SHARE]    long traces, or a part of them (default 1)

The long traces are first5000 twenty times in a row, jittered, and 100,000 cells of notebooks beside jobs
that always wait.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from jupyter_gpushare.core.model import DEFAULT_POLICY, Settings
from jupyter_gpushare.sim.report import write_whole
from jupyter_gpushare.sim.scenario import Fleet, ReplayResult, replay_jobs, replay_notebooks
from jupyter_gpushare.sim.synthetic import make_jobs
from jupyter_gpushare.sim.traces import NotebookSession, TrainingJob, read_cells, read_jobs
from tests.benchmarks.jittered import copies
from tests.benchmarks.report import print_table, spread
from tests.traces import public as trace

RUNS = 3
JOBS, GPUS = 5_000, 64
LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)


def curve(points: list[tuple[float, float]]) -> str:
    """Return an SVG of microseconds of CPU per round over load."""
    most = max(y for _, y in points) * 1.1
    at = [(60 + 400 * (x - LOADS[0]) / (LOADS[-1] - LOADS[0]), 220 - 180 * y / most, x, y) for x, y in points]
    marks = "".join(
        f'<circle cx="{px:.0f}" cy="{py:.0f}" r="3" fill="#4c78a8"/>'
        f'<text x="{px:.0f}" y="{py - 8:.0f}" text-anchor="middle">{y:.0f}</text>'
        f'<text x="{px:.0f}" y="238" text-anchor="middle">{x:.1f}</text>'
        for px, py, x, y in at
    )
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in at)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 270" '
        'font-family="sans-serif" font-size="12">'
        '<rect width="500" height="270" fill="#fff"/>'
        f'<polyline points="{line}" fill="none" stroke="#4c78a8" stroke-width="1.5"/>{marks}'
        '<text x="60" y="18">microseconds of CPU per round</text>'
        '<text x="260" y="262" text-anchor="middle">load: GPU time asked for, of all there is</text></svg>\n'
    )


def timed(jobs: list[TrainingJob], gpus: int) -> tuple[ReplayResult, float]:
    """Return a replay, and the seconds of processor time that it took."""
    began = time.process_time()
    result = replay_jobs(jobs, Fleet(gpus=gpus, nodes=None), Settings())
    return result, time.process_time() - began


def long_jobs(times: int) -> list[TrainingJob]:
    """Return first5000 this number of times in a row, jittered."""
    found: list[TrainingJob] = []
    for jobs in copies("training_philly_first5000", times):
        begins_at = found[-1].submit_at if found else 0.0
        found += [replace(job, submit_at=begins_at + job.submit_at) for job in jobs]
    return found


def long_sessions(count: int) -> list[NotebookSession]:
    """Return the first ``count`` cells of the repeated Adobe trace."""
    sessions = read_cells(trace("notebooks_adobe_june2021_60s"))
    span_s = max(session.cells[-1].submit_at for session in sessions)
    repeats = -(-count // sum(len(session.cells) for session in sessions))
    repeated = [
        [replace(cell, submit_at=cell.submit_at + number * span_s) for cell in session.cells]
        for number in range(repeats)
        for session in sessions
    ]
    last_at = sorted(cell.submit_at for cells in repeated for cell in cells)[count - 1]
    kept = (tuple(cell for cell in cells if cell.submit_at <= last_at) for cells in repeated)
    return [NotebookSession(sessions[n % len(sessions)].gpus, cells) for n, cells in enumerate(kept) if cells]


def long(share: float) -> None:
    """Time the long replays with the default policy."""
    began = time.process_time()
    jobs = replay_jobs(long_jobs(round(20 * share)), Fleet(gpus=256, nodes=32), DEFAULT_POLICY)
    between = time.process_time()
    fleet, waiting = Fleet(gpus=1200, nodes=150), read_jobs(trace("training_philly_0e4a51"))
    sessions = long_sessions(round(100_000 * share))
    notebooks = replay_notebooks(sessions, waiting, fleet, DEFAULT_POLICY, saturate=True)
    times = between - began, time.process_time() - between
    rows = [
        [name, f"{seconds:.0f}", f"{result.replay.rounds:,}", f"{1e6 * seconds / result.replay.rounds:.0f}"]
        for name, seconds, result in zip(("jobs", "notebooks"), times, (jobs, notebooks), strict=True)
    ]
    print_table("tests.benchmarks.simulator_speed --long", ["load", "CPU s", "rounds", "us per round"], rows)


def main() -> None:
    if "--long" in sys.argv:
        long(float((*sys.argv, "1")[sys.argv.index("--long") + 1]))
        return
    jobs = read_jobs(trace("training_philly_first5000"))
    philly = [timed(jobs, 256) for _ in range(RUNS)]
    rounds = philly[0][0].replay.rounds
    cpu = [seconds for _, seconds in philly]
    rows = [
        [
            "Philly, 5,000 jobs, 256 GPUs",
            spread([result.wall_s for result, _ in philly]),
            spread(cpu),
            f"{rounds:,}",
            spread([1e6 * seconds / rounds for seconds in cpu]),
        ]
    ]
    points = []
    for load in LOADS:
        result, seconds = timed(make_jobs(JOBS, gpus=GPUS, load=load, seed=1), GPUS)
        rounds = result.replay.rounds
        points.append((load, 1e6 * seconds / rounds))
        name = f"made up, {JOBS:,} jobs, {GPUS} GPUs, load {load}"
        rows.append([name, f"{result.wall_s:.1f}", f"{seconds:.1f}", f"{rounds:,}", f"{points[-1][1]:.0f}"])
    print_table(
        "tests.benchmarks.simulator_speed", ["load", "wall s", "CPU s", "rounds", "us per round"], rows
    )
    if "--plot" in sys.argv:
        write_whole(Path(sys.argv[sys.argv.index("--plot") + 1]), curve(points).encode())


if __name__ == "__main__":
    main()
