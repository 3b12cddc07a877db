"""The Littlest JupyterHub itself: its configuration, its plugin manager, its spawner, a real systemd.

GPUSHARE_TLJH names a folder with TLJH's sources and what they import (it is on no package index).
Its proxy (traefik) and its authenticator are replaced, in a file of `jupyterhub_config.d` as a site would.
The system users are real and are taken away afterwards.
"""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jupyter_gpushare.native import preload_path
from tests.hub.conftest import ADMIN_TOKEN, REPOSITORY, Hub, running_hub, wait_for
from tests.hub.fake_broker import JOB_NAME
from tests.hub.test_with_users import python_for_all_users
from tests.systemd import Systemd
from tests.waiting import is_alive

TLJH = os.environ.get("GPUSHARE_TLJH", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not TLJH, reason="GPUSHARE_TLJH names no folder with TLJH's sources"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

# TLJH's installer makes them.
GROUPS = ("jupyterhub-users", "jupyterhub-admins")
EXTRA = """
os.environ["PATH"] = "{folder}/bin:" + os.environ["PATH"]
os.environ["TLJH_INSTALL_PREFIX"] = "{folder}/tljh"
sys.path.insert(0, "{tljh}")
import systemdspawner.systemd
systemdspawner.systemd.RUN_ROOT = "{folder}/run"
load_subconfig("{tljh}/tljh/jupyterhub_config.py")
"""
# The last that TLJH loads.
SITE = """
import os
c.JupyterHub.proxy_class = __import__("memory_proxy").MemoryProxy
c.JupyterHub.authenticator_class = "dummy"
c.JupyterHub.services.extend([
    {{"name": "tests", "api_token": "{token}"}},
    {{"name": "gpushare", "url": "http://127.0.0.1:8011", "api_token": "token-of-the-broker"}},
])
c.JupyterHub.load_roles.append(
    {{"name": "tests", "services": ["tests"], "scopes": ["admin:users", "admin:servers", "access:servers"]}}
)
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 100}}
c.GPUShareMixin.broker_token_file = "{folder}/spawner-token"
c.GPUShareMixin.job_cmd = ["{python}", "-P", "-m", "jupyter_gpushare.job"]
c.Spawner.environment = {{"PYTHONPATH": "{path}"}}
"""


@dataclass
class Site:
    hub: Hub
    systemd: Systemd
    user: str

    @property
    def uid(self) -> int:
        return pwd.getpwnam(f"jupyter-{self.user}").pw_uid

    def pids(self, server: str = "") -> list[int]:
        return self.systemd.pids(f"jupyter-{self.user}_{server}.service")


@pytest.fixture(scope="module")
def groups() -> Iterator[None]:
    made = [name for name in GROUPS if name not in {group.gr_name for group in grp.getgrall()}]
    for name in made:
        subprocess.run(["groupadd", name], check=True)
    yield
    for name in made:
        subprocess.run(["groupdel", name], check=True)


@pytest.fixture(scope="module")
def shared(groups: None) -> Iterator[Site]:
    user = f"t{os.getpid()}"
    python = python_for_all_users()
    if python is None:
        pytest.skip("no Python that every user can run")
    with tempfile.TemporaryDirectory(prefix="gpushare-tljh-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for inner in ("bin", "run", "systemd", "lease", "tljh/config/jupyterhub_config.d"):
            (folder / inner).mkdir(parents=True)
        (folder / "lease" / "limit").touch()
        path = os.pathsep.join((str(REPOSITORY), sysconfig.get_path("purelib")))
        values = {"folder": folder, "tljh": TLJH, "token": ADMIN_TOKEN, "python": python, "path": path}
        (folder / "tljh/config/jupyterhub_config.d/site.py").write_text(SITE.format(**values))
        with Systemd.booted(folder / "systemd") as systemd:
            systemd.write_programs(folder / "bin")
            try:
                with running_hub("", folder, python=python, extra=EXTRA.format(**values)) as hub:
                    hub.ensure_user(user)
                    yield Site(hub, systemd, user)
            finally:
                command = ["userdel", "--remove", "--force", f"jupyter-{user}"]
                subprocess.run(command, check=False, capture_output=True)


@pytest.fixture
def site(shared: Site) -> Iterator[Site]:
    hub = shared.hub
    hub.broker.reset()
    hub.broker.grant_with(GPUSHARE_LEASE_DIR=str(hub.folder / "lease"), LD_PRELOAD=str(preload_path()))
    yield shared
    hub.stop_servers()


def test_tljhs_own_configuration_with_the_plugin_keeps_the_contract(site: Site) -> None:
    command = [sys.executable, "-m", "jupyter_gpushare.hub.contract", site.hub.config]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "GPUShareTLJHSpawner keeps the contract.")


def test_a_session_has_the_system_user_that_tljh_made_and_the_variables_of_its_lease(site: Site) -> None:
    answer = site.hub.start_server(site.user, {"fraction": "1/2"})
    assert answer.status_code == 201, f"{answer.text}\n{site.hub.log()[-3000:]}"
    assert site.hub.broker.of("spawner/start")[-1].body["uid"] == site.uid
    (pid,) = site.pids()
    assert os.stat(f"/proc/{pid}").st_uid == site.uid
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    assert {"GPUSHARE_LEASE=abc-1", f"LD_PRELOAD={preload_path()}"} <= set(entries)
    assert f"jupyter-{site.user}" in grp.getgrnam("jupyterhub-users").gr_mem


def test_a_job_runs_beside_its_owners_session(site: Site) -> None:
    assert site.hub.start_server(site.user, {"fraction": "1/2"}).status_code == 201
    session = site.pids()
    site.hub.broker.grant_job(grace_s=20.0)
    answer = site.hub.start_server(site.user, name=JOB_NAME)
    assert answer.status_code in (201, 202), f"{answer.text}\n{site.hub.log()[-3000:]}"
    wait_for(lambda: len(site.pids(JOB_NAME)) >= 2, "runner and command run in the job's unit")
    site.hub.stop_server(site.user, JOB_NAME, remove=True)
    wait_for(lambda: not site.pids(JOB_NAME), "no process of the job is left")
    assert site.pids() == session
    assert all(is_alive(pid) for pid in session)
