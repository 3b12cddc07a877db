"""The broker's database as a whole: which schema it has, how it is made and upgraded.

Rules:

* An SQLite database is made beside its name and gets the name once it is whole.
* An upgrade is one transaction, in SQLite too: its driver commits before DDL unless
  it is told where transactions begin (`begin_explicitly`).
* A schema that this version does not know is refused, and nothing of it is changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import alembic.command
import alembic.config
import alembic.migration
import alembic.script
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from jupyter_gpushare.broker.state.database_errors import brief
from jupyter_gpushare.broker.state.records import ProjectOverride
from jupyter_gpushare.broker.state.tables import projects
from jupyter_gpushare.errors import StoreError

MIGRATIONS = Path(__file__).parent / "migrations"


def url_of(text: str) -> sa.URL:
    """Return the parsed URL of a database.

    Raises:
        StoreError: a broker can use none of this kind.
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
    """Return why no broker could use the database of a URL; empty: one could, or makes it."""
    try:
        url = url_of(text)
        with _connected(url) as connection:
            return _left_behind(url) if connection is None else _unknown_schema(connection)
    except StoreError as error:
        return str(error)
    except (OSError, sa.exc.SQLAlchemyError) as error:
        return f"it cannot be used: {brief(error)}"
    except ImportError as error:
        return f"it cannot be used: {error}: install the package of its driver"


def stored_overrides(url: str) -> dict[str, ProjectOverride]:
    """Return, by project, what administrators changed.

    There is none where the database cannot be read: `database_trouble` says why.
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
    """Give a database the newest schema, in one transaction; make it first where it is an SQLite file.

    Raises:
        OSError: no file can be made there.
        sqlalchemy.exc.SQLAlchemyError: the database failed, and has the schema that it had.
    """
    if is_to_be_made(engine.url):
        _make_file(engine.url)
    with engine.begin() as connection:
        _migrate(connection)


def begin_explicitly(engine: sa.Engine) -> None:
    """Have SQLite's driver begin a transaction where SQLAlchemy does, not at the first INSERT.

    Source: SQLAlchemy's manual, dialects, SQLite, "Enabling Non-Legacy SQLite Transactional Modes".
    """
    sa.event.listen(engine, "connect", _begin_nothing)
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))


def _begin_nothing(connection: Any, _record: Any) -> None:
    connection.isolation_level = None


def _make_file(url: sa.URL) -> None:
    path = Path(os.path.realpath(url.database or ""))
    new = path.with_name(f"{path.name}.new")
    # Of a broker that was killed here; no other one is here now.
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
    # The file is thrown away unless it becomes whole, and is synced once.
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


def _left_behind(url: sa.URL) -> str:
    path = os.path.realpath(url.database or "")
    for rest in (Path(f"{path}-wal"), Path(f"{path}-journal")):
        # SQLite would delete it, with the commits in it.
        if rest.exists() and rest.stat().st_size:
            return (
                f"it is missing or empty, and {rest.name} has what was stored last: put the database back, "
                f"or move {rest.name} away too"
            )
    return ""


@contextmanager
def _connected(url: sa.URL) -> Iterator[Connection | None]:
    """Connect to a database; None: it is to be made."""
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
    alembic.command.upgrade(config, "head")


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
