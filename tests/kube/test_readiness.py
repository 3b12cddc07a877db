"""A broker for a cluster that lacks something does not start, and names it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpushare.core.model import Project
from jupyter_gpushare.kube.checks.cluster import find_missing, shares_gpus
from jupyter_gpushare.kube.cluster.api_server import ApiServer as Address
from jupyter_gpushare.kube.cluster.client import ApiClient
from jupyter_gpushare.kube.cluster.helpers import HelperPods, Helpers
from jupyter_gpushare.kube.cluster.queues import queues
from jupyter_gpushare.kube.cluster.seats import followed_nodes
from jupyter_gpushare.kube.settings import GPUShareKube
from jupyter_gpushare.protocol.helper_tls import BROKER
from tests.certificates import broker_and_helper, files_of
from tests.kube import store
from tests.kube.apiserver import ApiServer, api_server
from tests.kube.rbac import Rights
from tests.ports import free_ports
from tests.waiting import PATIENCE_S, becomes

NS = "gpushare"
VISION = Project(name="vision", quota_milli=4000)
TLS = files_of(BROKER, Path())
KUBE = GPUShareKube(namespace=NS, helper_selector="app=helper")
SITE = HelperPods(namespace=NS, selector="app=helper", port=8006, tls=TLS)


def helper_pod(server: ApiServer, name: str, node: str, **status: Any) -> None:
    body = {"metadata": {"name": name, "labels": {"app": "helper"}}, "spec": {"nodeName": node}}
    server.store.create("pods", NS, body | {"status": {"phase": "Running", "podIP": "10.0.0.7", **status}})


def complete(server: ApiServer) -> None:
    for body in queues([VISION], 0):
        server.store.create("queues", "", body)
    config = {"metadata": {"name": "kai-config"}, "spec": {"admission": {"gpuSharing": True}}}
    server.store.create("configs", "", config)
    helper_pod(server, "helper-a", "n0")


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with api_server() as server:
        complete(server)
        yield server


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[ApiClient]:
    client = ApiClient(Address(url=server.url), deadline_s=2.0)
    yield client
    await client.close()


async def test_a_complete_cluster_lacks_nothing(client: ApiClient):
    assert await find_missing(client, KUBE, [VISION]) == []


async def test_each_thing_that_is_missing_is_named_with_its_remedy(server: ApiServer, client: ApiClient):
    server.store.delete("queues", "", "vision-train")
    server.store.patch("configs", "", "kai-config", {"spec": {"admission": {"gpuSharing": None}}})
    server.store.delete("pods", NS, "helper-a", grace_s=0)
    queue, sharing, helper = await find_missing(client, KUBE, [VISION])
    assert "no queue vision-train: run gpushare kube queues" in queue
    assert "whole GPUs only" in sharing
    assert "admission.gpuSharing" in sharing
    assert "no pod of a device helper runs (app=helper): run one on each node" in helper


@pytest.mark.parametrize("plural", ["podgroups", "queues"])
async def test_a_cluster_without_kai_is_told_to_install_it(
    client: ApiClient, monkeypatch: pytest.MonkeyPatch, plural: str
):
    monkeypatch.delitem(store.KINDS, next(key for key in store.KINDS if key[2] == plural))
    (said,) = await find_missing(client, KUBE, [VISION])
    assert "install KAI-Scheduler" in said


async def test_settings_of_kai_that_this_account_may_not_see_are_no_reason_to_refuse():
    async with api_server(Rights.granting([], [], NS)) as server:
        client = ApiClient(Address(url=server.url, token="t"))
        assert await shares_gpus(client)
        await client.close()


@pytest.fixture
async def helpers(client: ApiClient) -> AsyncIterator[Helpers]:
    nodes = followed_nodes(client, lambda: None)
    helpers = Helpers(client, SITE, nodes)
    following = [asyncio.create_task(each.run()) for each in (helpers, nodes)]
    yield helpers
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)


async def test_helpers_are_known_by_their_node_while_they_run(server: ApiServer, helpers: Helpers):
    async def nodes(*expected: str) -> None:
        await becomes(lambda: tuple(sorted(helpers.addresses())) == expected)

    await nodes("n0")
    helper_pod(server, "helper-b", "n1", phase="Pending", podIP="")
    helper_pod(server, "helper-c", "n2")
    await nodes("n0", "n2")
    address = helpers.addresses()["n2"]
    assert (address.host, address.port, address.node) == ("10.0.0.7", 8006, "n2")  # type: ignore[attr-defined]
    server.store.patch("pods", NS, "helper-a", {"status": {"phase": "Failed"}}, part="status")
    await nodes("n2")


async def test_a_helper_that_is_replaced_is_known_until_its_node_has_left(
    server: ApiServer, helpers: Helpers
):
    """Else its node would seem to be gone, and the jobs there would be taken for ended."""
    server.store.create("nodes", "", {"metadata": {"name": "n0"}})
    helper_pod(server, "helper-c", "n2", podIP="10.0.0.9")  # of a node that leaves with it

    def hosts() -> dict[str, str]:
        return {node: address.host for node, address in helpers.addresses().items()}  # type: ignore[attr-defined]

    await becomes(lambda: hosts() == {"n0": "10.0.0.7", "n2": "10.0.0.9"})
    server.store.delete("pods", NS, "helper-a", grace_s=0)
    server.store.delete("pods", NS, "helper-c", grace_s=0)
    await becomes(lambda: hosts() == {"n0": "10.0.0.7"})
    helper_pod(server, "helper-b", "n0", podIP="10.0.0.8")
    await becomes(lambda: hosts() == {"n0": "10.0.0.8"})
    server.store.delete("nodes", "", "n0")
    server.store.delete("pods", NS, "helper-b", grace_s=0)
    await becomes(lambda: hosts() == {})


CONFIG = """
c.GPUShareBroker.engine = "kai"
c.GPUShareBroker.projects = {{"vision": {{"quota": {quota}}}}}
c.GPUShareBroker.state_dir = {folder!r}
c.GPUShareKube.api_server = {url!r}
c.GPUShareKube.seat_image = {image!r}
c.GPUShareKube.helper_selector = "app=helper"
c.GPUShareKube.helper_certificate_file = {certificate!r}
c.GPUShareKube.helper_key_file = {key!r}
c.GPUShareKube.helper_ca_file = {authority!r}
"""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, "the cluster has no queue vision, vision-build"),
        ({"image": ""}, "c.GPUShareKube.seat_image is not set"),
        ({"key": ""}, "c.GPUShareKube.helper_key_file is not set"),
        ({"key": "/none"}, "/none cannot be read: No such file"),
        ({"quota": "'50%'"}, "write quota = 4"),
    ],
    ids=str,
)
async def test_a_broker_that_lacks_something_ends_with_its_name(tmp_path: Path, change: Any, named: str):
    broker, _ = broker_and_helper(tmp_path)
    async with api_server() as server:
        given = {"quota": 4, "folder": str(tmp_path), "url": server.url, "image": "i"}
        given |= {name: str(path) for name, path in asdict(broker).items()}
        config = tmp_path / "config.py"
        config.write_text(CONFIG.format(**given | change))
        environ = os.environ | {
            "JUPYTERHUB_SERVICE_URL": f"http://127.0.0.1:{free_ports()}",
            "JUPYTERHUB_API_TOKEN": "t",
            "JUPYTERHUB_API_URL": "http://127.0.0.1:9/hub/api",
        }
        command = [sys.executable, "-m", "jupyter_gpushare.cli", "broker", "--config", str(config)]
        done = await asyncio.to_thread(
            subprocess.run, command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S
        )
    assert done.returncode == 1, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
