"""A plan comes to rest: no job is preempted for capacity that goes to another."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpushare.core.model import (
    CheckpointMode,
    Cluster,
    Grant,
    Lease,
    Order,
    Requeue,
    Resume,
    State,
    Suspend,
)
from jupyter_gpushare.core.planning.planner import plan
from jupyter_gpushare.core.size import Size
from tests.core.build import GIB, NOW, actions, cluster, device, project, train


def at_rest(c: Cluster, *, grace: bool, rounds: int = 40) -> tuple[Lease, ...]:
    """Carry plans out until nothing is left to do.

    ``grace``: jobs stop only after another plan was made.
    """
    stopped = {"state": State.PENDING, "devices": (), "held_milli": 0, "waits_since_at": NOW}
    for _ in range(rounds):
        planned = plan(c, NOW).actions
        leases = {x.id: x for x in c.leases}
        stopping = [x for x in c.leases if x.state is State.STOPPING]
        if not planned and not stopping:
            return c.leases
        leases |= {x.id: replace(x, **stopped) for x in stopping}
        for a in planned:
            lease = leases[a.lease]
            match a:
                case Requeue():
                    changed = {"state": State.STOPPING} if grace else stopped
                case Suspend():
                    changed = {"state": State.SUSPENDED}
                case Resume():
                    changed = {"state": State.RUNNING, "granted_at": NOW}
                case Grant():
                    at = {"devices": a.devices, "held_milli": a.held_milli, "borrowed": a.borrowed}
                    changed = {"state": State.RUNNING, "granted_at": NOW, **at}
            leases[a.lease] = replace(lease, **changed)
        c = replace(c, leases=tuple(leases.values()))
    raise AssertionError(f"still at it: {plan(c, NOW).actions}")


def where(leases: tuple[Lease, ...]) -> dict[str, tuple[str, ...]]:
    return {x.id: x.devices for x in leases if x.devices}


@pytest.mark.parametrize("grace", [False, True])
def test_what_a_project_is_short_of_is_not_taken_out_of_turn(grace):
    """The wide job waits for long: the small one behind it gets nothing before those of q."""
    held = {"project": "q", "survival": CheckpointMode.SIGTERM}
    c = cluster(
        train("a", 500, "0", granted_at=1, **held),
        train("b", 500, queued_at=2, **held),
        train("wide", 1000, queued_at=1, waits_since_at=1),
        train("small", 250, queued_at=2, waits_since_at=NOW),
        projects=[project("p", 0), project("q", 0, priority=1)],
        order=Order.BACKFILL,
        max_bypass_s=3600.0,
    )
    assert where(at_rest(c, grace=grace)) == {"a": ("gpu0",), "b": ("gpu0",)}


def crossing() -> Cluster:
    """Two gangs; a job moved for one goes where a junior was that made way for the other."""
    gpus = [device(n, node=f"n{n // 2}") for n in range(4)]
    ran = {"attained_gpu_s": 4000.0, "attained_at": NOW}
    return cluster(
        train("first", 1000, priority=1, survival=CheckpointMode.SIGTERM, queued_at=1, **ran),
        train("junior", 1000, "2", survival=CheckpointMode.NONE, queued_at=2, **ran),
        train("busy", 1000, "3", survival=CheckpointMode.NONE),
        train("gang", 1000, device_count=2, queued_at=3),
        train("loose", 1000, device_count=2, consolidate=False, queued_at=4),
        gpus=gpus,
        order=Order.LAS,
    )


@pytest.mark.parametrize("grace", [False, True])
def test_no_other_job_takes_the_capacity_in_which_a_moved_job_goes_on(grace):
    found = where(at_rest(crossing(), grace=grace))
    assert found == {"first": ("gpu2",), "gang": ("gpu0", "gpu1"), "busy": ("gpu3",)}


def test_no_job_is_moved_to_a_device_that_is_too_small_for_it():
    gpus = [device(n, node=f"n{n // 2}", memory_bytes=(80 if n < 3 else 40) * GIB) for n in range(4)]
    moves = {
        "survival": CheckpointMode.SIGTERM,
        "size": Size(memory_bytes=60 * GIB),
        "held_milli": 1000,
    }
    c = cluster(
        replace(train("a", 0, "0"), **moves),
        train("b", 1000, "2", survival=CheckpointMode.NONE),
        train("gang", 1000, device_count=2),
        gpus=gpus,
        order=Order.LAS,
    )
    assert actions(c) == []
    larger = replace(c, devices=(*gpus[:3], replace(gpus[3], memory_bytes=80 * GIB)))
    assert [a.lease for a in actions(larger)] == ["a"]


def crowd(seed: int) -> Cluster:
    """A few nodes of two GPUs; many wait, for long, of projects of which some come first."""
    random = Random(seed)
    gpus = [device(n, node=f"n{n // 2}") for n in range(random.choice([1, 2, 4, 6]))]
    leases = []
    for n in range(random.randrange(4, 16)):
        count = min(random.choice([1, 1, 1, 2, 4]), len(gpus))
        attained = random.choice([0.0, 0.0, 4000.0])
        lease = train(
            f"j{n}",
            1000 if count > 1 else random.choice([250, 500, 1000]),
            project=random.choice("pqr"),
            device_count=count,
            consolidate=random.random() < 0.7,
            priority=random.choice([0, 0, 1]),
            survival=random.choice([CheckpointMode.SIGTERM, CheckpointMode.NONE]),
            queued_at=float(n),
            waits_since_at=random.choice([0.0, NOW]),
            attained_gpu_s=attained,
            attained_at=NOW if attained else None,
        )
        leases.append(lease)
    return cluster(
        *leases,
        gpus=gpus,
        projects=[
            project(
                name,
                random.choice([0, 0, 0.5, 1]),
                priority=random.choice([0, 1]),
                weight=random.choice([1, 4]),
            )
            for name in "pqr"
        ],
        order=random.choice([Order.LAS, Order.BACKFILL]),
        max_bypass_s=random.choice([None, 3600.0]),
    )


@settings(deadline=None, derandomize=True, max_examples=300)
@given(seed=st.integers(0, 1 << 20), grace=st.booleans())
def test_the_plan_comes_to_rest_with_new_leases_while_others_run(seed, grace):
    c = crowd(seed)
    first = Random(seed).randrange(len(c.leases))
    c = replace(c, leases=at_rest(replace(c, leases=c.leases[first:]), grace=grace) + c.leases[:first])
    at_rest(c, grace=grace)
