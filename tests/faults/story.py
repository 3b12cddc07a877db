"""A session whose GPU is lent while a fault occurs, and the job that ends on that GPU meanwhile."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.site import SESSION_MIB, Site
from tests.faults.workload import TRAIN
from tests.waiting import until

# The promise to the owner once the GPU is empty again, whatever cannot be stored.
CELL_S = 30.0


@dataclass
class Story:
    """A sleeping session of ada, and a job of bo that runs on its GPU until the test ends it."""

    site: Site
    cells: int = 0
    job: str = ""

    def begin(self) -> None:
        site = self.site
        site.hub.start_server("ada", {"fraction": "1"})
        self.run_cell()
        command = [sys.executable, str(TRAIN), str(site.folder), f"{site.folder}/end"]
        body = {"command": [*command, str(SESSION_MIB), str(SESSION_MIB)], "gpus": "2"}
        answer = until(lambda: self.posted("jobs", body), "a job is accepted")
        self.job = answer["id"]
        until(lambda: (self.notes(), self.state()) == (["begin"], "suspended"), "the job runs", log=self.log)

    @property
    def log(self) -> Path:
        return self.site.services["broker"].log

    def posted(self, path: str, body: object) -> dict[str, Any] | None:
        answer = self.site.ask("POST", path, "bo", json=body)
        return answer.json() if answer is not None and answer.status_code == 201 else None

    def notes(self) -> list[str]:
        path = self.site.folder / "runs"
        return [line.split()[2] for line in path.read_text().splitlines()] if path.exists() else []

    def state(self) -> str:
        answer = self.site.ask("GET", "leases", "ada")
        leases = answer.json()["leases"] if answer is not None and answer.status_code == 200 else []
        return str(leases[0]["state"]) if leases else ""

    def end_job(self) -> None:
        """Let the job end; return once the driver shows its GPUs empty."""
        (self.site.folder / "end").touch()
        devices = range(2)
        until(lambda: not sum(map(self.site.sim.device_used, devices)), "the GPUs are empty", log=self.log)

    def run_cell(self) -> None:
        """Run a cell, which must return within `CELL_S`."""
        home = self.site.folder / "home" / "ada"
        self.cells += 1
        until(home.exists, "the session has begun")
        (home / "cells").write_text(str(self.cells))
        returned = f"cell {self.cells} returns"
        until(lambda: self.answers() == ["ok"] * self.cells, returned, CELL_S, log=self.log)

    def answers(self) -> list[str]:
        path = self.site.folder / "home" / "ada" / "answers"
        return [line.split()[2] for line in path.read_text().splitlines()] if path.exists() else []

    def judge(self) -> None:
        """Check that everything is stored: the job ran once, and the session is awake and stays awake."""
        until(self.site.is_healthy, "the broker is healthy", log=self.log)

        def ended() -> bool:
            answer = self.site.ask("GET", f"jobs/{self.job}", "bo")
            return answer is not None and answer.json().get("state") == "succeeded"

        until(ended, "the end of the job is stored", log=self.log)
        assert self.notes() == ["begin", "end"]
        until(lambda: self.state() in ("running", "suspended"), "the lease settles", log=self.log)
        self.run_cell()


def begun(site: Site) -> Story:
    """Return a story on a started site: the session sleeps, the job runs."""
    story = Story(site)
    story.begin()
    return story
