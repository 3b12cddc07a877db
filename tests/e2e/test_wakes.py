"""What wakes a sleeping session: with a real Hub, broker, helper and kernels on the simulated driver."""

from __future__ import annotations

import contextlib
import http.server
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.demo import DemoHub, Kernel, Person, until
from tests.e2e.test_story import bytes_of, steps_done, submit
from tests.gpu.machine import WORKER, Client

#: Longer than a process has to be stalled, in a busy kernel, until it wakes its session (2 s and 5 s).
WATCHED_S = 12.0
#: A kernel that holds GPU memory and can call the driver as `worker` does.
HOLD = f"""
import os, sys, threading
sys.path.insert(0, {str(WORKER.parent)!r})
import worker
_, context = worker.init()
(worker.alloc(64), os.getpid())
"""
POLL = """
for name in worker.QUERIES:
    threading.Thread(target=worker.poll, args=(context, name, 1.0), daemon=True).start()
"""
FEWEST_ANSWERS = "min(worker.queried[name] for name in worker.QUERIES)"


def hold(person: Person) -> tuple[Kernel, int]:
    """Return a kernel that holds GPU memory, and its process."""
    kernel = person.kernel()
    code, pid = kernel.run(HOLD).strip("()").split(", ")
    assert code == "0"
    return kernel, int(pid)


def sample_of(hub: DemoHub, person: Person) -> dict[str, Any]:
    """Return the session as the device helper measures it."""
    handle = f"{person.lease()['id']}-"
    with contextlib.closing(Client(hub.folder / "state" / "broker" / "helper.sock")) as client:
        samples = client.ask("sample")["leases"]
    found: dict[str, Any] = next(each for each in samples if each["lease"].startswith(handle))
    return found


@pytest.fixture
def slow() -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """A web server: its address, whether it was asked, and what lets it answer."""
    asked, may_answer = threading.Event(), threading.Event()

    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            may_answer.wait()
            self.send_response(204)
            self.end_headers()

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", asked, may_answer
    may_answer.set()
    server.shutdown()
    server.server_close()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_only_a_call_that_blocks_wakes_a_session(
    hub: DemoHub, tmp_path: Path, slow: tuple[str, threading.Event, threading.Event]
) -> None:
    address, asked, may_answer = slow
    ada, cy, bo = (hub.person(name) for name in ("ada", "cy", "bo"))
    ada.start_server(fraction="0.5")
    cy.start_server(fraction="0.5", project="vision")
    polling, pid = hold(ada)
    polling.run(POLL)
    until("each query was answered", lambda: int(polling.run(FEWEST_ANSWERS)) > 1)
    kernels = [hold(cy) for _ in range(3)]

    # Both fall asleep for bo's job, though ten queries a second are made in one.
    job = submit(bo, tmp_path)
    until("both sleep", lambda: {ada.state(), cy.state()} == {"suspended"})
    until("the job makes steps", lambda: len(steps_done(tmp_path)) > 3)
    assert [bytes_of(hub, each) for each in (pid, *(pid for _, pid in kernels))] == [0] * 4
    until("the helper sees queries wait", lambda: sample_of(hub, ada)["queries_only"])

    # input(), a sleep, a slow request: each in a busy kernel.
    (asks, _), (sleeps, _), (requests, _) = kernels
    waits = [
        (asks, asks.send("input()", allow_stdin=True)),
        (sleeps, sleeps.send(f"import time; time.sleep({WATCHED_S})")),
        (requests, requests.send(f"import urllib.request; urllib.request.urlopen({address!r}).status")),
    ]
    assert asked.wait(120)
    deadline = time.monotonic() + WATCHED_S
    while time.monotonic() < deadline:
        assert (ada.state(), cy.state()) == ("suspended", "suspended")
        time.sleep(0.2)
    asks.reply("still asleep")
    may_answer.set()
    assert [kernel.finish(cell) for kernel, cell in waits] == ["'still asleep'", "", "204"]
    assert (ada.state(), cy.state()) == ("suspended", "suspended")
    assert sample_of(hub, ada)["queries_only"]
    assert not sample_of(hub, cy)["wanted"]

    # A call that blocks wakes cy, and only cy.
    assert asks.run("worker.check(context)") == "'ok'"
    until("cy is awake", lambda: cy.state() == "running")
    assert ada.state() == "suspended"

    # The polling goes on where it was once its session is awake.
    before = int(polling.run(FEWEST_ANSWERS))
    assert polling.run("worker.check(context)") == "'ok'"
    until("each query is answered again", lambda: int(polling.run(FEWEST_ANSWERS)) > before)
    assert bo.job(job["id"])["state"] == "suspended"


def stored_state(hub: DemoHub, lease_id: str) -> str:
    """Return the state of a lease in the broker's database."""
    database = sqlite3.connect(f"file:{hub.folder}/state/broker/broker.sqlite?mode=ro", uri=True)
    with contextlib.closing(database):
        return str(database.execute("select state from leases where id = ?", [lease_id]).fetchone()[0])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_session_wakes_while_the_broker_hangs_and_the_broker_follows(hub: DemoHub, tmp_path: Path) -> None:
    ada, bo = hub.person("ada"), hub.person("bo")
    ada.start_server(fraction="0.5")
    kernel, pid = hold(ada)
    job = submit(bo, tmp_path)
    until("the job makes steps", lambda: len(steps_done(tmp_path)) > 3)
    assert bo.gpushare("cancel", job["id"]).returncode == 0
    until("the job is cancelled", lambda: bo.job(job["id"])["state"] == "cancelled")
    lease_id, epoch = ada.lease()["id"], ada.ask("health")["epoch"]
    assert ada.state() == "suspended"

    brokers = [process for process in hub.processes() if "broker" in process.info["cmdline"]]
    brokers.sort(key=lambda process: "--respawn" in process.info["cmdline"])
    for process in reversed(brokers):  # the parent first: it would replace a broker that hangs
        process.suspend()
    try:
        assert kernel.run("worker.check(context)") == "'ok'"
        assert bytes_of(hub, pid) >= 64 << 20
        assert stored_state(hub, lease_id) == "suspended"
        brokers[0].resume()
        until("the broker has followed", lambda: ada.state() == "running")
        assert ada.ask("health")["epoch"] == epoch
        until("the state is stored", lambda: stored_state(hub, lease_id) == "running")
        until("the helper knows it", lambda: not sample_of(hub, ada)["unconfirmed"])
    finally:
        for process in brokers:
            process.resume()
    assert kernel.run("worker.check(context)") == "'ok'"
