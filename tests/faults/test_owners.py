"""A name is not a person: users are deleted, made anew and renamed at a real Hub while their jobs wait."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.site import Site, running
from tests.waiting import until

# Lets the tests put a user that was made anew back into the group of the project.
GROUPS = "c.JupyterHub.load_roles[0]['scopes'].append('admin:groups')\n"
NOTE = "import os, sys; open(sys.argv[1], 'a').write(os.environ['GPUSHARE_JOB_ID'] + chr(10))"


@pytest.fixture
def site() -> Iterator[Site]:
    """A site that starts nothing: an administrator empties it."""

    def with_groups(folder: Path) -> Site:
        site = Site(folder)
        with site.hub.config.open("a") as config:
            config.write(GROUPS)
        return site

    with running(with_groups) as site:
        site.answer("PUT", "devices/machine/drain", json={})
        yield site


def submitted(site: Site, user: str) -> str:
    """The id of a job that notes that it runs."""
    job = {"command": [sys.executable, "-c", NOTE, str(site.folder / "runs")], "gpus": "1/2"}
    return str(site.answer("POST", "jobs", user, 201, json=job)["id"])


def state(site: Site, job: str, user: str = "root") -> str:
    found = site.answer("GET", f"jobs/{job}", user)
    print(found["user"], found["state"], found["reason"])
    return str(found["state"])


def test_the_next_user_of_a_name_neither_runs_nor_sees_what_the_last_one_queued(site: Site) -> None:
    old = submitted(site, "ada")
    assert site.hub.api("DELETE", "users/ada").status_code == 204
    site.tokens["ada"] = site.hub.user_token("ada")
    assert site.hub.api("POST", "groups/vision/users", {"users": ["ada"]}).status_code == 200
    site.answer("DELETE", "devices/machine/drain", "root")
    new = submitted(site, "ada")
    until(lambda: state(site, new) == "succeeded", "her own job ends", log=site.services["broker"].log)
    assert (site.folder / "runs").read_text().split() == [new]
    assert [job["id"] for job in site.answer("GET", "jobs", "ada")["jobs"]] == [new]
    site.answer("GET", f"jobs/{old}", "ada", 404)
    assert state(site, old) == "queued"


def test_a_user_that_is_renamed_keeps_what_is_queued(site: Site) -> None:
    job = submitted(site, "bo")
    assert site.hub.api("PATCH", "users/bo", {"name": "bob"}).status_code == 200
    site.hub.ensure_user("bo")
    site.answer("DELETE", "devices/machine/drain", "root")
    until(lambda: state(site, job, "bo") == "succeeded", "the job ends", log=site.services["broker"].log)
    assert site.answer("GET", f"jobs/{job}", "bo")["user"] == "bob"
    site.tokens["next"] = site.hub.user_token("bo")
    site.answer("GET", f"jobs/{job}", "next", 404)
