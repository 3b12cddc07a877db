"""A name is not a person: users are deleted, made anew and renamed at a real Hub while their jobs wait."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.site import Site
from tests.waiting import until

# Lets the tests put a user that was made anew back into the group of the project.
GROUPS = "c.JupyterHub.load_roles[0]['scopes'].append('admin:groups')\n"
NOTE = "import os, sys; open(sys.argv[1], 'a').write(os.environ['GPUSHARE_JOB_ID'] + chr(10))"


@pytest.fixture
def site() -> Iterator[Site]:
    """A site that starts nothing: an administrator empties it."""
    with tempfile.TemporaryDirectory(prefix="gpushare-owners-") as folder:
        whole = Site(Path(folder))
        with whole.hub.config.open("a") as config:
            config.write(GROUPS)
        try:
            whole.start()
            answer(whole, "PUT", "devices/machine/drain", "root", json={})
            yield whole
        finally:
            whole.close()
            print(whole.services["broker"].tail())


def answer(site: Site, method: str, path: str, user: str, status: int = 200, **options: Any) -> Any:
    found = site.ask(method, path, user, **options)
    assert found is not None
    assert found.status_code == status, found.text
    return found.json()


def submitted(site: Site, user: str) -> str:
    """The id of a job that notes that it runs."""
    job = {"command": [sys.executable, "-c", NOTE, str(site.folder / "runs")], "gpus": "1/2"}
    return str(answer(site, "POST", "jobs", user, 201, json=job)["id"])


def state(site: Site, job: str, user: str = "root") -> str:
    found = answer(site, "GET", f"jobs/{job}", user)
    print(found["user"], found["state"], found["reason"])
    return str(found["state"])


def test_the_next_user_of_a_name_neither_runs_nor_sees_what_the_last_one_queued(site: Site) -> None:
    old = submitted(site, "ada")
    assert site.hub.api("DELETE", "users/ada").status_code == 204
    site.tokens["ada"] = site.hub.user_token("ada")
    assert site.hub.api("POST", "groups/vision/users", {"users": ["ada"]}).status_code == 200
    answer(site, "DELETE", "devices/machine/drain", "root")
    new = submitted(site, "ada")
    until(lambda: state(site, new) == "succeeded", "her own job ends", log=site.services["broker"].log)
    assert (site.folder / "runs").read_text().split() == [new]
    assert [job["id"] for job in answer(site, "GET", "jobs", "ada")["jobs"]] == [new]
    answer(site, "GET", f"jobs/{old}", "ada", 404)
    assert state(site, old) == "queued"


def test_a_user_that_is_renamed_keeps_what_is_queued(site: Site) -> None:
    job = submitted(site, "bo")
    assert site.hub.api("PATCH", "users/bo", {"name": "bob"}).status_code == 200
    site.hub.ensure_user("bo")
    answer(site, "DELETE", "devices/machine/drain", "root")
    until(lambda: state(site, job, "bo") == "succeeded", "the job ends", log=site.services["broker"].log)
    assert answer(site, "GET", f"jobs/{job}", "bo")["user"] == "bob"
    site.tokens["next"] = site.hub.user_token("bo")
    answer(site, "GET", f"jobs/{job}", "next", 404)
