"""A suspended lease resumes on another GPU of its machine: the record is where the device helper has it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jupyter_gpushare.broker.control import snapshot
from jupyter_gpushare.broker.engine.local import LocalOutlook
from jupyter_gpushare.broker.state.records import JobRecord
from jupyter_gpushare.broker.views import history
from jupyter_gpushare.core.model import Action, Cluster, Plan, Resume, Suspend, Why
from jupyter_gpushare.errors import HelperError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.protocol.helper import MoveResult, Phase, Refusal
from tests.broker.brokers import Broker
from tests.broker.machine import Held, Program
from tests.broker.site import Site, spawn
from tests.broker.virtual_time import until

LONG = Program(work_s=10_000)


def decide(broker: Broker, *actions: Action) -> None:
    """Let the engine of a broker decide this once, and nothing else."""
    left = [actions]

    def decided(cluster: Cluster, now: float) -> Plan:
        return Plan(actions=left.pop() if left else ())

    broker.engine.decide = decided  # type: ignore[method-assign]
    broker.registry.changed.set()


async def paused(site: Site, broker: Broker, **more: object) -> tuple[JobRecord, Held]:
    """Return a job of bo on one GPU that is suspended; the other GPU is free."""
    job = await site.running("bo", "1", program=LONG, **more)
    held = site.held[broker.lease(job).handle]
    await until(lambda: held.used, 10)
    decide(broker, Suspend(job.lease_id, Why.OVER_QUOTA, ""))
    await until(lambda: broker.state(job) == "suspended", 30)
    return job, held


def other(held: Held) -> tuple[str]:
    return ("GPU-1",) if list(held.limits) == ["GPU-0"] else ("GPU-0",)


def asleep(site: Site, held: Held) -> None:
    held.place_on(other(held))


def agrees(broker: Broker, held: Held) -> bool:
    """Whether record and helper have a lease on the same devices with the same limits."""
    record = broker.lease(held.handle)
    return record.limits == held.limits and record.lease.devices == tuple(held.limits)


async def test_a_job_moves_with_its_limits_and_its_owner_reads_so(site, broker):
    job, held = await paused(site, broker)
    saved, limit, there = sum(held.saved.values()), sum(held.limits.values()), other(held)
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK, there))
    await until(lambda: broker.state(job) == "running", 30)
    assert agrees(broker, held)
    assert (held.limits, held.used) == ({there[0]: limit}, {there[0]: saved})
    assert broker.shown(held.handle).devices == list(there)
    assert "It resumed on another GPU." in broker.seen(job).reason
    timeline = await history.timeline(broker.registry, broker.job(job), "bo")
    said = [(each.what, each.sentence_texts[0].key) for each in timeline.moments]
    assert ("resume", "notice.moved_job") in said
    assert any("resumed on another GPU" in each.sentence for each in broker.told(None, 10))


async def test_a_session_moves_and_its_variables_stay(site, broker):
    ada = await site.session("ada", "1/2")
    await until(lambda: broker.state(ada.handle) == "running", 10)
    lease = broker.lease(ada.handle).id
    decide(broker, Suspend(lease, Why.OVER_QUOTA, ""))
    await until(lambda: broker.state(ada.handle) == "suspended", 30)
    there = other(ada)
    decide(broker, Resume(lease, Why.WANTED, there))
    await until(lambda: broker.state(ada.handle) == "running", 30)
    assert agrees(broker, ada)
    assert "It resumed on another GPU; your variables stay." in broker.shown(ada.handle).sentence
    decide(broker, Suspend(lease, Why.OVER_QUOTA, ""))
    await until(lambda: broker.state(ada.handle) == "suspended", 30)
    decide(broker, Resume(lease, Why.WANTED))
    await until(lambda: broker.state(ada.handle) == "running", 30)
    assert tuple(ada.limits) == there
    assert "another GPU" not in broker.shown(ada.handle).sentence


async def test_a_refused_move_leaves_the_job_where_it_was(site, broker):
    job, held = await paused(site, broker)
    before = dict(held.limits)
    site.fault("resume", MoveResult(done=False, refused=Refusal.NO_MEMORY, reason="no room"))
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK, other(held)))
    await until(lambda: broker.lease(job).note == "no room", 30)
    assert broker.state(job) == "suspended"
    assert broker.lease(job).limits == held.limits == before
    avoided = broker.registry.observations[job.lease_id].avoids
    assert avoided.keys() == set(other(held))
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK))
    await until(lambda: broker.state(job) == "running", 30)
    assert agrees(broker, held)
    assert "another GPU" not in broker.seen(job).reason


@pytest.mark.parametrize(
    ("refused", "again"),
    [
        (Refusal.NOT_SUSPENDABLE, False),
        (Refusal.NONE, False),
        (Refusal.NO_MEMORY, True),
        (Refusal.BUSY, True),
    ],
)
async def test_a_job_that_cannot_move_is_planned_to_no_more(site, broker, refused, again):
    job, held = await paused(site, broker)
    site.fault("resume", MoveResult(done=False, refused=refused, reason="not there"))
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK, other(held)))
    await until(lambda: broker.lease(job).note == "not there", 30)
    assert await planned(broker, job.lease_id) is again
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK))
    await until(lambda: broker.state(job) == "running", 30)
    assert agrees(broker, held)


async def test_a_refused_move_that_had_begun_is_followed(site, broker):
    """The helper could not finish, and has the lease on the new device."""
    job, held = await paused(site, broker)
    there = other(held)
    site.fault("resume", MoveResult(done=False, refused=Refusal.BUSY, reason="half way"))
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK, there))
    asleep(site, held)
    await until(lambda: broker.lease(job).note == "half way", 30)
    assert broker.lease(job).lease.devices == there
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK))
    await until(lambda: broker.state(job) == "running", 30)
    assert agrees(broker, held)
    assert "It resumed on another GPU." in broker.seen(job).reason


async def test_a_move_without_an_answer_is_asked_again(site, broker):
    job, held = await paused(site, broker)
    there = other(held)
    site.fault("resume", HelperError("silent", "the device helper did not answer"))
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK, there))
    await until(lambda: broker.state(job) == "running", 30)
    assert tuple(held.limits) == there
    assert agrees(broker, held)
    assert site.effects.count(f"resume {held.handle}") == 2


async def test_what_a_job_left_is_free_and_what_it_moved_to_is_taken(site, broker):
    job, held = await paused(site, broker)
    here, there = tuple(held.limits), other(held)
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK, there))
    await until(lambda: broker.state(job) == "running", 30)
    del broker.engine.decide  # the real one plans again
    second = await site.running("cy", "1", program=LONG)
    third = await site.submit("cy", "1/2", program=LONG)
    await until(lambda: broker.lease(second).lease.devices == here, 30)
    assert broker.state(third) == "pending"


async def test_a_job_that_already_runs_where_it_was_is_not_said_to_have_moved(site, broker):
    job, held = await paused(site, broker)
    here = tuple(held.limits)
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK, other(held)))
    back, held.saved, held.phase = held.saved, {}, Phase.RUNNING
    site.use(held, back)
    await until(lambda: broker.state(job) == "running", 30)
    assert broker.lease(job).lease.devices == tuple(held.limits) == here
    assert "another GPU" not in broker.seen(job).reason


@pytest.mark.parametrize("steps", range(1, 7))
async def test_a_move_is_finished_by_the_next_broker(site, broker, steps):
    job, held = await paused(site, broker)
    there = other(held)
    broker.die_at = broker.steps + steps
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK, there))
    await until(lambda: broker.dead.is_set(), 30)
    await broker.end()
    broker = await site.start_broker()
    await until(lambda: broker.state(job) == "running", 30)
    assert held.phase is Phase.RUNNING
    assert agrees(broker, held)
    # Without a stored intent nothing has moved, and the job resumes where it was.
    assert broker.lease(job).moved == (tuple(held.limits) == there)
    assert site.started[job.id] == 1


def awake(site: Site, held: Held) -> None:
    asleep(site, held)
    back, held.saved = held.saved, {}
    held.phase = Phase.RUNNING
    site.use(held, back)


@pytest.mark.parametrize("found", [asleep, awake])
async def test_a_helper_that_has_a_job_moved_after_a_restart_is_followed(
    site: Site, broker: Broker, found: Callable[[Site, Held], None]
) -> None:
    job, held = await paused(site, broker)
    await broker.end()
    found(site, held)
    broker = await site.start_broker(running=False)
    decide(broker)
    broker.begin()
    await until(lambda: agrees(broker, held), 30)
    decide(broker, Resume(job.lease_id, Why.CAPACITY_BACK))
    await until(lambda: broker.state(job) == "running", 30)
    assert agrees(broker, held)
    assert "It resumed on another GPU." in broker.seen(job).reason
    assert site.started[job.id] == 1


async def planned(broker: Broker, lease_id: str) -> bool:
    """Return whether the planner may move a lease, once it is measured."""
    await until(lambda: broker.registry.observations[lease_id].sample, 10)
    registry = broker.registry
    return snapshot.measured(registry, registry.leases[lease_id], registry.clock()).movable


async def test_only_a_job_that_may_is_planned_to_move(site, broker):
    free = await site.running("bo", "1/2", program=LONG)
    bound = await site.running("bo", "1/2", program=LONG, move=False)
    assert await planned(broker, free.lease_id)
    assert not await planned(broker, bound.lease_id)
    site.held[broker.lease(free).handle].suspendable = False
    await until(lambda: not broker.registry.observations[free.lease_id].sample.suspendable, 30)
    assert not await planned(broker, free.lease_id)


async def test_a_session_within_walls_is_not_planned_to_move(site, broker):
    grant = await broker.start(wire.replace(spawn("ada", "1/2"), sees_all_gpus=False))
    site.held[grant.lease].alive = True
    assert not await planned(broker, broker.lease(grant.lease).id)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"movable": False}, False), ({"host": ""}, False), ({"profile": "1g.10gb"}, False)],
)
async def test_a_device_moves_only_on_one_machine_and_whole(site, change, expected):
    for name, value in change.items():
        setattr(site, name, value)
    broker = await site.start_broker()
    assert [device.movable for device in broker.registry.devices.for_planner()] == [expected] * 2


@pytest.mark.parametrize(
    ("options", "movable", "because"),
    [
        ({"move": False}, True, "it was submitted not to move"),
        ({}, False, "the driver cannot move it"),
    ],
)
async def test_a_job_that_may_not_move_reads_why_it_waits_beside_a_free_gpu(
    site, monkeypatch, options, movable, because
):
    site.movable = movable
    broker = await site.start_broker()
    job, _ = await paused(site, broker, **options)
    why = {job.lease_id: Why.OWN_DEVICES}
    monkeypatch.setattr(LocalOutlook, "why", property(lambda outlook: why))
    said = broker.seen(job).reason
    assert f"It waits for the GPU that it was on; it cannot move to another because {because}." in said
    assert "free" not in said
