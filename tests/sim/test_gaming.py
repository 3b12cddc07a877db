"""What a project or a user could try to get more than their part, and what comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from jupyter_gpushare.core.model import (
    DEFAULT_POLICY,
    HOLDS_CAPACITY,
    LEAVING,
    CheckpointMode,
    Cluster,
    Kind,
    Lease,
    Project,
    Settings,
)
from jupyter_gpushare.core.replay import Costs, Replay, Watcher
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.sim.scenario import Fleet

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
Work = tuple[Lease, float]  # a job and its duration


def job(id: str, project: str, at: float = 0.0, gpus: int = 1, **more: object) -> Lease:
    given = {"survival": CheckpointMode.SIGTERM} | more
    return Lease(id=id, project=project, kind=Kind.TRAIN, size=Size(1000, gpus), submitted_at=at, **given)


class Held(Watcher):
    """GPU-hours that each group of jobs held, by hour, and the preemptions of each group."""

    def __init__(self, group: Callable[[Lease], str]) -> None:
        self.group = group
        self.at = 0.0
        self.gpus: Counter[str] = Counter()
        self.hours: Counter[tuple[str, int]] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.ended_at: dict[str, float] = {}

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        self.advance(now)
        change = _holds(after) - _holds(before)
        self.gpus[self.group(after)] += change
        if before is not None and change < 0 and after.state not in (after.state.RELEASED,):
            self.preemptions[self.group(after)] += 1
        if after.state is after.state.RELEASED:
            self.ended_at[after.id] = now

    def advance(self, now: float) -> None:
        while self.at < now:
            until = min(now, (self.at // HOUR_S + 1) * HOUR_S)
            for name, gpus in self.gpus.items():
                self.hours[name, int(self.at // HOUR_S)] += gpus * (until - self.at) / HOUR_S
            self.at = until

    def between(self, name: str, start_h: int, end_h: int) -> float:
        return sum(self.hours[name, hour] for hour in range(start_h, end_h))


def _holds(lease: Lease | None) -> int:
    holds = lease is not None and lease.state in HOLDS_CAPACITY - LEAVING
    return lease.size.device_count if lease is not None and holds else 0


def replayed(
    work: Iterable[Work],
    projects: Iterable[Project],
    until_at: float,
    *,
    gpus: int = 8,
    group: Callable[[Lease], str] = lambda lease: lease.project,
    settings: Settings = DEFAULT_POLICY,
) -> Held:
    """Replay jobs on nodes of 8 GPUs; a preemption takes 30 s."""
    held = Held(group)
    devices = Fleet(gpus=gpus, nodes=-(-gpus // 8)).devices()
    cluster = Cluster(devices=devices, projects=tuple(projects), leases=(), settings=settings)
    replay = Replay(cluster, Costs(restart_s=settings.preempt_cost_s), watcher=held)
    for lease, duration_s in work:
        replay.add_job(lease, duration_s)
    replay.run(until_at)
    held.advance(until_at)
    return held


@pytest.mark.parametrize(
    "more", [{"borrow": False}, {"retry_at": 2 * DAY_S}], ids=["does-not-borrow", "backs-off"]
)
def test_jobs_that_could_not_run_gain_nothing_for_later(more):
    """For 2 days p queues jobs that cannot run, then what it wants; q works all the time."""
    projects = [Project(name="p", quota_milli=1000), Project(name="q", quota_milli=0)]
    honest: list[Work] = [(job(f"q{n}", "q"), 99 * DAY_S) for n in range(16)]
    honest += [(job(f"p{n}", "p", 2 * DAY_S), 99 * DAY_S) for n in range(16)]
    lure = [(job(f"lure{n}", "p", **more), 2 * DAY_S) for n in range(16)]
    held = [replayed(work, projects, 3 * DAY_S) for work in (honest, [*honest, *lure])]
    without, with_lure = (x.between("p", 48, 72) for x in held)
    assert with_lure == pytest.approx(without, rel=0.02)


def test_a_project_that_gathered_no_arrears_takes_no_more_than_its_share():
    projects = [Project(name="p", quota_milli=0), Project(name="q", quota_milli=0)]
    settings = replace(DEFAULT_POLICY, preempt_cost_s=0.0)
    work: list[Work] = [(job(f"q{n}", "q"), 99 * DAY_S) for n in range(16)]
    work += [(job(f"p{n}", "p", DAY_S), 99 * DAY_S) for n in range(16)]
    held = replayed(work, projects, 2 * DAY_S, settings=settings)
    assert held.between("p", 25, 48) == pytest.approx(4 * 23, rel=0.02)
