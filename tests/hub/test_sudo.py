"""SudoSpawner as docs/spawners.md has it: a Hub without root, real users, a real sudo.

The class, the wrapper of servers and the line of sudoers are those of the page.  The users and the
line are real and are taken away afterwards.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jupyter_gpushare.native import preload_path
from tests.chapters import block
from tests.hub.conftest import REPOSITORY, Hub, running_hub, wait_for
from tests.hub.test_with_users import python_for_all_users
from tests.waiting import is_alive

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("sudo") is None, reason="needs root and sudo: apt-get install sudo"
    ),
]

CHAPTER = "sudospawner"
JOBS = ["0123456789", "9876543210"]
# Without a grace period a server has 2 s to end.
CONFIG = """
c.SudoSpawner.sudospawner_path = "{bin}/sudospawner"
c.LocalProcessSpawner.interrupt_timeout = c.LocalProcessSpawner.term_timeout = 1
c.JupyterHub.load_groups = {{}}
"""
# As pip makes it, for the Python of these tests.
SCRIPT = """#!{python}
import sys
sys.path[:0] = {path!r}
from {module} import main
sys.exit(main())
"""
SERVER = """#!/bin/sh
env -0 > "$HOME/environment"
exec {python} {folder}/stub_server.py
"""
JOB = """
import os, pathlib, signal, sys, time
home = pathlib.Path.home()
def save(*_):
    time.sleep(6)  # as long as a checkpoint takes
    (home / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(home / "uid").write_text(str(os.getuid()))
time.sleep(600)
"""


def packages() -> list[str]:
    return [str(REPOSITORY), sysconfig.get_path("purelib")]


@dataclass
class Site:
    hub: Hub
    user: str

    @property
    def home(self) -> Path:
        return Path(pwd.getpwnam(self.user).pw_dir)

    @property
    def uid(self) -> int:
        return pwd.getpwnam(self.user).pw_uid

    def environment(self) -> dict[str, str]:
        """The environment that the server began with."""
        path = self.home / "environment"
        wait_for(path.exists, "the server has written its environment", log=self.hub.folder / "hub.log")
        entries = path.read_text().split("\0")
        return dict(each.split("=", 1) for each in entries if "=" in each)


def make_programs(folder: Path, python: str) -> Path:
    """The folder of sudospawner, the wrapper of the page and the servers' program."""
    programs = folder / "bin"
    programs.mkdir()
    # sudospawner takes PYTHONPATH away from what it starts.
    of_package = f"env PYTHONPATH={os.pathsep.join(packages())} {python}"
    here = {"/opt/jupyterhub/bin/python": of_package, "/opt/jupyterhub/bin": str(programs)}
    wrapper = block("spawners", CHAPTER, "sh")
    for there, path in here.items():
        wrapper = wrapper.replace(there, path)
    texts = {
        "sudospawner": SCRIPT.format(python=python, path=packages(), module="sudospawner.mediator"),
        "sudospawner-singleuser": wrapper,
        "jupyterhub-singleuser": SERVER.format(python=python, folder=folder / "hub"),
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return programs


@pytest.fixture(scope="module")
def shared() -> Iterator[Site]:
    hub_user, user = f"gpushare-h{os.getpid()}", f"gpushare-u{os.getpid()}"
    sudoers = Path("/etc/sudoers.d") / f"gpushare-t{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="gpushare-sudo-") as given:
        folder = Path(given)
        folder.chmod(0o755)
        (folder / "hub").mkdir()
        for name in (hub_user, user):
            subprocess.run(["useradd", "--create-home", name], check=True)
        try:
            python = python_for_all_users()
            if python is None:
                pytest.skip("no Python that every user can run")
            programs = make_programs(folder, python)
            line = block("spawners", CHAPTER, "text").replace("/opt/jupyterhub/bin", str(programs))
            sudoers.write_text(line.replace("rhea", hub_user).replace("%jupyterhub", f"%{user}"))
            sudoers.chmod(0o440)
            subprocess.run(["visudo", "--check", "--strict", "--file", sudoers], check=True)
            extra = block("spawners", CHAPTER, "python") + CONFIG.format(bin=programs)
            path = f"PYTHONPATH={os.pathsep.join(packages())}"
            rights = (f"--reuid={hub_user}", f"--regid={hub_user}", "--init-groups")
            own = ("setpriv", *rights, "env", path, python)
            with running_hub("", folder / "hub", extra=extra, interpreter=own, user=hub_user) as hub:
                hub.ensure_user(user)
                yield Site(hub, user)
        finally:
            sudoers.unlink(missing_ok=True)
            for name in (hub_user, user):
                subprocess.run(["pkill", "-KILL", "-u", name], check=False)
                subprocess.run(["userdel", "--remove", "--force", name], check=False, capture_output=True)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    hub = shared.hub
    hub.broker.reset()
    lease = hub.folder / "lease"
    lease.mkdir(exist_ok=True)
    (lease / "limit").touch()
    hub.broker.grant_with(GPUSHARE_LEASE_DIR=str(lease), LD_PRELOAD=str(preload_path()))
    yield shared
    hub.stop_servers()


def start_job(site: Site, job_id: str, *command: str, grace_s: float) -> str:
    """Returns the name of the server."""
    site.hub.broker.grant_job(id=job_id, command=list(command), grace_s=grace_s)
    name = f"j{job_id}-1"
    answer = site.hub.start_server(site.user, name=name)
    assert answer.status_code in (201, 202), f"{answer.text}\n{site.hub.log()[-3000:]}"
    return name


def test_a_server_has_the_uid_of_its_owner_and_the_variables_of_its_lease(site: Site) -> None:
    answer = site.hub.start_server(site.user, {"fraction": "1/2"})
    assert answer.status_code == 201, f"{answer.text}\n{site.hub.log()[-3000:]}"
    assert site.hub.broker.of("spawner/start")[-1].body["uid"] == site.uid
    pid = site.hub.state(site.user)["pid"]
    assert os.stat(f"/proc/{pid}").st_uid == site.uid
    assert site.hub.process is not None
    assert os.stat(f"/proc/{site.hub.process.pid}").st_uid not in (0, site.uid)
    environment = site.environment()
    assert environment["GPUSHARE_LEASE"] == "abc-1"
    assert environment["LD_PRELOAD"] == str(preload_path())
    assert "libgpushare_preload.so" in Path(f"/proc/{pid}/maps").read_text()
    site.hub.stop_server(site.user)
    assert not is_alive(pid)


def test_a_job_runs_its_command_and_gets_its_grace_period(site: Site) -> None:
    name = start_job(site, JOBS[0], "/usr/bin/python3", "-c", JOB, grace_s=60)
    uid = site.home / "uid"
    wait_for(uid.exists, "the job's command runs", log=site.hub.folder / "hub.log")
    assert uid.read_text() == str(site.uid)
    site.hub.api("DELETE", f"users/{site.user}/servers/{name}", {"remove": True})
    wait_for(lambda: not site.hub.server(site.user, name), "the Hub has noticed the end")
    assert (site.home / "saved").exists(), "killed before its checkpoint was written"


def test_a_job_that_fails_at_once_is_a_result_and_no_failed_start(site: Site) -> None:
    name = start_job(site, JOBS[1], "sh", "-c", "exit 3", grace_s=1)

    def reported() -> list[int]:
        asked = site.hub.broker.of(f"jobs/{JOBS[1]}/attempts/1/report")
        return [each.body["exit_code"] for each in asked if each.body["state"] == "ended"]

    wait_for(reported, "the end is reported", log=site.hub.folder / "hub.log")
    assert reported() == [3]
    wait_for(lambda: not site.hub.server(site.user, name), "the Hub has noticed the end")
