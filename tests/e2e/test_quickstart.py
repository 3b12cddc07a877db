"""docs/quickstart.md, played at the speed of a person: its own commands, settings and order."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.demo import ROOT, DemoHub, Person, until

PAGE = (ROOT / "docs" / "quickstart.md").read_text()
# Between reading a paragraph and doing what it says.
PAUSE_S = 12.0


def blocks(language: str) -> list[str]:
    """The code blocks of the page in one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


class Quickstart(DemoHub):
    """The demo hub with the machine that `make hub` simulates by default."""

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        del environment["GPUSHARE_SIMULATE"]
        return environment


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Quickstart]:
    (start, *_) = blocks("bash")
    idle = re.fullmatch(r"GPUSHARE_DEMO_IDLE_TIMEOUT=(\d+) make hub\n", start)
    assert idle
    demo = Quickstart(tmp_path, idle_timeout_s=float(idle[1]))
    try:
        demo.start()
        yield demo
    finally:
        demo.stop()


def sentence(person: Person) -> str:
    return str(person.lease()["sentence"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_quickstart_can_be_followed_at_the_speed_of_a_person(hub: Quickstart) -> None:
    allocate, light, heavy = blocks("python")
    _, submit, follow = blocks("bash")
    ada, bo = hub.person("ada"), hub.person("bo")
    assert re.search(r'fraction&#34;: &#34;0.5&#34;\}"[^>]* checked', ada.first_page), "1/2 is preselected"
    # Her GPU is not the first of the machine, whatever the number in her first cell.
    admin = hub.person("admin")
    first, second = (device["uuid"] for device in admin.ask("devices")["devices"])
    admin.ask(f"devices/{first}/drain", "PUT", json={})
    ada.start_server(fraction="0.5")
    admin.ask(f"devices/{first}/drain", "DELETE")
    time.sleep(PAUSE_S)
    notebook = ada.kernel()
    *_, before = notebook.run(allocate).splitlines()
    assert ada.lease()["devices"] == [second]

    bo.start_server(gpus=0)
    time.sleep(PAUSE_S)
    terminal = bo.terminal()
    terminal.run(submit.splitlines()[0])
    listed = terminal.run(submit.splitlines()[1])
    (job,) = bo.ask("jobs")["jobs"]
    assert job["state"] == "queued"
    assert "number 1" in listed.lower()
    until("Ada is warned", lambda: ada.lease()["warned"], 60)
    assert "idle" in sentence(ada).lower()
    until("Ada sleeps", lambda: ada.state() == "suspended", 60)
    assert "nlp" in sentence(ada)
    until("the job runs", lambda: bo.job(job["id"])["state"] == "running", 60)

    # Nothing that is described is over before a person has read it.
    time.sleep(3 * PAUSE_S)
    assert bo.job(job["id"])["state"] == "running"
    notebook.disconnect()  # this connection answers no pings of the server while nothing is read
    assert notebook.run(light) == "499500"
    assert ada.state() == "suspended"
    time.sleep(PAUSE_S)
    assert notebook.run(heavy, 120) == before
    assert bo.job(job["id"])["state"] == "suspended"
    until("the job goes on", lambda: bo.job(job["id"])["state"] == "running", 120)
    assert ada.state() == "suspended"
    log = bo.terminal().run(follow.replace("ID", job["id"]).strip(), 600)
    assert "every step was applied exactly once" in log
    assert bo.job(job["id"])["state"] == "succeeded"
