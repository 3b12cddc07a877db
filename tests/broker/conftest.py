"""`database`: a fresh one for one test, SQLite and a real PostgreSQL; `http`: a broker that listens."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from jupyter_gpushare.broker.state.store import Store
from tests.broker.http_site import Http
from tests.broker.site import Site
from tests.waiting import PATIENCE_S

INSTALL_POSTGRESQL = "apt-get update && apt-get install -y postgresql"

Open = Callable[..., Store]


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens this test's database: ``database(boot_id="boot")``."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'b.sqlite'}"
    else:
        url = request.getfixturevalue("postgresql")()
    return lambda boot_id="boot": Store(url, boot_id)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Callable[[], str]]:
    """A PostgreSQL server of this run: makes an empty database, and returns its URL."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs:
        pytest.skip(f"no PostgreSQL; install it with: {INSTALL_POSTGRESQL}")
    initdb, control = programs[-1], programs[-1].with_name("pg_ctl")
    folder = Path(tempfile.mkdtemp(prefix="gpushare-postgresql-"))
    # The server refuses to run as root.
    user = "nobody" if os.geteuid() == 0 else None
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)

    def run(*command: str | Path) -> None:
        subprocess.run(command, user=user, cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S)

    data = folder / "data"
    run(initdb, "--pgdata", data, "--username", "gpushare", "--auth", "trust", "--no-sync")
    options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
    try:
        run(control, "--pgdata", data, "--log", folder / "log", "--options", options, "--wait", "start")

        def make() -> str:
            name = f"test_{uuid.uuid4().hex}"
            with psycopg.connect(f"host={folder} user=gpushare dbname=postgres", autocommit=True) as server:
                server.execute(f"CREATE DATABASE {name}")
            return f"postgresql+psycopg://gpushare@/{name}?host={folder}"

        yield make
    finally:
        run(control, "--pgdata", data, "--mode", "immediate", "stop")
        shutil.rmtree(folder)


@pytest.fixture
async def http(tmp_path) -> AsyncIterator[Http]:
    site = Site(tmp_path)
    http = Http(site)
    await http.open()
    yield http
    await http.close()
