"""Capacity for gangs that others hold in pieces."""

from __future__ import annotations

from dataclasses import replace

from jupyter_gpushare.core.model import CheckpointMode, Cluster, Requeue, Why
from jupyter_gpushare.core.planner import plan
from tests.core.build import NOW, actions, cluster, device, project, train

HOUR_S = 3600.0


def nodes(gpus: int, size: int) -> list:
    return [device(n, node=f"n{n // size}") for n in range(gpus)]


def held(name: str, on: range, **more) -> list:
    """Jobs of a project, one per GPU, the oldest first."""
    jobs = {"project": name, "survival": CheckpointMode.SIGTERM} | more
    return [train(f"{name}{n}", 1000, f"{n}", granted_at=n, **jobs) for n in on]


def scattered(*, borrow: bool = True) -> Cluster:
    """Of the six jobs of q, one in quota, four lie on the first node; p has a gang of four waiting."""
    first = replace(held("q", range(1))[0], borrow=borrow)
    return cluster(
        first,
        *held("q", range(1, 6)),
        *held("r", range(6, 8)),
        train("gang", 1000, device_count=4),
        gpus=nodes(8, 4),
        projects=[project("p", 0, weight=8), project("q", 1), project("r", 2)],
    )


def test_a_job_in_quota_is_not_in_the_way_of_a_gang_while_its_project_keeps_its_quota():
    asked = actions(scattered())
    assert asked == [
        *[Requeue(f"q{n}", Why.OVER_QUOTA, "gang") for n in (3, 2, 1)],
        Requeue("q0", Why.MOVED, "gang"),  # its project keeps its quota: nothing is taken back from it
    ]


def test_a_job_that_does_not_borrow_stays_where_it_is():
    assert actions(scattered(borrow=False)) == []


def test_no_gang_leaves_a_project_less_than_its_quota():
    def contest(quota: int) -> Cluster:
        return cluster(
            *held("q", range(4)),
            *held("s", range(4, 8)),
            train("gang", 1000, device_count=4),
            gpus=nodes(8, 4),
            projects=[project("p", 0, weight=8), project("q", quota), project("s", 4)],
            fairness_horizon_s=HOUR_S,
        )

    lags = {"p": 2 * HOUR_S, "q": -2 * HOUR_S}
    assert plan(replace(contest(1), lags_gpu_s=lags), NOW).actions == ()
    assert len(plan(replace(contest(0), lags_gpu_s=lags), NOW).actions) == 4


def test_a_gang_wider_than_a_node_asks_for_whole_nodes():
    """Four GPUs are free, but on three nodes."""
    c = cluster(
        *held("q", range(1, 4, 2)),
        train("gang", 1000, device_count=4),
        train("later", 1000, device_count=4),
        gpus=nodes(6, 2),
        projects=[project("p", 0, weight=9), project("q", 0)],
    )
    assert actions(c) == [Requeue("q3", Why.OVER_QUOTA, "gang")]


def test_a_gang_wider_than_a_node_preempts_no_job_where_no_whole_nodes_come_of_it():
    c = cluster(
        *held("q", range(1, 2)),
        *held("r", range(3, 6, 2)),
        train("gang", 1000, device_count=4),
        gpus=nodes(6, 2),
        projects=[project("p", 0), project("q", 0), project("r", 2)],
        fairness_horizon_s=HOUR_S,
    )
    assert actions(replace(c, lags_gpu_s={"p": 4 * HOUR_S, "q": -4 * HOUR_S})) == []
