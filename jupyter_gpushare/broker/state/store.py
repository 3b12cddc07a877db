"""The broker's database: SQLite by default, PostgreSQL by URL; never the Hub's.

Rules:

* An intent is committed before it is carried out.  Commits run on one thread of
  their own, off the event loop, in the order of the calls.
* SQLite runs with WAL and ``synchronous=FULL``, both read back at start: with
  less, acknowledged commits are lost in a power cut.
* A commit that fails is never retried: the pages in memory may be wrong by
  then.  `StoreError` ends the broker, and its parent starts it again.
* A full disk is no such failure: the database rolls the commit back before it
  syncs.  `DiskFull` refuses this and all queued commits until `retry` succeeds.
* One broker per database: a lock (a file beside SQLite, an advisory lock in
  PostgreSQL) is held for as long as the store is open, and each commit asks
  whether the epoch is still its own, should the lock have been lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from jupyter_gpushare.broker.state import schema
from jupyter_gpushare.broker.state.database_errors import brief, free_bytes, is_disk_full
from jupyter_gpushare.broker.state.records import (
    DecisionRecord,
    JobRecord,
    LeaseRecord,
    MachineUse,
    MetaValues,
    Owner,
    ProjectOverride,
    UsageRecord,
)
from jupyter_gpushare.broker.state.rows import Change, read_meta, update_leases, write, write_meta
from jupyter_gpushare.broker.state.tables import (
    decision_of,
    decisions,
    job_of,
    jobs,
    lease_of,
    leases,
    machine,
    meta,
    meta_values,
    owners,
    projects,
    usage,
    usage_select,
)
from jupyter_gpushare.broker.state.usage import AMOUNTS, WEEK_DAYS, Amounts, UsageQuery, UsageSum
from jupyter_gpushare.core.model import State
from jupyter_gpushare.errors import DiskFull, StoreError
from jupyter_gpushare.wall_clock import iso_now

# PostgreSQL advisory lock: the letters "gpus".
_LOCK_KEY = 0x67707573
# A lock of one 64-bit key shows its low half as objid (PostgreSQL manual, view pg_locks).
_LOCK_HOLDER = sa.text(
    "SELECT application_name FROM pg_stat_activity JOIN pg_locks USING (pid)"
    " WHERE locktype = 'advisory' AND objid = :key AND granted"
)
_MAX_HOLDER_BYTES = 200
# Nothing is written with less free space: a commit of the largest request needs about half of it.
MIN_FREE_BYTES = 4 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that survives a restart of the broker."""

    leases: tuple[LeaseRecord, ...]  # living ones
    jobs: tuple[JobRecord, ...]  # living ones and the newest ended ones
    decisions: tuple[DecisionRecord, ...]  # the newest 1,000, oldest first
    overrides: tuple[ProjectOverride, ...]
    owners: tuple[Owner, ...]
    usage: tuple[UsageRecord, ...]  # of the newest `WEEK_DAYS` days with any
    meta: MetaValues
    boot_id: str  # the boot that the stored monotonic moments belong to


class Store:
    """The open database.

    Raises:
        StoreError: in use by another broker, with the schema of another version, or broken.
    """

    def __init__(self, url: str, boot_id: str) -> None:
        self._url = schema.url_of(url)
        self._lock_fd = -1
        self._lock_connection: Connection | None = None
        self._is_full = False  # in the store's thread alone
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._scans = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-scans")
        postgresql = self._url.get_backend_name() == "postgresql"
        connect_args = {"application_name": _holder()} if postgresql else {}
        try:
            # Parameters are jobs with their secrets: an error must not bring them into the log.
            self._engine = sa.create_engine(
                self._url, pool_pre_ping=True, hide_parameters=True, connect_args=connect_args
            )
            self._open()
            self._upgrade()
            with self._engine.begin() as connection:
                epoch = read_meta(connection, "epoch")
                self.epoch = int(epoch or 0) + 1
                write_meta(connection, "epoch", str(self.epoch))
                if read_meta(connection, "boot_id") is None:
                    write_meta(connection, "boot_id", boot_id)
        except (OSError, sa.exc.SQLAlchemyError) as error:
            self.close()
            raise self._unusable(f"it cannot be used: {brief(error)}") from None
        except ImportError as error:
            self.close()
            raise StoreError(f"{error}: install the package of the database's driver") from None
        except StoreError:
            self.close()
            raise

    # ---- opening -------------------------------------------------------------

    def _lock_sqlite(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, _MAX_HOLDER_BYTES, 0).decode(errors="replace")
            os.close(fd)
            raise StoreError(
                f"another broker uses the database {path} ({holder or 'unknown'}): stop it first, "
                "or give this one a database of its own (GPUShareBroker.db_url)"
            ) from None
        self._lock_fd = fd
        os.ftruncate(fd, 0)
        os.pwrite(fd, _holder().encode(), 0)

    def _open(self) -> None:
        if self._url.get_backend_name() == "sqlite":
            self._lock_sqlite(Path(self._url.database or ""))
            schema.begin_explicitly(self._engine)
            sa.event.listen(self._engine, "connect", _sqlite_pragmas)
        else:
            self._lock_connection = self._engine.connect()
            got = self._lock_connection.execute(sa.select(sa.func.pg_try_advisory_lock(_LOCK_KEY))).scalar()
            self._lock_connection.commit()  # the lock is the session's; no transaction stays open
            if not got:
                holder = self._lock_connection.execute(_LOCK_HOLDER, {"key": _LOCK_KEY}).scalar()
                raise StoreError(f"another broker uses this database ({holder or 'unknown'}): stop it first")

    def _upgrade(self) -> None:
        if trouble := schema.database_trouble(self._url.render_as_string(hide_password=False)):
            raise self._unusable(trouble)
        schema.upgrade(self._engine)

    def _unusable(self, why: str) -> StoreError:
        with contextlib.suppress(StoreError):  # its disk does not answer
            why += "; its disk is full" if self._free_bytes() < MIN_FREE_BYTES else ""
        return StoreError(f"the broker's database {self._url!r}: {why}")

    # ---- reading -------------------------------------------------------------

    def load(self) -> Loaded:
        """Return all that the last broker stored.

        Raises:
            StoreError: the database cannot be read.
        """
        try:
            return self._load()
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the database cannot be read: {brief(error)}") from None

    def _load(self) -> Loaded:
        living = leases.select().where(leases.c.state.not_in([State.RELEASED, State.FAILED]))
        recent = jobs.select().order_by(jobs.c.submitted_at.desc())
        days = sa.select(usage.c.day).distinct().order_by(usage.c.day.desc()).limit(WEEK_DAYS)
        week = usage.select().where(usage.c.day.in_(days.subquery().select()))
        with self._engine.connect() as connection:
            return Loaded(
                leases=tuple(lease_of(row) for row in connection.execute(living).mappings()),
                jobs=tuple(
                    [job_of(r) for r in connection.execute(recent.where(jobs.c.result == "")).mappings()]
                    + [
                        job_of(r)
                        for r in connection.execute(recent.where(jobs.c.result != "").limit(1000)).mappings()
                    ]
                ),
                decisions=tuple(
                    decision_of(row)
                    for row in reversed(
                        connection.execute(decisions.select().order_by(decisions.c.seq.desc()).limit(1000))
                        .mappings()
                        .all()
                    )
                ),
                overrides=tuple(
                    ProjectOverride(**row) for row in connection.execute(projects.select()).mappings()
                ),
                owners=tuple(Owner(**row) for row in connection.execute(owners.select()).mappings()),
                usage=tuple(UsageRecord(**row) for row in connection.execute(week).mappings()),
                meta=meta_values(partial(read_meta, connection)),
                boot_id=read_meta(connection, "boot_id") or "",
            )

    async def decisions_about(self, lease: str) -> tuple[DecisionRecord, ...]:
        """Return the newest 1,000 decisions about a lease, oldest first.

        Raises:
            StoreError: the database cannot be read.
        """
        query = decisions.select().where(decisions.c.lease == lease)
        query = query.order_by(decisions.c.seq.desc()).limit(1000)
        rows = await self._read(query)
        return tuple(decision_of(row) for row in reversed(rows))

    async def decisions_before(self, seq: int, user: str | None, limit: int) -> tuple[DecisionRecord, ...]:
        """Return decisions about a user's leases (None: all) that are older than ``seq``, newest first.

        Raises:
            StoreError: the database cannot be read.
        """
        query = decisions.select().where(decisions.c.seq < seq)
        if user is not None:
            query = query.where(decisions.c.user == user)
        rows = await self._read(query.order_by(decisions.c.seq.desc()).limit(limit))
        return tuple(decision_of(row) for row in rows)

    async def machine_since(self, at: str) -> tuple[MachineUse, ...]:
        """Return the use of the machine's GPUs since a time (ISO 8601, UTC), oldest first.

        Raises:
            StoreError: the database cannot be read.
        """
        rows = await self._read(machine.select().where(machine.c.at >= at).order_by(machine.c.at))
        return tuple(MachineUse(**row) for row in rows)

    async def usage(self, query: UsageQuery, before: str, limit: int) -> list[UsageSum]:
        """Return at most ``limit`` sums of use up to the day before ``before``, which may end the query.

        Raises:
            StoreError: the database cannot be read.
        """
        return await self.scan(
            usage_select(query, before).limit(limit),
            lambda row: (tuple(row[name] for name in query.by), Amounts(*(row[a] for a in AMOUNTS))),
        )

    async def helped(self, user: str, since: str) -> int:
        """Return for how many other leases the user's sessions were suspended since a time (ISO 8601).

        Raises:
            StoreError: the database cannot be read.
        """
        query = sa.select(sa.func.count(sa.distinct(decisions.c.for_lease)).label("count")).where(
            decisions.c.user == user, decisions.c.action == "suspend", decisions.c.at >= since
        )
        query = query.where(decisions.c.lease.like("b%"), decisions.c.for_lease.is_not(None))
        (row,) = await self._read(query)
        return int(row["count"])

    async def _read(self, query: sa.Select[Any]) -> list[sa.RowMapping]:
        return await self._in_thread(lambda: self._rows(query))

    async def scan(self, query: sa.Select[Any], of: Callable[[sa.RowMapping], T]) -> list[T]:
        """Return what ``of`` makes of each row of a query that may take long: no commit waits for it.

        Raises:
            StoreError: the database cannot be read.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._scans, lambda: [of(row) for row in self._rows(query)]
        )

    def _rows(self, query: sa.Select[Any]) -> list[sa.RowMapping]:
        try:
            with self._engine.connect() as connection:
                return list(connection.execute(query).mappings())
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the database cannot be read: {brief(error)}") from None

    async def has_lease(self, lease_id: str) -> bool:
        """Return whether there is, or was lately, a lease with this id.

        Raises:
            StoreError: the database cannot be read.
        """
        return bool(await self._read(sa.select(leases.c.id).where(leases.c.id == lease_id)))

    async def job(self, job_id: str, user: str | None) -> JobRecord | None:
        """Return a job of ``user`` (None: of any user), also one that is no longer in memory.

        Raises:
            StoreError: the database cannot be read.
        """
        wanted = jobs.select().where(jobs.c.id == job_id)
        rows = await self._read(wanted if user is None else wanted.where(jobs.c.user == user))
        return job_of(rows[0]) if rows else None

    async def job_by_key(self, user: str, key: str) -> JobRecord | None:
        """Return the job that a user submitted under an idempotency key, however long ago.

        Raises:
            StoreError: the database cannot be read.
        """
        mine = jobs.select().where(jobs.c.user == user, jobs.c.idempotency_key == key)
        rows = await self._read(mine)
        return job_of(rows[0]) if rows else None

    # ---- writing -------------------------------------------------------------

    async def commit(self, changes: Sequence[Change]) -> None:
        """Make ``changes`` durable, all or none, in the order of the calls.

        Raises:
            DiskFull: they are not durable, nor is any later commit until `retry` has succeeded.
            StoreError: they may not be durable; the broker must end.
        """
        if changes:
            await self._in_thread(lambda: self._write(tuple(changes)))

    async def retry(self) -> None:
        """Take commits again after `DiskFull`, once a small one succeeds.

        Raises:
            DiskFull: the disk is still full.
            StoreError: the database failed; the broker must end.
        """
        await self._in_thread(self._retry)

    def _retry(self) -> None:
        self._is_full = False
        self._write(())

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def begin_boot(self, boot_id: str, leases: Sequence[LeaseRecord]) -> None:
        """Store ``leases`` with times of this boot, and the boot's id, in one commit.

        Raises:
            StoreError: they may not be durable; the broker must end.
        """
        self._write((), boot_id=boot_id, leases=leases)

    def raise_epoch(self, epoch: int) -> None:
        """Take a higher epoch; possible only while the database has this broker's own.

        Raises:
            DiskFull: the epoch stays as it was, and nothing is taken until `retry` has succeeded.
            StoreError: a newer broker is at work, or the database failed; this broker must end.
        """
        self._write((), epoch=epoch)
        self.epoch = epoch

    def _write(
        self,
        changes: tuple[Change, ...],
        *,
        epoch: int = 0,
        boot_id: str = "",
        leases: Sequence[LeaseRecord] = (),
    ) -> None:
        try:
            if self._is_full or self._free_bytes() < MIN_FREE_BYTES:
                raise DiskFull
            with self._engine.begin() as connection:
                mine = meta.update().where(meta.c.key == "epoch", meta.c.value == str(self.epoch))
                if not connection.execute(mine.values(value=str(epoch or self.epoch))).rowcount:
                    raise StoreError("a newer broker uses the database: this one ends")
                if boot_id:
                    write_meta(connection, "boot_id", boot_id)
                    update_leases(connection, leases)
                for change in changes:
                    write(connection, change)
        except DiskFull:
            self._is_full = True
            raise
        except sa.exc.SQLAlchemyError as error:
            if is_disk_full(error):
                self._is_full = True
                raise DiskFull from None
            raise StoreError(f"a commit failed: {brief(error)}") from None

    def _free_bytes(self) -> int:
        """Return the free space beside an SQLite file for a process without privileges."""
        is_sqlite = self._url.get_backend_name() == "sqlite"  # PostgreSQL says when its disk is full
        return free_bytes(Path(self._url.database or ".").parent) if is_sqlite else MIN_FREE_BYTES

    def close(self) -> None:
        """Release the database and its lock."""
        self._thread.shutdown(wait=True)
        self._scans.shutdown(wait=True, cancel_futures=True)
        if self._lock_connection is not None:
            # Explicitly: the server notices the end of a session only later.
            with contextlib.suppress(sa.exc.SQLAlchemyError):
                self._lock_connection.execute(sa.select(sa.func.pg_advisory_unlock(_LOCK_KEY)))
            self._lock_connection.close()
        if hasattr(self, "_engine"):
            self._engine.dispose()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _holder() -> str:
    """Return the text that names this broker to a second one; PostgreSQL cuts it at 63 characters."""
    return f"process {os.getpid()} on {socket.gethostname()[:20]} since {iso_now()[:16]}Z"


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=5000")
    # An I/O error while switching raises nothing: read both back.
    mode = cursor.execute("PRAGMA journal_mode").fetchone()[0]
    level = cursor.execute("PRAGMA synchronous").fetchone()[0]
    cursor.close()
    if mode != "wal" or level != 2:
        raise StoreError(
            f"SQLite refused WAL with synchronous=FULL (got {mode}, {level}): is this a local disk?"
        )
