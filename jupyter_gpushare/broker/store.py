"""The broker's database: SQLite by default, PostgreSQL by URL; never the Hub's.

Rules:

* What is about to be done is committed before it is done.  Commits run on one
  thread of their own, off the event loop, in the order they were asked for.
* SQLite runs with WAL and ``synchronous=FULL``, both read back at start: with
  less, acknowledged commits are lost in a power cut.
* A commit that fails is never retried: the pages in memory may be wrong by
  then.  `StoreError` ends the broker, and its parent starts it again.
* One broker per database: a lock (a file beside SQLite, an advisory lock in
  PostgreSQL) is held for as long as the store is open, and each commit asks
  whether the epoch is still its own, should the lock have been lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
import alembic.migration
import alembic.script
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from jupyter_gpushare.broker.records import (
    DecisionRecord,
    JobRecord,
    Lags,
    LeaseRecord,
    MachineUse,
    ProjectOverride,
    UsageRecord,
)
from jupyter_gpushare.broker.tables import (
    JOB_FIELDS,
    decisions,
    job_of,
    jobs,
    lease_of,
    lease_row,
    leases,
    machine,
    meta,
    packed,
    projects,
    usage,
)
from jupyter_gpushare.core.model import State
from jupyter_gpushare.errors import StoreError

# Decisions are for people to look back at; older ones are dropped.
MAX_DECISIONS = 100_000
# Ended jobs and leases kept, newest first.
MAX_ENDED = 10_000
# Days of use that are kept; a week is shown.
MAX_USAGE_DAYS = 100
# Days of what the machine's GPUs did.
MAX_MACHINE_DAYS = 90

_MIGRATIONS = Path(__file__).parent / "migrations"
# PostgreSQL advisory lock: the letters "gpus".
_LOCK_KEY = 0x67707573


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that survives a restart of the broker."""

    leases: tuple[LeaseRecord, ...]  # living ones
    jobs: tuple[JobRecord, ...]  # living ones and the newest ended ones
    decisions: tuple[DecisionRecord, ...]  # the newest 1,000, oldest first
    overrides: tuple[ProjectOverride, ...]
    usage: tuple[UsageRecord, ...]  # of the newest `MAX_USAGE_DAYS` days
    lags: Lags
    boot_id: str  # the boot that the stored monotonic moments belong to


Change = LeaseRecord | JobRecord | DecisionRecord | ProjectOverride | UsageRecord | MachineUse | Lags


class Store:
    """The open database.

    Raises:
        StoreError: in use by another broker, from a newer version, or broken.
    """

    def __init__(self, url: str, boot_id: str) -> None:
        self._url = sa.make_url(url)
        self._lock_fd = -1
        self._lock_connection: Connection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        if self._url.get_backend_name() == "sqlite":
            if not self._url.database or self._url.database == ":memory:":
                raise StoreError("the broker's database must be a file: jobs would be lost with its process")
            self._lock_sqlite(Path(self._url.database))
        try:
            # Parameters are jobs with their secrets: an error must not bring them into the log.
            self._engine = sa.create_engine(self._url, pool_pre_ping=True, hide_parameters=True)
            self._open()
            self._migrate()
            with self._engine.begin() as connection:
                epoch = self._read_meta(connection, "epoch")
                self.epoch = int(epoch or 0) + 1
                self._write_meta(connection, "epoch", str(self.epoch))
                if self._read_meta(connection, "boot_id") is None:
                    self._write_meta(connection, "boot_id", boot_id)
        except sa.exc.SQLAlchemyError as error:
            self.close()
            raise StoreError(f"the database {self._url!r} cannot be used: {_brief(error)}") from None
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
            os.close(fd)
            raise StoreError(
                f"another broker uses the database {path}: stop it first, "
                "or give this one a database of its own (GPUShareBroker.db_url)"
            ) from None
        self._lock_fd = fd

    def _open(self) -> None:
        if self._url.get_backend_name() == "sqlite":
            sa.event.listen(self._engine, "connect", _sqlite_pragmas)
            if self._url.database:
                Path(self._url.database).touch(mode=0o600)
        else:
            self._lock_connection = self._engine.connect()
            got = self._lock_connection.execute(sa.select(sa.func.pg_try_advisory_lock(_LOCK_KEY))).scalar()
            self._lock_connection.commit()  # the lock is the session's; no transaction stays open
            if not got:
                raise StoreError("another broker uses this database: stop it first")

    def _migrate(self) -> None:
        config = alembic.config.Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        script = alembic.script.ScriptDirectory.from_config(config)
        with self._engine.begin() as connection:
            current = alembic.migration.MigrationContext.configure(connection).get_current_revision()
            known = {revision.revision for revision in script.walk_revisions()}
            if current is not None and current not in known:
                raise StoreError(
                    f"the database comes from a newer version (schema {current}; this one knows "
                    f"{script.get_current_head()}): install that version again, or restore a backup"
                )
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, "head")

    @staticmethod
    def _read_meta(connection: Connection, key: str) -> str | None:
        return connection.execute(sa.select(meta.c.value).where(meta.c.key == key)).scalar()

    @staticmethod
    def _write_meta(connection: Connection, key: str, value: str) -> None:
        connection.execute(meta.delete().where(meta.c.key == key))
        connection.execute(meta.insert().values(key=key, value=value))

    # ---- reading -------------------------------------------------------------

    def load(self) -> Loaded:
        """Return what the last broker remembered."""
        living = leases.select().where(leases.c.state.not_in([State.RELEASED, State.FAILED]))
        recent = jobs.select().order_by(jobs.c.submitted_at.desc())
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
                    DecisionRecord(**row)
                    for row in reversed(
                        connection.execute(decisions.select().order_by(decisions.c.seq.desc()).limit(1000))
                        .mappings()
                        .all()
                    )
                ),
                overrides=tuple(
                    ProjectOverride(**row) for row in connection.execute(projects.select()).mappings()
                ),
                usage=tuple(UsageRecord(**row) for row in connection.execute(usage.select()).mappings()),
                lags=Lags(gpu_s=json.loads(self._read_meta(connection, "lags") or "{}")),
                boot_id=self._read_meta(connection, "boot_id") or "",
            )

    async def decisions_about(self, lease: str) -> tuple[DecisionRecord, ...]:
        """Return the newest 1,000 decisions about a lease, oldest first.

        Raises:
            StoreError: the database cannot be read.
        """
        query = decisions.select().where(decisions.c.lease == lease)
        query = query.order_by(decisions.c.seq.desc()).limit(1000)
        rows = await self._read(query)
        return tuple(DecisionRecord(**row) for row in reversed(rows))

    async def decisions_before(self, seq: int, user: str | None, limit: int) -> tuple[DecisionRecord, ...]:
        """Return decisions about a user's leases (None: all) that are older than ``seq``, newest first.

        Raises:
            StoreError: the database cannot be read.
        """
        query = decisions.select().where(decisions.c.seq < seq)
        if user is not None:
            query = query.where(decisions.c.user == user)
        rows = await self._read(query.order_by(decisions.c.seq.desc()).limit(limit))
        return tuple(DecisionRecord(**row) for row in rows)

    async def machine_since(self, at: str) -> tuple[MachineUse, ...]:
        """Return what the machine's GPUs did since a moment (ISO 8601, UTC), oldest first.

        Raises:
            StoreError: the database cannot be read.
        """
        rows = await self._read(machine.select().where(machine.c.at >= at).order_by(machine.c.at))
        return tuple(MachineUse(**row) for row in rows)

    async def helped(self, user: str, since: str) -> int:
        """Return how many other leases the user's were put to sleep for since a moment (ISO 8601).

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
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._rows, query)

    def _rows(self, query: sa.Select[Any]) -> list[sa.RowMapping]:
        try:
            with self._engine.connect() as connection:
                return list(connection.execute(query).mappings())
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"the database cannot be read: {_brief(error)}") from None

    async def job(self, job_id: str, user: str | None) -> JobRecord | None:
        """Return a job of ``user`` (of anybody: None), also one that is no longer in memory.

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
            StoreError: they may not be durable; the broker must end.
        """
        if changes:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write, tuple(changes))

    def begin_boot(self, boot_id: str, leases: Sequence[LeaseRecord]) -> None:
        """Store ``leases`` with moments of this boot, and its name, in one: a start cut short begins again.

        Raises:
            StoreError: they may not be durable; the broker must end.
        """
        self._write(tuple(leases), boot_id=boot_id)

    def raise_epoch(self, epoch: int) -> None:
        """Go on with a higher epoch; only the broker whose epoch the database has can do so.

        Raises:
            StoreError: a newer broker is at work, or the database failed; this broker must end.
        """
        self._write((), epoch=epoch)
        self.epoch = epoch

    def _write(self, changes: tuple[Change, ...], *, epoch: int = 0, boot_id: str = "") -> None:
        try:
            with self._engine.begin() as connection:
                mine = meta.update().where(meta.c.key == "epoch", meta.c.value == str(self.epoch))
                if not connection.execute(mine.values(value=str(epoch or self.epoch))).rowcount:
                    raise StoreError("a newer broker uses the database: this one ends")
                if boot_id:
                    self._write_meta(connection, "boot_id", boot_id)
                for change in changes:
                    self._upsert(connection, change)
        except sa.exc.SQLAlchemyError as error:
            raise StoreError(f"a commit failed: {_brief(error)}") from None

    @classmethod
    def _upsert(cls, connection: Connection, change: Change) -> None:
        match change:
            case Lags():
                cls._write_meta(connection, "lags", json.dumps(change.gpu_s))
                return
            case LeaseRecord():
                table, row, key = leases, lease_row(change), "id"
            case JobRecord():
                table, row, key = jobs, packed({n: getattr(change, n) for n in JOB_FIELDS}), "id"
            case DecisionRecord():
                connection.execute(
                    decisions.insert().values({f.name: getattr(change, f.name) for f in fields(change)})
                )
                if change.seq % 1000 == 0:
                    connection.execute(
                        decisions.delete().where(decisions.c.seq <= change.seq - MAX_DECISIONS)
                    )
                    _prune(connection)
                return
            case UsageRecord():
                row = {f.name: getattr(change, f.name) for f in fields(change)}
                key_of = [usage.c[name] == row[name] for name in ("day", "user", "project")]
                if not connection.execute(usage.update().where(*key_of).values(row)).rowcount:
                    connection.execute(usage.insert().values(row))
                    _forget_days(connection)
                return
            case MachineUse():
                connection.execute(
                    machine.delete().where(machine.c.at <= _days_before(change.at, MAX_MACHINE_DAYS))
                )
                table, row, key = machine, {f.name: getattr(change, f.name) for f in fields(change)}, "at"
            case ProjectOverride():
                row = {f.name: getattr(change, f.name) for f in fields(change)}
                table, key = projects, "name"
        column = table.c[key]
        if not connection.execute(table.update().where(column == row[key]).values(row)).rowcount:
            connection.execute(table.insert().values(row))

    def close(self) -> None:
        """Let go of the database and its lock."""
        self._thread.shutdown(wait=True)
        if self._lock_connection is not None:
            # Said, not left to the end of the session, which the server notices only later.
            with contextlib.suppress(sa.exc.SQLAlchemyError):
                self._lock_connection.execute(sa.select(sa.func.pg_advisory_unlock(_LOCK_KEY)))
            self._lock_connection.close()
        if hasattr(self, "_engine"):
            self._engine.dispose()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _brief(error: sa.exc.SQLAlchemyError) -> str:
    """Return what went wrong in one line: the further ones of a driver may quote a row, with its secrets."""
    cause = getattr(error, "orig", None) or error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


def _days_before(at: str, days: int) -> str:
    before = datetime.fromisoformat(at) - timedelta(days=days)
    return before.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _forget_days(connection: Connection) -> None:
    """Drop the days beyond the newest `MAX_USAGE_DAYS`."""
    days = sa.select(usage.c.day).distinct().order_by(usage.c.day.desc())
    oldest = connection.execute(days.offset(MAX_USAGE_DAYS).limit(1)).scalar()
    if oldest is not None:
        connection.execute(usage.delete().where(usage.c.day <= oldest))


def _prune(connection: Connection) -> None:
    """Drop the oldest ended leases and jobs beyond `MAX_ENDED`."""
    for table, ended, newest in (
        (leases, leases.c.state.in_([State.RELEASED, State.FAILED]), leases.c.since_at),
        (jobs, jobs.c.result != "", jobs.c.submitted_at),
    ):
        limit = connection.execute(
            sa.select(newest).where(ended).order_by(newest.desc()).offset(MAX_ENDED).limit(1)
        ).scalar()
        if limit is not None:
            connection.execute(table.delete().where(ended, newest <= limit))


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
