"""Where leases go: several devices, islands, nodes, memory on mixed devices."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpushare.core.capacity import DeviceCapacity
from jupyter_gpushare.core.model import Grant, State, Suspend, Why
from jupyter_gpushare.core.placement import Index, Placement, Topology, find
from jupyter_gpushare.core.planning.planner import plan
from jupyter_gpushare.core.size import Size
from tests.core.build import ASLEEP, GIB, NOW, build, cluster, device, project, train


def placed(*leases, gpus):
    """Where the new leases go, as in "0 1"."""
    done = plan(cluster(*leases, gpus=gpus), NOW)
    return [" ".join(u.removeprefix("gpu") for u in a.devices) for a in done.actions if isinstance(a, Grant)]


def nodes(*sizes):
    """Devices of nodes n0, n1, ... with so many each."""
    names = [f"n{n}" for n, size in enumerate(sizes) for _ in range(size)]
    return [device(n, node=node) for n, node in enumerate(names)]


def test_a_gang_stays_inside_an_island():
    gpus = [device(n, island="left" if n in (0, 3) else "right") for n in range(4)]
    assert placed(train("gang", 1000, device_count=2), gpus=gpus) == ["0 3"]


def test_a_gang_takes_a_node_where_no_island_has_capacity():
    gpus = [device(n, island="left" if n in (0, 3) else "") for n in range(4)]
    assert placed(train("old", 1000, "0"), train("gang", 1000, device_count=2), gpus=gpus) == ["1 2"]


def test_a_gang_is_not_spread_over_nodes():
    assert (
        placed(
            train("a", 1000, "0"),
            train("b", 1000, "2"),
            train("gang", 1000, device_count=2),
            gpus=nodes(2, 2),
        )
        == []
    )


def test_a_gang_takes_the_node_it_fits_best():
    assert placed(train("gang", 1000, device_count=2), gpus=nodes(4, 2)) == ["4 5"]


def test_a_gang_that_does_not_care_takes_what_is_left_over():
    gang = train("gang", 1000, device_count=3, consolidate=False)
    assert placed(train("a", 1000, "4"), gang, gpus=nodes(4, 2)) == ["5 0 1"]


def test_a_job_larger_than_every_node_takes_the_emptiest_nodes():
    gang = train("gang", 1000, device_count=4)
    assert placed(train("a", 1000, "2"), gang, gpus=nodes(2, 2, 2)) == ["0 1 4 5"]


def test_a_job_larger_than_a_node_takes_whole_nodes_and_the_rest_in_one():
    gang = train("gang", 1000, device_count=5)
    assert placed(gang, gpus=nodes(2, 2, 2)) == ["0 1 2 3 4"]
    assert placed(train("a", 1000, "0"), gang, gpus=nodes(2, 2, 2)) == ["2 3 4 5 1"]
    six = train("gang", 1000, device_count=6)
    assert placed(train("a", 1000, "0"), train("b", 1000, "2"), six, gpus=nodes(2, 2, 2, 2)) == []
    assert placed(train("gang", 1000, device_count=6), gpus=nodes(4, 2, 1)) == ["0 1 2 3 4 5"]


def test_mig_instances_go_to_requests_for_their_profile_or_for_bytes():
    small = [device(n, profile="1g.10gb", memory_bytes=10 * GIB) for n in range(2)]
    gpus = [*small, device(2)]
    assert placed(train("job", 1000), gpus=gpus) == ["2"]
    assert placed(train("job", 500), gpus=gpus) == ["2"]
    assert placed(train("job", 1000, profile="1g.10gb"), gpus=gpus) == ["0"]
    assert placed(train("job", 1000, profile="1g.10gb", device_count=2), gpus=gpus) == ["0 1"]
    assert placed(train("job", 1000, profile="2g.20gb"), gpus=gpus) == []
    assert placed(train("job", 0, memory_bytes=5 * GIB), gpus=gpus) in (["0"], ["2"])
    assert placed(train("job", 1000, profile="1g.10gb", device_count=3), gpus=gpus) == []


def test_a_single_gpu_is_taken_where_no_whole_node_is_broken():
    assert placed(train("a", 1000, "2"), train("job", 1000), gpus=nodes(2, 2)) == ["3"]


def test_fractions_leave_capacity_for_what_is_asked_for():
    """Two halves are free in pieces: the quarter goes where no half is spoiled."""
    held = [train("a", 500, "0"), train("b", 750, "1")]
    assert placed(*held, train("job", 250), gpus=2) == ["1"]


def test_memory_is_converted_for_the_device_it_is_placed_on():
    small, large = device(0, memory_bytes=40 * GIB), device(1, memory_bytes=160 * GIB)
    lease = train("job", 0, memory_bytes=30 * GIB)
    assert plan(cluster(lease, gpus=[large]), NOW).actions[0].held_milli == 188
    assert plan(cluster(lease, gpus=[small, large]), NOW).actions == (
        Grant("job", ("gpu0",), 750, Why.FREE_CAPACITY),
    )
    lease = train("job", 0, memory_bytes=50 * GIB)
    assert plan(cluster(lease, gpus=[small, large]), NOW).actions == (
        Grant("job", ("gpu1",), 313, Why.FREE_CAPACITY),
    )


def test_a_claim_in_bytes_must_fit_the_quota_where_it_is_placed():
    small, large = device(0, memory_bytes=40 * GIB), device(1, memory_bytes=160 * GIB)
    c = cluster(build("nb", 0, memory_bytes=30 * GIB), gpus=[small, large], projects=[project("p", 0.5)])
    assert plan(c, NOW).actions == (Grant("nb", ("gpu1",), 188, Why.CLAIM),)


def test_a_gang_beyond_quota_is_no_claim():
    c = cluster(build("nb", 1000, device_count=2), gpus=2, projects=[project("p", 1)])
    assert plan(c, NOW).actions == (Grant("nb", ("gpu0", "gpu1"), 1000, Why.FREE_CAPACITY, borrowed=True),)


def test_a_gang_preempts_where_it_disturbs_fewest():
    idle = [build(f"nb{n}", 500, on, idle_s=9000) for n, on in enumerate("0123")]
    busy_elsewhere = build("other", 500, "3", idle_s=9000)
    c = cluster(*idle, busy_elsewhere, train("gang", 1000, device_count=2), gpus=nodes(2, 2))
    assert plan(c, NOW).actions == (Suspend("nb0", Why.IDLE, "gang"), Suspend("nb1", Why.IDLE, "gang"))


def test_a_victim_on_several_devices_is_asked_once():
    c = cluster(build("nb", 1000, "0 1", idle_s=9000), train("gang", 1000, device_count=2), gpus=2)
    assert plan(c, NOW).actions == (Suspend("nb", Why.IDLE, "gang"),)


def test_a_device_that_is_gone_counts_for_no_project():
    c = cluster(train("old", 1000, "0 7"), train("job", 1000), gpus=2)
    assert placed(*c.leases, gpus=2) == ["1"]


def test_an_owner_on_two_devices_wakes_when_both_are_free():
    ada = build("ada", 1000, "0 1", state=ASLEEP, wanted=True)
    c = cluster(ada, train("a", 1000, "0"), train("b", 1000, "1"), gpus=2)
    assert plan(c, NOW).actions == (
        Suspend("a", Why.LENDER_RETURNED, "ada"),
        Suspend("b", Why.LENDER_RETURNED, "ada"),
    )
    c = cluster(ada, train("a", 1000, "0"), train("b", 1000, "1", state=State.RESUMING), gpus=2)
    assert plan(c, NOW).actions == ()


# -- the index


def row(seed):
    """Devices of mixed sizes, nodes and islands with random capacity."""
    random = Random(seed)
    capacities = []
    for n in range(random.randrange(1, 12)):
        d = device(
            n,
            node=f"n{n // 4}",
            island=random.choice(["", "left", "right"]),
            memory_bytes=random.choice([40, 80]) * GIB,
            reserve_bytes=random.choice([0, 0, 40]) * GIB,
        )
        capacity = DeviceCapacity(d)
        capacity.free = random.choice([0, 250, 300, 500, 1000, 1000, 1000])
        capacities.append(capacity)
    return random, capacities


def free(capacity):
    return capacity.free


def best_device(lease, topology):
    """Looks at every device: tightest device, then tightest node."""
    found = []
    for node in topology.nodes:
        total, first = sum(c.free for c in node), min(c.device.uuid for c in node)
        for c in node:
            need = c.device.demand_milli(lease.size)
            if c.free >= need:
                order = c.free - need, total, first, c.device.uuid
                found.append((order, Placement((c.device.uuid,), need)))
    return min(found, key=lambda x: x[0])[1] if found else None


@given(st.integers(0, 10_000))
def test_the_index_answers_as_if_every_device_was_looked_at(seed):
    random, capacities = row(seed)
    topology, changed = Topology(capacities), set()
    index = Index(topology, free, changed)
    for _ in range(20):
        size = random.choice(
            [
                Size(random.choice([125, 250, 300, 1000])),
                Size(memory_bytes=random.randrange(1, 80) * GIB),
                Size(1000, random.randrange(2, 6)),
                Size(250, 2),
            ]
        )
        lease = replace(train("job", 0, consolidate=random.choice([True, True, False])), size=size)
        placement = index.find(lease)
        assert placement == find(lease, topology, free)
        if lease.size.device_count == 1:
            assert placement == best_device(lease, topology)
        for capacity in capacities:
            if placement and capacity.device.uuid in placement.devices:
                capacity.free -= placement.held_milli
                changed.add(capacity)
        if random.random() < 0.3:
            capacity = random.choice(capacities)
            capacity.free = 1000
            changed.add(capacity)
