"""What a long queue costs while nothing changes: waiting jobs are not looked at again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.engine import local
from jupyter_gpushare.core.model import Cluster, Grant, Plan
from tests.broker.machine import Program
from tests.broker.virtual_time import until
from tests.core.build import build, cluster, project, train

SESSION, WAITING = build("s", 1000, "0"), train("j", 1000)
CLUSTER = cluster(SESSION, WAITING, idle_timeout_s=900.0)


@pytest.fixture
def planned(monkeypatch):
    """The times at which a plan was made."""
    times, plan = [], local.IncrementalPlanner.plan

    def counted(self, cluster: Cluster, now: float) -> Plan:
        times.append(now)
        return plan(self, cluster, now)

    monkeypatch.setattr(local.IncrementalPlanner, "plan", counted)
    return times


def test_the_same_snapshot_is_planned_once_until_the_review(planned):
    engine = local.LocalEngine()
    for second in range(25):
        assert not engine.decide(replace(CLUSTER, lags_gpu_s={"p": float(second)}), 100.0 + second).actions
    assert planned == [100.0, 110.0, 120.0]


def test_every_change_of_the_snapshot_is_planned(planned):
    engine = local.LocalEngine()
    engine.decide(CLUSTER, 100.0)
    engine.decide(replace(CLUSTER, leases=(SESSION,)), 101.0)
    engine.decide(replace(CLUSTER, projects=(project("p", 0.5),)), 102.0)
    assert planned == [100.0, 101.0, 102.0]


def test_a_plan_is_made_anew_when_time_alone_changes_it(planned):
    engine = local.LocalEngine()
    idle = replace(SESSION, idle_since_at=0.0, used_bytes=1)
    at = replace(CLUSTER, leases=(idle, WAITING))
    assert not engine.decide(at, 897.0).actions
    assert not engine.decide(at, 899.0).actions
    assert engine.decide(at, 900.0).actions, "idle for long enough"
    assert planned == [897.0, 900.0]


def test_actions_are_decided_again_until_they_are_carried_out(planned):
    engine = local.LocalEngine()
    free = replace(CLUSTER, leases=(WAITING,))
    for now in (100.0, 101.0):
        assert isinstance(engine.decide(free, now).actions[0], Grant)
    assert planned == [100.0, 101.0]


async def test_an_idle_broker_with_a_queue_does_not_plan_every_second(site, broker, planned):
    running = await site.submit("bo", "2", program=Program(work_s=500))
    for _ in range(3):
        await site.submit("bo", "2")
    await until(lambda: broker.state(running) == "running", 60)
    await until(lambda: not broker.loop.effects.tasks, 60)
    planned.clear()
    ends = site.now + 100
    await until(lambda: site.now >= ends, 200)
    assert len(planned) <= 100 / local.KEEP_S + 2


async def test_waiting_jobs_are_in_the_snapshot_as_they_are_now(site):
    broker = await site.start_broker(running=False)
    registry = broker.registry
    await broker.loop.observer.measure()

    def waiting():
        return snapshot.cluster(registry, broker.engine, site.now).leases

    first = await site.submit("bo", "2")
    (before,) = waiting()
    assert waiting()[0] is before, "made once"
    registry.hub_backoff_until = site.now + 5
    assert waiting()[0].retry_at == site.now + 5
    second = await site.submit("bo", "1")
    assert {x.id for x in waiting()} == {first.lease_id, second.lease_id}
    await broker.requests.cancel(first)
    assert [x.id for x in waiting()] == [second.lease_id]
    assert set(registry.index.queued) == {second.lease_id}
    assert not registry.index.placed
