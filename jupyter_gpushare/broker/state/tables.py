"""Tables of the broker's database, and conversions and writes of `records` to and from their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from jupyter_gpushare.broker.state.records import (
    USE_AMOUNTS,
    BusyStretch,
    DecisionRecord,
    Drain,
    Drains,
    JobRecord,
    Lags,
    LeaseRecord,
    LendingMode,
    LendingOverride,
    MachineUse,
    MetaValue,
    MetaValues,
    Owner,
    OwnerForgotten,
    OwnerMoved,
    PartedPairs,
    ProjectOverride,
    SuspensionCounts,
    UsageAddition,
    UsageRecord,
    UserLags,
)
from jupyter_gpushare.broker.state.usage import AMOUNTS, UsageQuery
from jupyter_gpushare.core.measure import Measure
from jupyter_gpushare.core.model import CheckpointMode, Kind, Lease, State
from jupyter_gpushare.core.size import Size
from jupyter_gpushare.protocol.wire import Text, decode_stored, encode
from jupyter_gpushare.wall_clock import before

metadata = sa.MetaData()

meta = sa.Table(
    "meta",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)
leases = sa.Table(
    "leases",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("project", sa.String(255), nullable=False),
    sa.Column("kind", sa.String(16), nullable=False),
    sa.Column("user", sa.String(255), nullable=False),
    sa.Column("server", sa.String(255), nullable=False),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("fraction_milli", sa.Integer, nullable=False),
    sa.Column("device_count", sa.Integer, nullable=False),
    sa.Column("memory_bytes", sa.BigInteger, nullable=False),
    sa.Column("profile", sa.String(32), nullable=False),
    sa.Column("devices", sa.Text, nullable=False),  # JSON list of UUIDs
    sa.Column("held_milli", sa.Integer, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("survival", sa.String(16), nullable=False),
    sa.Column("borrow", sa.Boolean, nullable=False),
    sa.Column("share", sa.Boolean, nullable=False),  # the owner's consent only
    sa.Column("submitted_at", sa.Float, nullable=False),  # monotonic, of the boot in meta
    sa.Column("queued_at", sa.Float, nullable=False),
    sa.Column("waits_since_at", sa.Float, nullable=False),
    sa.Column("granted_at", sa.Float, nullable=False),
    sa.Column("keep_until_at", sa.Float, nullable=False),
    sa.Column("borrowed", sa.Boolean, nullable=False),
    sa.Column("host", sa.String(64), nullable=False),  # the lease that it is a guest of
    sa.Column("lend_now", sa.Boolean, nullable=False),
    sa.Column("suspendable", sa.Boolean, nullable=False),
    sa.Column("saved_bytes", sa.BigInteger, nullable=False),
    sa.Column("attained_gpu_s", sa.Float, nullable=False),
    sa.Column("attained_at", sa.Float),  # null: not running
    sa.Column("turns", sa.Integer, nullable=False),
    sa.Column("cancelled", sa.Boolean, nullable=False),
    sa.Column("uid", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("since_at", sa.String(40), nullable=False),
    sa.Column("entered_at", sa.Float, nullable=False),
    sa.Column("counted_at", sa.Float, nullable=False),
    sa.Column("why", sa.String(64), nullable=False),
    sa.Column("requeue", sa.Boolean, nullable=False),
    sa.Column("note", sa.Text, nullable=False),
    sa.Column("given_to", sa.String(255), nullable=False),
    sa.Column("suspend_reason", sa.Text, nullable=False),
    sa.Column("limits", sa.Text, nullable=False),  # JSON: bytes per UUID
    sa.Column("tries", sa.Integer, nullable=False),
    sa.Column("lost", sa.Boolean, nullable=False),
    sa.Column("never_sleep", sa.Boolean, nullable=False),
    sa.Column("settled", sa.Integer, nullable=False),
    sa.Column("moves", sa.Boolean, nullable=False),
    sa.Column("slept_on", sa.Text, nullable=False),  # JSON list of UUIDs
    sa.Column("unprepared", sa.Boolean, nullable=False),
    sa.Column("guest_bytes", sa.BigInteger, nullable=False),
    sa.Index("leases_by_server", "user", "server"),
)
jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("user", sa.String(255), nullable=False, index=True),
    sa.Column("project", sa.String(255), nullable=False),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("command", sa.Text, nullable=False),  # JSON list
    sa.Column("cwd", sa.Text),
    sa.Column("env", sa.Text, nullable=False),  # JSON object
    sa.Column("retries", sa.Integer, nullable=False),
    sa.Column("grace_s", sa.Float, nullable=False),
    sa.Column("request", sa.Text, nullable=False),
    sa.Column("submitted_at", sa.String(40), nullable=False),
    sa.Column("started_at", sa.String(40)),
    sa.Column("ended_at", sa.String(40)),
    sa.Column("result", sa.String(16), nullable=False),
    sa.Column("exit_code", sa.Integer),
    sa.Column("stopped", sa.Boolean, nullable=False),
    sa.Column("reason_texts", sa.Text, nullable=False),  # JSON
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("failures", sa.Integer, nullable=False),
    sa.Column("preemptions", sa.Integer, nullable=False),
    sa.Column("ran_s", sa.Float, nullable=False),
    sa.Column("done", sa.Float),
    sa.Column("total", sa.Float),
    sa.Column("measure", sa.Text),  # JSON object; null: it reported no progress
    sa.Column("idempotency_key", sa.String(255)),
    sa.Column("request_digest", sa.String(64), nullable=False),
    sa.UniqueConstraint("user", "idempotency_key", name="one_job_per_key"),
)
decisions = sa.Table(
    "decisions",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("at", sa.String(40), nullable=False),
    sa.Column("lease", sa.String(64), nullable=False, index=True),
    sa.Column("user", sa.String(255), nullable=False),
    sa.Column("project", sa.String(255), nullable=False),
    sa.Column("action", sa.String(32), nullable=False),
    sa.Column("why", sa.String(64), nullable=False),
    sa.Column("for_lease", sa.String(64)),
    sa.Column("texts", sa.Text, nullable=False),  # JSON
    sa.Index("decisions_by_user", "user", "at"),
)
owners = sa.Table(
    "owners",
    metadata,
    sa.Column("user", sa.String(255), primary_key=True),
    sa.Column("name", sa.String(255), nullable=False),
    sa.Column("created", sa.String(40), nullable=False),
    sa.Column("uid", sa.BigInteger, nullable=False),
    sa.Column("held", sa.Boolean, nullable=False),
)
projects = sa.Table(
    "projects",
    metadata,
    sa.Column("name", sa.String(255), primary_key=True),
    sa.Column("quota_milli", sa.Integer),
    sa.Column("weight", sa.Integer),
    sa.Column("limit_milli", sa.Integer),
    sa.Column("priority_max", sa.Integer),
)

usage = sa.Table(
    "usage",
    metadata,
    sa.Column("day", sa.String(10), primary_key=True),
    sa.Column("user", sa.String(255), primary_key=True),
    sa.Column("project", sa.String(255), primary_key=True),
    sa.Column("gpu", sa.String(255), primary_key=True),
    sa.Column("used_gpu_s", sa.Float, nullable=False),
    sa.Column("computing_gpu_s", sa.Float, nullable=False),
    sa.Column("borrowed_gpu_s", sa.Float, nullable=False),
    sa.Column("lent_gpu_s", sa.Float, nullable=False),
    sa.Column("saved_gib_s", sa.Float, nullable=False),
    sa.Column("kept_s", sa.Float, nullable=False),
)

machine = sa.Table(
    "machine",
    metadata,
    sa.Column("at", sa.String(40), primary_key=True),
    sa.Column("gpus", sa.Float, nullable=False),
    sa.Column("held", sa.Float, nullable=False),
    sa.Column("busy", sa.Float, nullable=False),
    sa.Column("lent", sa.Float, nullable=False),
)

cells = sa.Table(
    "cells",
    metadata,
    sa.Column("seq", sa.Integer, primary_key=True),
    sa.Column("lease", sa.String(64), nullable=False),
    sa.Column("user", sa.String(255), nullable=False),
    sa.Column("project", sa.String(255), nullable=False),
    sa.Column("gpus", sa.Float, nullable=False),
    sa.Column("began_at", sa.String(40), nullable=False),
    sa.Column("duration_s", sa.Float, nullable=False),
)

_JSON_COLUMNS = {"devices", "limits", "slept_on", "command", "env"}
_TEXTS_COLUMNS = {"reason_texts", "texts"}
_LEASE_FIELDS = tuple(f.name for f in fields(Lease) if f.name in leases.c)
_RECORD_FIELDS = tuple(f.name for f in fields(LeaseRecord) if f.name != "lease")


def lease_row(record: LeaseRecord) -> dict[str, Any]:
    """Return the columns of `leases` for a record, ready to write."""
    row = {name: getattr(record.lease, name) for name in _LEASE_FIELDS}
    row.update(record.lease.size._asdict())
    row.update({name: getattr(record, name) for name in _RECORD_FIELDS})
    return packed(row)


def packed(row: dict[str, Any]) -> dict[str, Any]:
    """Return ``row`` with lists and mappings as JSON text."""
    return {name: _to_column(name, value) for name, value in row.items()}


def _to_column(name: str, value: Any) -> Any:
    if name in _TEXTS_COLUMNS:
        return encode(value).decode()
    return json.dumps(value) if name in _JSON_COLUMNS else value


def _of_column(name: str, value: Any) -> Any:
    if name in _TEXTS_COLUMNS:
        return tuple(decode_stored(value, list[Text]))
    return json.loads(value) if name in _JSON_COLUMNS else value


def _unpacked(row: sa.RowMapping) -> dict[str, Any]:
    return {str(name): _of_column(name, value) for name, value in row.items()}


def job_row(job: JobRecord) -> dict[str, Any]:
    """Return the columns of `jobs` for a job, ready to write."""
    measure = None if job.measure is None else json.dumps(asdict(job.measure))
    return packed(_row(job) | {"measure": measure})


def lease_of(row: sa.RowMapping) -> LeaseRecord:
    """Return the lease in a row of `leases`.

    Raises:
        ValueError: this version does not know the row's kind, state or JSON text.
    """
    values = _unpacked(row)
    mine = {name: values[name] for name in _LEASE_FIELDS}
    mine.update(
        size=Size(*(values[name] for name in Size._fields)),
        kind=Kind(mine["kind"]),
        state=State(mine["state"]),
        survival=CheckpointMode(mine["survival"]),
        devices=tuple(mine["devices"]),
    )
    values["slept_on"] = tuple(values["slept_on"])
    return LeaseRecord(lease=Lease(**mine), **{name: values[name] for name in _RECORD_FIELDS})


def job_of(row: sa.RowMapping) -> JobRecord:
    """Return the job in a row of `jobs`.

    Raises:
        ValueError: a JSON column holds something else.
    """
    values = _unpacked(row)
    values["command"] = tuple(values["command"])
    if values["measure"] is not None:
        values["measure"] = Measure(**json.loads(values["measure"]))
    return JobRecord(**values)


def usage_select(query: UsageQuery, before: str) -> sa.Select[Any]:
    """Return the statement that sums the use that ``query`` selects, up to the day before ``before``."""
    by = [
        sa.literal_column("substr(day, 1, 7)").label("month") if name == "month" else usage.c[name]
        for name in query.by
    ]
    sums = [sa.func.sum(usage.c[name]).label(name) for name in AMOUNTS]
    chosen = sa.select(*by, *sums).group_by(*by).order_by(*by)
    chosen = chosen.where(usage.c.day >= query.since, usage.c.day <= query.until, usage.c.day < before)
    for name in ("user", "project"):
        if (only := getattr(query, name)) is not None:
            chosen = chosen.where(usage.c[name] == only)
    return chosen


def ended_select(before: tuple[str, str], limit: int) -> sa.Select[Any]:
    """Return the statement for ended jobs before a submission time and an id, newest first."""
    key = jobs.c.submitted_at, jobs.c.id
    columns = sa.select(jobs.c.id, jobs.c.user, jobs.c.project, jobs.c.submitted_at, jobs.c.ran_s)
    older = columns.where(jobs.c.result != "", sa.tuple_(*key) < sa.tuple_(*map(sa.literal, before)))
    return older.order_by(*(column.desc() for column in key)).limit(limit)


def requests_select(ids: Sequence[str]) -> sa.Select[Any]:
    """Return the statement for the requests of jobs."""
    return sa.select(jobs.c.id, jobs.c.request).where(jobs.c.id.in_(ids))


def cells_select(before: int, limit: int) -> sa.Select[Any]:
    """Return the statement for stretches of work with a number below ``before``, newest first."""
    return cells.select().where(cells.c.seq < before).order_by(cells.c.seq.desc()).limit(limit)


def meta_row(value: MetaValue) -> tuple[str, str]:
    """Return the key and the JSON text of ``value`` in `meta`.

    Raises:
        TypeError: the type of ``value`` has no key.
    """
    match value:
        case Lags():
            return "lags", json.dumps(value.gpu_s)
        case UserLags():
            return "user_lags", json.dumps(value.gpu_s)
        case PartedPairs():
            return "parted_pairs", json.dumps({"rows": value.rows})
        case LendingOverride():
            return "lending", json.dumps(asdict(value))
        case SuspensionCounts():
            return "suspensions", json.dumps(asdict(value))
        case Drains():
            return "drains", json.dumps({uuid: asdict(drain) for uuid, drain in value.of.items()})
        case _:
            raise TypeError(f"{type(value).__name__} has no key")


def meta_values(read: Callable[[str], str | None]) -> MetaValues:
    """Return the values stored by `meta_row`, with defaults; ``read`` returns the text of a key.

    Raises:
        ValueError: this version does not write such a text.
    """
    keys = "lags", "lending", "suspensions", "drains", "user_lags", "parted_pairs"
    lags, lending, suspensions, drains, users, parted = (json.loads(read(key) or "{}") for key in keys)
    mode = lending.pop("mode", None)
    return MetaValues(
        Lags(gpu_s=lags),
        LendingOverride(mode=None if mode is None else LendingMode(mode), **lending),
        SuspensionCounts(**suspensions),
        Drains(of={uuid: Drain(**drain) for uuid, drain in drains.items()}),
        UserLags(gpu_s=users),
        PartedPairs(**parted),
    )


def decision_of(row: sa.RowMapping) -> DecisionRecord:
    """Return the entry in a row of `decisions`.

    Raises:
        ValueError: a JSON column holds something else.
    """
    return DecisionRecord(**_unpacked(row))


# ---- writes of records: one row per record; the oldest rows beyond a bound are deleted

# Decisions.
MAX_DECISIONS = 100_000
# Ended jobs, and ended leases.
MAX_ENDED = 10_000
# Stretches of work of sessions.
MAX_CELLS = 50_000
# Days of use.
MAX_USAGE_DAYS = 400
# Days of the use of the machine's GPUs.
MAX_MACHINE_DAYS = 90

Change = (
    LeaseRecord
    | JobRecord
    | DecisionRecord
    | Owner
    | OwnerForgotten
    | OwnerMoved
    | ProjectOverride
    | UsageRecord
    | UsageAddition
    | MachineUse
    | BusyStretch
    | MetaValue
)


def read_meta(connection: Connection, key: str) -> str | None:
    """Return a value of the database itself, such as its epoch, or None if not stored.

    Raises:
        SQLAlchemyError: the database cannot be read.
    """
    return connection.execute(sa.select(meta.c.value).where(meta.c.key == key)).scalar()


def write_meta(connection: Connection, key: str, value: str) -> None:
    """Write a value of the database itself inside the connection's transaction.

    Raises:
        SQLAlchemyError: the database refused it.
    """
    connection.execute(meta.delete().where(meta.c.key == key))
    connection.execute(meta.insert().values(key=key, value=value))


def write(connection: Connection, change: Change) -> None:
    """Write one change inside the connection's transaction, and delete rows beyond the bounds.

    Raises:
        SQLAlchemyError: the database refused it.
    """
    match change:
        case MetaValue():
            write_meta(connection, *meta_row(change))
        case LeaseRecord():
            _upsert(connection, leases, lease_row(change))
        case JobRecord():
            _upsert(connection, jobs, job_row(change))
        case Owner():
            _upsert(connection, owners, _row(change))
        case OwnerMoved():
            _move_owner(connection, change)
        case OwnerForgotten():
            connection.execute(owners.delete().where(owners.c.user == change.user))
        case DecisionRecord():
            connection.execute(decisions.insert().values(packed(_row(change))))
            if change.seq % 1000 == 0:
                connection.execute(decisions.delete().where(decisions.c.seq <= change.seq - MAX_DECISIONS))
                _prune(connection)
        case UsageRecord():
            row = _row(change)
            _write_use(connection, row, row)
        case UsageAddition():
            row = _row(change.use)
            _write_use(connection, row, {name: usage.c[name] + row[name] for name in USE_AMOUNTS})
        case BusyStretch():
            added = connection.execute(cells.insert().values(_row(change)))
            (seq,) = added.inserted_primary_key or (0,)
            if seq % 1000 == 0:
                connection.execute(cells.delete().where(cells.c.seq <= seq - MAX_CELLS))
        case MachineUse():
            connection.execute(
                machine.delete().where(machine.c.at <= before(change.at, days=MAX_MACHINE_DAYS))
            )
            _upsert(connection, machine, _row(change))
        case ProjectOverride(is_empty=True):
            connection.execute(projects.delete().where(projects.c.name == change.name))
        case ProjectOverride():
            _upsert(connection, projects, _row(change))


def _row(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record)}


def _upsert(connection: Connection, table: sa.Table, row: dict[str, Any]) -> None:
    (key,) = table.primary_key
    if not connection.execute(table.update().where(key == row[key.name]).values(row)).rowcount:
        connection.execute(table.insert().values(row))


def _write_use(connection: Connection, row: dict[str, Any], sums: dict[str, Any]) -> None:
    key_of = [column == row[column.name] for column in usage.primary_key]
    if not connection.execute(usage.update().where(*key_of).values(sums)).rowcount:
        connection.execute(usage.insert().values(row))
        _forget_days(connection)


def update_leases(connection: Connection, records: Sequence[LeaseRecord]) -> None:
    """Update stored leases inside the connection's transaction, with one prepared statement.

    Raises:
        SQLAlchemyError: the database refused it.
    """
    if records:
        changed = leases.update().where(leases.c.id == sa.bindparam("known_id"))
        connection.execute(changed, [{**lease_row(each), "known_id": each.id} for each in records])


def _move_owner(connection: Connection, moved: OwnerMoved) -> None:
    """Write `OwnerMoved`: add up sums of the same day; drop the jobs' keys, which ``new`` may have used."""
    connection.execute(jobs.update().where(jobs.c.user == moved.old).values(idempotency_key=None))
    for table in (leases, jobs, decisions, cells):
        connection.execute(table.update().where(table.c.user == moved.old).values(user=moved.new))
    for row in connection.execute(usage.select().where(usage.c.user == moved.old)).mappings().all():
        write(connection, UsageAddition(UsageRecord(**{**row, "user": moved.new})))
    connection.execute(usage.delete().where(usage.c.user == moved.old))
    connection.execute(owners.delete().where(owners.c.user == moved.old))


def _forget_days(connection: Connection) -> None:
    """Drop the days beyond the newest `MAX_USAGE_DAYS` with any use; a wrong clock drops only one day."""
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
