"""The broker's database: its schema, reads from it, and commits to it.

SQLite is the default, PostgreSQL is chosen by URL; the Hub's database is never used.

Rules:

* An intent is committed before it is carried out.  Commits run off the event loop,
  on a thread of their own, in the order of the calls.
* SQLite runs with WAL and ``synchronous=FULL``, and both are read back at start.
  Otherwise a power cut could lose acknowledged commits.
* A failed commit is never retried, because the pages in memory may then be wrong.
  `StoreError` ends the broker, and its parent restarts it.
* A full disk is no such failure: the database rolls the commit back before it
  syncs.  `DiskFull` refuses this and all queued commits until `retry` succeeds.
* One broker uses a database.  It holds a lock (a file beside SQLite, an advisory
  lock in PostgreSQL) while the store is open.  Each commit also checks that the
  epoch is still its own, in case the lock was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import socket
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import alembic.command
import alembic.config
import alembic.migration
import alembic.script
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from jupyter_gpushare.broker.state.records import (
    BusyStretch,
    DecisionRecord,
    JobRecord,
    LeaseRecord,
    MachineUse,
    MetaValues,
    Owner,
    ProjectOverride,
    UsageRecord,
)
from jupyter_gpushare.broker.state.tables import (
    MAX_CELLS,
    MAX_ENDED,
    Change,
    cells_select,
    decision_of,
    decisions,
    ended_select,
    job_of,
    jobs,
    lease_of,
    leases,
    machine,
    meta,
    meta_values,
    metadata,
    owners,
    projects,
    read_meta,
    requests_select,
    update_leases,
    usage,
    usage_select,
    write,
    write_meta,
)
from jupyter_gpushare.broker.state.usage import AMOUNTS, WEEK_DAYS, Amounts, UsageQuery, UsageSum
from jupyter_gpushare.core.model import State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.errors import DiskFull, InvalidRequest, StoreError
from jupyter_gpushare.protocol import wire
from jupyter_gpushare.wall_clock import iso_now

# ---- errors of database drivers, and free space ------------------------------

# SQLSTATE of PostgreSQL's disk_full (manual, appendix A).
_POSTGRESQL_DISK_FULL = "53100"


def is_disk_full(error: sa.exc.SQLAlchemyError) -> bool:
    """Return whether a commit failed because the disk is full.

    SQLite reports a write that ENOSPC cut short as SQLITE_FULL, before any sync (os_unix.c, unixWrite).
    """
    cause = getattr(error, "orig", None)
    is_sqlite = getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return is_sqlite or getattr(cause, "sqlstate", None) == _POSTGRESQL_DISK_FULL


def brief(error: Exception) -> str:
    """Return an error in one line; a driver's further lines may quote a row, with its secrets."""
    cause = getattr(error, "orig", None) or error
    return f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"


def free_bytes(folder: Path) -> int:
    """Return the bytes of a folder's disk that a process without privileges can use.

    Raises:
        StoreError: the disk does not answer.
    """
    try:
        space = os.statvfs(folder)
    except OSError as error:
        raise StoreError(f"the disk of the database does not answer: {error.strerror}") from None
    return space.f_bavail * space.f_frsize


# ---- the schema of the database: check, creation and upgrade -----------------
# Rules:
#
# * A new SQLite database is created under another name and renamed when it is complete.
# * An upgrade is one transaction.  SQLite's driver would commit before DDL, so
#   `begin_explicitly` tells it where transactions begin.
# * A schema that this version does not know is refused and left unchanged.

MIGRATIONS = Path(__file__).parent / "migrations"


def url_of(text: str) -> sa.URL:
    """Return the parsed URL of a database.

    Raises:
        StoreError: a broker cannot use such a database.
    """
    try:
        url = sa.make_url(text)
    except sa.exc.ArgumentError:
        raise StoreError("GPUShareBroker.db_url is a URL of SQLAlchemy, such as sqlite:////path") from None
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError(f"GPUShareBroker.db_url is sqlite or postgresql, not {url.get_backend_name()}")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise StoreError("the broker's database must be a file: jobs would be lost with its process")
    return url


def database_trouble(text: str) -> str:
    """Return why no broker could use the database of a URL; empty if one could use or create it."""
    try:
        url = url_of(text)
        with _connected(url) as connection:
            return _leftover_journal(url) if connection is None else _unknown_schema(connection)
    except StoreError as error:
        return str(error)
    except (OSError, sa.exc.SQLAlchemyError) as error:
        return f"it cannot be used: {brief(error)}"
    except ImportError as error:
        return f"it cannot be used: {error}: install the package of its driver"


def stored_overrides(url: str) -> dict[str, ProjectOverride]:
    """Return, by project, the numbers that administrators changed.

    The result is empty if the database cannot be read; `database_trouble` says why.
    """
    try:
        with _connected(sa.make_url(url)) as connection:
            if connection is None:
                return {}
            rows = connection.execute(sa.select(projects)).mappings()
            return {row["name"]: ProjectOverride(**row) for row in rows}
    except (OSError, sa.exc.SQLAlchemyError, ImportError):
        return {}


def upgrade(engine: sa.Engine) -> None:
    """Upgrade a database to the newest schema in one transaction; create a missing SQLite file first.

    Raises:
        OSError: the file cannot be created.
        sqlalchemy.exc.SQLAlchemyError: the database failed and keeps its old schema.
    """
    if is_to_be_made(engine.url):
        _make_file(engine.url)
    with engine.begin() as connection:
        _migrate(connection)


def begin_explicitly(engine: sa.Engine) -> None:
    """Make SQLite's driver begin a transaction where SQLAlchemy does, not at the first INSERT.

    Source: SQLAlchemy's manual, dialects, SQLite, "Enabling Non-Legacy SQLite Transactional Modes".
    """
    sa.event.listen(engine, "connect", _disable_implicit_begin)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))


def _disable_implicit_begin(connection: Any, _record: Any) -> None:
    connection.isolation_level = None


def _make_file(url: sa.URL) -> None:
    path = Path(os.path.realpath(url.database or ""))
    new = path.with_name(f"{path.name}.new")
    # A broker that was killed here may have left it; the lock keeps other brokers out.
    new.unlink(missing_ok=True)
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    engine = sa.create_engine(url.set(database=str(new)), poolclass=sa.NullPool)
    begin_explicitly(engine)
    sa.event.listen(engine, "connect", _in_memory_journal)
    try:
        with engine.begin() as connection:
            _migrate(connection)
        _sync(new)
        new.rename(path)
        _sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def _in_memory_journal(connection: Any, _record: Any) -> None:
    # An incomplete file is deleted, and a complete one is synced once.
    connection.execute("PRAGMA journal_mode=MEMORY").close()
    connection.execute("PRAGMA synchronous=OFF").close()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_to_be_made(url: sa.URL) -> bool:
    """Return whether a URL names an SQLite file that is missing or empty."""
    path = Path(url.database or "")
    return url.get_backend_name() == "sqlite" and (not path.exists() or path.stat().st_size == 0)


def _leftover_journal(url: sa.URL) -> str:
    path = os.path.realpath(url.database or "")
    for file in (Path(f"{path}-wal"), Path(f"{path}-journal")):
        # SQLite would delete it, with the commits in it.
        if file.exists() and file.stat().st_size:
            return (
                f"it is missing or empty, and {file.name} has what was stored last: put the database back, "
                f"or move {file.name} away too"
            )
    return ""


@contextmanager
def _connected(url: sa.URL) -> Iterator[Connection | None]:
    """Connect to a database; yield None if it must be created first."""
    if is_to_be_made(url):
        yield None
        return
    engine = sa.create_engine(url, hide_parameters=True)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _config() -> alembic.config.Config:
    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def _migrate(connection: Connection) -> None:
    config = _config()
    config.attributes["connection"] = connection
    if sa.inspect(connection).get_table_names():
        alembic.command.upgrade(config, "head")
    else:
        metadata.create_all(connection)
        alembic.command.stamp(config, "head")


def _unknown_schema(connection: Connection) -> str:
    heads = alembic.migration.MigrationContext.configure(connection).get_current_heads()
    if not heads and not sa.inspect(connection).get_table_names():
        return ""
    script = alembic.script.ScriptDirectory.from_config(_config())
    if len(heads) == 1 and heads[0] in {each.revision for each in script.walk_revisions()}:
        return ""
    return (
        f"it has the schema {', '.join(heads) or 'of another program'}, and this version knows "
        f"{script.get_current_head()}: start the version that wrote it, or name another database "
        "(GPUShareBroker.db_url)"
    )


# ---- the store ---------------------------------------------------------------

# PostgreSQL advisory lock: the letters "gpus".
_LOCK_KEY = 0x67707573
# The view pg_locks shows the low half of a lock's 64-bit key as objid (PostgreSQL manual).
_LOCK_HOLDER = sa.text(
    "SELECT application_name FROM pg_stat_activity JOIN pg_locks USING (pid)"
    " WHERE locktype = 'advisory' AND objid = :key AND granted"
)
_MAX_HOLDER_BYTES = 200
# Nothing is written with less free space.  A commit of the largest request needs about half of it.
MIN_FREE_BYTES = 4 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state that survives a restart of the broker."""

    leases: tuple[LeaseRecord, ...]  # not ended
    jobs: tuple[JobRecord, ...]  # all that have not ended, and the newest 1,000 that have
    decisions: tuple[DecisionRecord, ...]  # the newest 1,000, oldest first
    overrides: tuple[ProjectOverride, ...]
    owners: tuple[Owner, ...]
    usage: tuple[UsageRecord, ...]  # of the newest `WEEK_DAYS` days with any use
    meta: MetaValues
    boot_id: str  # the boot that the stored monotonic times belong to


class Store:
    """The open database.

    Raises:
        StoreError: another broker uses it, its schema is unknown, or it is broken.
    """

    def __init__(self, url: str, boot_id: str) -> None:
        self._url = url_of(url)
        self._lock_fd = -1
        self._lock_connection: Connection | None = None
        self._is_full = False  # used in the store's thread only
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._scans = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-scans")
        postgresql = self._url.get_backend_name() == "postgresql"
        connect_args = {"application_name": _holder()} if postgresql else {}
        try:
            # Parameters include jobs with their secrets, which errors must not bring into the log.
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
            begin_explicitly(self._engine)
            sa.event.listen(self._engine, "connect", _sqlite_pragmas)
        else:
            self._lock_connection = self._engine.connect()
            is_locked = self._lock_connection.execute(
                sa.select(sa.func.pg_try_advisory_lock(_LOCK_KEY))
            ).scalar()
            self._lock_connection.commit()  # the session keeps the lock; no transaction stays open
            if not is_locked:
                holder = self._lock_connection.execute(_LOCK_HOLDER, {"key": _LOCK_KEY}).scalar()
                raise StoreError(f"another broker uses this database ({holder or 'unknown'}): stop it first")

    def _upgrade(self) -> None:
        if trouble := database_trouble(self._url.render_as_string(hide_password=False)):
            raise self._unusable(trouble)
        upgrade(self._engine)

    def _unusable(self, why: str) -> StoreError:
        with contextlib.suppress(StoreError):  # the disk may not answer
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
        newest = decisions.select().order_by(decisions.c.seq.desc()).limit(1000)
        days = sa.select(usage.c.day).distinct().order_by(usage.c.day.desc()).limit(WEEK_DAYS)
        week = usage.select().where(usage.c.day.in_(days.subquery().select()))
        with self._engine.connect() as connection:

            def rows(query: sa.Select[Any]) -> Sequence[sa.RowMapping]:
                return connection.execute(query).mappings().all()

            ended = rows(recent.where(jobs.c.result != "").limit(1000))
            return Loaded(
                leases=tuple(map(lease_of, rows(living))),
                jobs=tuple(map(job_of, (*rows(recent.where(jobs.c.result == "")), *ended))),
                decisions=tuple(map(decision_of, reversed(rows(newest)))),
                overrides=tuple(ProjectOverride(**row) for row in rows(projects.select())),
                owners=tuple(Owner(**row) for row in rows(owners.select())),
                usage=tuple(UsageRecord(**row) for row in rows(week)),
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
        """Return the use of the machine's GPUs since ``at`` (ISO 8601, UTC), oldest first.

        Raises:
            StoreError: the database cannot be read.
        """
        rows = await self._read(machine.select().where(machine.c.at >= at).order_by(machine.c.at))
        return tuple(MachineUse(**row) for row in rows)

    async def usage(self, query: UsageQuery, before: str, limit: int) -> list[UsageSum]:
        """Return at most ``limit`` sums of the selected use, up to the day before ``before``.

        Raises:
            StoreError: the database cannot be read.
        """
        return await self.scan(
            usage_select(query, before).limit(limit),
            lambda row: (tuple(row[name] for name in query.by), Amounts(*(row[a] for a in AMOUNTS))),
        )

    async def helped(self, user: str, since: str) -> int:
        """Return the number of leases for which the user's sessions were suspended since a time (ISO 8601).

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
        """Return what ``of`` makes of each row of a long query; commits do not wait for it.

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
        """Return whether the database has a lease with this id; it keeps recently ended leases too.

        Raises:
            StoreError: the database cannot be read.
        """
        return bool(await self._read(sa.select(leases.c.id).where(leases.c.id == lease_id)))

    async def job(self, job_id: str, user: str | None) -> JobRecord | None:
        """Return a job of ``user`` (None: of any user), even if it is no longer in memory.

        Raises:
            StoreError: the database cannot be read.
        """
        query = jobs.select().where(jobs.c.id == job_id)
        rows = await self._read(query if user is None else query.where(jobs.c.user == user))
        return job_of(rows[0]) if rows else None

    async def job_by_key(self, user: str, key: str) -> JobRecord | None:
        """Return the job that a user submitted with an idempotency key, even long ago.

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
            DiskFull: they are not durable, and no later commit is until `retry` succeeds.
            StoreError: they may not be durable; the broker must end.
        """
        if changes:
            await self._in_thread(lambda: self._write(tuple(changes)))

    async def retry(self) -> None:
        """Accept commits again after `DiskFull` if a small one succeeds.

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
        """Store this boot's id and ``leases`` with the times of this boot, in one commit.

        Raises:
            StoreError: they may not be durable; the broker must end.
        """
        self._write((), boot_id=boot_id, leases=leases)

    def raise_epoch(self, epoch: int) -> None:
        """Take a higher epoch; possible only while the database has this broker's epoch.

        Raises:
            DiskFull: the epoch is unchanged, and no commit is accepted until `retry` succeeds.
            StoreError: a newer broker uses the database, or it failed; this broker must end.
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
        """Return the free bytes on the disk of an SQLite file for a process without privileges."""
        is_sqlite = self._url.get_backend_name() == "sqlite"  # PostgreSQL reports a full disk itself
        return free_bytes(Path(self._url.database or ".").parent) if is_sqlite else MIN_FREE_BYTES

    def close(self) -> None:
        """Release the database and its lock."""
        self._thread.shutdown(wait=True)
        self._scans.shutdown(wait=True, cancel_futures=True)
        if self._lock_connection is not None:
            # Unlock explicitly, because the server notices the end of a session late.
            with contextlib.suppress(sa.exc.SQLAlchemyError):
                self._lock_connection.execute(sa.select(sa.func.pg_advisory_unlock(_LOCK_KEY)))
            self._lock_connection.close()
        if hasattr(self, "_engine"):
            self._engine.dispose()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _holder() -> str:
    """Return the text that names this broker to a second one; PostgreSQL truncates it to 63 characters."""
    return f"process {os.getpid()} on {socket.gethostname()[:20]} since {iso_now()[:16]}Z"


def _sqlite_pragmas(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=5000")
    # An I/O error during the switch raises nothing, so read both back.
    mode = cursor.execute("PRAGMA journal_mode").fetchone()[0]
    level = cursor.execute("PRAGMA synchronous").fetchone()[0]
    cursor.close()
    if mode != "wal" or level != 2:
        raise StoreError(
            f"SQLite refused WAL with synchronous=FULL (got {mode}, {level}): is this a local disk?"
        )


# ---- commits of the registry's changes, and the effects of a failed commit ---
# A failed database ends the broker.  A full disk does not: when no commit is open, the
# changes that are not durable are undone in memory, and further changes are refused
# until `retry` finds space.  So memory does not show for long what a restart would lose.
# The journal waits for a database that hangs; `is_blocked` shows this after `LATE_S`.

# A disk syncs, and a database answers, within this time.
LATE_S = 5.0


class Journal:
    """Makes changes durable, in the order of the calls."""

    def __init__(self, store: Store, roll_back: Callable[[], None]) -> None:
        """Commit to ``store``; ``roll_back`` replaces the state in memory with that on disk."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_disk_full = False
        self._store = store
        self._roll_back = roll_back
        self._open: dict[asyncio.Future[None], float] = {}  # open commits, and when each began

    async def commit(self, *changes: Change) -> None:
        """Make changes durable.

        Raises:
            DiskFull: they are not durable, and are undone in memory.
            StoreError: the database failed; the broker ends (`failed`).
        """
        self._refuse_after_failure()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._open[ended] = loop.time()
        try:
            await self._store.commit(changes)
        except DiskFull:
            self.is_disk_full = True
            raise
        except StoreError as error:
            raise self.fail(error) from None
        finally:
            del self._open[ended]
            if self.is_disk_full and not self._open:
                self._undo()
            ended.set_result(None)

    async def durable(self) -> None:
        """Wait until all changes so far are on disk; an answer may depend on another request's changes.

        Raises:
            DiskFull: one of them is not on disk.
            StoreError: a commit failed; the broker ends.
        """
        if self._open:
            await asyncio.wait(tuple(self._open))
            self.check()
        self._refuse_after_failure()

    @property
    def is_blocked(self) -> bool:
        """Whether nothing can be stored now: the disk was full at the last try, or a commit is late."""
        began_at = min(self._open.values(), default=math.inf)
        return self.is_disk_full or asyncio.get_running_loop().time() - began_at > LATE_S

    def check(self) -> None:
        """Raise an error if changes cannot be stored now; called before a change in memory.

        Raises:
            DiskFull: the disk was full at the last try.
            StoreError: a commit failed; the broker ends.
        """
        self._refuse_after_failure()
        if self.is_disk_full:
            raise DiskFull

    async def retry(self) -> bool:
        """Return whether changes can be stored again.

        Raises:
            StoreError: the database failed; the broker ends.
        """
        if self._open:
            return False  # the failed changes are not undone yet
        try:
            await self._store.retry()
        except DiskFull:
            return False
        except StoreError as error:
            raise self.fail(error) from None
        self.is_disk_full = False
        return True

    def raise_epoch(self, epoch: int) -> None:
        """Take a higher epoch before anything else is stored.

        Raises:
            DiskFull: the epoch cannot be stored; the broker does nothing until it is.
            StoreError: a newer broker uses the database, or the database failed; the broker ends.
        """
        try:
            self._store.raise_epoch(epoch)
        except DiskFull:
            self.is_disk_full = True
            raise
        except StoreError as error:
            raise self.fail(error) from None

    def fail(self, error: StoreError) -> StoreError:
        """End the broker and store nothing from now on; return the error for the caller to raise."""
        if not self.failed.done():
            self.failed.set_exception(error)
        return error

    def _undo(self) -> None:
        try:
            self._roll_back()
        except StoreError as error:
            self.fail(error)

    def _refuse_after_failure(self) -> None:
        if self.failed.done() and (error := self.failed.exception()) is not None:
            raise StoreError(str(error))


# ---- past jobs and stretches of work, read from the database in pages --------
# No commit waits for these reads: the thread for long queries reads the pages and converts their
# rows.  A page has at most `PAGE` rows of short columns.  Requests of jobs may have 1 MiB each, so
# they are read by their keys, `_REQUESTS_PER_QUERY` at once.

PAGE = 1_000
_REQUESTS_PER_QUERY = 20
# Above every submission time, and above every number of a stretch.
_AFTER_ALL_TIMES = "9999"
_ABOVE_ALL_NUMBERS = 1 << 53


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended."""

    id: str
    user: str
    project: str
    submitted_at: str  # wall clock (ISO 8601, UTC)
    ran_s: float


async def ended_jobs(store: Store) -> list[EndedJob]:
    """Return the newest `MAX_ENDED` ended jobs, in the order of their submission.

    Raises:
        StoreError: the database cannot be read.
    """
    found: list[EndedJob] = []
    before = _AFTER_ALL_TIMES, ""
    while len(found) < MAX_ENDED:
        page = await store.scan(ended_select(before, PAGE), lambda row: EndedJob(**row))
        found += page
        if len(page) < PAGE:
            break
        before = page[-1].submitted_at, page[-1].id
    return found[::-1]


async def sizes(store: Store, ids: Iterable[str]) -> dict[str, Size]:
    """Return the requested sizes of jobs by id, without jobs whose request is unreadable or gone.

    Raises:
        StoreError: the database cannot be read.
    """
    found: dict[str, Size] = {}
    job_ids = list(ids)
    for start in range(0, len(job_ids), _REQUESTS_PER_QUERY):
        query = requests_select(job_ids[start : start + _REQUESTS_PER_QUERY])
        for job_id, size in await store.scan(query, lambda row: (row["id"], _size(row["request"]))):
            if size is not None:
                found[job_id] = size
    return found


def _size(request: str) -> Size | None:
    try:
        return wire.decode_stored(request, wire.JobTerms).requested_size()
    except (ValueError, InvalidRequest):  # of an earlier version
        return None


async def cells(store: Store) -> list[BusyStretch]:
    """Return the newest `MAX_CELLS` stretches of work of sessions, in the order of their ends.

    Raises:
        StoreError: the database cannot be read.
    """
    found: list[BusyStretch] = []
    before = _ABOVE_ALL_NUMBERS
    while len(found) < MAX_CELLS:
        page = await store.scan(
            cells_select(before, PAGE),
            lambda row: (row["seq"], BusyStretch(**{k: v for k, v in row.items() if k != "seq"})),
        )
        found += [stretch for _, stretch in page]
        if len(page) < PAGE:
            break
        before = page[-1][0]
    return found[::-1]
