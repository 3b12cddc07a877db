"""What the broker's database says of times when the machine has started again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sqlalchemy as sa

from jupyter_gpushare.broker.state.policy import Policy
from jupyter_gpushare.broker.state.records import LeaseRecord
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.core.model import Kind, Lease, State
from jupyter_gpushare.core.size import Size
from tests.broker.stored import LEASE


async def test_moments_of_another_boot_start_anew_but_not_those_of_waiting(database):
    store = database("one")
    await store.commit([LEASE])
    store.close()
    store = database("two")
    wall = "2025-01-02T03:05:04.678Z"  # 59 s after the lease entered its state, at 7.5 of boot one
    registry = Registry(store, Policy(projects=()), clock=lambda: 3.0, wall=lambda: wall)
    registry.load("two")
    record = registry.leases[LEASE.id]
    lease = record.lease
    assert (lease.submitted_at, lease.queued_at, lease.waits_since_at) == (-62.0, -61.0, -60.75)
    assert (lease.granted_at, lease.keep_until_at, lease.attained_at) == (3.0, 0.0, 3.0)
    assert (record.entered_at, record.since_at) == (3.0, wall)
    assert record.uncounted_s(5.0) == 2.0
    registry.journal.failed.cancel()


@pytest.mark.parametrize(
    ("walls", "waited"),
    [
        (("2025-01-01T10:02:00.000Z", "2025-01-01T10:05:00.000Z"), (300.0, 280.0)),
        # A clock that lost its time: the order and the differences stay.
        (("1970-01-01T00:00:00.000Z", "1970-01-01T00:00:10.000Z"), (20.0, 0.0)),
    ],
)
async def test_waiting_jobs_keep_their_order_and_waits_through_two_reboots(database, walls, waited):
    store = database("one")

    def job(name: str, at: float, since_at: str) -> LeaseRecord:
        lease = Lease(id=name, project="nlp", kind=Kind.TRAIN, size=Size(1000))
        lease = replace(lease, submitted_at=at, queued_at=at, waits_since_at=at)
        return LeaseRecord(lease=lease, attempt=0, since_at=since_at, entered_at=at)

    first = job("jb", 1000.0, "2025-01-01T10:00:00.000Z")
    await store.commit([first, job("ja", 1020.0, "2025-01-01T10:00:20.000Z")])
    store.close()
    for boot, now, wall in (("two", 30.0, walls[0]), ("three", 5.0, walls[1])):
        store = database(boot)
        registry = Registry(
            store, Policy(projects=()), clock=lambda now=now: now, wall=lambda wall=wall: wall
        )
        registry.load(boot)
        registry.journal.failed.cancel()
        store.close()
    leases = [registry.leases[name].lease for name in ("jb", "ja")]
    assert tuple(now - lease.waits_since_at for lease in leases) == waited
    assert tuple(now - lease.queued_at for lease in leases) == waited


async def test_no_wait_is_in_the_future_of_the_new_boot(database):
    store = database("one")
    lease = replace(LEASE.lease, state=State.PENDING, queued_at=9.0)  # moved in the queue after it came
    await store.commit([replace(LEASE, lease=lease)])
    store.close()
    store = database("two")
    registry = Registry(store, Policy(projects=()), clock=lambda: 3.0, wall=lambda: LEASE.since_at)
    registry.load("two")
    assert registry.leases[LEASE.id].lease.queued_at == 3.0
    registry.journal.failed.cancel()


async def test_a_long_queue_is_stored_at_once_after_a_reboot(database):
    store, queue = (
        database("one"),
        [replace(LEASE, lease=replace(LEASE.lease, id=f"j{n}")) for n in range(50)],
    )
    await store.commit(queue)
    before = store.load().leases
    written: list[bool] = []

    def note(_connection, _cursor, statement, _parameters, _context, executemany):
        if "UPDATE leases" in statement:
            written.append(executemany)

    sa.event.listen(store._engine, "before_cursor_execute", note)
    later = [replace(record, entered_at=9.0) for record in before]
    store.begin_boot("two", later)
    loaded = store.load()
    assert written == [True]
    assert loaded.boot_id == "two"
    assert {each.id: each for each in loaded.leases} == {each.id: each for each in later}


async def test_moments_of_this_boot_survive_a_second_start(database):
    """Else the second broker would take moments of the old boot for this one's."""
    store = database("one")
    await store.commit([LEASE])
    store.close()
    for now in (3.0, 9.0):
        store = database("two")
        registry = Registry(store, Policy(projects=()), clock=lambda now=now: now)
        registry.load("two")
        record = registry.leases[LEASE.id]
        assert (record.entered_at, record.lease.granted_at, record.lease.attained_at) == (3.0, 3.0, 3.0)
        registry.journal.failed.cancel()
        store.close()


async def test_a_start_that_is_cut_short_before_the_new_moments_are_stored_begins_again(database):
    store = database("one")
    await store.commit([LEASE])
    store.close()
    database("two").close()
    store = database("two")
    assert store.load().boot_id == "one"
