"""`ClusterState`: taking a decision back leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from jupyter_gpushare.core.cluster_state import ClusterState
from jupyter_gpushare.core.model import Lease
from tests.core.build import GIB, NOW, build, cluster, train


def numbers(state: ClusterState) -> dict[str, Any]:
    capacities = {
        uuid: (
            capacity.free,
            capacity.releasing,
            capacity.soon,
            capacity.claimed,
            capacity.suspended_claims,
            sorted(capacity.holders),
        )
        for uuid, capacity in state.capacities.items()
    }
    jobs = {name: sorted(jobs) for name, jobs in state.quotas.jobs.items()}
    return {"capacities": capacities, "jobs": jobs, "host": state.host_free}


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
