"""The story on a cluster: half a GPU by the form, idle, lent to a job, and back with its variable.

There are two nodes, each with a driver and a device helper of its own.  Real: Hub, KubeSpawner, broker,
helpers, seats, the job's runner, and what runs in the pods.  By their models: API server, KAI-Scheduler,
kubelet, driver.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from jupyter_gpushare.channel import unix_url
from jupyter_gpushare.protocol.helper_tls import HELPER
from tests.certificates import broker_and_helper, files_of, helper_options
from tests.hub.conftest import Hub, running_hub
from tests.kube import test_broker
from tests.kube.cluster import Cluster, running_cluster
from tests.kube.kubelet import Node
from tests.kube.test_broker import CLI, Site
from tests.kube.test_spawner import KUBE, PODS, environment, pid_of
from tests.ports import free_ports
from tests.simulator import GIB, Simulator
from tests.waiting import PATIENCE_S, until

# A real KAI-Scheduler takes longer than its model.
SOON_S = 300.0 if os.environ.get("GPUSHARE_TEST_ENGINE") == "kai" else PATIENCE_S
# In each second round the broker is killed.
RETURNS = int(os.environ.get("GPUSHARE_TEST_RETURNS", "50"))
CELLS = Path(__file__).with_name("cells.py")
HUB_NS = "hub"
NODES = ("n1", "n2")
BROKER_MORE = """
c.GPUShareBroker.idle_timeout = 6
c.GPUShareBroker.notice = 1
c.GPUShareBroker.tls_address = "127.0.0.1:{port}"
"""
HUB_MORE = """
c.KubeSpawner.uid = {uid}
c.GPUShareMixin.broker_url = {broker!r}
c.GPUShareMixin.server_broker_url = "https://127.0.0.1:{port}/services/gpushare"
c.GPUShareMixin.broker_token_file = "{folder}/broker/spawner-token"
c.GPUShareMixin.broker_certificate_file = "{folder}/broker/api-certificate.pem"
c.GPUShareMixin.offers_timeout_s = 30
c.GPUShareKubeSpawner.host_dirs = ["{folder}/n1/host", "{folder}/n2/host"]
c.GPUShareKubeSpawner.holder_timeout = 60
c.GPUShareKubeSpawner.job_cmd = [{python!r}, "-P", "-m", "jupyter_gpushare.job"]
c.Spawner.start_timeout = 240
c.Spawner.http_timeout = 240
c.Spawner.cmd = [{python!r}, {cells!r}]
c.JupyterHub.load_groups["nlp"]["users"].append("dot")
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
    """A site with its Hub and people; ``machines``: those of the nodes, by name."""

    hub: Hub
    tokens: dict[str, str]
    machines: dict[str, Simulator]
    helpers: dict[str, subprocess.Popen[bytes]]
    helper_port: int
    broker_is_there: threading.Lock

    def api(self, user: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Ask the broker as a user."""
        if user not in self.tokens:
            self.tokens[user] = self.hub.user_token(user)
        with self.broker_is_there, self.client(self.tokens[user]) as client:
            answer = client.request(method, path, json=body)
        assert answer.status_code < 300, (path, answer.text, self.log())
        return dict(answer.json())

    def trouble(self) -> list[str]:
        """What `health` says."""
        with self.client() as client:
            return list(client.get("health").json()["reasons"])

    def listens(self) -> bool:
        """Whether a broker listens."""
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(self.socket))
            except OSError:
                return False
        return True

    def leases(self, user: str) -> list[dict[str, Any]]:
        """The sessions of a user as their owner sees them."""
        return [x for x in self.api(user, "GET", "status")["leases"] if x["kind"] == "build"]

    def session(self, user: str) -> dict[str, Any]:
        (lease,) = self.leases(user)
        return lease

    def pod(self, user: str) -> dict[str, Any]:
        (found,) = [
            pod
            for pod in self.cluster.pods(HUB_NS).values()
            if pod["metadata"]["annotations"]["hub.jupyter.org/username"] == user
        ]
        return found

    def runs_of(self, user: str) -> list[str]:
        """The pods of a user's servers that have a process now."""
        ours = {pod["metadata"]["uid"]: name for name, pod in self.cluster.pods(HUB_NS).items()
                if pod["metadata"]["annotations"]["hub.jupyter.org/username"] == user}  # fmt: skip
        running = self.cluster.do(lambda: dict(self.cluster.kubelet.running))
        return [ours[uid] for uid, of in running.items() if uid in ours and of.process.poll() is None]

    def seats_of(self, lease: str) -> list[dict[str, Any]]:
        """The pods of the seats of a lease."""
        pods, label = self.cluster.pods(test_broker.NS).values(), "gpushare.jupyter.org/lease"
        return [pod for pod in pods if pod["metadata"].get("labels", {}).get(label) == lease]

    def cell(self, user: str, code: str) -> str:
        """What a cell of the user's server prints."""
        address = environment(pid_of(self.cluster, self.pod(user)))["JUPYTERHUB_SERVICE_URL"]
        return httpx.post(address, content=code, timeout=PATIENCE_S, trust_env=False).text


@contextlib.contextmanager
def running_story() -> Iterator[Story]:
    """Cluster, Hub, helpers and broker, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="gps-") as name:
        folder = Path(name)
        (folder / "hub").mkdir()
        machines = {}
        for node in NODES:
            (folder / node / "host").mkdir(parents=True)
            machines[node] = Simulator(folder / node, f"1xH100 of {node}-80GB,host=512GiB")
        broker_and_helper(folder)
        nodes = [
            Node(
                name,
                gpus=(machine.uuid(0),),
                environ=machine.env(),
                folders={f"{folder}/host": f"{folder}/{name}/host"},
            )
            for name, machine in machines.items()
        ]
        with running_cluster(folder, nodes, images={"gpushare": CLI}) as cluster:
            made = Story(folder, cluster, machines["n1"])
            made.tokens, made.machines, made.broker_is_there = {}, machines, threading.Lock()
            made.helpers, made.helper_port = {}, free_ports()
            test_broker.prepare(cluster)
            for node in NODES:
                helper_pod(cluster, node)
            tls_port = free_ports()
            more = (PODS + HUB_MORE).format(
                kubeconfig=str(cluster.kubeconfig()), folder=name, python=sys.executable, cells=str(CELLS),
                port=tls_port, broker=unix_url(made.socket, "/services/gpushare"), uid=os.getuid(),
            )  # fmt: skip
            try:
                with running_hub(KUBE, folder / "hub", extra=more) as hub:
                    made.hub = hub
                    start(made, tls_port)
                    yield made
            finally:
                for process in reversed(made.processes):  # the broker, then the helpers
                    process.terminate()
                    process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with running_story() as made:
        yield made


def helper_pod(cluster: Cluster, node: str) -> None:
    """Create the pod of a node's device helper."""
    helper = copy.deepcopy(test_broker.HELPER)
    helper["metadata"]["name"] = f"helper-{node}"
    helper["spec"]["nodeName"] = node
    helper["status"] |= {"podIP": address_of(node), "podIPs": [{"ip": address_of(node)}]}
    cluster.do(lambda: cluster.server.store.create("pods", test_broker.NS, helper))


def address_of(node: str) -> str:
    """Where the helper of a node listens."""
    return f"127.0.0.{1 + NODES.index(node)}"


def start_helper(made: Story, node: str) -> None:
    """Start the device helper of a node."""
    own, tls = made.folder / node, files_of(HELPER, made.folder)
    driver = {k: v for k, v in made.machines[node].env().items() if k.startswith("GPUSHARE_SIM")}
    made.helpers[node] = made.run(
        *("helper", "--state-dir", f"{own}/helper", "--lease-dir", f"{own}/host/leases", "--node", node),
        *("--listen", f"{address_of(node)}:{made.helper_port}", *helper_options(tls)),
        *("--seat-socket", f"{own}/host/seat.sock", "--install-library", f"{own}/host/lib"),
        *("--sample-s", "0.2"),
        **driver,
    )
    made.processes.insert(0, made.processes.pop())  # the broker stays the last


def start(made: Story, tls_port: int) -> None:
    for node in NODES:
        start_helper(made, node)
    file = made.folder / "config.py"
    config = test_broker.CONFIG.format(
        folder=made.folder, kubeconfig=str(made.cluster.kubeconfig()), port=made.helper_port
    )
    file.write_text(config + BROKER_MORE.format(port=tls_port))
    start_broker(made)


def start_broker(made: Story) -> None:
    """Start the broker, and wait until it listens."""
    made.run(
        *("broker", "--config", str(made.folder / "config.py")),
        JUPYTERHUB_SERVICE_URL=f"http://127.0.0.1:{free_ports()}",
        JUPYTERHUB_SERVICE_PREFIX="/services/gpushare/",
        JUPYTERHUB_SERVICE_NAME="gpushare",
        JUPYTERHUB_API_TOKEN="token-of-the-broker",
        JUPYTERHUB_API_URL=f"{made.hub.url}/hub/api",
    )
    until(made.listens, "the broker listens", process=made.processes[-1], log=made.folder / "broker.log")


@dataclass
class Job:
    """A job of a user without a server of their own."""

    story: Story
    user: str
    id: str

    def get(self) -> dict[str, Any]:
        found = self.story.api(self.user, "GET", f"jobs/{self.id}")
        assert found["state"] not in ("failed", "cancelled"), f"{found}\n{self.story.log()}"
        return found

    def runs(self) -> bool:
        return bool(self.get()["state"] == "running")

    @property
    def node(self) -> str:
        return str(self.story.pod(self.user)["spec"]["nodeName"])

    @property
    def pid(self) -> int:
        return pid_of(self.story.cluster, self.story.pod(self.user))


def submitted(story: Story, user: str, **more: str) -> Job:
    request = {"command": [sys.executable, *TRAIN], "gpus": "1", "project": "nlp", **more}
    return Job(story, user, story.api(user, "POST", "jobs", request)["id"])


@dataclass
class Lent:
    """Ada's session on one node, its GPU lent to Cy's job, and Dot's job on the other node."""

    story: Story
    beside: Job
    guest: Job
    server: int  # process of the session
    node: str  # of the session

    @property
    def machine(self) -> Simulator:
        return self.story.machines[self.node]


def lend(story: Story) -> Lent:
    """Start Dot's job and Ada's session, and submit Cy's job."""
    until(lambda: story.api("dot", "GET", "status")["devices_known"], "the helpers answer")
    beside = submitted(story, "dot")
    until(beside.runs, "a job runs on one node", SOON_S)
    hub = story.hub
    with hub.browser("ada") as browser:
        size = {"gpushare_project": "vision", "gpushare_size:vision": '{"fraction": "1/2"}'}
        until(lambda: "1/2 GPU" in browser.get("/hub/spawn/ada").text, "the page offers it")
        assert hub.submit_form(browser, "ada", size).status_code == 302
    hub.wait_ready("ada")
    assert story.cell("ada", ALLOCATE) == "True", story.log()
    said = story.cell("ada", TOO_MUCH)
    assert "in your share of this GPU" in said, said
    pod = story.pod("ada")
    return Lent(
        story, beside, submitted(story, "cy"), pid_of(story.cluster, pod), str(pod["spec"]["nodeName"])
    )


@pytest.fixture(scope="module")
def lent(story: Story) -> Lent:
    return lend(story)


def come_back(lent: Lent) -> None:
    """Run a cell of the session that lends its GPU: the same process, its variable, the same GPU."""
    story = lent.story
    assert story.cell("ada", "print(weights.is_intact())") == "True", story.log()
    assert pid_of(story.cluster, story.pod("ada")) == lent.server
    assert story.pod("ada")["spec"]["nodeName"] == lent.node
    for machine in story.machines.values():
        assert max((event.device_used or 0 for event in machine.ledger()), default=0) <= 80 * GIB


def lease_of(lent: Lent) -> str:
    return str(lent.story.session("ada")["id"])


def everything_settles(lent: Lent) -> None:
    """Every seat and PodGroup belongs to a lease that is there, and no lease has two."""
    story = lent.story

    def is_settled() -> bool:
        leases = [lease_of(lent), f"j{lent.guest.id}", f"j{lent.beside.id}"]
        there = sorted(story.seats().values())
        return len(set(there)) == len(there) and set(there) <= set(leases)

    until(is_settled, "no seat is left over")


def of_beside(lent: Lent) -> tuple[Any, ...]:
    """All that an eviction of the job on the other node would change."""
    job = lent.beside.get()
    seats = [pod["metadata"]["name"] for pod in lent.story.seats_of(f"j{job['id']}")]
    return job["state"], job["attempt"], job["preemptions"], lent.beside.pid, lent.beside.node, seats


@pytest.mark.timeout(900)
def test_an_idle_half_gpu_is_lent_to_a_job_and_comes_back_with_its_variable(lent: Lent) -> None:
    story, before = lent.story, of_beside(lent)
    assert before[:3] == ("running", 1, 0)
    assert lent.beside.node != lent.node
    assert len(before[-1]) == 1
    until(lent.guest.runs, "the job runs on the GPU of the idle session", SOON_S)
    assert story.session("ada")["state"] == "suspended"
    assert lent.guest.node == lent.node
    until(lambda: lent.machine.device_used(0) > 60 * GIB, "the job computes", SOON_S)
    come_back(lent)
    # Not the session's state: it may be lent again by then.
    until(lambda: lent.guest.get()["preemptions"] > 0, "the job made way")
    assert of_beside(lent) == before


@pytest.mark.timeout(900)
def test_a_job_that_has_to_stop_is_never_there_twice(lent: Lent) -> None:
    story = lent.story
    story.api("cy", "DELETE", f"jobs/{lent.guest.id}")
    job = lent.guest = submitted(story, "cy", checkpoint="sigterm")
    until(job.runs, "the idle GPU is lent", SOON_S)
    first = job.pid
    come_back(lent)

    def is_second_attempt() -> bool:
        assert len(story.runs_of("cy")) <= 1, "two attempts at once"
        return job.get()["attempt"] == 2 and job.runs()

    until(is_second_attempt, "it runs again", SOON_S)
    assert job.pid != first
    everything_settles(lent)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_many_returns_lose_nothing_though_the_broker_is_killed(lent: Lent) -> None:
    story, before = lent.story, of_beside(lent)
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)

    def kill(after_s: float) -> None:
        time.sleep(after_s)
        with story.broker_is_there:
            broker = story.processes.pop()
            broker.kill()
            broker.wait()
            start_broker(story)

    for number in range(RETURNS):
        killer = threading.Thread(target=kill, args=(chance.uniform(0, 15),))
        if number % 2:
            killer.start()
        preempted = lent.guest.get()["preemptions"] if not number % 2 else 0
        until(lent.guest.runs, "the GPU is lent", SOON_S)
        come_back(lent)
        if number % 2:
            killer.join()
        else:
            until(lambda n=preempted: lent.guest.get()["preemptions"] > n, "the job made way")
        assert of_beside(lent) == before
