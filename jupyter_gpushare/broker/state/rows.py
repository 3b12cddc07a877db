"""Writes of records: one row per record, older rows beyond a bound deleted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from jupyter_gpushare.broker.state.records import (
    USE_AMOUNTS,
    BusyStretch,
    DecisionRecord,
    JobRecord,
    LeaseRecord,
    MachineUse,
    MetaValue,
    Owner,
    OwnerForgotten,
    OwnerMoved,
    ProjectOverride,
    UsageAddition,
    UsageRecord,
)
from jupyter_gpushare.broker.state.tables import (
    cells,
    decisions,
    job_row,
    jobs,
    lease_row,
    leases,
    machine,
    meta,
    meta_row,
    owners,
    packed,
    projects,
    usage,
)
from jupyter_gpushare.core.model import State
from jupyter_gpushare.wall_clock import before

# Stored decisions; older ones are deleted.
MAX_DECISIONS = 100_000
# Ended jobs and leases kept, newest first.
MAX_ENDED = 10_000
# Stretches of work of sessions kept, newest first.
MAX_CELLS = 50_000
# Stored days of use.
MAX_USAGE_DAYS = 400
# Stored days of the use of the machine's GPUs.
MAX_MACHINE_DAYS = 90

# Of a row of use.
USE_KEY = ("day", "user", "project", "gpu")

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
    """Return a value of the database itself, such as its epoch; None: it has none.

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
    """Write one change inside the connection's transaction, and delete what is beyond the bounds.

    Raises:
        SQLAlchemyError: the database refused it.
    """
    match change:
        case MetaValue():
            write_meta(connection, *meta_row(change))
            return
        case LeaseRecord():
            table, row, key = leases, lease_row(change), "id"
        case OwnerMoved():
            _move_owner(connection, change)
            return
        case OwnerForgotten():
            connection.execute(owners.delete().where(owners.c.user == change.user))
            return
        case Owner():
            row = {f.name: getattr(change, f.name) for f in fields(change)}
            table, key = owners, "user"
        case JobRecord():
            table, row, key = jobs, job_row(change), "id"
        case DecisionRecord():
            connection.execute(
                decisions.insert().values(packed({f.name: getattr(change, f.name) for f in fields(change)}))
            )
            if change.seq % 1000 == 0:
                connection.execute(decisions.delete().where(decisions.c.seq <= change.seq - MAX_DECISIONS))
                _prune(connection)
            return
        case UsageRecord() | UsageAddition():
            use = change if isinstance(change, UsageRecord) else change.use
            row = {f.name: getattr(use, f.name) for f in fields(use)}
            sums = row if use is change else {name: usage.c[name] + row[name] for name in USE_AMOUNTS}
            key_of = [usage.c[name] == row[name] for name in USE_KEY]
            if not connection.execute(usage.update().where(*key_of).values(sums)).rowcount:
                connection.execute(usage.insert().values(row))
                _forget_days(connection)
            return
        case BusyStretch():
            added = connection.execute(
                cells.insert().values({f.name: getattr(change, f.name) for f in fields(change)})
            )
            (seq,) = added.inserted_primary_key or (0,)
            if seq % 1000 == 0:
                connection.execute(cells.delete().where(cells.c.seq <= seq - MAX_CELLS))
            return
        case MachineUse():
            connection.execute(
                machine.delete().where(machine.c.at <= before(change.at, days=MAX_MACHINE_DAYS))
            )
            table, row, key = machine, {f.name: getattr(change, f.name) for f in fields(change)}, "at"
        case ProjectOverride(is_empty=True):
            connection.execute(projects.delete().where(projects.c.name == change.name))
            return
        case ProjectOverride():
            row = {f.name: getattr(change, f.name) for f in fields(change)}
            table, key = projects, "name"
    column = table.c[key]
    if not connection.execute(table.update().where(column == row[key]).values(row)).rowcount:
        connection.execute(table.insert().values(row))


def update_leases(connection: Connection, records: Sequence[LeaseRecord]) -> None:
    """Write leases that the database has, with one prepared statement, inside the connection's transaction.

    Raises:
        SQLAlchemyError: the database refused it.
    """
    if records:
        changed = leases.update().where(leases.c.id == sa.bindparam("known_id"))
        connection.execute(changed, [{**lease_row(each), "known_id": each.id} for each in records])


def _move_owner(connection: Connection, moved: OwnerMoved) -> None:
    """Write `OwnerMoved`: sums of one day are added up; moved jobs lose their keys, which others may have."""
    connection.execute(jobs.update().where(jobs.c.user == moved.old).values(idempotency_key=None))
    for table in (leases, jobs, decisions, cells):
        connection.execute(table.update().where(table.c.user == moved.old).values(user=moved.new))
    for row in connection.execute(usage.select().where(usage.c.user == moved.old)).mappings().all():
        write(connection, UsageAddition(UsageRecord(**{**row, "user": moved.new})))
    connection.execute(usage.delete().where(usage.c.user == moved.old))
    connection.execute(owners.delete().where(owners.c.user == moved.old))


def _forget_days(connection: Connection) -> None:
    """Drop the days beyond the newest `MAX_USAGE_DAYS` with any use: a wrong clock drops one."""
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
