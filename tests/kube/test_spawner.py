"""`gpushare-kube` in a real Hub: the real KubeSpawner, pods that run, and what a refused start leaves."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import make_certificate
from tests.hub.conftest import Hub, running_hub, wait_for
from tests.hub.fake_broker import GRANT
from tests.kube.cluster import Cluster, running_cluster
from tests.kube.kubelet import Node

KUBE = "jupyter_gpushare.kube.spawner.GPUShareKubeSpawner"
STUB = Path(__file__).with_name("cells.py")
NS = "hub"
# KubeSpawner in a Hub with a home for each user.
PODS = """
from kubernetes_asyncio.config import kube_config
# Read from $KUBECONFIG at its import, which may have been before this file.
kube_config.KUBE_CONFIG_DEFAULT_LOCATION = {kubeconfig!r}
c.KubeSpawner.namespace = "hub"
c.KubeSpawner.image = "lab:1"
c.KubeSpawner.volumes = [{{"name": "home", "persistentVolumeClaim": {{"claimName": "{{pvc_name}}"}}}}]
c.KubeSpawner.volume_mounts = [{{"name": "home", "mountPath": "/home/jovyan"}}]
c.KubeSpawner.storage_pvc_ensure = True
c.KubeSpawner.storage_capacity = "1Gi"
"""
EXTRA = """
c.KubeSpawner.profile_list = [
    {{"display_name": "plain", "slug": "plain", "default": True}},
    {{"display_name": "image of jobs", "slug": "own",
      "kubespawner_override": {{"image": "own:2", "uid": 2000}}}},
    {{"display_name": "gpu", "slug": "gpu",
      "kubespawner_override": {{"extra_resource_limits": {{"nvidia.com/gpu": "1"}}}}}},
]
c.GPUShareMixin.server_broker_url = "https://127.0.0.1:9/services/gpushare"
c.GPUShareMixin.broker_certificate_file = "{folder}/api.crt"
c.GPUShareKubeSpawner.host_dirs = ["{folder}"]
c.GPUShareKubeSpawner.holder_timeout = 2
c.GPUShareKubeSpawner.job_cmd = [{python!r}, "-c", {job!r}]
c.Spawner.start_timeout = 60
c.Spawner.cmd = [{python!r}, {stub!r}]
"""
# A runner of a job that notes what it was given, and serves the Hub's question whether it is there.
JOB = (
    "import os, pathlib, runpy; "
    "pathlib.Path('job').write_text(os.environ['GPUSHARE_JOB']); "
    f"runpy.run_path({str(STUB)!r})"
)
JOB_NAME = "j0123456789-1"
COMMAND = ["sh", "-c", "echo $$ $(HOME) $HOME"]
SPEC = {
    "id": "0123456789",
    "attempt": 1,
    "name": "n",
    "command": COMMAND,
    "cwd": None,
    "env": {},
    "grace_s": 60.0,
}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Hub, Cluster]]:
    with tempfile.TemporaryDirectory(prefix="gpushare-kube-") as name:
        folder = Path(name)
        make_certificate(folder / "api.crt", folder / "api.key")
        nodes = [Node(f"node-{n}", gpus=(f"GPU-{n}",)) for n in (1, 2)]
        with running_cluster(folder, nodes) as cluster:
            extra = (PODS + EXTRA).format(
                kubeconfig=str(cluster.kubeconfig()),
                folder=name,
                python=sys.executable,
                stub=str(STUB),
                job=JOB,
            )
            with running_hub(KUBE, folder, extra=extra) as hub:
                yield hub, cluster


@pytest.fixture
def cluster(shared: tuple[Hub, Cluster]) -> Cluster:
    return shared[1]


@pytest.fixture
def hub(shared: tuple[Hub, Cluster]) -> Iterator[Hub]:
    hub, cluster = shared
    hub.broker.reset()
    yield hub
    for node in cluster.kubelet.nodes.values():
        node.accepts = True
    hub.stop_servers()
    wait_for(lambda: not cluster.pods(NS), "all pods are gone")


def grant(folder: Path, node: str = "node-1", gpu: str = "GPU-1", **more: Any) -> dict[str, Any]:
    lease = folder / "leases" / "abc-1"
    lease.mkdir(parents=True, exist_ok=True)
    (folder / "lib").mkdir(exist_ok=True)
    env = GRANT["env"] | {
        "GPUSHARE_LEASE_DIR": str(lease),
        "CUDA_VISIBLE_DEVICES": gpu,
        "LD_PRELOAD": str(folder / "lib" / "libgpushare_preload.so"),
    }
    mounts = [{"path": str(lease), "read_only": False}, {"path": str(folder / "lib"), "read_only": True}]
    return GRANT | {"env": env, "devices": [gpu], "node": node, "mounts": mounts} | more


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def pid_of(cluster: Cluster, pod: dict[str, Any]) -> int:
    return int(cluster.kubelet.running[pod["metadata"]["uid"]].process.pid)


def test_a_server_runs_on_the_node_of_its_lease_and_ends_with_its_pod(hub: Hub, cluster: Cluster):
    hub.broker.grant = grant(hub.folder, "node-2", "GPU-2")
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code in (201, 202), hub.log()[-3000:]
    assert hub.wait_ready("ada")
    (pod,) = cluster.pods(NS).values()
    assert pod["spec"]["nodeName"] == "node-2"
    pid = pid_of(cluster, pod)
    given = environment(pid)
    assert given["NVIDIA_VISIBLE_DEVICES"] == "k8s.device-plugin.nvidia.com/gpu=GPU-2"
    assert given["GPUSHARE_LEASE"] == "abc-1"
    hub.stop_server("ada")
    wait_for(lambda: not cluster.pods(NS), "the pod is gone")
    assert not Path(f"/proc/{pid}").exists()


def test_a_server_without_a_gpu_runs_anywhere_and_sees_none(hub: Hub, cluster: Cluster):
    assert hub.start_server("ada").status_code in (201, 202)
    assert hub.wait_ready("ada")
    (pod,) = cluster.pods(NS).values()
    assert environment(pid_of(cluster, pod))["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "runtimeClassName" not in pod["spec"]


def fails_to_start(hub: Hub, user: str, options: dict[str, Any]) -> str:
    """Start a server that is refused, and return what its page says."""
    with hub.browser(user) as client:
        answer = hub.api("POST", f"users/{user}/server", options)
        wait_for(lambda: not hub.server(user), "the start is over")
        page = client.get(f"/hub/spawn-pending/{user}")
        return answer.text + page.text


def test_a_profile_with_a_gpu_of_its_own_is_refused_and_leaves_no_pod(hub: Hub, cluster: Cluster):
    hub.broker.grant = grant(hub.folder)
    said = fails_to_start(hub, "ada", {"profile": "gpu", "gpushare": {"fraction": "1/2"}})
    assert "GPU of its own" in said, hub.log()[-3000:]
    wait_for(lambda: not cluster.pods(NS), "there is no pod")
    assert hub.broker.of("spawner/stop"), "the lease is released"


def test_a_server_that_its_node_has_no_capacity_for_is_refused_and_asks_for_another_node(
    hub: Hub, cluster: Cluster
):
    cluster.kubelet.nodes["node-1"].accepts = False
    hub.broker.grant = grant(hub.folder)
    said = fails_to_start(hub, "ada", {"gpushare": {"fraction": "1/2"}})
    assert "no CPU or memory left" in said, hub.log()[-3000:]
    wait_for(lambda: not cluster.pods(NS), "there is no pod")
    assert hub.broker.of("spawner/start")[-1].body["not_nodes"] == []
    hub.broker.grant = grant(hub.folder, "node-2", "GPU-2")
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code in (201, 202)
    assert hub.wait_ready("ada")
    assert hub.broker.of("spawner/start")[-1].body["not_nodes"] == ["node-1"]


def test_a_job_whose_node_has_no_capacity_for_its_server_leaves_that_node_out(hub: Hub, cluster: Cluster):
    hub.ensure_user("cy")
    cluster.kubelet.nodes["node-1"].accepts = False
    hub.broker.grant = grant(hub.folder, kind="train", job=SPEC)
    hub.start_server("cy", name=JOB_NAME)
    wait_for(lambda: hub.broker.of("spawner/stop"), "the attempt is given back")
    said = hub.broker.of("spawner/stop")[-1].body
    assert said.pop("created"), "it says of which cy"
    stop = {"user": "cy", "server": JOB_NAME, "not_nodes": ["node-1"], "by_hub": True}
    assert said == stop, hub.log()[-3000:]
    wait_for(lambda: not cluster.pods(NS), "there is no pod")


def test_a_job_uses_the_home_and_the_profile_of_its_owners_server_and_deletes_neither(
    hub: Hub, cluster: Cluster
):
    hub.ensure_user("cy")
    options = {"profile": "own", "gpushare": {"fraction": "1/2"}}
    hub.broker.grant = grant(hub.folder)
    assert hub.api("POST", "users/cy/server", options).status_code in (201, 202)
    assert hub.wait_ready("cy")
    hub.broker.grant = grant(hub.folder, kind="train", job=SPEC)
    assert hub.start_server("cy", name=JOB_NAME).status_code in (201, 202)
    assert hub.wait_ready("cy", JOB_NAME)
    pods = {
        pod["metadata"]["annotations"].get("hub.jupyter.org/servername", ""): pod
        for pod in cluster.pods(NS).values()
    }
    claims = {n: [v["persistentVolumeClaim"]["claimName"] for v in p["spec"]["volumes"]
                  if "persistentVolumeClaim" in v] for n, p in pods.items()}  # fmt: skip
    assert claims[JOB_NAME] == claims[""]
    assert {pod["spec"]["containers"][0]["image"] for pod in pods.values()} == {"own:2"}
    assert [asked.body["uid"] for asked in hub.broker.of("spawner/start")] == [2000, 2000]
    home = cluster.kubelet.claim(claims[""][0])
    job = wait_for(lambda: (home / "job").exists() and (home / "job").read_text(), "the job has begun")
    assert json.loads(job)["command"] == COMMAND
    hub.stop_server("cy", JOB_NAME, remove=True)
    stored = cluster.do(lambda: list(cluster.server.store.all("persistentvolumeclaims", NS)))
    assert claims[""][0] in {claim["metadata"]["name"] for claim in stored}


def test_a_pod_that_is_deleted_by_hand_ends_its_server(hub: Hub, cluster: Cluster):
    hub.broker.grant = grant(hub.folder)
    assert hub.start_server("ada", {"fraction": "1/2"}).status_code in (201, 202)
    hub.wait_ready("ada")
    (name,) = cluster.pods(NS)
    cluster.do(lambda: cluster.server.store.delete("pods", NS, name, grace_s=0))
    wait_for(lambda: not hub.server("ada"), "the Hub sees that it has ended")
    assert hub.broker.of("spawner/stop")
