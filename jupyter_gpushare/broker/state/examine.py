"""What the database of a broker says that need not run, only read: for ``gpushare doctor --site``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import alembic.config
import alembic.migration
import alembic.script
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from jupyter_gpushare.broker.state.database_errors import brief
from jupyter_gpushare.broker.state.records import ProjectOverride
from jupyter_gpushare.broker.state.store import MIGRATIONS
from jupyter_gpushare.broker.state.tables import projects


@contextmanager
def _connected(url: str) -> Iterator[Connection | None]:
    """Connect to a database; None: it is made at the first start."""
    made = sa.make_url(url)
    if made.get_backend_name() == "sqlite" and not Path(made.database or "").is_file():
        yield None
        return
    engine = sa.create_engine(made, hide_parameters=True)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def database_trouble(url: str) -> str:
    """Return why no broker could use an existing database; empty: one could."""
    try:
        with _connected(url) as connection:
            if connection is None:
                return ""
            current = alembic.migration.MigrationContext.configure(connection).get_current_revision()
    except sa.exc.SQLAlchemyError as error:
        return brief(error)
    except ImportError as error:
        return f"{error}: install the package of its driver"
    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    known = {each.revision for each in alembic.script.ScriptDirectory.from_config(config).walk_revisions()}
    return "" if current in {None, *known} else f"it comes from a newer version (schema {current})"


def stored_overrides(url: str) -> dict[str, ProjectOverride]:
    """Return, by project, what administrators changed.

    There is none where the database cannot be read: `database_trouble` says why.
    """
    try:
        with _connected(url) as connection:
            if connection is None:
                return {}
            rows = connection.execute(sa.select(projects)).mappings()
            return {row["name"]: ProjectOverride(**row) for row in rows}
    except (sa.exc.SQLAlchemyError, ImportError):
        return {}
