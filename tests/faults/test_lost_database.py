"""A PostgreSQL that refuses or does not answer: sleeping sessions wake, and all is stored once it is back."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from tests.faults.site import Site, running
from tests.faults.story import begun
from tests.waiting import until

# Beside the orders in virtual time of test_full_disk.py.
pytestmark = pytest.mark.long


class Database:
    """One database of a server that others use too."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = sa.make_url(url)
        self._name = str(parts.database)
        self._server = f"host={parts.query['host']} user=gpushare dbname=postgres"

    def _do(self, statement: str) -> list[int]:
        with psycopg.connect(self._server, autocommit=True) as server:
            done = server.execute(statement.format(name=self._name).encode())
            return [row[0] for row in done.fetchall()] if done.description else []

    @contextmanager
    def refuses(self) -> Iterator[None]:
        """Every connection ends, and no new one is taken."""
        self._do("ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        self._do("SELECT pg_terminate_backend(pid)::int FROM pg_stat_activity WHERE datname = '{name}'")
        yield
        self._do("ALTER DATABASE {name} ALLOW_CONNECTIONS true")

    @contextmanager
    def hangs(self) -> Iterator[None]:
        """Every connection stays, and nothing is answered."""
        pids = self._do("SELECT pid FROM pg_stat_activity WHERE datname = '{name}'")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@pytest.fixture
def database(postgresql: Callable[[], str]) -> Database:
    return Database(postgresql())


@pytest.fixture
def site(database: Database) -> Iterator[Site]:
    def on_it(folder: Path) -> Site:
        site = Site(folder)
        with (folder / "broker.py").open("a") as config:
            config.write(f"c.GPUShareBroker.db_url = {database.url!r}\n")
        return site

    with running(on_it) as site:
        yield site


def test_a_session_wakes_when_the_job_on_its_gpu_ends_while_the_database_refuses(
    site: Site, database: Database
) -> None:
    story, broker = begun(site), site.services["broker"].process
    assert broker is not None
    with database.refuses():
        story.end_job()
        story.run_cell()
        until(lambda: broker.poll() is not None, "the broker ends: its commits may be lost", log=story.log)
    site.services["broker"].start()
    story.judge()


def test_a_session_wakes_when_the_job_on_its_gpu_ends_while_the_database_hangs(
    site: Site, database: Database
) -> None:
    story, broker = begun(site), site.services["broker"].process
    assert broker is not None
    with database.hangs():
        story.end_job()
        story.run_cell()
    story.judge()
    assert broker.poll() is None, "the broker did not restart"
