"""The broker's database: durable, alone, never misread."""

from __future__ import annotations

import errno
import os
import socket
import traceback
from dataclasses import fields, replace

import pytest
import sqlalchemy as sa

from jupyter_gpushare.broker.state import store as store_module
from jupyter_gpushare.broker.state import tables
from jupyter_gpushare.broker.state.policy import Policy
from jupyter_gpushare.broker.state.registry import Registry
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.core.model import Kind, Lease, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import DiskFull, StoreError
from tests.broker.disks import SmallDisk
from tests.broker.stored import DECISION, JOB, LAGS, LEASE, OVERRIDE, RECORDS, USAGE, USER_LAGS


def test_the_examples_differ_from_every_default():
    """Else a column that is not stored would come back right by chance."""
    plain = Lease(id="x", project="p", kind=Kind.BUILD, size=Size())
    measured = {
        "idle_since_at",
        "wanted",
        "retry_at",
        "avoids",  # a memory of the observations, which are not stored, like the next
        "made_way_for",
        "movable",
        "used_bytes",
        "duration_s",
        "consolidate",
        "idle_timeout_s",
        "notice_s",
        "left_gpu_s",
        "trusted_until_gpu_s",
        "spare_bytes",
        "needs_bytes",
        "pair_key",
        "waits",  # of places in the queue of sessions, which are not stored
    }
    same = {f.name for f in fields(Lease) if getattr(plain, f.name) == getattr(LEASE.lease, f.name)}
    assert same <= measured


async def test_every_record_comes_back_as_it_was(database):
    store = database()
    await store.commit(RECORDS)
    store.close()
    store = database()
    loaded = store.load()
    assert loaded.leases == (LEASE,)
    assert loaded.jobs == (JOB,)
    assert loaded.decisions == (DECISION,)
    assert loaded.overrides == (OVERRIDE,)
    assert loaded.usage == (USAGE,)
    assert loaded.meta.lags == LAGS
    assert loaded.meta.users == USER_LAGS


async def test_a_changed_record_replaces_the_old_one(store):
    await store.commit([LEASE, JOB])
    await store.commit([replace(LEASE, note="new"), replace(JOB, done=2.5)])
    loaded = store.load()
    assert [x.note for x in loaded.leases] == ["new"]
    assert [x.done for x in loaded.jobs] == [2.5]


async def test_ended_leases_are_not_loaded_but_ended_jobs_are(store):
    gone = replace(LEASE, lease=replace(LEASE.lease, state=State.RELEASED))
    await store.commit([gone, replace(JOB, result="failed")])
    loaded = store.load()
    assert loaded.leases == ()
    assert [j.result for j in loaded.jobs] == ["failed"]


def test_sqlite_runs_with_wal_and_full(sqlite):
    with sqlite._engine.connect() as connection:
        assert connection.execute(sa.text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(sa.text("PRAGMA synchronous")).scalar() == 2


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
    named = rf"another broker uses .*process {os.getpid()} on {socket.gethostname()[:20]} since 20"
    with pytest.raises(StoreError, match=named):
        database()
    first.close()
    database()


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


def test_others_cannot_read_the_database(sqlite, tmp_path):
    assert (tmp_path / "b.sqlite").stat().st_mode & 0o077 == 0


async def test_a_broker_that_another_one_followed_can_store_nothing_more(store):
    """Should its lock be lost (PostgreSQL restarted), the epoch still tells it."""
    await store.commit([LEASE])
    with store._engine.begin() as connection:
        connection.execute(sa.text("update meta set value = '2' where key = 'epoch'"))
    with pytest.raises(StoreError, match="a newer broker"):
        await store.commit([replace(LEASE, note="late")])
    assert [x.note for x in store.load().leases] == [LEASE.note]


async def test_a_failed_commit_stores_nothing_and_ends_the_broker(store):
    registry = Registry(store, Policy(projects=()), clock=lambda: 0.0)
    await store.commit([DECISION])
    with pytest.raises(StoreError, match="a commit failed"):
        await registry.journal.commit(LEASE, DECISION)  # the same number twice
    with pytest.raises(StoreError):
        await registry.journal.failed
    assert store.load().leases == ()


async def test_a_full_disk_refuses_every_commit_until_one_succeeds_again(sqlite):
    disk = SmallDisk(sqlite)
    disk.fill()
    with pytest.raises(DiskFull):
        await sqlite.commit([replace(JOB, env={"A": "x" * 1_000_000})])
    with pytest.raises(DiskFull):
        await sqlite.commit([LEASE])  # small, but it may rest on the one that was refused
    disk.clear()
    with pytest.raises(DiskFull):
        await sqlite.commit([LEASE])
    await sqlite.retry()
    await sqlite.commit([LEASE])
    assert sqlite.load().jobs == ()
    assert sqlite.load().leases == (LEASE,)


async def test_an_epoch_that_a_full_disk_refused_is_taken_once_there_is_space(sqlite):
    disk = SmallDisk(sqlite)
    disk.fill_all()
    with pytest.raises(DiskFull):
        sqlite.raise_epoch(50)
    assert sqlite.epoch == 1
    disk.clear()
    await sqlite.retry()
    sqlite.raise_epoch(50)
    await sqlite.commit([LEASE])
    assert (sqlite.epoch, sqlite.load().leases) == (50, (LEASE,))


async def test_an_epoch_lets_no_commit_pass_one_that_was_refused(sqlite):
    disk = SmallDisk(sqlite)
    disk.fill_all()
    with pytest.raises(DiskFull):
        await sqlite.commit([LEASE])
    disk.clear()
    with pytest.raises(DiskFull):
        sqlite.raise_epoch(50)
    with pytest.raises(DiskFull):
        await sqlite.commit([LEASE])


def test_a_broker_that_cannot_start_says_that_its_disk_is_full(tmp_path, monkeypatch):
    (tmp_path / "broker.sqlite").write_bytes(b"cut short" * 1000)
    monkeypatch.setattr(store_module, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(StoreError, match=r"cannot be used: .*; its disk is full"):
        Store(f"sqlite:///{tmp_path / 'broker.sqlite'}", "boot")


async def test_a_disk_that_does_not_answer_ends_the_broker(sqlite, monkeypatch):

    def statvfs(_path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "statvfs", statvfs)
    with pytest.raises(StoreError, match="Input/output error"):
        await sqlite.commit([LEASE])


async def test_nothing_is_written_when_the_last_of_the_space_would_be_used(sqlite, monkeypatch):
    monkeypatch.setattr(store_module, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(DiskFull):
        await sqlite.commit([LEASE])
    monkeypatch.undo()
    await sqlite.retry()


async def test_old_decisions_and_ended_jobs_are_dropped(database, monkeypatch):
    monkeypatch.setattr(tables, "MAX_DECISIONS", 10)
    monkeypatch.setattr(tables, "MAX_ENDED", 3)
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
    assert [d.seq for d in loaded.decisions] == list(range(991, 1001))
    assert {j.id for j in loaded.jobs} == {"lives", "job2", "job3", "job4"}


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


async def test_no_error_quotes_a_row_or_the_password_of_the_database(store):
    """Rows are jobs with their secrets, and errors go to the log."""
    secret = replace(JOB, env={"TOKEN": "hush"})
    await store.commit([secret])
    with pytest.raises(StoreError, match="a commit failed") as refused:
        await store.commit([replace(secret, id="another")])  # the same key twice
    with pytest.raises(StoreError, match="a commit failed") as missing:
        await store.commit([replace(secret, id="third", idempotency_key=None, name=None)])
    said = "".join("".join(traceback.format_exception(x.value)) for x in (refused, missing))
    assert "hush" not in said
    with pytest.raises(StoreError, match="cannot be used") as unreachable:
        Store("postgresql+psycopg://gpushare:hush@/none?host=/nonexistent", "boot")
    assert "hush" not in str(unreachable.value)


async def test_a_job_is_found_by_its_owner_however_long_ago_it_ended(store):
    await store.commit([JOB])
    assert await store.job(JOB.id, JOB.user) == JOB
    assert await store.job(JOB.id, None) == JOB
    assert await store.job(JOB.id, "ada") is None
    assert await store.job("another", None) is None
