"""Chapters of docs/operations.md that change the Hub's configuration: the Hub runs on after them."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import httpx
import pytest

import jupyter_gpushare
from tests.e2e.demo import Person
from tests.setup.machine import Site, installed
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.long


def restarts(site: Site, unit: str) -> int:
    """How often systemd has started a unit again because it ended."""
    return int(site.properties(unit, "NRestarts")[0])


def test_hub_and_broker_speak_tls_after_the_chapter(wheel: Path) -> None:
    with installed(wheel, jupyter_gpushare.__version__) as site:
        config = site.etc / "jupyterhub" / "jupyterhub_config.py"
        proxy = f"127.0.0.1:{site.port + 1}"  # its address is of the tests
        config.write_text(config.read_text().replace(f"http://{proxy}", f"https://{proxy}"))
        said = site.play("operations", "TLS and `internal_ssl`")
        assert "internal-ssl" in said
        assert "fail" not in said
        until(lambda: site.is_well(jupyter_gpushare.__version__), "the broker is reached by TLS")
        assert restarts(site, "jupyterhub.service") == 0
        ada = Person(site, "ada")  # type: ignore[arg-type]
        ada.start_server(fraction="1/2")
        assert ada.lease()["state"] == "running"
        ada.close()


# This machine has no user of docs/admin.md, and after the chapter not this one either.
REMOVED = f"gpushare-r{os.getpid()}"
TOKEN = "token-of-an-administrator"
WITH_USERS = f"""
c.JupyterHub.authenticator_class = "pam"
c.JupyterHub.spawner_class = "gpushare-local"
c.JupyterHub.load_groups["nlp"]["users"].append("{REMOVED}")
c.JupyterHub.services.append({{"name": "tests", "api_token": "{TOKEN}"}})
scopes = ["admin:users", "admin:servers"]
c.JupyterHub.load_roles.append({{"name": "tests", "services": ["tests"], "scopes": scopes}})
"""


def test_the_hub_runs_on_after_a_user_is_removed(wheel: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root and useradd")
    subprocess.run(["useradd", "--create-home", REMOVED], check=True)
    try:
        headers = {"Authorization": f"token {TOKEN}"}
        with (
            installed(wheel, jupyter_gpushare.__version__, WITH_USERS) as site,
            httpx.Client(base_url=f"{site.hub_url}/hub/api", headers=headers, timeout=PATIENCE_S) as hub,
        ):
            assert hub.get(f"/users/{REMOVED}").status_code == 200
            said = site.play_as("operations", "Remove a user", token=TOKEN, user=REMOVED)
            assert f'append("{REMOVED}")' in said  # where the configuration still names the user
            with pytest.raises(KeyError):
                pwd.getpwnam(REMOVED)
            assert hub.get(f"/users/{REMOVED}").status_code == 404
            site.run("restart", "jupyterhub.service")
            until(lambda: site.is_well(jupyter_gpushare.__version__), "the Hub has started again")
            assert restarts(site, "jupyterhub.service") == 0
            log = (site.folder / "jupyterhub.service.log").read_text()
            assert f"The configuration names the user {REMOVED} (group: nlp)" in log
    finally:
        subprocess.run(["userdel", "--remove", REMOVED], check=False, capture_output=True)
