"""Orders that do not preempt: strict first come first served, and backfill."""

from __future__ import annotations

from jupyter_gpushare.core import order
from jupyter_gpushare.core.model import Order, State
from jupyter_gpushare.core.planning.planner import plan
from tests.core.build import ASLEEP, NOW, build, cluster, device, project, started, stops, train


def test_in_a_strict_queue_a_job_that_cannot_start_blocks_those_behind():
    c = [stops("old", "0"), stops("wide", device_count=2, queued_at=1), stops("small", queued_at=2)]
    assert started(cluster(*c, gpus=2, order=Order.FIFO)) == []
    assert started(cluster(*c, gpus=2, order=Order.BACKFILL)) == ["small"]


def test_in_a_strict_queue_those_in_front_start():
    c = [stops("a", queued_at=1), stops("b", device_count=2, queued_at=2), stops("c", queued_at=3)]
    assert started(cluster(*c, gpus=4, order=Order.FIFO)) == ["a", "b", "c"]


def test_a_strict_queue_is_one_projects_only():
    c = [stops("old", "0"), stops("wide", device_count=2, queued_at=1), stops("small", project="q")]
    assert started(cluster(*c, gpus=2, order=Order.FIFO)) == ["small"]


def test_a_strict_queue_does_not_wait_for_what_can_never_start():
    c = [stops("huge", device_count=8, queued_at=1), stops("small", queued_at=2)]
    assert started(cluster(*c, gpus=2, order=Order.FIFO)) == ["small"]


def test_a_strict_queue_waits_for_releasing_capacity():
    c = [
        stops("old", "0", state=State.STOPPING),
        stops("wide", device_count=2, queued_at=1),
        stops("b", queued_at=2),
    ]
    assert started(cluster(*c, gpus=3, order=Order.FIFO)) == ["wide"]
    c[1] = stops("wide", device_count=3, queued_at=1)
    assert started(cluster(*c, gpus=3, order=Order.FIFO)) == []


def test_what_a_strict_queue_is_owed_waits_for_its_head():
    c = [stops("wide", device_count=2, queued_at=1), stops("small", queued_at=2)]
    assert started(cluster(*c, projects=[project("p", 1)], gpus=3, order=Order.FIFO)) == ["wide", "small"]


def test_a_job_overtaken_for_long_enough_is_not_overtaken_any_more():
    old, wide = stops("old", "0"), stops("wide", device_count=2, waits_since_at=NOW - 100, queued_at=1)
    c = cluster(old, wide, stops("small", queued_at=2), gpus=2, order=Order.BACKFILL, max_bypass_s=100.0)
    assert started(c) == []
    early = plan(c, NOW - 1)
    assert [a.lease for a in early.actions] == ["small"]
    assert early.next_at == NOW
    assert started(cluster(*c.leases, gpus=3, order=Order.BACKFILL, max_bypass_s=100.0)) == ["wide"]


def test_only_the_first_of_those_reserves_capacity():
    c = cluster(
        stops("old", "0"),
        stops("wide", device_count=2, waits_since_at=0, queued_at=1),
        stops("wider", device_count=3, waits_since_at=0, queued_at=2),
        stops("small", queued_at=3),
        gpus=[device(n, node=f"n{n // 3}") for n in range(4)],
        order=Order.BACKFILL,
        max_bypass_s=100.0,
    )
    assert started(cluster(*c.leases[:3], gpus=list(c.devices), order=Order.BACKFILL)) == ["wide"]
    busy = [stops(f"o{n}", f"{n}") for n in (0, 1)]
    c = cluster(*busy, *c.leases[1:], gpus=list(c.devices), order=Order.BACKFILL, max_bypass_s=100.0)
    assert started(c) == ["small"]  # on the device that is not kept


def test_capacity_is_reserved_where_least_is_missing():
    """Of two nodes the one with a free device; sessions are not waited for."""
    c = cluster(
        stops("a", "0"),
        stops("b", "1"),
        stops("c", "2"),
        stops("wide", device_count=2, waits_since_at=0, queued_at=1),
        stops("small", queued_at=2),
        gpus=[device(n, node=f"n{n // 2}") for n in range(4)],
        order=Order.BACKFILL,
        max_bypass_s=100.0,
    )
    assert started(c) == []


def test_whole_nodes_are_kept_for_a_job_larger_than_one():
    c = cluster(
        stops("old", "0"),
        stops("wide", device_count=4, waits_since_at=0, queued_at=1),
        stops("small", queued_at=2),
        gpus=[device(n, node=f"n{n // 2}") for n in range(4)],
        order=Order.BACKFILL,
        max_bypass_s=100.0,
    )
    assert started(c) == []


def test_a_suspended_job_keeps_its_own_devices():
    c = cluster(
        stops("old", "0"),
        train("asleep", 1000, "0 1", state=ASLEEP, waits_since_at=0),
        stops("small"),
        gpus=2,
        order=Order.BACKFILL,
        max_bypass_s=100.0,
    )
    assert started(c) == []


def test_no_capacity_is_reserved_where_sessions_are_in_the_way():
    c = cluster(
        build("nb", 500, "0"),
        stops("wide", device_count=2, waits_since_at=0, queued_at=1),
        stops("small", queued_at=2),
        gpus=2,
        order=Order.BACKFILL,
        max_bypass_s=100.0,
    )
    assert started(c) == ["small"]


def test_orders_that_do_not_preempt_set_no_bound_on_the_gain():
    assert order.gain_gpu_s(stops("x"), NOW, cluster(order=Order.FIFO).settings) == float("inf")
