"""Chapters of docs/operations.md with their commands: secrets are replaced, a backup is restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import jupyter_gpushare
from tests.e2e.demo import Person, Refused
from tests.setup.machine import Site, installed
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.long

ALLOCATE = """
from jupyter_gpushare import demo_gpu
weights = demo_gpu.open().allocate("6GiB")
weights.fill(seed=42)
print(weights.is_intact())
"""
INTACT = "print(weights.is_intact())"
LEVEL = "LC_MESSAGES=C\n"  # another variable of the broker


@pytest.fixture(scope="module")
def site(wheel: Path) -> Iterator[Site]:
    with installed(wheel, jupyter_gpushare.__version__) as made:
        yield made


@pytest.fixture
def ada(site: Site) -> Iterator[Person]:
    person = Person(site, "ada")  # type: ignore[arg-type]
    if not person.server_ready():
        person.start_server(fraction="1/2")
    yield person
    person.close()


@contextmanager
def starting(site: Site) -> Iterator[Callable[[], int]]:
    """Start and stop a server of bo with a GPU all the time; yields how many have started.

    None may be refused.
    """
    bo = Person(site, "bo")  # type: ignore[arg-type]
    started: list[str] = []
    refused: list[str] = []
    ended = threading.Event()

    def go_on() -> None:
        try:
            while not ended.is_set():
                bo.start_server(fraction="1/4")
                started.append(bo.lease()["id"])
                bo.stop_server()
                until(lambda: not bo.ask("status")["leases"], "the server has stopped")
        except (AssertionError, Refused) as error:
            refused.append(str(error))

    def count() -> int:
        assert refused == []
        return len(started)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()
        bo.close()
    count()


def offers(site: Site, token: str) -> int:
    """The status with which the broker answers a request that shows this spawner's token."""
    socket = httpx.HTTPTransport(uds=f"/proc/{site.pid}/root/run/gpushare-api/api.sock")
    url = "http://localhost/services/gpushare/api/v1/spawner/offers"
    headers = {"Authorization": f"token {token}"}
    with httpx.Client(transport=socket, headers=headers, timeout=PATIENCE_S) as http:
        return http.get(url, params={"user": "ada", "group": "vision"}).status_code


def test_both_secrets_are_replaced_without_a_failed_start(site: Site, ada: Person) -> None:
    kernel = ada.kernel()
    assert kernel.run(ALLOCATE) == "True"
    kernel.disconnect()
    secrets = site.etc / "gpushare"
    old = (secrets / "spawner-token").read_text().strip()
    assert offers(site, old) != 403
    with starting(site) as started:
        until(started, "a server has started")
        site.play("operations", "Replace both secrets")
        before = started()
        until(lambda: started() > before + 1, "servers start with the new token")
    new = (secrets / "spawner-token").read_text().strip()
    assert old != new
    assert (offers(site, old), offers(site, new) != 403) == (403, True)

    variables = secrets / "broker.env"
    api_token = variables.read_text().partition("=")[2].strip()
    with variables.open("a") as file:
        file.write(LEVEL)
    said = site.play("operations", "Replace both secrets", number=1)
    assert "fail" not in said
    assert variables.read_text().endswith(LEVEL)
    assert variables.stat().st_mode & 0o777 == 0o600
    until(lambda: site.is_well(jupyter_gpushare.__version__), "broker and Hub know the new token")
    answer = httpx.get(f"{site.hub_url}/hub/api/user", headers={"Authorization": f"token {api_token}"})
    assert answer.status_code == 403
    until(ada.server_ready, "the Hub has found ada's server")
    assert kernel.run(INTACT) == "True"
    with starting(site) as started:
        until(started, "a server has started")


def test_a_restored_backup_knows_what_it_held_and_names_what_came_later(site: Site, ada: Person) -> None:
    kernel = ada.kernel()
    assert kernel.run(ALLOCATE) == "True"
    kernel.disconnect()
    held = ada.lease()["id"]
    backup = site.folder / "backup" / "gpushare-before.sqlite"
    database = "/var/lib/gpushare/broker.sqlite"
    site.shell(f"umask 077; sqlite3 {database} '.backup {backup}'")
    bo = Person(site, "bo")  # type: ignore[arg-type]
    bo.start_server(fraction="1/2")
    later = bo.lease()["id"]
    site.play("operations", "Restore a backup")
    until(lambda: later in " ".join(site.health().get("reasons", ())), "health names bo's lease")
    assert ada.lease()["id"] == held
    assert kernel.run(INTACT) == "True"
    bo.stop_server()
    until(lambda: site.is_well(jupyter_gpushare.__version__), "all is well once its server has stopped")
    bo.close()
