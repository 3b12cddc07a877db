"""A Hub with `internal_ssl`, set up as docs/operations.md says: every connection between Hub, proxy, broker,
servers and jobs shows a certificate of the Hub's, in both directions.

Hub, proxy, broker, device helper, JupyterLab's server and the runner of a job are real; GPUs are simulated.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from certipy import Certipy

from jupyter_gpushare.cli.site import ask_hub
from jupyter_gpushare.internal_tls import VARIABLES, internal_tls
from tests.faults.site import PREFIX, Site, running
from tests.ports import free_ports
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.long

BIN = Path(sys.executable).parent
PROXY = BIN / "configurable-http-proxy"
CONFIG = """
c.JupyterHub.internal_ssl = True
c.JupyterHub.internal_certs_location = "{folder}/internal-ssl"
c.JupyterHub.proxy_class = "configurable-http-proxy"
c.ConfigurableHTTPProxy.command = ["{proxy}"]
c.ConfigurableHTTPProxy.api_url = "https://127.0.0.1:{proxy_port}"
c.ConfigurableHTTPProxy.pid_file = "{folder}/proxy.pid"
c.JupyterHub.bind_url = "http://127.0.0.1:{public_port}"
c.JupyterHub.services[1]["url"] = "https://127.0.0.1:{port}"
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.args = ["--allow-root"]
"""


def certificates(folder: Path, name: str) -> dict[str, str]:
    """The variables that docs/operations.md puts into broker.env, for a pair of the Hub's store."""
    store = Certipy(store_dir=str(folder / "internal-ssl")).store
    files = store.get_record(name)["files"]
    bundle = folder / "internal-ssl" / "notebooks-ca_trust.crt"
    return dict(zip(VARIABLES, (files["key"], files["cert"], str(bundle)), strict=True))


class TlsSite(Site):
    """A site; its broker is an external service with a certificate that the administrator made."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.public_port, self.port = free_ports(2), free_ports()
        values = {"folder": folder, "proxy": PROXY, "port": self.port, "public_port": self.public_port}
        with self.hub.config.open("a") as config:
            config.write(CONFIG.format(**values, proxy_port=self.public_port + 1))
        self._make_certificates()
        tls = certificates(folder, "service-gpushare")
        broker = self.services["broker"].env
        broker |= tls | {
            "JUPYTERHUB_SERVICE_URL": f"https://127.0.0.1:{self.port}",
            "JUPYTERHUB_API_URL": f"https://127.0.0.1:{self.hub.port}/hub/api",
        }
        self.services["broker"].env = broker
        self.hub.tls = internal_tls(tls)
        self.http.base_url = f"http://127.0.0.1:{self.public_port}{PREFIX}api/v1/"

    def _make_certificates(self) -> None:
        for command in (
            [sys.executable, "-m", "jupyterhub", "--generate-certs", "-f", str(self.hub.config)],
            [
                *(BIN / "certipy", "service-gpushare", "--ca-name", "notebooks-ca"),
                *("--alt-names", "DNS:localhost,IP:127.0.0.1", "--store-dir", self.folder / "internal-ssl"),
            ],
        ):
            subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=PATIENCE_S)

    def through_proxy(self, path: str, user: str) -> httpx.Response:
        return httpx.get(
            f"http://127.0.0.1:{self.public_port}{path}",
            headers={"Authorization": f"token {self.tokens[user]}"},
            timeout=PATIENCE_S,
            trust_env=False,
        )

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.answer("GET", f"jobs/{job_id}", "bo"))


@pytest.fixture(scope="module")
def site() -> Iterator[TlsSite]:
    with running(TlsSite) as site:
        yield site


def submit(site: TlsSite, *command: str) -> str:
    job = {"command": list(command), "gpus": "1"}
    return str(site.answer("POST", "jobs", "bo", 201, json=job)["id"])


def test_a_session_gets_its_gpu_and_its_server_is_reached_by_the_proxy(site: TlsSite) -> None:
    assert site.hub.start_server("ada", {"fraction": "1/2"}).status_code in (201, 202)
    site.hub.wait_ready("ada")
    environment = site.hub.environment("ada")
    assert environment["JUPYTERHUB_SERVICE_URL"].startswith("https://")
    (lease,) = site.through_proxy("/user/ada/gpushare/status", "ada").json()["leases"]
    assert (lease["user"], lease["state"]) == ("ada", "running")


def test_a_job_runs_reports_and_shows_its_log_to_its_owner_alone(site: TlsSite) -> None:
    go = site.folder / "go"
    waits = f"echo hello; while [ ! -e {go} ]; do sleep 0.1; done"
    job = submit(site, "sh", "-c", waits)
    until(lambda: site.job(job)["state"] == "running", "the job runs", log=site.services["broker"].log)
    path = f"/user/bo/{site.job(job)['server']}/log"
    until(lambda: site.through_proxy(path, "bo").text == "hello\n", "its log is shown")
    assert site.through_proxy(path, "ada").status_code == 403
    go.touch()
    until(lambda: site.job(job)["state"] == "succeeded", "its end is known")
    assert site.job(job)["exit_code"] == 0


def test_the_hub_finds_its_servers_and_the_broker_again_after_a_restart(site: TlsSite) -> None:
    job = submit(site, "sleep", "600")
    until(lambda: site.job(job)["state"] == "running", "the job runs", log=site.services["broker"].log)
    site.hub.stop()
    site.hub.start()
    until(site.is_healthy, "the proxy leads to the broker again")
    assert site.hub.server("bo", site.job(job)["server"])
    site.answer("DELETE", f"jobs/{job}", "bo")
    until(lambda: site.job(job)["state"] == "cancelled", "the Hub stopped its server")


@pytest.mark.parametrize("of", ["broker", "hub"])
def test_a_caller_without_a_certificate_of_the_hub_is_not_answered(site: TlsSite, of: str) -> None:
    port = site.port if of == "broker" else site.hub.port
    bundle = certificates(site.folder, "service-gpushare")["JUPYTERHUB_SSL_CLIENT_CA"]
    without = ssl.create_default_context(cafile=bundle)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"https://127.0.0.1:{port}/", verify=without, trust_env=False, timeout=PATIENCE_S)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/", trust_env=False, timeout=PATIENCE_S)


def test_doctor_asks_the_hub_with_the_brokers_certificate(site: TlsSite) -> None:
    url, env = f"https://127.0.0.1:{site.hub.port}/hub/api", site.services["broker"].env
    assert ask_hub(url, "token-of-the-broker", env) is None
    refused = ask_hub(url, "another", env)
    assert refused is not None
    assert "must be the same token" in refused[1]


def test_a_broker_with_an_https_address_and_no_certificate_says_what_it_needs(site: TlsSite) -> None:
    env = {name: value for name, value in site.services["broker"].env.items() if name not in VARIABLES}
    env["JUPYTERHUB_SERVICE_URL"] = f"https://127.0.0.1:{free_ports()}"
    state = site.folder / "second"
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_gpushare.cli", "broker", "--state-dir", str(state)],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "JUPYTERHUB_SSL_KEYFILE" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_broker_does_not_take_the_server_of_a_user_for_the_hub(site: TlsSite) -> None:
    tls = internal_tls(certificates(site.folder, "user-ada"), ssl.Purpose.CLIENT_AUTH)
    assert tls is not None
    asking = internal_tls(site.services["broker"].env)
    assert asking is not None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

        def pose() -> None:
            with listening.accept()[0] as connection:
                try:
                    tls.wrap_socket(connection, server_side=True).close()
                except OSError:
                    return

        thread = threading.Thread(target=pose, daemon=True)
        thread.start()
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://127.0.0.1:{port}/", verify=asking, trust_env=False)
        thread.join(PATIENCE_S)
