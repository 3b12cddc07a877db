"""Moving running jobs to make a node free for a larger one."""

from __future__ import annotations

import pytest

from jupyter_gpushare.core.model import CheckpointMode, Grant, Order, Requeue, State, Why
from tests.core.build import ASLEEP, actions, build, cluster, device, project, stops, train

LAS = {"order": Order.LAS, "las_thresholds_gpu_s": (100.0, 200.0)}


def test_a_running_job_is_moved_to_make_a_node_free_for_a_larger_one():
    nodes = [device(n, node=f"n{n // 2}") for n in range(4)]
    c = cluster(stops("a", "0"), stops("b", "2"), stops("wide", device_count=2), gpus=nodes, **LAS)
    assert actions(c) == [Requeue("a", Why.MOVED, "wide")]
    after = cluster(stops("a"), stops("b", "2"), stops("wide", device_count=2), gpus=nodes, **LAS)
    assert actions(after) == [
        Grant("a", ("gpu3",), 1000, Why.FREE_CAPACITY),
        Grant("wide", ("gpu0", "gpu1"), 1000, Why.FREE_CAPACITY),
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"order": Order.BACKFILL},  # does not preempt
        {"min_run_s": 1e6},
        {"preempt_cost_s": 1e6},
    ],
)
def test_no_job_is_moved_where_preempting_is_not_allowed(more):
    nodes = [device(n, node=f"n{n // 2}") for n in range(4)]
    c = [stops("a", "0", granted_at=1), stops("b", "2", granted_at=1), stops("wide", device_count=2)]
    assert actions(cluster(*c, gpus=nodes, **{**LAS, **more})) == []


def test_a_job_that_has_no_checkpoint_of_its_own_is_not_moved():
    nodes = [device(n, node=f"n{n // 2}") for n in range(4)]
    for survival in (CheckpointMode.SUSPEND, CheckpointMode.NONE):
        held = [train(x, 1000, on, survival=survival) for x, on in (("a", "0"), ("b", "2"))]
        assert actions(cluster(*held, stops("wide", device_count=2), gpus=nodes, **LAS)) == []


def test_no_job_is_moved_without_a_place_to_go_to():
    nodes = [device(n, node=f"n{n // 2}") for n in range(4)]
    c = [stops("a", "0"), stops("b", "2"), stops("c", "3"), stops("wide", device_count=2)]
    assert actions(cluster(*c, gpus=nodes, **LAS)) == []


def test_the_node_is_cleared_where_fewest_gpus_change_hands():
    nodes = [device(n, node=f"n{n // 4}") for n in range(8)]
    c = cluster(
        stops("a", "0"), stops("b", "1 2"), stops("c", "4 5"),
        stops("wide", device_count=3), gpus=nodes, **LAS,
    )  # fmt: skip
    assert actions(c) == [Requeue("c", Why.MOVED, "wide")] or actions(c) == [Requeue("b", Why.MOVED, "wide")]
    assert len(actions(c)) == 1


def test_whole_nodes_are_cleared_for_a_job_larger_than_one():
    nodes = [device(n, node=f"n{n // 2}") for n in range(8)]
    held = [stops("a", "0"), stops("b", "2"), stops("c", "4")]
    c = cluster(*held, stops("wide", device_count=4), gpus=nodes, **LAS)
    assert actions(c) == [Requeue("a", Why.MOVED, "wide")]
    c = cluster(*held, stops("wide", device_count=5), gpus=nodes, **LAS)
    assert actions(c) == [Requeue("a", Why.MOVED, "wide")]
    held = [stops(x, on) for x, on in (("a", "0"), ("b", "2"), ("c", "4"), ("d", "6"))]
    c = cluster(*held, stops("wide", device_count=4), gpus=nodes, **LAS)
    assert actions(c) == [Requeue("a", Why.MOVED, "wide"), Requeue("b", Why.MOVED, "wide")]


def test_jobs_that_need_not_move_stay():
    """3 and 3 make capacity for 5; 1 was the better start, and is not needed then."""
    nodes = [device(n, node=node) for n, node in enumerate("aaaaaaabbbbcccc")]
    held = [stops("a", "0 1 2"), stops("b", "3 4 5"), stops("c", "6"), stops("x", "7"), stops("y", "11")]
    c = cluster(*held, stops("wide", device_count=5), gpus=nodes, **LAS)
    assert {a.lease for a in actions(c)} == {"a", "b"}


def test_whole_nodes_are_not_cleared_without_a_place_to_go_to():
    """Eight GPUs are free, but no two of them together outside of the nodes that would be cleared."""
    nodes = [device(n, node=f"n{n // 4}") for n in range(24)]
    pairs = [stops("a", "0 1"), stops("b", "4 5")]
    single = [stops(f"s{n}", f"{n}") for n in range(8, 24) if n % 4 < 3]
    assert actions(cluster(*pairs, *single, stops("wide", device_count=8), gpus=nodes, **LAS)) == []
    done = actions(cluster(*pairs, *single[:-1], stops("wide", device_count=8), gpus=nodes, **LAS))
    assert done[0].lease == "a"


def test_no_node_is_cleared_for_a_gang_on_a_device_that_a_suspended_session_wants():
    """Its project is owed nothing: the session beyond quota comes first there."""
    c = cluster(
        build("nb", 500, "0", state=ASLEEP, wanted=True, borrowed=True),
        train("old", 1000, "0", state=State.STOPPING, cancelled=True),
        train("junior", 1000, "1"),
        stops("gang", device_count=2, priority=1),
        gpus=2,
        projects=[project("p", 0)],
        **LAS,
    )
    assert actions(c) == []


def test_no_node_is_cleared_for_a_gang_where_another_job_has_just_started():
    c = cluster(
        train("small", 250, "0", attained_gpu_s=150.0),
        stops("wide", "1", attained_gpu_s=150.0),
        train("busy", 1000, "2", priority=1),
        train("new", 500, priority=1),
        stops("gang", device_count=2),
        gpus=[device(n, node=f"n{n // 2}") for n in range(4)],
        **LAS,
    )
    assert actions(c) == [Grant("new", ("gpu0",), 500, Why.FREE_CAPACITY)]


def test_no_job_is_moved_off_a_node_that_a_suspended_one_waits_for_if_another_does():
    nodes = [device(n, node=f"n{n // 2}") for n in range(4)]
    waits = train("waits", 1000, "0", state=ASLEEP, retry_at=1e9)
    c = cluster(stops("a", "0"), stops("b", "2"), waits, stops("wide", device_count=2), gpus=nodes, **LAS)
    assert actions(c) == [Requeue("b", Why.MOVED, "wide")]
