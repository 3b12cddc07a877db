"""The story on a cluster: half a GPU by the form, idle, lent to a job, and back with its variable.

Real: Hub, KubeSpawner, broker, device helper, seats, the job's runner, and what runs in the pods.  By their
models: API server, KAI-Scheduler, kubelet, driver.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jupyter_gpushare.backends.kubernetes.queues import priority_classes, queues
from jupyter_gpushare.channel import unix_url
from tests.hub.conftest import Hub, running_hub
from tests.kube import test_broker
from tests.kube.cluster import Cluster, running_cluster
from tests.kube.kubelet import Node
from tests.kube.test_broker import CLI, PROJECTS, Site
from tests.kube.test_spawner import KUBE, environment, pid_of
from tests.ports import free_ports
from tests.simulator import GIB, Simulator
from tests.waiting import PATIENCE_S, until

CELLS = Path(__file__).with_name("cells.py")
HUB_NS = "hub"
BROKER_MORE = """
c.GPUShareBroker.idle_timeout = 6
c.GPUShareBroker.notice = 1
c.GPUShareBroker.tls_address = "127.0.0.1:{port}"
"""
HUB_MORE = """
from kubernetes_asyncio.config import kube_config
kube_config.KUBE_CONFIG_DEFAULT_LOCATION = {kubeconfig!r}
c.KubeSpawner.namespace = "hub"
c.KubeSpawner.image = "lab:1"
c.KubeSpawner.volumes = [{{"name": "home", "persistentVolumeClaim": {{"claimName": "{{pvc_name}}"}}}}]
c.KubeSpawner.volume_mounts = [{{"name": "home", "mountPath": "/home/jovyan"}}]
c.KubeSpawner.storage_pvc_ensure = True
c.KubeSpawner.storage_capacity = "1Gi"
c.KubeSpawner.uid = {uid}
c.GPUShareMixin.broker_url = {broker!r}
c.GPUShareMixin.server_broker_url = "https://127.0.0.1:{port}/services/gpushare"
c.GPUShareMixin.broker_token_file = "{folder}/broker/spawner-token"
c.GPUShareMixin.broker_certificate_file = "{folder}/broker/api-certificate.pem"
c.GPUShareMixin.offers_timeout_s = 30
c.GPUShareKubeSpawner.host_dirs = ["{folder}/host"]
c.GPUShareKubeSpawner.holder_timeout = 60
c.GPUShareKubeSpawner.job_cmd = [{python!r}, "-P", "-m", "jupyter_gpushare.job"]
c.Spawner.start_timeout = 240
c.Spawner.http_timeout = 240
c.Spawner.cmd = [{python!r}, {cells!r}]
c.JupyterHub.load_roles.append({{
    "name": "broker", "services": ["gpushare"],
    "scopes": ["list:users", "read:users", "read:groups", "read:servers", "servers", "delete:servers"],
}})
"""
ALLOCATE = """
from jupyter_gpushare import demo_gpu
gpu = demo_gpu.open()
weights = gpu.allocate("6GiB")
weights.fill(seed=42)
print(weights.is_intact())
"""
TOO_MUCH = """
try:
    gpu.allocate("40GiB")
except demo_gpu.GpuOutOfMemory as error:
    print(error)
"""
TRAIN = ["-m", "jupyter_gpushare.demo_gpu", "train", "--steps", "99999", "--bytes", "60GiB"]


class Story(Site):
    """A site with its Hub and people."""

    hub: Hub
    tokens: dict[str, str]

    def api(self, user: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Ask the broker as a user."""
        if user not in self.tokens:
            self.tokens[user] = self.hub.user_token(user)
        token = self.tokens[user]
        transport = httpx.HTTPTransport(uds=str(self.socket))
        with httpx.Client(transport=transport, base_url="http://broker", timeout=PATIENCE_S) as client:
            address = f"/services/gpushare/api/v1/{path}"
            answer = client.request(method, address, json=body, headers={"Authorization": f"token {token}"})
        assert answer.status_code < 300, (path, answer.text, self.log())
        return dict(answer.json())

    def session(self, user: str) -> dict[str, Any]:
        """The session of a user as its owner sees it."""
        (lease,) = [x for x in self.api(user, "GET", "status")["leases"] if x["kind"] == "build"]
        return dict(lease)

    def pod(self, user: str) -> dict[str, Any]:
        (found,) = [
            pod
            for pod in self.cluster.pods(HUB_NS).values()
            if pod["metadata"]["annotations"]["hub.jupyter.org/username"] == user
        ]
        return found

    def cell(self, user: str, code: str) -> str:
        """What a cell of the user's server prints."""
        address = environment(pid_of(self.cluster, self.pod(user)))["JUPYTERHUB_SERVICE_URL"]
        return httpx.post(address, content=code, timeout=PATIENCE_S, trust_env=False).text


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with tempfile.TemporaryDirectory(prefix="gps-") as name:
        folder = Path(name)
        machine = Simulator(folder, "1xH100-80GB,host=512GiB")
        for part in ("host", "hub"):
            (folder / part).mkdir()
        secret = folder / "secret"
        secret.write_text("s" * 40)
        secret.chmod(0o600)
        node = Node("n1", gpus=(machine.uuid(0),), environ=machine.env())
        with running_cluster(folder, [node], images={"gpushare": CLI}) as cluster:
            made = Story(folder, cluster, machine)
            made.tokens = {}
            prepare(made, cluster)
            tls_port, helper_port = free_ports(), free_ports()
            more = HUB_MORE.format(
                kubeconfig=str(cluster.kubeconfig()), folder=name, python=sys.executable, cells=str(CELLS),
                port=tls_port, broker=unix_url(made.socket, "/services/gpushare"), uid=os.getuid(),
            )  # fmt: skip
            try:
                with running_hub(KUBE, folder / "hub", extra=more) as hub:
                    made.hub = hub
                    start(made, helper_port, tls_port)
                    yield made
            finally:
                for process in made.processes:
                    process.terminate()
                for process in made.processes:
                    process.wait(60)


def prepare(made: Story, cluster: Cluster) -> None:
    store = cluster.server.store
    config = {"metadata": {"name": "kai-config"}, "spec": {"admission": {"gpuSharing": True}}}
    cluster.do(lambda: store.create("configs", "", config))
    for body in queues(PROJECTS, 0):
        cluster.do(lambda body=body: store.create("queues", "", body))
    for body in priority_classes(3):
        cluster.do(lambda body=body: store.create("priorityclasses", "", body))
    cluster.do(lambda: store.create("pods", test_broker.NS, test_broker.HELPER))


def start(made: Story, helper_port: int, tls_port: int) -> None:
    name = str(made.folder)
    made.run(
        *("helper", "--state-dir", f"{name}/helper", "--lease-dir", f"{name}/host/leases"),
        *("--listen", f"127.0.0.1:{helper_port}", "--secret-file", f"{name}/secret", "--node", "n1"),
        *("--seat-socket", f"{name}/host/seat.sock", "--install-library", f"{name}/host/lib"),
        *("--sample-s", "0.2"),
    )
    file = made.folder / "config.py"
    config = test_broker.CONFIG.format(
        folder=name, kubeconfig=str(made.cluster.kubeconfig()), port=helper_port
    )
    file.write_text(config + BROKER_MORE.format(port=tls_port))
    made.run(
        *("broker", "--config", str(file)),
        JUPYTERHUB_SERVICE_URL=f"http://127.0.0.1:{free_ports()}",
        JUPYTERHUB_SERVICE_PREFIX="/services/gpushare/",
        JUPYTERHUB_SERVICE_NAME="gpushare",
        JUPYTERHUB_API_TOKEN="token-of-the-broker",
        JUPYTERHUB_API_URL=f"{made.hub.url}/hub/api",
    )
    token = made.folder / "broker" / "spawner-token"
    until(token.exists, "the broker listens", process=made.processes[-1], log=made.folder / "broker.log")


@pytest.mark.timeout(900)
def test_an_idle_half_gpu_is_lent_to_a_job_and_comes_back_with_its_variable(story: Story) -> None:
    hub, device = story.hub, 0
    with hub.browser("ada") as browser:
        size = {"gpushare_project": "vision", "gpushare_size:vision": '{"fraction": "1/2"}'}
        until(lambda: "1/2 GPU" in browser.get("/hub/spawn/ada").text, "the page offers it")
        assert hub.submit_form(browser, "ada", size).status_code == 302
    hub.wait_ready("ada")
    assert story.cell("ada", ALLOCATE) == "True", story.log()
    said = story.cell("ada", TOO_MUCH)
    assert "in your share of this GPU" in said, said
    server = pid_of(story.cluster, story.pod("ada"))

    request = {"command": [sys.executable, *TRAIN], "gpus": "1", "project": "nlp"}
    job = story.api("cy", "POST", "jobs", request)

    def job_is(state: str) -> bool:
        found = story.api("cy", "GET", f"jobs/{job['id']}")
        assert found["state"] not in ("failed", "cancelled"), f"{found}\n{story.log()}"
        return bool(found["state"] == state)

    until(lambda: job_is("running"), "the job runs on the GPU of the idle session", 300)
    assert story.session("ada")["state"] == "suspended"
    until(lambda: story.machine.device_used(device) > 60 * GIB, "the job computes", 300)

    assert story.cell("ada", "print(weights.is_intact())") == "True", story.log()
    assert pid_of(story.cluster, story.pod("ada")) == server
    # Not its state: it may run again by then.
    until(lambda: story.api("cy", "GET", f"jobs/{job['id']}")["preemptions"] > 0, "the job made way")
    peak = max(event.device_used or 0 for event in story.machine.ledger())
    assert peak <= 80 * GIB
