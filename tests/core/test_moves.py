"""A suspended lease resumes on other devices of its node where it may move, and is told why where not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpushare.core.model import (
    CheckpointMode,
    Cluster,
    Order,
    Requeue,
    Resume,
    Settings,
    State,
    Suspend,
    Why,
)
from jupyter_gpushare.core.planning.planner import plan
from jupyter_gpushare.core.replay import Replay
from tests.core.build import (
    ASLEEP,
    GIB,
    NOW,
    actions,
    build,
    cluster,
    device,
    grant,
    project,
    train,
    why,
)

BOTH = CheckpointMode.SUSPEND_SIGTERM
DAY_S = 86_400.0


def alike(count: int, per_node: int = 8, **more):
    return [device(n, node=f"n{n // per_node}", movable=True, **more) for n in range(count)]


def asleep(id: str, milli: int, on: str, **more):
    return train(id, milli, on, state=ASLEEP, **{"movable": True} | more)


# ---- where it resumes


def test_a_suspended_job_moves_to_the_gpu_beside_its_own():
    c = cluster(asleep("a", 1000, "0"), train("c", 1000, "0"), gpus=alike(2))
    assert actions(c) == [Resume("a", Why.CAPACITY_BACK, ("gpu1",))]


def test_a_suspended_job_stays_where_its_own_gpu_is_free():
    assert actions(cluster(asleep("a", 1000, "1"), gpus=alike(2))) == [Resume("a", Why.CAPACITY_BACK)]


@pytest.mark.parametrize(
    ("job", "gpus"),
    [
        ({"movable": False}, alike(2)),
        ({}, alike(2, per_node=1)),  # on another machine
        ({}, [device(0, movable=True), device(1)]),  # the other is not movable
        ({}, [device(0), device(1, movable=True)]),  # its own is not
        ({}, [device(0, movable=True, name="H100"), device(1, movable=True, name="A100")]),
        ({}, [device(0, movable=True), device(1, movable=True, memory_bytes=40 * GIB)]),
        ({}, [device(0, movable=True), device(1, movable=True, reserve_bytes=GIB)]),  # less to grant
        ({"avoids": (("gpu1", NOW + 60),)}, alike(2)),  # it was refused there a moment ago
    ],
)
def test_a_suspended_job_that_cannot_move_waits_for_its_own_gpu(job, gpus):
    c = cluster(asleep("x", 1000, "0", **job), train("c", 1000, "0"), gpus=gpus)
    assert (actions(c), why(c)) == ([], Why.OWN_DEVICES)


def test_a_device_that_was_refused_is_left_out_until_then():
    job = asleep("a", 1000, "0", avoids=(("gpu1", NOW + 60),))
    c = cluster(job, train("c", 1000, "0"), gpus=alike(2))
    assert plan(c, NOW).next_at == NOW + 60
    assert actions(c, NOW + 60) == [Resume("a", Why.CAPACITY_BACK, ("gpu1",))]
    beside = cluster(job, train("c", 1000, "0"), gpus=alike(3))
    assert actions(beside) == [Resume("a", Why.CAPACITY_BACK, ("gpu2",))]


def test_a_suspended_job_leaves_a_gpu_that_is_emptied_where_it_can():
    gpus = [
        replace(device, usable=False, draining=True) if n < 2 else device for n, device in enumerate(alike(4))
    ]
    one, two = asleep("a", 1000, "0"), asleep("a", 1000, "0 1")
    assert actions(cluster(one, gpus=gpus)) == [Resume("a", Why.CAPACITY_BACK, ("gpu2",))]
    assert actions(cluster(two, gpus=gpus)) == [Resume("a", Why.CAPACITY_BACK, ("gpu2", "gpu3"))]
    assert actions(cluster(two, gpus=gpus[:3])) == [Resume("a", Why.CAPACITY_BACK, ("gpu2", "gpu1"))]
    held = train("b", 1000, "0")
    assert actions(cluster(two, held, gpus=gpus[:3])) == [Resume("a", Why.CAPACITY_BACK, ("gpu2", "gpu1"))]
    assert actions(cluster(one, gpus=gpus[:2])) == [Resume("a", Why.CAPACITY_BACK)]


def test_a_job_that_cannot_move_is_told_so_only_where_that_keeps_it():
    full = [train("c", 1000, "0"), train("d", 1000, "1")]
    assert why(cluster(asleep("x", 1000, "0", movable=False), *full, gpus=alike(2))) is Why.NO_CAPACITY


def test_a_suspended_job_moves_next_to_others_not_to_an_empty_gpu():
    held = [train("b", 1000, "0"), train("d", 500, "2"), train("e", 250, "3")]
    c = cluster(asleep("a", 500, "0"), *held, gpus=alike(4))
    assert actions(c) == [Resume("a", Why.CAPACITY_BACK, ("gpu2",))]


def test_a_gang_that_moves_keeps_those_of_its_gpus_that_are_free():
    c = cluster(asleep("a", 1000, "0 1 2"), train("b", 1000, "1"), gpus=alike(5))
    assert actions(c) == [Resume("a", Why.CAPACITY_BACK, ("gpu0", "gpu3", "gpu2"))]


def test_a_gang_over_two_machines_does_not_move():
    gang = asleep("x", 1000, "0 1 2", device_count=3)
    c = cluster(gang, train("b", 1000, "2"), gpus=alike(4, per_node=2))
    assert (actions(c), why(c)) == ([], Why.OWN_DEVICES)


def test_a_session_without_a_claim_moves_and_one_with_a_claim_takes_its_own_back():
    guest = build("guest", 1000, "0", state=ASLEEP, wanted=True, movable=True)
    job = train("job", 1000, "0", project="q")
    beyond = [project("p", 0), project("q", 1)]
    c = cluster(guest, job, gpus=alike(2), projects=beyond)
    assert actions(c) == [Resume("guest", Why.WANTED, ("gpu1",))]
    within = [project("p", 1), project("q", 0)]
    (made_way,) = actions(replace(c, projects=tuple(within)))
    assert made_way == Suspend("job", Why.LENDER_RETURNED, "guest")


def test_jobs_make_way_on_another_gpu_for_one_that_moves():
    first = asleep("first", 1000, "0", priority=2)
    c = cluster(first, train("high", 1000, "0", priority=3), train("low", 1000, "1"), gpus=alike(2))
    assert actions(c) == [Suspend("low", Why.PRIORITY, "first")]
    leaving = train("low", 1000, "1", state=State.SUSPENDING)
    assert why(cluster(*c.leases[:2], leaving, gpus=alike(2)), "first") is Why.AWAITING_RELEASE


def test_a_job_waits_for_room_on_its_machine_where_it_may_move():
    c = cluster(asleep("x", 1000, "0"), train("b", 1000, "0"), train("c", 1000, "1"), gpus=alike(2))
    assert why(c) is Why.NO_CAPACITY


# ---- where others start, and who is suspended


def test_a_new_job_leaves_the_gpus_that_a_suspended_gang_waits_for():
    gang = asleep("gang", 1000, "0 1", movable=False)
    c = cluster(gang, train("b", 1000, "1"), train("new", 1000), gpus=alike(4, per_node=2))
    assert actions(c) == [grant("new", 2)]


def test_a_new_job_takes_them_where_nothing_else_is_free():
    gang = asleep("gang", 1000, "0 1", movable=False)
    c = cluster(gang, train("b", 1000, "1"), train("new", 1000), gpus=alike(2), order=Order.LAS)
    assert actions(c) == [grant("new", 0)]


def preempts(*jobs, gpus, **more):
    """What an urgent job of one GPU preempts."""
    return actions(cluster(*jobs, train("x", 1000, priority=1), gpus=gpus, **more))


def test_an_order_suspends_where_nobody_waits_already():
    waits = asleep("waits", 1000, "1", movable=False, retry_at=NOW + 60)
    running = [train("a", 1000, "0", granted_at=1), train("b", 1000, "1", granted_at=2)]
    assert preempts(waits, *running, gpus=2) == [Suspend("a", Why.PRIORITY, "x")]
    assert preempts(*running, gpus=2) == [Suspend("b", Why.PRIORITY, "x")]


def test_the_priority_of_a_job_comes_before_who_waits_for_its_gpu():
    waits = asleep("waits", 1000, "1", movable=False, retry_at=NOW + 60)
    running = [train("a", 1000, "0", priority=0.5), train("b", 1000, "1")]
    assert preempts(waits, *running, gpus=2) == [Suspend("b", Why.PRIORITY, "x")]


@pytest.mark.parametrize(
    ("others", "gpus", "stops"),
    [
        ([], alike(2), False),  # it resumes on the first GPU that comes free
        ([], [device(0), device(1)], True),  # it could only resume on its own
        ([asleep("waits", 1000, "0", movable=False, retry_at=NOW + 60)], alike(2), True),
    ],
)
def test_an_order_stops_a_job_with_a_checkpoint_that_would_wait_for_long(others, gpus, stops):
    running = [train("a", 1000, "0", granted_at=1), train("b", 1000, "1", granted_at=2)]
    jobs = [replace(x, survival=BOTH, movable=True) for x in running]
    (action,) = preempts(*others, *jobs, gpus=gpus)
    assert isinstance(action, Requeue if stops else Suspend)


def test_an_order_stops_a_gang_with_a_checkpoint():
    gang = train("gang", 1000, "0 1", survival=BOTH, movable=True)
    assert preempts(gang, gpus=alike(4, per_node=4)[:2]) == [Requeue("gang", Why.PRIORITY, "x")]


def test_an_owner_suspends_it_all_the_same():
    owner = build("owner", 1000, "0", state=ASLEEP, wanted=True)
    job = train("job", 1000, "0", project="q", survival=BOTH)
    c = cluster(owner, job, projects=[project("p", 1), project("q", 0)])
    assert actions(c) == [Suspend("job", Why.LENDER_RETURNED, "owner")]


# ---- over time


@pytest.mark.parametrize(
    ("survival", "movable", "idles"),
    [
        (CheckpointMode.SUSPEND, True, False),
        (BOTH, True, False),
        (BOTH, False, False),
        (CheckpointMode.SUSPEND, False, True),  # a newcomer that waited instead would wait far longer
    ],
)
def test_no_gpu_idles_beside_a_job_that_could_run_there(survival, movable, idles):
    gpus = tuple(device(n, movable=movable) for n in range(2))
    settings = Settings(order=Order.LAS, min_run_s=600.0)
    replay = Replay(Cluster(devices=gpus, projects=(project("p", 2),), leases=(), settings=settings))
    for id, at, duration_s in (("a", 0.0, 30 * DAY_S), ("b", 0.0, 5_000.0), ("c", 4_000.0, 30 * DAY_S)):
        job = train(id, 1000, movable=True, survival=survival, submitted_at=at)
        replay.add_job(job, duration_s)
    assert not replay.run()
    days = replay.now / DAY_S
    assert days == pytest.approx(60 if idles else 30, abs=0.1)
