"""Fair shares, claims and quotas, with worked examples."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import CheckpointMode, Requeue, State, Suspend, Why
from jupyter_gpushare.core.planning.planner import plan
from jupyter_gpushare.core.quota import fair_shares, kept_quotas
from tests.core.build import ASLEEP, NOW, build, cluster, device, project, quotas, train
from tests.core.test_settles import at_rest


@pytest.mark.parametrize(
    ("projects", "demand", "capacity", "shares"),
    [
        ([project("a", 2), project("b", 2)], {"a": 9000, "b": 9000}, 4000, {"a": 2000, "b": 2000}),
        ([project("a", 2), project("b", 2)], {"a": 9000}, 4000, {"a": 4000, "b": 0}),
        ([project("a", 2), project("b", 2)], {"a": 9000, "b": 500}, 4000, {"a": 3500, "b": 500}),
        ([project("a", 1), project("b", 1, weight=3)], {"a": 9000, "b": 9000}, 6000, {"a": 2000, "b": 4000}),
        ([project("a", 1, limit_milli=1500), project("b", 1)], {"a": 9000, "b": 9000},
         4000, {"a": 1500, "b": 2500}),
        ([project("a", 0, weight=0), project("b", 0)], {"a": 9000, "b": 1000}, 4000, {"a": 3000, "b": 1000}),
        ([project("a", 3), project("b", 3, priority=1)], {"a": 9000, "b": 9000},
         4000, {"a": 1000, "b": 3000}),
        ([project("a", 0), project("b", 0), project("c", 0)], {"a": 1, "b": 9, "c": 9},
         6, {"a": 1, "b": 3, "c": 2}),
        ([project("a", 1)], {"a": 300}, 4000, {"a": 300}),
    ],
)  # fmt: skip
def test_fair_shares(projects, demand, capacity, shares):
    assert fair_shares(projects, demand, capacity) == shares


@given(st.lists(st.tuples(*[st.integers(0, 4000)] * 2, st.integers(0, 3)), max_size=6), st.integers(0, 9000))
def test_shares_are_exact_and_never_more_than_asked_for(numbers, capacity):
    projects = [project(f"{n}", quota / 1000, weight=weight) for n, (quota, _, weight) in enumerate(numbers)]
    demand = {f"{n}": wants for n, (_, wants, _) in enumerate(numbers)}
    shares = fair_shares(projects, demand, capacity)
    assert sum(shares.values()) == min(capacity, sum(demand.values()))
    assert all(0 <= shares[name] <= demand[name] for name in demand)


def test_sessions_claim_the_quota_first_come_first_served():
    c = cluster(
        build("late", 600, "1", queued_at=2),
        build("early", 600, "0", queued_at=1, state=ASLEEP),
        build("ending", 400, "1", state=State.STOPPING),
        projects=[project("p", 1)],
    )
    assert quotas(c).claimants == {"early"}


def test_a_borrowing_session_moves_up_into_quota_that_is_free():
    c = cluster(build("nb", 600, "0", borrowed=True))
    assert quotas(c).claimants == {"nb"}
    c = cluster(build("nb", 600, "0", borrowed=True), build("other", 600, "0", project="q"))
    c = cluster(*c.leases, projects=[project("p", 1), project("q", 1)])
    assert quotas(c).claimants == {"other"}


def test_jobs_are_in_quota_oldest_first_after_the_sessions():
    c = cluster(
        build("nb", 500, "0"),
        train("old", 1000, "1", granted_at=1),
        train("large", 1000, "2", granted_at=2),
        train("small", 500, "0", granted_at=3),
        gpus=3,
        projects=[project("p", 2)],
    )
    assert quotas(c).in_quota == {"nb", "old", "small"}


def test_a_lease_that_leaves_the_quota_is_replaced_by_the_next_oldest():
    """Two that are in quota make way for higher priorities; the two borrowers are in quota then."""
    c = cluster(
        *[train(f"old{n}", 1000, f"{n}", granted_at=n) for n in (0, 1)],
        *[train(f"high{n}", 1000, f"{n}", granted_at=n, priority=9) for n in (2, 3)],
        *[train(f"mid{n}", 1000, priority=5) for n in (0, 1)],
        gpus=4,
        projects=[project("p", 2)],
    )
    state = ClusterState.of(c)
    assert state.quotas.in_quota == {"old0", "old1"}
    state.begin()
    for name in ("old1", "old0"):
        state.evict(state.leases[name], suspended=False)
    assert state.quotas.in_quota == {"old0", "old1", "high2", "high3"}
    state.undo()
    assert state.quotas.in_quota == {"old0", "old1"}
    assert [a.lease for a in plan(c, NOW).actions] == ["old1", "old0"]


def test_a_project_that_is_not_configured_is_owed_nothing():
    c = cluster(train("job", 1000, "0", project="gone"))
    account = quotas(c).account("gone")
    assert (account.use, account.in_quota_use, account.project.quota_milli) == (1000, 0, 0)


# -- two projects with a quota of 2 GPUs each on 4 GPUs


def test_a_project_alone_uses_all_gives_the_other_its_quota_and_goes_on_when_that_leaves():
    def settled(*leases):
        found = at_rest(cluster(*leases, gpus=4, projects=both), grace=False)
        return found, [x.id for x in found if x.state is State.RUNNING]

    both = [project("p", 2), project("q", 2)]
    alone, running = settled(*(train(f"p{n}", 1000, queued_at=n) for n in range(4)))
    assert running == ["p0", "p1", "p2", "p3"]
    others = [train(f"q{n}", 1000, project="q", queued_at=10 + n) for n in range(4)]
    first = plan(cluster(*alone, *others, gpus=4, projects=both), NOW).actions
    assert [a.why for a in first] == [Why.OVER_QUOTA] * 2  # asked for within one round
    shared, running = settled(*alone, *others)
    assert running == ["p0", "p1", "q0", "q1"]
    assert settled(*shared[:4])[1] == ["p0", "p1", "p2", "p3"]


# -- fair share beyond quota


def weighted(**more):
    """Two projects without a quota, one with three times the weight; both ask for more than there is."""
    held = [train(f"p{n}", 1000, f"{n}", granted_at=n) for n in range(4)]
    waits = [train(f"q{n}", 1000, project="q") for n in range(8)]
    projects = [project("p", 0), project("q", 0, weight=3)]
    return cluster(*held, train("more", 1000), *waits, gpus=4, projects=projects, **more)


def test_a_project_below_its_fair_share_takes_from_one_that_is_above():
    assert plan(weighted(), NOW).actions == (
        Suspend("p3", Why.OVER_QUOTA, "q0"),
        Suspend("p2", Why.OVER_QUOTA, "q1"),
        Suspend("p1", Why.OVER_QUOTA, "q2"),
    )


def test_only_from_jobs_that_have_run_for_the_minimum_time():
    done = plan(weighted(min_run_s=NOW - 2), NOW)
    assert [a.lease for a in done.actions] == ["p2", "p1", "p0"]
    assert done.next_at == NOW + 1


def test_a_project_at_its_share_takes_nothing():
    held = [train("p0", 1000, "0"), *[train(f"q{n}", 1000, f"{n}", project="q") for n in (1, 2, 3)]]
    waits = [train("p1", 1000), train("q4", 1000, project="q")]
    projects = [project("p", 0), project("q", 0, weight=3)]
    assert plan(cluster(*held, *waits, gpus=4, projects=projects), NOW).actions == ()


def test_a_project_above_its_share_may_fall_below_by_a_part_of_one_job_only():
    projects = [project("p", 0), project("q", 0)]
    waits = [train("q0", 1000, project="q"), train("p1", 1000)]
    c = cluster(train("p0", 1000, "0 1 2 3"), *waits, gpus=4, projects=projects)
    assert plan(c, NOW).actions == (Suspend("p0", Why.OVER_QUOTA, "q0"),)
    asleep = train("p0", 1000, "0 1 2 3", state=ASLEEP)
    assert [a.lease for a in plan(cluster(asleep, *waits, gpus=4, projects=projects), NOW).actions] == [
        "p1",
        "q0",
    ]
    at_share = [train("p0", 1000, "0 1"), train("r0", 1000, "2 3", project="r")]
    c = cluster(
        *at_share,
        train("q0", 1000, project="q", device_count=2),
        gpus=4,
        projects=[*projects, project("r", 0)],
    )
    assert plan(c, NOW).actions == ()


def test_a_sleeping_job_takes_nothing_within_quota_on_its_own_device():
    c = cluster(
        train("asleep", 1000, "0", state=ASLEEP),
        train("old", 1000, "0", project="q", granted_at=1),
        train("new", 1000, "1", project="q", granted_at=2),
        gpus=2,
        projects=[project("p", 1), project("q", 1)],
    )
    assert plan(c, NOW).actions == ()


def test_nothing_is_taken_from_a_project_that_has_just_its_share():
    """Of 5 GPUs one is guaranteed to r and one is no GPU that the job can use: p and q share 4."""
    gpus = [*(device(n) for n in range(4)), device(4, profile="1g.10gb")]
    c = cluster(
        build("nb", 1000, "0", project="r"),
        train("p1", 1000, "1"),
        train("q1", 1000, "2", project="q"),
        train("q2", 1000, "3", project="q"),
        train("job", 1000),
        gpus=gpus,
        projects=[project("p", 0), project("q", 0), project("r", 1)],
    )
    assert plan(c, NOW).actions == ()


def test_quotas_that_the_machine_cannot_keep_together_are_shared_out_by_weight():
    """8 GPUs, and three projects that are guaranteed 8 each: the first holds all, for 9 days."""
    held = [train(f"p{n}", 1000, str(n), granted_at=n) for n in range(8)]
    wait = [train(f"{name}{n}", 1000, project=name) for name in "qr" for n in range(8)]
    projects = [project("p", 8), project("q", 8), project("r", 8, weight=2)]
    c = cluster(*held, *wait, gpus=8, projects=projects)
    assert [p.quota_milli for p in kept_quotas(projects, 8_000)] == [2000, 2000, 4000]
    taken = [(a.lease, a.for_lease) for a in plan(c, NOW).actions]
    assert taken == [("p7", "q0"), ("p6", "r0"), ("p5", "r1"), ("p4", "q1"), ("p3", "r2"), ("p2", "r3")]


def test_no_session_loses_its_claim_because_others_are_promised_more():
    asleep = build("nb", 1000, "0", state=ASLEEP)
    c = cluster(asleep, projects=[project("p", 1), project("q", 1)])
    assert quotas(c).claimants == {"nb"}


def thirds(*leases, nodes="000000", **more):
    """Three projects of equal weight, nothing guaranteed; ``nodes``: which each GPU is on."""
    gpus = [device(n, node=f"n{node}") for n, node in enumerate(nodes)]
    return cluster(*leases, gpus=gpus, projects=[project(name, 0) for name in "pqr"], **more)


def held(project, on, granted_at, survival=CheckpointMode.SIGTERM):
    """Jobs of one GPU each, the youngest last, that go on elsewhere when they are stopped."""
    more = {"project": project, "survival": survival}
    return [train(f"{project}{n}", 1000, n, granted_at=granted_at + int(n), **more) for n in on.split()]


def waiting(project, *names, gpus=1):
    return [train(name, 1000, project=project, device_count=gpus) for name in names]


def test_a_project_within_its_share_is_protected_though_its_jobs_would_be_cheapest():
    others = [*waiting("q", "q"), *waiting("r", "r")]
    c = thirds(*held("q", "0 1", 200), *held("r", "2 3 4 5", 100), *waiting("p", "a", "b", "c"), *others)
    assert plan(c, NOW).actions == (
        Requeue("r5", Why.OVER_QUOTA, "a"),
        Requeue("r4", Why.OVER_QUOTA, "b"),
    )


def test_a_gang_wider_than_a_node_asks_for_whole_nodes():
    """Four GPUs are free, but on three nodes."""
    c = cluster(
        *held("q", "1 3", 1),
        train("gang", 1000, device_count=4),
        train("later", 1000, device_count=4),
        gpus=[device(n, node=f"n{n // 2}") for n in range(6)],
        projects=[project("p", 0, weight=9), project("q", 0)],
    )
    assert plan(c, NOW).actions == (Requeue("q3", Why.OVER_QUOTA, "gang"),)


def test_a_gang_wider_than_a_node_preempts_no_job_where_no_whole_nodes_come_of_it():
    c = cluster(
        *held("q", "1", 1),
        *held("r", "3 5", 1),
        train("gang", 1000, device_count=4),
        gpus=[device(n, node=f"n{n // 2}") for n in range(6)],
        projects=[project("p", 0), project("q", 0), project("r", 2)],
        fairness_horizon_s=3600.0,
    )
    assert plan(replace(c, lags_gpu_s={"p": 4 * 3600.0, "q": -4 * 3600.0}), NOW).actions == ()
