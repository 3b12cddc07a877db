"""The broker of a cluster as a process: real seats and device helpers on nodes, KAI by its model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jupyter_gpushare.core.model import Project
from jupyter_gpushare.kube.checks.canary import canary
from jupyter_gpushare.kube.cluster.queues import priority_classes, queues
from jupyter_gpushare.kube.command_line import configured
from jupyter_gpushare.kube.settings import GPUShareKube
from tests.certificates import broker_and_helper, helper_options
from tests.kube.cluster import Cluster, running_cluster
from tests.kube.kubelet import Node
from tests.ports import free_ports
from tests.simulator import GIB, Simulator
from tests.waiting import PATIENCE_S, until

NS = "gpushare"
CLI = [sys.executable, "-m", "jupyter_gpushare.cli"]
PROJECTS = (Project(name="vision", quota_milli=1000), Project(name="nlp", quota_milli=0))
CONFIG = """
c.GPUShareBroker.engine = "kai"
c.GPUShareBroker.compute_share = "fair"
c.GPUShareBroker.projects = {{"vision": {{"quota": 1}}, "nlp": {{"quota": 0}}}}
c.GPUShareBroker.state_dir = "{folder}/broker"
c.GPUShareKube.kubeconfig = {kubeconfig!r}
c.GPUShareKube.seat_image = "gpushare"
c.GPUShareKube.seat_grace_s = 60
c.GPUShareKube.host_dir = "{folder}/host"
c.GPUShareKube.helper_selector = "app=helper"
c.GPUShareKube.helper_port = {port}
c.GPUShareKube.helper_certificate_file = "{folder}/gpushare-broker.crt"
c.GPUShareKube.helper_key_file = "{folder}/gpushare-broker.key"
c.GPUShareKube.helper_ca_file = "{folder}/ca.crt"
"""
HELPER: dict[str, Any] = {
    "metadata": {"name": "helper-1", "labels": {"app": "helper"}},
    "spec": {"nodeName": "n1", "containers": [{"name": "helper", "image": "gpushare"}]},
    "status": {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]},
}


class Site:
    """A node with one simulated GPU, its helper, and the broker."""

    def __init__(self, folder: Path, cluster: Cluster, machine: Simulator) -> None:
        self.folder, self.cluster, self.machine = folder, cluster, machine
        self.socket = folder / "broker" / "api.sock"
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{words[0]}.log").open("ab") as log:
            env = self.machine.env(**environ)
            process = subprocess.Popen([*CLI, *words], env=env, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def log(self) -> str:
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("logs/*")])
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def ask(self, path: str, body: Any) -> httpx.Response:
        token = (self.folder / "broker" / "spawner-token").read_text().strip()
        with self.client(token, 150) as client:
            return client.post(f"spawner/{path}", json=body)

    def client(self, token: str = "", timeout_s: float = PATIENCE_S) -> httpx.Client:
        """A client of the broker's HTTP API."""
        transport = httpx.HTTPTransport(uds=str(self.socket))
        headers = {"Authorization": f"token {token}"} if token else {}
        api = "http://broker/services/gpushare/api/v1/"
        return httpx.Client(transport=transport, base_url=api, timeout=timeout_s, headers=headers)

    def start(self, user: str, fraction: str = "1/2", project: str = "vision") -> httpx.Response:
        request = {"user": user, "server": "", "groups": [project], "uid": os.getuid()}
        return self.ask("start", request | {"options": {"fraction": fraction}})

    def seats(self) -> dict[str, str]:
        """Leases of the seats that are there, by name; pods and PodGroups."""
        store = self.cluster.server.store
        kinds = ("pods", "podgroups")
        found = self.cluster.do(lambda: [o for kind in kinds for o in store.all(kind, NS)])
        label = "gpushare.jupyter.org/lease"
        return {
            o["metadata"]["name"]: o["metadata"]["labels"][label]
            for o in found
            if label in o["metadata"].get("labels", {})
        }


def prepare(cluster: Cluster) -> None:
    """Create what an administrator brings: KAI's settings, Queues and priority classes."""
    store = cluster.server.store
    config = {"metadata": {"name": "kai-config"}, "spec": {"admission": {"gpuSharing": True}}}
    cluster.do(lambda: store.create("configs", "", config))
    for body in queues(PROJECTS, 0):
        cluster.do(lambda body=body: store.create("queues", "", body))
    for body in priority_classes(3):
        cluster.do(lambda body=body: store.create("priorityclasses", "", body))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="gps-") as name:
        folder = Path(name)
        machine = Simulator(folder, "1xH100-80GB,host=512GiB")
        (folder / "host").mkdir()
        _, helper = broker_and_helper(folder)
        node = Node("n1", gpus=(machine.uuid(0),), environ=machine.env())
        with running_cluster(folder, [node], images={"gpushare": CLI}) as cluster:
            store, port = cluster.server.store, free_ports()
            prepare(cluster)
            made = Site(folder, cluster, machine)
            made.run(
                *("helper", "--state-dir", f"{name}/helper", "--lease-dir", f"{name}/host/leases"),
                *("--listen", f"127.0.0.1:{port}", *helper_options(helper), "--node", "n1"),
                *("--seat-socket", f"{name}/host/seat.sock", "--install-library", f"{name}/host/lib"),
                *("--sample-s", "0.2"),
            )
            cluster.do(lambda: store.create("pods", NS, HELPER))
            file = folder / "config.py"
            file.write_text(CONFIG.format(folder=name, kubeconfig=str(cluster.kubeconfig()), port=port))
            made.run(
                *("broker", "--config", str(file)),
                JUPYTERHUB_SERVICE_URL=f"http://127.0.0.1:{free_ports()}",
                JUPYTERHUB_API_TOKEN="t",
                JUPYTERHUB_API_URL="http://127.0.0.1:9/hub/api",
            )
            try:
                token = folder / "broker" / "spawner-token"
                until(token.exists, "it listens", process=made.processes[-1], log=folder / "broker.log")
                yield made
            finally:
                for process in made.processes:
                    process.terminate()
                for process in made.processes:
                    process.wait(60)


def test_the_check_of_the_cluster_finds_its_helper(site: Site):
    words = [*CLI, "kube", "check", "--config", str(site.folder / "config.py")]
    done = subprocess.run(words, env=site.machine.env(), capture_output=True, text=True, timeout=120)
    assert "They answer on 1 nodes." in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("cdi", "form"), [(True, "cdi"), (False, "uuid")])
async def test_a_canary_finds_out_how_servers_are_told_their_gpus(
    site: Site, monkeypatch: pytest.MonkeyPatch, cdi: bool, form: str
):
    monkeypatch.setattr(site.cluster.kubelet.nodes["n1"], "cdi", cdi)
    before = site.cluster.pods(NS)
    settings = GPUShareKube(parent=configured(site.folder / "config.py"))
    found = await canary(settings, patience_s=10.0)
    assert (found.result, f'gpu_names = "{form}"' in found.message) == ("ok", True), found
    until(lambda: site.cluster.pods(NS).keys() == before.keys(), "no canary is left")


async def test_a_runtime_that_shows_no_gpu_is_named(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(site.cluster.kubelet.nodes["n1"], "gpus", ())
    found = await canary(GPUShareKube(parent=configured(site.folder / "config.py")), patience_s=2.0)
    assert found.result == "fail"
    assert "does not see exactly that one (cdi, uuid, annotation)" in found.message


def start(site: Site, user: str, **more: Any) -> dict[str, Any]:
    """Start a session; again while the broker does not know the devices yet."""

    def answered() -> dict[str, Any] | None:
        answer = site.start(user, **more)
        assert answer.status_code in (200, 409), answer.text
        if answer.status_code == 409:
            assert answer.json()["reason"] in ("devices_unknown",), (answer.text, site.log())
            time.sleep(1)
            return None
        return dict(answer.json())

    return until(answered, "the session is granted")


def test_two_halves_get_seats_on_the_node_and_a_third_leaves_nothing(site: Site):
    first = start(site, "ada")
    assert first["node"] == "n1", site.log()
    (device,) = first["devices"]
    assert first["memory_limit_bytes"] <= 40 * GIB
    paths = [Path(mount["path"]) for mount in first["mounts"]]
    assert all(path.exists() for path in paths)
    assert all(site.folder / "host" in path.parents for path in paths)
    second = start(site, "bo")
    assert second["devices"] == [device]
    for lease in (first["lease"], second["lease"]):
        asked = json.loads((site.folder / "helper/private/journal" / lease).read_bytes())["asked"]
        assert (asked["compute_share"], asked["share"]) == ("fair", 0.5)
    there = site.seats()
    assert len(there) == 2
    began = time.monotonic()
    refused = site.start("cy")
    assert refused.status_code == 409, site.log()
    assert "smaller size" in refused.json()["message"]
    assert time.monotonic() - began < 60  # 8 s on a machine that has time
    until(lambda: site.seats() == there, "nothing of the third is left")
    for user in ("ada", "bo"):
        assert site.ask("stop", {"user": user, "server": ""}).status_code == 204
    until(lambda: not site.seats(), "the seats of ended sessions are gone")
