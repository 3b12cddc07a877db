"""PAM (docs/operations.md): a system user logs in with a password, gets a server, and is removed again.

The user, the PAM service and the limits are real and are taken away afterwards.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.hub.conftest import LOCAL, Hub, running_hub, wait_for
from tests.hub.test_with_users import python_for_all_users
from tests.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("useradd") is None, reason="needs root and useradd"),
]

PASSWORD = "a password of the tests"
LIMIT = 1234
SERVICE = """
auth     required pam_unix.so
account  required pam_unix.so
session  required pam_limits.so conf={limits}
"""
CONFIG = """
c.JupyterHub.authenticator_class = "pam"
c.JupyterHub.load_groups = {{}}
c.PAMAuthenticator.service = "{service}"
c.PAMAuthenticator.open_sessions = True
"""


@dataclass
class Site:
    hub: Hub
    user: str

    def login(self, password: str) -> httpx.Response:
        with httpx.Client(base_url=self.hub.url, timeout=PATIENCE_S, trust_env=False) as client:
            client.get("/hub/login")
            fields = {"username": self.user, "password": password, "_xsrf": client.cookies["_xsrf"]}
            return client.post("/hub/login", data=fields)

    def limit_of_files(self) -> str:
        pid = self.hub.state(self.user)["pid"]
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
        return next(line.split()[3] for line in lines if line.startswith("Max open files"))

    def processes(self) -> list[int]:
        """Pids of the user's processes."""
        uid = pwd.getpwnam(self.user).pw_uid
        return [int(each.name) for each in Path("/proc").glob("[0-9]*") if _uid_of(each) == uid]


def _uid_of(path: Path) -> int:
    try:
        return path.stat().st_uid
    except OSError:
        return -1


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    python = python_for_all_users()
    if python is None:
        pytest.skip("no Python that every user can run")
    name = f"gpushare-t{os.getpid()}"
    service = Path("/etc/pam.d") / name
    with tempfile.TemporaryDirectory(prefix="gpushare-pam-") as given:
        folder = Path(given)
        folder.chmod(folder.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
        (folder / "limits.conf").write_text(f"{name} - nofile {LIMIT}\n")
        subprocess.run(["useradd", "--create-home", name], check=True)
        try:
            subprocess.run(["chpasswd"], input=f"{name}:{PASSWORD}", text=True, check=True)
            service.write_text(SERVICE.format(limits=folder / "limits.conf"))
            with running_hub(LOCAL, folder, python=python, extra=CONFIG.format(service=name)) as hub:
                (folder / "stub_server.py").chmod(0o644)
                yield Site(hub, name)
        finally:
            service.unlink(missing_ok=True)
            subprocess.run(["userdel", "--remove", "--force", name], check=False, capture_output=True)


def test_the_right_password_logs_in_and_a_wrong_one_does_not(site: Site) -> None:
    assert site.login("wrong").status_code == 403
    assert site.login(PASSWORD).status_code == 302


def test_a_server_runs_as_its_user_with_the_limits_of_its_pam_session(site: Site) -> None:
    site.hub.ensure_user(site.user)
    answer = site.hub.start_server(site.user, {"fraction": "1/2"})
    assert answer.status_code == 201, site.hub.log()[-3000:]
    assert site.limit_of_files() == str(LIMIT)
    assert site.hub.state(site.user)["pid"] in site.processes()
    assert "Failed to open PAM session" not in site.hub.log()


def test_a_removed_user_leaves_neither_servers_nor_processes_nor_a_home(site: Site) -> None:
    """The commands of docs/operations.md, *Remove a user*; the last two are those of its script."""
    site.hub.ensure_user(site.user)
    if site.hub.server(site.user) is None:
        assert site.hub.start_server(site.user, {"fraction": "1/2"}).status_code == 201
    assert site.hub.start_server(site.user, None, name="second").status_code == 201
    home = Path(pwd.getpwnam(site.user).pw_dir)
    stray = subprocess.Popen(["sleep", "600"], user=site.user, cwd="/")
    # While a server runs the Hub deletes nothing.
    assert (
        site.hub.api("DELETE", f"users/{site.user}").status_code >= 400 or site.hub.server(site.user) is None
    )
    for name in ("second", ""):
        if site.hub.server(site.user, name):
            site.hub.stop_server(site.user, name, remove=bool(name))
    wait_for(
        lambda: site.hub.api("DELETE", f"users/{site.user}").status_code in (204, 404),
        "the Hub forgets the user",
    )
    assert site.hub.api("GET", f"users/{site.user}").status_code == 404
    assert len(site.hub.broker.of("spawner/stop")) >= 2
    subprocess.run(["pkill", "-KILL", "-u", site.user], check=True)
    assert stray.wait(PATIENCE_S) == -9
    subprocess.run(["userdel", "--remove", site.user], check=True, capture_output=True)
    assert not home.exists()
    with pytest.raises(KeyError):
        pwd.getpwnam(site.user)
    assert site.login(PASSWORD).status_code == 403
