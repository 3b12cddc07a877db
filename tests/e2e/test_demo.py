"""The program behind `make hub`: what a person reads in the terminal, from the start to Ctrl-C."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from tests.e2e.demo import ROOT, DemoHub, Person, until
from tests.waiting import PATIENCE_S


class Launched(DemoHub):
    """A demo hub under the program that `make hub` runs."""

    @property
    def terminal(self) -> str:
        return (self.folder / "terminal").read_text()

    @property
    def hub_log(self) -> Path:
        return self.folder / "state" / "hub.log"

    def start(self) -> None:
        with (self.folder / "terminal").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "demo/hub.py"],
                cwd=ROOT,
                env={**self.environment(), "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        until("the box is shown", lambda: "Ctrl-C" in self.terminal or self._process.poll())


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path)
    try:
        launched.start()
        yield launched
    finally:
        launched.stop()
        until("everything has ended", lambda: not launched.processes(), 30)


def see_an_ended_job_leave_the_hubs_list(person: Person) -> None:
    job = person.ask("jobs", "POST", json={"command": ["true"], "gpus": "0.25"})
    until("the job has ended", lambda: person.job(job["id"])["state"] == "succeeded")

    def servers() -> set[str]:
        user = person.http.get(f"/hub/api/users/{person.name}", params={"include_stopped_servers": "true"})
        return set(user.json()["servers"])

    until("the Hub lists the job no more", lambda: servers() == {""})


def test_the_box_shows_the_address_that_the_hub_has_by_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "demo"))
    program = importlib.import_module("hub")
    asked = []

    class Below(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    wanted = program.settings({"GPUSHARE_DEMO_DIR": str(tmp_path)})
    assert not program.is_ready(wanted)
    with HTTPServer(("127.0.0.1", 0), Below) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/jupyter"
        wanted.log.write_text(f"[I JupyterHub app:3944] JupyterHub is now running at {url}/\n")
        assert program.is_ready(wanted)
        server.shutdown()
    assert asked == ["/jupyter/services/gpushare/api/v1/health"]
    assert f"The demo is ready:  {url} " in program.box(wanted)


def test_the_terminal_shows_what_a_newcomer_needs_and_ctrl_c_ends_all_in_order(demo):
    assert f"The demo is ready:  {demo.url}" in demo.terminal
    for text in ("ada, bo, cy or admin, with any password", "Try first: log in as ada", str(demo.hub_log)):
        assert text in demo.terminal
    login = httpx.get(f"{demo.url}/hub/login").text
    assert re.search(r"Log in as <b>ada</b>.*with any password", login, re.DOTALL)
    assert "Try first" in login

    ada = Person(demo, "ada")
    assert re.search(r'value="\{&#34;fraction&#34;: &#34;0.5&#34;\}"[^>]* checked', ada.first_page)
    ada.start_server(fraction="0.5")
    see_an_ended_job_leave_the_hubs_list(ada)
    ada.close()
    before = len(demo.hub_log.read_text())
    assert demo.terminal.count("GET /") == 0
    assert "GET /hub/login" in demo.hub_log.read_text()

    began_at = time.monotonic()
    os.kill(demo._process.pid, signal.SIGINT)
    assert demo._process.wait(PATIENCE_S) == 0
    took_s = time.monotonic() - began_at
    print(f"Ctrl-C with a server: {took_s:.1f} s")
    after = demo.hub_log.read_text()[before:]
    assert "release not delivered" not in after
    assert [line for line in after.splitlines() if re.match(r"\[[WE] .* JupyterHub ", line)] == []
    assert "[W " not in demo.terminal
    assert "Ended after" in demo.terminal
