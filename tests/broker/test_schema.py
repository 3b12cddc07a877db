"""The broker's database is made, upgraded, refused: whole, or as it was.

Kills are at system calls: the kernel ends a broker's process before the call has an effect.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import alembic.migration
import pytest
import sqlalchemy as sa

from jupyter_gpushare.broker.state import store as store_module
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.broker.state.tables import metadata
from jupyter_gpushare.errors import StoreError
from tests.broker.stored import DECISION, JOB, LEASE, RECORDS
from tests.waiting import until

LONG = "GPUSHARE_TEST_KILLS" in os.environ
# For each of two databases that is made, and upgraded.
KILLS = 75 if LONG else 2
SEED = random.randrange(1 << 32) if LONG else 20261128
# What changes a file, and what speaks with a server.
CALLS = "pwrite64,write,fsync,fdatasync,ftruncate,rename,unlink,flock,sendto,poll"
OPEN = """
import sys
from pathlib import Path
from jupyter_gpushare.broker.state import store as schema
from jupyter_gpushare.broker.state.store import Store
schema.MIGRATIONS = Path(sys.argv[2])
Store(sys.argv[1], "boot").close()
"""
# What a later release may do: a new table with data of an old one, a column, and a table that SQLite copies.
NEXT = '''
"""A next schema."""

import sqlalchemy as sa
from alembic import op

revision = "v2"
down_revision = "v1e"


def upgrade() -> None:
    op.create_table("kinds", sa.Column("id", sa.String(64), primary_key=True), sa.Column("kind", sa.Text))
    op.execute("INSERT INTO kinds SELECT id, kind FROM leases")
    op.add_column("jobs", sa.Column("colour", sa.Text, nullable=False, server_default="red"))
    with op.batch_alter_table("decisions") as batch:
        batch.alter_column("why", type_=sa.Text)
        batch.add_column(sa.Column("colour", sa.Text, nullable=False, server_default="red"))
    op.execute("UPDATE decisions SET colour = why")
'''


@pytest.fixture(params=["sqlite", "postgresql"])
def make_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes the URL of a database that is not there yet."""
    numbers = iter(range(1_000))
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql")  # type: ignore[no-any-return]
    return lambda: f"sqlite:///{tmp_path / f'{next(numbers)}.sqlite'}"


@pytest.fixture
def next_schema(tmp_path: Path) -> Path:
    folder = tmp_path / "next"
    shutil.copytree(store_module.MIGRATIONS, folder)
    (folder / "versions" / "v2_next.py").write_text(NEXT)
    return folder


def revision_of(url: str) -> str | None:
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        found = alembic.migration.MigrationContext.configure(connection).get_current_revision()
    engine.dispose()
    return found


def execute(url: str, *statements: str) -> None:
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))
    engine.dispose()


def filled(url: str) -> None:
    store = Store(url, "boot")
    store._write(tuple(RECORDS))
    store.close()


def is_open_to_the_next(url: str) -> bool:
    """Whether a broker opens the database; PostgreSQL keeps the lock of one that was killed for a moment."""
    try:
        Store(url, "boot").close()
    except StoreError as error:
        if "another broker uses" in str(error):
            return False
        raise
    return True


def test_other_tables_have_another_revision():
    """A database of an earlier commit is refused by its revision: a change of the tables changes that too."""
    lines = []
    for table in metadata.sorted_tables:
        lines += [f"{c} {c.type} {c.nullable} {c.primary_key} {c.server_default}" for c in table.columns]
        lines += [f"{each.name} {list(each.columns.keys())}" for each in table.indexes]
        lines += [f"{each.name} {list(each.columns.keys())}" for each in table.constraints]
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:12]
    (file,) = (store_module.MIGRATIONS / "versions").glob("*.py")
    (revision,) = re.findall(r'^revision = "(.*)"$', file.read_text(), re.MULTILINE)
    assert (revision, digest) == ("v1e", "fd31b57f77bd")


# ---- refused -----------------------------------------------------------------


@pytest.mark.parametrize("revision", ["0001", "0021", "v9"])
def test_a_schema_of_another_version_is_refused_and_left_alone(make_url, revision):
    url = make_url()
    Store(url, "boot").close()
    execute(url, f"UPDATE alembic_version SET version_num = '{revision}'")
    with pytest.raises(StoreError) as refused:
        Store(url, "boot")
    assert f"it has the schema {revision}, and this version knows v1e: start" in str(refused.value)
    assert store_module.database_trouble(url) in str(refused.value)
    assert revision_of(url) == revision
    execute(url, "UPDATE alembic_version SET version_num = 'v1e'")
    Store(url, "boot").close()


def test_the_database_of_another_program_is_refused_and_left_alone(make_url):
    url = make_url()
    execute(url, "CREATE TABLE users (name VARCHAR(10))", "INSERT INTO users VALUES ('ada')")
    path = Path(sa.make_url(url).database or "")
    before = path.read_bytes() if path.exists() else b""
    with pytest.raises(StoreError, match="it has the schema of another program"):
        Store(url, "boot")
    # Not even to WAL.
    assert (path.read_bytes() if path.exists() else b"") == before
    execute(url, "INSERT INTO users VALUES ('bo')")


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "b.sqlite").write_bytes(b"not a database at all" * 500)
    with pytest.raises(StoreError, match="cannot be used"):
        Store(f"sqlite:///{tmp_path / 'b.sqlite'}", "boot")
    assert (tmp_path / "b.sqlite").read_bytes().startswith(b"not a database")


def test_a_place_where_no_file_can_be_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "folder", tmp_path / "file" / "b.sqlite"):
        with pytest.raises(StoreError, match=f"database .*{path.parent.name}.* cannot be used"):
            Store(f"sqlite:///{path}", "boot")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite://", "must be a file"),
        ("sqlite:///:memory:", "must be a file"),
        ("mysql://db/gpushare", "is sqlite or postgresql, not mysql"),
        ("broker.sqlite", "is a URL of SQLAlchemy"),
        ("postgresql+no_such_driver://db/gpushare", "no_such_driver"),
    ],
)
def test_a_url_that_no_broker_can_use_is_refused(url, says):
    with pytest.raises(StoreError, match=says):
        Store(url, "boot")
    assert says in store_module.database_trouble(url)


# ---- made --------------------------------------------------------------------


def test_what_a_killed_start_left_behind_is_no_part_of_a_new_database(tmp_path):
    path = tmp_path / "b.sqlite"
    filled(f"sqlite:///{path}")
    path.rename(f"{path}.new")
    path.touch()
    store = Store(f"sqlite:///{path}", "boot")
    assert (store.epoch, store.load().leases) == (1, ())
    store.close()
    assert {each.name for each in tmp_path.iterdir()} == {"b.sqlite", "b.sqlite.lock"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("put_back", [True, False])
def test_no_database_is_made_beside_what_another_stored_last(tmp_path, put_back):
    path, kept = tmp_path / "b.sqlite", tmp_path / "kept.sqlite"
    filled(url := f"sqlite:///{path}")
    with sqlite3.connect(path) as writer:
        writer.execute("INSERT INTO meta VALUES ('last', '1')")
        writer.commit()
        # As a killed broker leaves them: the last commit is in the WAL alone.
        shutil.copy(path, kept)
        shutil.copy(f"{path}-wal", tmp_path / "kept-wal")
    writer.close()
    path.unlink()
    (tmp_path / "kept-wal").rename(f"{path}-wal")
    with pytest.raises(StoreError, match=r"b\.sqlite-wal has what was stored last"):
        Store(url, "boot")
    assert "b.sqlite-wal" in store_module.database_trouble(url)
    if put_back:
        kept.rename(path)
    else:
        (tmp_path / "b.sqlite-wal").rename(tmp_path / "away")
    Store(url, "boot").close()
    with sqlite3.connect(path) as reader:
        assert len(reader.execute("SELECT * FROM meta WHERE key = 'last'").fetchall()) == put_back
    reader.close()


def test_a_link_to_a_database_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "b.sqlite").symlink_to(tmp_path / "disk" / "real.sqlite")
    Store(f"sqlite:///{tmp_path / 'b.sqlite'}", "boot").close()
    assert (tmp_path / "b.sqlite").is_symlink()
    assert (tmp_path / "disk" / "real.sqlite").stat().st_size > 0


# ---- upgraded ----------------------------------------------------------------


def test_a_next_schema_keeps_what_is_stored_and_the_old_version_refuses_it(
    make_url, next_schema, monkeypatch
):
    filled(url := make_url())
    with monkeypatch.context() as later:
        later.setattr(store_module, "MIGRATIONS", next_schema)
        assert is_upgraded(url)
    with pytest.raises(StoreError, match="it has the schema v2, and this version knows v1e"):
        Store(url, "boot")


def is_upgraded(url: str) -> bool:
    until(lambda: is_open_to_the_next(url), "the database is open to the next broker")
    store = Store(url, "boot")
    loaded = store.load()
    with store._engine.connect() as connection:
        kinds = connection.execute(sa.text("SELECT id, kind FROM kinds")).all()
        colours = connection.execute(sa.text("SELECT colour, why FROM decisions")).all()
    store.close()
    kept = (loaded.leases, loaded.jobs, loaded.decisions) == ((LEASE,), (JOB,), (DECISION,))
    assert revision_of(url) == "v2"
    return kept and kinds == [(LEASE.id, LEASE.lease.kind)] and colours == [(DECISION.why, DECISION.why)]


def test_an_upgrade_that_fails_half_way_changes_nothing(make_url, next_schema, monkeypatch):
    filled(url := make_url())
    file = next_schema / "versions" / "v2_next.py"
    file.write_text(f'{NEXT}    op.execute("SELECT no_such_column FROM kinds")\n')
    with monkeypatch.context() as later:
        later.setattr(store_module, "MIGRATIONS", next_schema)
        with pytest.raises(StoreError, match="no_such_column"):
            Store(url, "boot")
        file.write_text(NEXT)
        assert revision_of(url) == "v1e"
    store = Store(url, "boot")
    assert store.load().leases == (LEASE,)
    assert "kinds" not in sa.inspect(store._engine).get_table_names()
    store.close()


# ---- kills -------------------------------------------------------------------


class Killed:
    """Opens a database in a process of its own that is killed at a system call."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "calls"
        if shutil.which("strace") is None:
            pytest.skip("no strace; install it with: apt-get update && apt-get install -y strace")

    def _open(self, url: str, migrations: Path, kill: str) -> int:
        command = ["strace", "-qq", "-o", self._log, "-e", f"trace={CALLS}", *(("-e", kill) if kill else ())]
        done = subprocess.run(
            [*command, sys.executable, "-c", OPEN, url, migrations], capture_output=True, text=True
        )
        assert done.returncode in (0, -9), done.stderr
        return done.returncode

    def points(self, url: str, migrations: Path) -> list[str]:
        """Where it can be killed: what strace injects, in the order of the calls."""
        assert self._open(url, migrations, "") == 0
        calls = [line.partition("(")[0] for line in self._log.read_text().splitlines() if "(" in line]
        seen: Counter[str] = Counter()
        found = []
        for call in calls:
            seen[call] += 1
            found.append(f"inject={call}:signal=KILL:when={seen[call]}")
        return found

    def at(self, point: str, url: str, migrations: Path) -> bool:
        """Kill it there; False: it ended before."""
        return self._open(url, migrations, point) == -9


def chosen(points: list[str]) -> list[str]:
    """`KILLS` points, each of them at least once where there are so many."""
    chance = random.Random(SEED)
    print(f"seed {SEED}, {len(points)} system calls, {KILLS} kills")
    if len(points) >= KILLS:
        return chance.sample(points, KILLS)
    return [*points, *chance.choices(points, k=KILLS - len(points))]


@pytest.mark.long_form
@pytest.mark.timeout(1800)
def test_a_broker_killed_while_it_makes_its_database_leaves_one_for_the_next(make_url, tmp_path):
    killed = Killed(tmp_path)
    killed_ones = 0
    for point in chosen(killed.points(make_url(), store_module.MIGRATIONS)):
        url = make_url()
        killed_ones += killed.at(point, url, store_module.MIGRATIONS)
        until(lambda url=url: is_open_to_the_next(url), "the database is open to the next broker")
        assert revision_of(url) == "v1e"
    assert killed_ones >= KILLS * 0.9


@pytest.mark.long_form
@pytest.mark.timeout(1800)
def test_a_broker_killed_while_it_upgrades_its_database_loses_nothing(
    make_url, tmp_path, next_schema, monkeypatch
):
    killed = Killed(tmp_path)
    filled(url := make_url())
    killed_ones = 0
    for point in chosen(killed.points(url, next_schema)):
        filled(url := make_url())
        killed_ones += killed.at(point, url, next_schema)
        with monkeypatch.context() as later:
            later.setattr(store_module, "MIGRATIONS", next_schema)
            assert is_upgraded(url)
    assert killed_ones >= KILLS * 0.9


def test_a_new_database_has_its_name_only_when_it_is_whole(tmp_path):
    killed = Killed(tmp_path)
    url = f"sqlite:///{tmp_path / 'first.sqlite'}"
    points = killed.points(url, store_module.MIGRATIONS)
    (renamed,) = [number for number, point in enumerate(points) if "rename:" in point]
    for number in (renamed, renamed + 1):
        path = tmp_path / f"{number}.sqlite"
        assert killed.at(points[number], f"sqlite:///{path}", store_module.MIGRATIONS)
        assert path.exists() == (number > renamed)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("v1e",)]
    connection.close()
