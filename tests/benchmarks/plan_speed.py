"""Measure the time of one plan: ``python -m tests.benchmarks.plan_speed``.

Three clusters have busy and idle sessions, running and waiting jobs of all sizes,
and three projects.  *Steady*: nothing can be done, as in most rounds.  *Full*: all
decisions are made at once, as after a restart.  *Kept*: a planner updates its plan
after one lease changed.  With ``--users`` each project has this number of users,
each with a different level.

A second table shows how a round grows with the number of projects: 16 GPUs with the
default policy, and 1,200 waiting jobs of projects of which every second one lags.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from jupyter_gpushare.broker.engine.local import gc_paused
from jupyter_gpushare.core.model import (
    DEFAULT_ORDER,
    DEFAULT_POLICY,
    Behind,
    CheckpointMode,
    Cluster,
    Device,
    Grant,
    Kind,
    Lease,
    Order,
    Plan,
    Project,
    Requeue,
    Resume,
    Settings,
    State,
    Suspend,
)
from jupyter_gpushare.core.planning.planner import Planner, plan
from jupyter_gpushare.core.size import Size

NOW = 100_000.0
GIB = 1 << 30


def cluster(gpus: int, leases: int, pending: int, order: Order, users: int = 1) -> Cluster:
    """Return a cluster with ``leases`` on devices, while some are free, and ``pending`` waiting leases."""
    random = Random(gpus)
    devices = tuple(
        Device(uuid=f"gpu{n:04}", memory_bytes=80 * GIB, node=f"n{n // 8:03}", island=f"i{n // 4}")
        for n in range(gpus)
    )
    projects = tuple(
        Project(name=p, quota_milli=gpus * 250, weight=w) for p, w in (("a", 1), ("b", 2), ("c", 4))
    )
    # Parts of GPUs, so that about all of them fit; waiting jobs have all sizes.
    mean_milli = gpus * 1000 // leases
    fractions = (mean_milli // 2, mean_milli, mean_milli)
    found = [_lease(n, random, "abc", users, fractions=fractions) for n in range(leases)]
    settings = Settings(
        order=order, min_run_s=300, preempt_cost_s=30, starvation_guard_s=864_000, max_bypass_s=86_400
    )
    first = Cluster(devices=devices, projects=projects, leases=tuple(found), settings=settings)
    first = replace(first, behind={(p, f"u{n}"): Behind(4000) for p in "abc" for n in range(1, users, 2)})
    placed = tuple(x for x in carried_out(first) if x.devices)
    waiting = tuple(_lease(leases + n, random, "abc", users) for n in range(pending))
    return replace(first, leases=placed + waiting)


def shared_by(projects: int, *, gpus: int = 16, running: int = 30, pending: int = 1_200) -> Cluster:
    """Return a busy cluster of this number of projects, with a quarter of the GPUs as quotas."""
    random = Random(projects)
    names = [f"p{n:03}" for n in range(projects)]
    leases = [_lease(n, random, names, 1, fractions=(250, 500, 1000)) for n in range(running)]
    leases += [_lease(running + n, random, names, 1) for n in range(pending)]
    empty = cluster(gpus, 1, 0, Order.PROGRESS)
    full = replace(
        empty,
        projects=tuple(Project(name=name, quota_milli=gpus * 250 // projects) for name in names),
        leases=tuple(leases[:running]),
        settings=DEFAULT_POLICY,
        lags_gpu_s={name: random.uniform(-3_600, 3_600) for name in names[::2]},
    )
    placed = tuple(x for x in carried_out(full) if x.devices)
    return settled(replace(full, leases=placed + tuple(leases[running:])))


def settled(full: Cluster) -> Cluster:
    """Return the cluster in the state in which nothing more can be done."""
    for _ in range(20):
        if not plan(full, NOW).actions:
            break
        full = replace(full, leases=tuple(carried_out(full)))
    return full


def _lease(
    number: int, random: Random, projects: Sequence[str], users: int, *, fractions: tuple[int, ...] = ()
) -> Lease:
    """Return a lease of one of these sizes, or a job of any size."""
    build = bool(fractions) and random.random() < 0.6
    count = 1 if fractions else random.choice([1, 1, 1, 1, 2, 4, 8])
    return Lease(
        id=f"x{number:05}",
        project=random.choice(projects),
        user=f"u{number % users}",
        kind=Kind.BUILD if build else Kind.TRAIN,
        size=Size(1000 if count > 1 else random.choice(fractions or (250, 500, 1000)), count),
        survival=random.choice(list(CheckpointMode)),
        queued_at=NOW - random.randrange(80_000),
        waits_since_at=NOW - random.randrange(80_000),
        idle_since_at=NOW - random.randrange(2_000) if build and random.random() < 0.5 else None,
        used_bytes=4 * GIB,
        attained_gpu_s=random.choice([0.0, 2_000.0, 5_000.0, 50_000.0]),
    )


def carried_out(before: Cluster) -> list[Lease]:
    """Return the leases after all planned actions."""
    leases = {x.id: x for x in before.leases}
    for action in plan(before, NOW).actions:
        lease = leases[action.lease]
        match action:
            case Grant():
                state = State.SUSPENDED if action.asleep else State.RUNNING
                more = {"devices": action.devices, "held_milli": action.held_milli, "granted_at": NOW - 3_600}
            case Suspend():
                state, more = State.SUSPENDED, {"saved_bytes": lease.used_bytes}
            case Resume():
                state, more = State.RUNNING, {}
            case Requeue():
                state, more = State.PENDING, {"devices": (), "held_milli": 0}
        leases[lease.id] = replace(lease, state=state, **more)
    return list(leases.values())


def kept(c: Cluster) -> Callable[[], Plan]:
    """Run a round of a planner after one lease changed."""
    planner = Planner.of(c)
    planner.plan(NOW)
    changing = next(x for x in c.leases if x.state is State.PENDING)

    def round() -> Plan:
        planner.put(changing)
        return planner.plan(NOW)

    return round


def timed(what: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the median and the 99th percentile in milliseconds."""
    taken = []
    gc.collect()
    gc.freeze()  # as the broker does, like the next but one
    for _ in range(rounds):
        start = time.process_time()
        with gc_paused():
            what()
        taken.append(1000 * (time.process_time() - start))
    taken.sort()
    return taken[len(taken) // 2], taken[min(len(taken) - 1, int(len(taken) * 0.99))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--order", choices=list(Order), default=DEFAULT_ORDER)
    parser.add_argument("--users", type=int, default=1, help="of each project")
    args = parser.parse_args()
    rounds, order = args.rounds, Order(args.order)
    print(f"{'GPUs':>5} {'leases':>6} {'pending':>7} {'round':>7} {'actions':>7} {'p50 ms':>8} {'p99 ms':>8}")
    for gpus, leases, pending in ((16, 100, 1_000), (128, 800, 3_000), (1_024, 6_000, 10_000)):
        full = cluster(gpus, leases, pending, order, args.users)
        steady = settled(full)
        for name, what in (
            ("full", lambda c=full: plan(c, NOW)),
            ("steady", lambda c=steady: plan(c, NOW)),
            ("kept", kept(steady)),
        ):
            done = what()
            p50, p99 = timed(what, rounds)
            print(
                f"{gpus:>5} {len(full.leases) - pending:>6} {pending:>7} {name:>7} {len(done.actions):>7} "
                f"{p50:>8.2f} {p99:>8.2f}"
            )
    print(
        f"\n{'projects':>8} {'held':>5} {'pending':>7} {'round':>7} {'actions':>7} {'p50 ms':>8} "
        f"{'p99 ms':>8}"
    )
    for projects in (3, 30, 100, 500):
        c = shared_by(projects)
        pending = sum(x.state is State.PENDING for x in c.leases)
        for name, what in (("steady", lambda c=c: plan(c, NOW)), ("kept", kept(c))):
            done = what()
            p50, p99 = timed(what, rounds)
            print(
                f"{projects:>8} {len(c.leases) - pending:>5} {pending:>7} {name:>7} {len(done.actions):>7} "
                f"{p50:>8.2f} {p99:>8.2f}"
            )


if __name__ == "__main__":
    main()
