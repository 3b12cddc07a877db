"""`ClusterState`: taking a decision back leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import Lease, Why
from tests.core.build import ASLEEP, GIB, NOW, build, cluster, train, why


def numbers(state: ClusterState) -> dict[str, Any]:
    capacities = {
        uuid: (
            capacity.free,
            capacity.releasing,
            capacity.soon(),
            capacity.claimed,
            capacity.suspended_claims,
            sorted(capacity.holders),
        )
        for uuid, capacity in state.capacities.items()
    }
    jobs = {name: sorted(jobs) for name, jobs in state.quotas.jobs.items()}
    return {
        "capacities": capacities,
        "jobs": jobs,
        "host": state.host_free,
        "kept": dict(state.reserved_bytes),
    }


@pytest.mark.parametrize("suspended", [True, False])
@pytest.mark.parametrize(
    "lease", [build("nb", 500, "0", used_bytes=GIB), train("job", 500, "0", used_bytes=GIB)]
)
def test_a_reinstated_lease_is_as_if_never_evicted(lease: Lease, suspended: bool) -> None:
    state = ClusterState.of(cluster(lease, train("other", 250, "0")), NOW)
    before = numbers(state)
    state.evict(lease, suspended=suspended)
    assert numbers(state) != before
    state.reinstate(lease, suspended=suspended)
    assert numbers(state) == before


@pytest.mark.parametrize("asleep", [True, False])
def test_a_new_claim_keeps_host_memory_for_the_job_that_runs_there_until_it_is_taken_back(
    asleep: bool,
) -> None:
    old, job, new = build("old", 500, "0", state=ASLEEP), train("job", 500, "0"), build("new", 500)
    state = ClusterState.of(cluster(old, job, host_budget_bytes=90 * GIB), NOW)
    before = numbers(state)
    assert (before["host"], before["kept"]) == (90 * GIB, {})
    state.begin()
    if asleep:
        state.allocate_suspended(new, ("gpu0",), 500)
    else:
        state.allocate(new, ("gpu0",), 500, claim=True)
    state.reserve_host_memory(job)  # once only
    assert (state.host_free, state.reserved_bytes) == (50 * GIB, {"job": 40 * GIB})
    state.undo()
    assert numbers(state) == before


def test_host_memory_is_not_given_away_that_a_new_claim_needs() -> None:
    c = cluster(
        build("old", 500, "0", state=ASLEEP),
        train("job", 500, "0"),
        build("new", 500),
        build("away", 1000, "1", state=ASLEEP),
        train("x", 1000),
        gpus=2,
        host_budget_bytes=90 * GIB,
    )
    assert (why(c, "new"), why(c)) == (Why.CLAIM, Why.JOB_HOST_MEMORY)
