"""What a waiting job is told holds: random work is replayed, and each reason compared with what comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from random import Random

import pytest

from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import (
    DEFAULT_POLICY,
    HOLDS_CAPACITY,
    LEAVING,
    Action,
    Cluster,
    Grant,
    Lease,
    Order,
    Plan,
    Project,
    Requeue,
    State,
    Why,
)
from jupyter_gpushare.core.order import is_starved, rank
from jupyter_gpushare.core.planning.planner import dry_run
from jupyter_gpushare.core.replay import Costs, Replay, ReplayWatcher
from jupyter_gpushare.sim.scenario import Fleet
from tests.sim.test_gaming import DAY_S, HOUR_S, job

GPUS, GUARD_S = 8, 6 * HOUR_S


class World(ReplayWatcher):
    """Jobs of up to three projects that want more than all GPUs, on 1 or 2 nodes, and what they are told."""

    def __init__(self, seed: int) -> None:
        random = self.random = Random(seed)
        self.projects = tuple(
            Project(
                name=name,
                quota_milli=1000 * random.choice([0, 0, 1, 2]),
                weight=random.choice([1, 1, 3]),
                priority=random.choice([0, 0, 0, 1]),
            )
            for name in "pqr"[: random.randint(1, 3)]
        )
        order = random.choice([Order.PROGRESS, Order.LAS, Order.BACKFILL, Order.FIFO])
        self.settings = replace(
            DEFAULT_POLICY,
            order=order,
            starvation_guard_s=GUARD_S,
            max_bypass_s=3 * HOUR_S,
            grace_s=random.choice([0.0, 30.0]),
        )
        self.devices = Fleet(gpus=GPUS, nodes=random.choice([1, 2])).devices()
        self.leases: dict[str, Lease] = {}
        self.rounds = 0
        self.replay = Replay(self.cluster({}), Costs(restart_s=30.0), watcher=self)
        for p in self.projects:
            self.add_jobs(p.name)

    def add_jobs(self, project: str) -> None:
        random = self.random
        for stream in range(2):
            gpus, lasts_s = random.choice([1, 1, 2, 4]), random.choice([1_500.0, 3_000.0, 9_000.0])
            at, every_s = 0.0, lasts_s * gpus / (GPUS * random.choice([0.3, 0.6]))
            while at < DAY_S:
                name, priority = f"{project}{stream}-{at:.0f}", random.choice([0, 0, 0, 1])
                work_s = lasts_s * random.uniform(0.5, 1.5)
                self.replay.add_job(job(name, project, at, gpus, priority=priority), work_s)
                at += random.expovariate(1 / every_s)
        large = job(f"{project}-large", project, random.uniform(0, HOUR_S), random.choice([1, 2, 4, 8]))
        self.replay.add_job(large, 9 * DAY_S)

    def changed(self, now: float, before: Lease | None, after: Lease) -> None:
        if after.state is State.RELEASED:
            del self.leases[after.id]
        else:
            self.leases[after.id] = after

    def cluster(self, lags_gpu_s: Mapping[str, float]) -> Cluster:
        return Cluster(
            devices=self.devices,
            projects=self.projects,
            leases=tuple(self.leases.values()),
            settings=self.settings,
            lags_gpu_s=lags_gpu_s,
        )

    def lacks(self, granted: Set[str], gpus: int) -> int:
        """GPUs that are missing for so many together beside ``granted`` ones, where fewest are."""
        held = {u for x in self.leases.values() if x.state in HOLDS_CAPACITY for u in x.devices} | granted
        free = [d.node for d in self.devices if d.uuid not in held]
        return max(0, gpus - max((free.count(node) for node in free), default=0))

    def check_rounds(self) -> None:
        """From now on compare in each round what waiting jobs are told with what is decided."""
        planner = self.replay._planner
        plan = planner.plan

        def checked(now: float) -> Plan:
            told = dry_run(self.cluster(planner.lags_gpu_s), now).run().waiting
            planned = plan(now)
            self.rounds += 1
            for id, why in told.items():
                self.check(self.leases[id], why, told, planned.actions, now)
            return planned

        planner.plan = checked

    def check(
        self, x: Lease, why: Why, told: Mapping[str, Why], actions: Sequence[Action], now: float
    ) -> None:
        grants = [a for a in actions if isinstance(a, Grant)]
        if x.id in [a.lease for a in grants]:
            return  # a later pass of the round started it
        same = [y for y in self.leases.values() if y.project == x.project and y.state is State.PENDING]
        mine = rank(x, now, self.settings)
        if why is Why.IN_LINE:
            assert any(rank(y, now, self.settings) < mine for y in same)
        elif why is Why.AWAITING_RELEASE:
            leaving = any(y.state in LEAVING for y in self.leases.values())
            assert leaving or any(isinstance(a, Requeue) for a in actions), (now, x)
        elif why in (Why.RESERVED, Why.NOT_BYPASSED):
            # What was released for a lease goes to that lease, even if others starve.
            promised = {y.made_way_for for y in self.leases.values()}
            later = [a for a in grants if a.lease not in promised]
            later = [a for a in later if not is_starved(self.leases[a.lease], now, self.settings)]
            if why is Why.NOT_BYPASSED:
                owed = ClusterState.of(self.cluster({})).quotas.account(x.project)
                behind = {y.id for y in same if rank(y, now, self.settings) > mine}
                later = [a for a in later if a.lease in behind and not owed.is_below_quota(1)]
            before = {u for a in grants if a not in later for u in a.devices}
            taken = {u for a in later for u in a.devices}
            gpus = x.size.device_count
            assert self.lacks(before | taken, gpus) == self.lacks(before, gpus), (x, later)


# Each reason is among these; the others take four times as long together.
FEW = frozenset({0, 3, 9, 11, 12, 14, 18, 19, 21})


@pytest.mark.parametrize(
    "seed", [seed if seed in FEW else pytest.param(seed, marks=pytest.mark.long) for seed in range(24)]
)
def test_what_a_waiting_job_is_told_holds(seed):
    world = World(seed)
    world.replay.run(GUARD_S)
    world.check_rounds()
    world.replay.run(DAY_S, max_events=200)
    assert world.rounds
