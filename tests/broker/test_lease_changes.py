"""Leases change through typed transitions and edits of the registry, and nowhere else."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpushare.broker.state import transitions
from jupyter_gpushare.broker.state.observations import Observation
from jupyter_gpushare.broker.state.transitions import Released, Stopping, Transition, cancelled
from jupyter_gpushare.core.model import HOLDS_CAPACITY, LEAVING, LeaseEvent, State
from jupyter_gpushare.errors import Conflict
from jupyter_gpushare.protocol.helper import EventKind, MoveResult, Refusal
from tests.broker.machine import Program
from tests.broker.virtual_time import until


def test_every_event_of_a_lease_has_one_transition() -> None:
    kinds = [kind for kind in vars(transitions).values() if isinstance(kind, type)]
    events = [kind.event for kind in kinds if issubclass(kind, Transition) and kind is not Transition]
    assert sorted(events) == sorted(LeaseEvent)


async def test_no_other_module_can_put_a_lease_or_a_job_into_the_registry(site, broker):
    job = await site.submit("bo", "2")
    registry = broker.registry
    for records, key in (
        (registry.leases, job.lease_id),
        (registry.jobs, job.id),
        (registry.observations, job.lease_id),
    ):
        with pytest.raises(TypeError):
            records[key] = records[key]


async def test_a_lease_that_has_ended_does_not_come_back_by_a_late_change(site, broker):
    job = await site.submit("bo", "2", program=Program(work_s=5))
    old = broker.lease(job)
    await until(lambda: broker.job(job).result, 60)
    for late in (
        broker.registry.edit(old, cancelled),
        broker.registry.advance(old, Released()),
        broker.registry.want(old),
    ):
        with pytest.raises(Conflict, match="has ended"):
            await late
    assert broker.registry.leases == {}


async def test_an_impossible_transition_changes_nothing(site, broker):
    job = await site.submit("bo", "2")
    before = broker.lease(job)
    if before.state is State.PENDING:
        with pytest.raises(Conflict):
            broker.registry.move(before, Stopping())
        assert broker.lease(job) == before


@pytest.mark.parametrize("state", State)
def test_a_request_to_wake_counts_only_while_the_lease_is_away(state: State) -> None:
    observation = Observation()
    is_away = state in (State.SUSPENDING, State.SUSPENDED, State.RESUMING)
    assert observation.want(state, 1.0) is observation.wanted is is_away
    assert not observation.want(state, 2.0), "a request that is known is no news"
    observation.wanted_at = 1.0
    observation.enter(state)
    assert observation.wanted is (state in (State.SUSPENDED, State.RESUMING))


def test_a_lease_that_keeps_its_devices_has_made_way_for_no_other() -> None:
    for state in HOLDS_CAPACITY - LEAVING:
        observation = Observation()
        observation.enter(State.SUSPENDING, "job")
        observation.enter(State.SUSPENDED)
        assert observation.made_way_for == "job"
        observation.enter(state)
        assert observation.made_way_for == "", state


async def test_a_session_that_has_its_gpu_does_not_show_that_it_wants_it(site, broker):
    ada = await site.session("ada", "1/2")
    await until(lambda: broker.state(ada.handle) == "running", 30)
    site.emit(EventKind.WANTED, ada.handle)
    await asyncio.sleep(3)
    assert not broker.shown(ada.handle).wanted
    # Nor after a suspension that was refused because of it.
    site.fault("suspend", MoveResult(done=False, refused=Refusal.BUSY, reason="it is busy"))
    await site.submit("bo", "2")
    await until(lambda: broker.state(ada.handle) == "suspending", 120)
    await broker.registry.want(broker.lease(ada.handle))
    await until(lambda: broker.state(ada.handle) == "running", 30)
    assert not broker.shown(ada.handle).wanted


async def test_a_job_that_waits_again_after_a_loss_says_so_in_a_sentence(site, broker):
    ada, work = await site.lent(program=Program(work_s=300))
    await site.gpu_cell(ada)
    await until(lambda: broker.state(work) == "suspended", 60)
    lost = MoveResult(done=False, refused=Refusal.LOST, reason="the driver lost a process")
    site.fault("resume", lost)
    seen: set[str] = set()

    def requeued() -> bool:
        seen.add(broker.seen(work).reason)
        return broker.lease(work).attempt == 2

    await until(requeued, 600, step_s=0.02)
    assert not [reason for reason in seen if "state_lost" in reason]
    assert any("its GPU memory could not be brought back" in reason for reason in seen)
    assert not broker.lease(work).lost
