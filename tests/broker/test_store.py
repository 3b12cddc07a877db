"""The broker's database: durable, alone, never misread."""

from __future__ import annotations

import sqlite3
import traceback
from dataclasses import fields, replace
from datetime import date, timedelta
from pathlib import Path

import alembic.autogenerate
import alembic.command
import alembic.config
import alembic.migration
import pytest
import sqlalchemy as sa

from jupyter_gpushare.broker.state import rows
from jupyter_gpushare.broker.state import store as store_module
from jupyter_gpushare.broker.state.policy import Policy
from jupyter_gpushare.broker.state.records import (
    DecisionRecord,
    JobRecord,
    Lags,
    LeaseRecord,
    ProjectOverride,
    UsageRecord,
)
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.broker.state.tables import metadata
from jupyter_gpushare.broker.state.usage import Amounts, UsageQuery
from jupyter_gpushare.core.model import CheckpointMode, Kind, Lease, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import DiskFull, StoreError
from jupyter_gpushare.protocol.wire import Text
from tests.broker.disks import SmallDisk

LEASE = LeaseRecord(
    lease=Lease(
        id="jabcdefghij",
        project="nlp",
        kind=Kind.TRAIN,
        size=Size(333, 2, 3 << 33, "1g.10gb"),
        user="bö",
        server="s",
        state=State.SUSPENDED,
        devices=("GPU-1", "GPU-0"),
        held_milli=334,
        priority=-7,
        survival=CheckpointMode.SIGTERM,
        submitted_at=1.5,
        queued_at=2.5,
        waits_since_at=2.75,
        granted_at=3.5,
        keep_until_at=4.5,
        lend_now=True,
        suspendable=False,
        saved_bytes=5 << 33,
        attained_gpu_s=6.25,
        attained_at=2.25,
        turns=2,
        cancelled=True,
        borrow=False,
        borrowed=True,
    ),
    uid=4_000_000_000,
    attempt=3,
    since_at="2025-01-02T03:04:05.678Z",
    entered_at=7.5,
    counted_at=8.5,
    why="idle",
    requeue=True,
    note="a note",
    given_to="nlp",
    suspend_reason="IPC",
    limits={"GPU-1": 1 << 36, "GPU-0": 1},
    tries=2,
)
JOB = JobRecord(
    id="abcdefghij",
    user="bö",
    project="nlp",
    name="train",
    command=("python", "a b", ""),
    cwd="/home/bo",
    env={"A": "1", "B": "é"},
    retries=3,
    grace_s=7.5,
    request='{"command":[]}',
    submitted_at="2025-01-02T03:04:05.678Z",
    started_at="2025-01-02T03:04:06.678Z",
    ended_at=None,
    result="",
    exit_code=-15,
    stopped=True,
    reason="because",
    reason_texts=(Text(key="job.ended_with", args=["2"]),),
    attempts=1,
    failures=2,
    preemptions=4,
    ran_s=8.5,
    done=1.5,
    total=9.5,
    idempotency_key="k",
    request_digest="5f",
)
DECISION = DecisionRecord(
    seq=1,
    at="2025-01-02T03:04:05.678Z",
    lease="jabcdefghij",
    user="bö",
    project="nlp",
    action="suspend",
    why="idle",
    for_lease="bxyz",
    sentence="it sleeps for 5 s",
    texts=(Text(key="verbatim", args=[Text(key="duration.seconds", args=["5"])]),),
)
OVERRIDE = ProjectOverride(name="nlp", quota_milli=1500, weight=2, limit_milli=None)
USAGE = UsageRecord(
    day="2025-01-02",
    user="bö",
    project="nlp",
    gpu="NVIDIA H200",
    used_gpu_s=1.5,
    computing_gpu_s=0.75,
    borrowed_gpu_s=0.25,
    lent_gpu_s=2.5,
    saved_gib_s=3.5,
    kept_s=4.5,
)
LAGS = Lags(gpu_s={"nlp": -1.5, "bö": 1.5})
RECORDS = (LEASE, JOB, DECISION, OVERRIDE, USAGE, LAGS)


def url(folder) -> str:
    return f"sqlite:///{folder / 'b.sqlite'}"


def opened(folder, boot="boot"):
    return Store(url(folder), boot)


def test_the_examples_differ_from_every_default():
    """Else a column that is not stored would come back right by chance."""
    plain = Lease(id="x", project="p", kind=Kind.BUILD, size=Size())
    measured = {
        "idle_since_at",
        "wanted",
        "retry_at",
        "used_bytes",
        "duration_s",
        "consolidate",
        "idle_timeout_s",
        "left_gpu_s",
        "trusted_until_gpu_s",
    }
    same = {f.name for f in fields(Lease) if getattr(plain, f.name) == getattr(LEASE.lease, f.name)}
    assert same <= measured


async def test_every_record_comes_back_as_it_was(database):
    store = database()
    await store.commit(RECORDS)
    store.close()
    store = database()
    loaded = store.load()
    store.close()
    assert loaded.leases == (LEASE,)
    assert loaded.jobs == (JOB,)
    assert loaded.decisions == (DECISION,)
    assert loaded.overrides == (OVERRIDE,)
    assert loaded.usage == (USAGE,)
    assert loaded.meta.lags == LAGS


async def test_a_changed_record_replaces_the_old_one(database):
    store = database()
    await store.commit([LEASE, JOB])
    await store.commit([replace(LEASE, note="new"), replace(JOB, done=2.5)])
    loaded = store.load()
    store.close()
    assert [x.note for x in loaded.leases] == ["new"]
    assert [x.done for x in loaded.jobs] == [2.5]


async def test_ended_leases_are_not_loaded_but_ended_jobs_are(database):
    store = database()
    gone = replace(LEASE, lease=replace(LEASE.lease, state=State.RELEASED))
    await store.commit([gone, replace(JOB, result="failed")])
    loaded = store.load()
    store.close()
    assert loaded.leases == ()
    assert [j.result for j in loaded.jobs] == ["failed"]


def test_sqlite_runs_with_wal_and_full(tmp_path):
    store = opened(tmp_path)
    with store._engine.connect() as connection:
        assert connection.execute(sa.text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(sa.text("PRAGMA synchronous")).scalar() == 2
    store.close()


def test_a_database_that_refuses_wal_is_refused(tmp_path, monkeypatch):
    class Refuses:
        def cursor(self):
            return self

        def execute(self, what):
            self.what = what
            return self

        def fetchone(self):
            return ("delete",) if "journal" in self.what else (2,)

        def close(self):
            pass

    with pytest.raises(StoreError, match="WAL with synchronous=FULL"):
        store_module._sqlite_pragmas(Refuses(), None)


def test_a_second_broker_on_the_same_database_is_told_so(database):
    first = database()
    with pytest.raises(StoreError, match="another broker uses"):
        database()
    first.close()
    database().close()


def test_every_start_has_a_higher_epoch(database):
    epochs = []
    for _ in range(3):
        store = database()
        epochs.append(store.epoch)
        store.close()
    assert epochs == [1, 2, 3]


def test_the_boot_of_the_last_broker_is_told(database):
    database("one").close()
    store = database("two")
    assert store.load().boot_id == "one"
    store.close()


def test_a_newer_schema_is_refused_and_left_alone(tmp_path):
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / "b.sqlite") as connection:
        connection.execute("update alembic_version set version_num = '9999'")
    connection.close()
    with pytest.raises(StoreError, match="newer version"):
        opened(tmp_path)
    with sqlite3.connect(tmp_path / "b.sqlite") as connection:
        assert connection.execute("select version_num from alembic_version").fetchall() == [("9999",)]
    connection.close()


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "b.sqlite").write_bytes(b"not a database at all" * 500)
    with pytest.raises(StoreError, match="cannot be used"):
        opened(tmp_path)


@pytest.mark.parametrize("memory", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(memory):
    with pytest.raises(StoreError, match="must be a file"):
        Store(memory, "boot")


def test_others_cannot_read_the_database(tmp_path):
    opened(tmp_path).close()
    assert (tmp_path / "b.sqlite").stat().st_mode & 0o077 == 0


def test_migrations_give_exactly_the_tables_of_the_code(database):
    store = database()
    with store._engine.connect() as connection:
        context = alembic.migration.MigrationContext.configure(connection, opts={"compare_type": True})
        assert alembic.autogenerate.compare_metadata(context, metadata) == []
    store.close()


async def test_a_broker_that_another_one_followed_can_store_nothing_more(database):
    """Should its lock be lost (PostgreSQL restarted), the epoch still tells it."""
    first = database()
    await first.commit([LEASE])
    with first._engine.begin() as connection:
        connection.execute(sa.text("update meta set value = '2' where key = 'epoch'"))
    with pytest.raises(StoreError, match="a newer broker"):
        await first.commit([replace(LEASE, note="late")])
    assert [x.note for x in first.load().leases] == [LEASE.note]
    first.close()


async def test_a_failed_commit_stores_nothing_and_ends_the_broker(database):
    store = database()
    registry = Registry(store, Policy(projects=()), clock=lambda: 0.0)
    await store.commit([DECISION])
    with pytest.raises(StoreError, match="a commit failed"):
        await registry.journal.commit(LEASE, DECISION)  # the same number twice
    with pytest.raises(StoreError):
        await registry.journal.failed
    assert store.load().leases == ()
    store.close()


async def test_a_full_disk_refuses_every_commit_until_one_succeeds_again(tmp_path):
    store = opened(tmp_path)
    disk = SmallDisk(store)
    disk.fill()
    with pytest.raises(DiskFull):
        await store.commit([replace(JOB, env={"A": "x" * 1_000_000})])
    with pytest.raises(DiskFull):
        await store.commit([LEASE])  # small, but it may rest on the one that was refused
    disk.clear()
    with pytest.raises(DiskFull):
        await store.commit([LEASE])
    await store.retry()
    await store.commit([LEASE])
    assert store.load().jobs == ()
    assert store.load().leases == (LEASE,)
    store.close()


async def test_nothing_is_written_when_the_last_of_the_space_would_be_used(tmp_path, monkeypatch):
    store = opened(tmp_path)
    monkeypatch.setattr(store_module, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(DiskFull):
        await store.commit([LEASE])
    monkeypatch.undo()
    await store.retry()
    store.close()


async def test_old_decisions_and_ended_jobs_are_dropped(database, monkeypatch):
    monkeypatch.setattr(rows, "MAX_DECISIONS", 10)
    monkeypatch.setattr(rows, "MAX_ENDED", 3)
    store = database()
    for number in range(5):
        await store.commit(
            [
                replace(
                    JOB,
                    id=f"job{number}",
                    idempotency_key=None,
                    result="failed",
                    submitted_at=f"2025-01-0{number + 1}",
                )
            ]
        )
    await store.commit([replace(JOB, id="lives", idempotency_key=None, submitted_at="2024-01-01")])
    for seq in (*range(980, 1001),):
        await store.commit([replace(DECISION, seq=seq)])
    loaded = store.load()
    store.close()
    assert [d.seq for d in loaded.decisions] == list(range(991, 1001))
    assert {j.id for j in loaded.jobs} == {"lives", "job2", "job3", "job4"}


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
    store.close()


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
    store.close()


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
    store.close()


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
    store.close()


async def test_only_the_broker_with_the_stored_epoch_can_raise_it(database):
    store = database()
    store.raise_epoch(7)
    await store.commit([LEASE])
    with store._engine.begin() as connection:
        connection.execute(sa.text("update meta set value = '8' where key = 'epoch'"))
    with pytest.raises(StoreError, match="a newer broker"):
        store.raise_epoch(9)
    assert store.epoch == 7
    store.close()
    store = database()
    assert store.epoch == 9
    store.close()


async def test_no_error_quotes_a_row_or_the_password_of_the_database(database):
    """Rows are jobs with their secrets, and errors go to the log."""
    store = database()
    secret = replace(JOB, env={"TOKEN": "hush"})
    await store.commit([secret])
    with pytest.raises(StoreError, match="a commit failed") as refused:
        await store.commit([replace(secret, id="another")])  # the same key twice
    with pytest.raises(StoreError, match="a commit failed") as missing:
        await store.commit([replace(secret, id="third", idempotency_key=None, name=None)])
    store.close()
    said = "".join("".join(traceback.format_exception(x.value)) for x in (refused, missing))
    assert "hush" not in said
    with pytest.raises(StoreError, match="cannot be used") as unreachable:
        Store("postgresql+psycopg://gpushare:hush@/none?host=/nonexistent", "boot")
    assert "hush" not in str(unreachable.value)


async def test_a_job_is_found_by_its_owner_however_long_ago_it_ended(database):
    store = database()
    await store.commit([JOB])
    assert await store.job(JOB.id, JOB.user) == JOB
    assert await store.job(JOB.id, None) == JOB
    assert await store.job(JOB.id, "ada") is None
    assert await store.job("another", None) is None
    store.close()


async def test_use_of_a_day_is_replaced_and_kept_for_400_days(database):
    """A day in the future, of a wrong clock, is one of them and drops no more than one."""
    store = database()
    last = date(2025, 3, 1)
    days = [(last - timedelta(days=n)).isoformat() for n in range(401, -1, -1)]
    await store.commit([replace(USAGE, day=day) for day in days])
    await store.commit([replace(USAGE, day=days[-1], used_gpu_s=9.0)])
    everything = UsageQuery(since="2000-01-01", until="2100-01-01", by=("day",))
    found = await store.usage(everything, "2100-01-01", 1000)
    assert [day for (day,), _ in found] == days[2:]
    assert [amounts.used_gpu_s for _, amounts in found] == [*[1.5] * 399, 9.0]
    await store.commit([replace(USAGE, day="2099-01-01")])
    found = await store.usage(everything, "2100-01-01", 1000)
    store.close()
    assert [day for (day,), _ in found] == [*days[3:], "2099-01-01"]


async def test_only_the_newest_week_of_use_is_loaded(database):
    store = database()
    days = [f"2025-01-{n:02}" for n in range(1, 11)]
    await store.commit([replace(USAGE, day=day, gpu=gpu) for day in days for gpu in ("A", "B")])
    loaded = store.load()
    store.close()
    assert sorted({u.day for u in loaded.usage}) == days[-7:]
    assert len(loaded.usage) == 14


async def test_use_is_added_up_by_what_is_asked_for(database):
    store = database()
    rows_of = [
        replace(USAGE, day=day, user=user, gpu=gpu, used_gpu_s=1.0)
        for day in ("2025-01-31", "2025-02-01")
        for user in ("ada", "bo")
        for gpu in ("A", "B")
    ]
    await store.commit(rows_of)
    query = UsageQuery(since="2025-01-01", until="2025-12-31", by=("month", "user"))
    by_month = await store.usage(query, "2025-12-31", 10)
    assert [(group, amounts.used_gpu_s) for group, amounts in by_month] == [
        ((month, user), 2.0) for month in ("2025-01", "2025-02") for user in ("ada", "bo")
    ]
    ada = await store.usage(replace(query, by=("gpu",), user="ada"), "2025-02-01", 10)
    none = await store.usage(replace(query, project="vision"), "2025-12-31", 10)
    store.close()
    assert (ada, none) == (
        [(("A",), Amounts(1.0, 0.75, 0.25, 2.5)), (("B",), Amounts(1.0, 0.75, 0.25, 2.5))],
        [],
    )


def test_use_of_an_earlier_version_is_kept_without_a_model(database):
    store = database()
    with store._engine.begin() as connection:
        config = alembic.config.Config()
        config.set_main_option("script_location", str(Path(store_module.__file__).parent / "migrations"))
        config.attributes["connection"] = connection
        alembic.command.downgrade(config, "0016")
        row = {"day": "2025-01-02", "user": "bo", "project": "nlp", "used": 1.5}
        said = 'INSERT INTO usage (day, "user", project, used_gpu_s, lent_gpu_s, saved_gib_s, kept_s)'
        connection.execute(sa.text(f"{said} VALUES (:day, :user, :project, :used, 2, 3, 4)"), row)
    store.close()
    store = database()
    (kept,) = store.load().usage
    store.close()
    assert kept == UsageRecord(
        day="2025-01-02", user="bo", project="nlp", used_gpu_s=1.5, lent_gpu_s=2, saved_gib_s=3, kept_s=4
    )


def test_migrations_are_one_row_without_a_number_twice():
    folder = Path(store_module.__file__).parent / "migrations" / "versions"
    numbers = sorted(path.name.partition("_")[0] for path in folder.glob("[0-9]*.py"))
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]
