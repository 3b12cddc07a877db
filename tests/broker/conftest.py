"""Fixtures: `site` is a site in memory, in virtual time, and `broker` a broker on it; `http` is a listening
broker; `database` opens a fresh database for one test, in SQLite and in a real PostgreSQL.
"""

from __future__ import annotations

import asyncio
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
from tests.broker import processes
from tests.broker.brokers import Broker
from tests.broker.http_site import Http
from tests.broker.processes import Brokers
from tests.broker.site import Site
from tests.broker.virtual_time import VirtualLoop
from tests.forks import Forks, forks
from tests.ports import free_ports
from tests.waiting import PATIENCE_S

INSTALL_POSTGRESQL = "apt-get update && apt-get install -y postgresql"

Open = Callable[..., Store]
Loops = dict[str, Callable[[], asyncio.AbstractEventLoop]]


def pytest_asyncio_loop_factories(item: pytest.Function) -> Loops:
    """Run tests with a `site` in virtual time."""
    return {"virtual": VirtualLoop} if "site" in item.fixturenames else {"real": asyncio.new_event_loop}


@pytest.fixture
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """Yield a site for this test; ``@pytest.mark.site(gpus=1)`` sets what differs from the default."""
    marker = request.node.get_closest_marker("site")
    async with Site(tmp_path, **(marker.kwargs if marker else {})) as site:
        yield site


@pytest.fixture
async def broker(site: Site) -> Broker:
    return await site.start_broker()


@pytest.fixture(scope="module")
def imported_broker() -> Iterator[Forks]:
    """Brokers without their imports, which take longer than most tests."""
    with forks(processes.IMPORTS, os.environ) as made:
        yield made


@pytest.fixture
def brokers(tmp_path: Path, imported_broker: Forks) -> Iterator[Brokers]:
    made = Brokers(tmp_path, free_ports(), imported_broker)
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Yield a function that opens this test's database: ``database(boot_id="boot")``; it may stay open."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'b.sqlite'}"
    else:
        url = request.getfixturevalue("postgresql")()
    opened: list[Store] = []

    def open_it(boot_id: str = "boot") -> Store:
        opened.append(Store(url, boot_id))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


@pytest.fixture
def store(database: Open) -> Store:
    return database()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'b.sqlite'}", "boot")
    yield store
    store.close()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Callable[[], str]]:
    """Yield a function that makes an empty database in the run's PostgreSQL server and returns its URL."""
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
    async with Http(Site(tmp_path)) as http:
        yield http
