"""Fair shares and standing, with worked examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.core.model import State
from jupyter_gpushare.core.quota import fair_shares, standing
from tests.core.build import ASLEEP, build, cluster, project, train


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
def test_shares_are_exact_and_nobody_gets_more_than_asked_for(numbers, capacity):
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
    assert standing(c.projects, c.leases).claimants == {"early"}


def test_a_borrowing_session_moves_up_into_quota_that_is_free():
    c = cluster(build("nb", 600, "0", borrowed=True))
    assert standing(c.projects, c.leases).claimants == {"nb"}
    c = cluster(build("nb", 600, "0", borrowed=True), build("other", 600, "0", project="q"))
    c = cluster(*c.leases, projects=[project("p", 1), project("q", 1)])
    assert standing(c.projects, c.leases).claimants == {"other"}


def test_jobs_are_in_quota_oldest_first_after_the_sessions():
    c = cluster(
        build("nb", 500, "0"),
        train("old", 1000, "1", granted_at=1),
        train("large", 1000, "2", granted_at=2),
        train("small", 500, "0", granted_at=3),
        projects=[project("p", 2)],
    )
    assert standing(c.projects, c.leases).in_quota == {"nb", "old", "small"}


def test_a_project_that_is_not_configured_is_owed_nothing():
    c = cluster(train("job", 1000, "0", project="gone"))
    account = standing(c.projects, c.leases).account("gone")
    assert (account.use, account.in_quota_use, account.project.quota_milli) == (1000, 0, 0)
