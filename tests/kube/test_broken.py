"""Broken installations: `gpushare kube check` names each, and what to change."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from traitlets.config import Config

from jupyter_gpushare.cli.checks import Check
from jupyter_gpushare.core.model import Project
from jupyter_gpushare.kube import command_line
from jupyter_gpushare.kube.checks import cluster as cluster_checks
from jupyter_gpushare.kube.checks.cluster import CLUSTER_RIGHTS, RIGHTS, examine
from jupyter_gpushare.kube.checks.hub import BrokerPod, hub_checks
from jupyter_gpushare.kube.checks.surroundings import PolicyPort, parse_list
from jupyter_gpushare.kube.cluster.objects import Meta, OtherObject
from jupyter_gpushare.kube.cluster.queues import priority_classes, queues
from jupyter_gpushare.kube.settings import GPUShareKube
from tests.certificates import broker_and_helper, broker_settings
from tests.kube import store
from tests.kube.apiserver import ApiServer, api_server
from tests.kube.rbac import Rights

Json = dict[str, Any]
NS = "gpushare"
PROJECTS = (Project(name="vision", quota_milli=4000), Project(name="nlp", quota_milli=4000, weight=2))
# Rights of the checks alone.
SETTINGS = (
    ("list", "scheduling.k8s.io", "priorityclasses"),
    ("list", "kai.scheduler", "schedulingshards"),
    ("list", "kai.scheduler", "configs"),
    ("list", "nvidia.com", "clusterpolicies"),
)
Z2JH: Json = yaml.safe_load((Path(__file__).parents[2] / "helm-values/z2jh.yaml").read_text())
BROKER = BrokerPod(namespace=NS, address="10.1.0.9", http_port=8888, tls_port=8004)
# Of JupyterHub's chart by default: everything but private networks.
PUBLIC = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}]}


def rights(drop: tuple[str, str] = ("", "")) -> Rights:
    """Rights of the broker, without one."""
    here, everywhere = (
        [(verb, group, resource) for verb, group, resource in each if (verb, resource) != drop]
        for each in (RIGHTS, (*CLUSTER_RIGHTS, *SETTINGS))
    )
    return Rights.granting(here, everywhere, NS)


def policy(component: str, values: Json) -> Json:
    labels = {"app": "jupyterhub", "component": component, "release": "jhub"}
    more = values["networkPolicy"]
    spec = {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": more.get("ingress", []),
        "egress": [PUBLIC, *more.get("egress", [])],
    }
    return {"kind": "NetworkPolicy", "metadata": {"name": component}, "spec": spec}


def home(name: str, user: str = "ada", modes: tuple[str, ...] = ("ReadWriteMany",)) -> Json:
    meta = {"name": name, "labels": {"component": "singleuser-storage"}}
    meta["annotations"] = {"hub.jupyter.org/username": user}
    return {"kind": "PersistentVolumeClaim", "metadata": meta, "spec": {"accessModes": list(modes)}}


class Installation:
    """A cluster that is ready; a test breaks one thing of it."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server, self.store = server, server.store
        self.token = folder / "token"
        self.token.write_text("t")
        self.settings = {"api_server": server.url, "token_file": str(self.token), "seat_image": "i"}
        self.settings |= broker_settings(broker_and_helper(folder)[0])
        self.silent: set[str] = set()
        self.hub: list[Json] = [
            {"kind": "Deployment", "metadata": {"name": "hub", "labels": {"component": "hub"}}, "spec": {}},
            policy("hub", Z2JH["hub"]),
            policy("proxy", Z2JH["proxy"]["chp"]),
            policy("singleuser-server", Z2JH["singleuser"]),
            home("claim-ada"),
            home("claim-bo", "bo"),
            {"kind": "Secret", "metadata": {"name": "other"}},
        ]
        for body in queues(PROJECTS, 600):
            self.store.create("queues", "", body)
        for body in priority_classes(3):
            self.store.create("priorityclasses", "", body)
        self.put("schedulingshards", "default", {"actions": {"consolidation": {"enabled": False}}})
        self.put("configs", "kai-config", {"admission": {"gpuSharing": True}})
        self.put("clusterpolicies", "cluster-policy", {"cdi": {"enabled": True}, "toolkit": {"env": []}})
        self.node("n1", "1", {})
        self.node("n2", "8", {"gpushare.jupyter.org/units": "2"})
        self.pod("gpushare-helper-1", {"app.kubernetes.io/component": "gpushare-helper"}, node="n1")
        self.pod("gpushare-broker-1", {"app.kubernetes.io/name": "gpushare-broker"})

    def put(self, plural: str, name: str, spec: Json) -> None:
        self.store.create(plural, "", {"metadata": {"name": name}, "spec": spec})

    def spec(self, plural: str, name: str, change: Json) -> None:
        self.store.patch(plural, "", name, {"spec": change})

    def node(self, name: str, gpus: str, labels: dict[str, str]) -> None:
        status = {"allocatable": {"nvidia.com/gpu": gpus, "cpu": "8"}}
        self.store.create("nodes", "", {"metadata": {"name": name, "labels": labels}, "status": status})

    def pod(self, name: str, labels: dict[str, str], node: str = "c1") -> None:
        status = {"phase": "Running", "podIP": "127.0.0.1"}
        body = {"metadata": {"name": name, "labels": labels}, "spec": {"nodeName": node}, "status": status}
        self.store.create("pods", NS, body)

    def without_right(self, verb: str, resource: str) -> None:
        self.server.rights = rights((verb, resource))

    def cut(self, component: str) -> None:
        """Take the egress rules of the values away."""
        (found,) = [
            o for o in self.hub if o["metadata"]["name"] == component and o["kind"] == "NetworkPolicy"
        ]
        found["spec"]["egress"] = [PUBLIC]


async def examined(site: Installation, monkeypatch: pytest.MonkeyPatch) -> dict[str, Check]:
    asked = cluster_checks._answers

    async def answers(address: Any) -> bool:
        return address.node not in site.silent or await asked(address)

    monkeypatch.setattr(cluster_checks, "_answers", answers)
    found = await examine(GPUShareKube(config=Config(GPUShareKube=site.settings)), PROJECTS, 3)
    content = json.dumps({"kind": "List", "items": copy.deepcopy(site.hub)}).encode()
    return {each.name: each for each in [*found, *hub_checks(parse_list(content), BROKER)]}


async def test_a_whole_installation_is_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with api_server(rights()) as server:
        found = await examined(Installation(server, tmp_path), monkeypatch)
    assert {name: check.message for name, check in found.items() if check.result != "ok"} == {}
    assert "2 nodes with GPUs, 1 of them unit pools" in found["nodes"].message
    assert len(found) == 14


Break = Callable[[Installation], Any]
BROKEN: dict[str, tuple[Break, str, str, str, str]] = {
    "a custom resource is missing": (
        lambda _: None,  # below: the API server then knows no Queue
        *("queues", "fail", "KAI-Scheduler is not installed", "install KAI-Scheduler"),
    ),
    "idle sessions are below a project": (
        lambda site: site.spec("queues", "gpushare-idle", {"parentQueue": "vision"}),
        *("queues", "fail", "gpushare-idle (below vision)", "delete them, then run gpushare kube queues"),
    ),
    "consolidation is on": (
        lambda site: site.spec("schedulingshards", "default", {"actions": None}),
        *("consolidation", "fail", "shard default", "scheduler.actions.consolidation.enabled"),
    ),
    "the NRI plugin is on": (
        lambda site: site.spec("clusterpolicies", "cluster-policy", {"cdi": {"nriPluginEnabled": True}}),
        *("visible-devices", "warn", "annotation alone", "cdi.nriPluginEnabled"),
    ),
    "KAI blocks the device variable": (
        lambda site: site.spec("configs", "kai-config", {"admission": {"blockNvidiaVisibleDevices": True}}),
        *("visible-devices", "fail", "KAI overwrites", "global.blockNvidiaVisibleDevices"),
    ),
    "the toolkit ignores the device variable": (
        lambda site: site.spec(
            *("clusterpolicies", "cluster-policy"),
            {"toolkit": {"env": [{"name": cluster_checks.ENV_ACCEPTED, "value": "false"}]}},
        ),
        *("visible-devices", "fail", "toolkit ignores", "toolkit.env"),
    ),
    "the user-scheduler is on": (
        lambda site: site.hub.append(
            {
                "kind": "Deployment",
                "metadata": {"name": "user-scheduler", "labels": {"component": "user-scheduler"}},
                "spec": {"replicas": 2},
            }
        ),
        *("hub-scheduler", "fail", "user-scheduler", "scheduling.userScheduler.enabled"),
    ),
    "a rule of the Role is missing": (
        lambda site: site.without_right("patch", "podgroups"),
        *("rights", "fail", "patch podgroups", "broker's Role"),
    ),
    "a network policy cuts servers off": (
        lambda site: site.cut("singleuser-server"),
        *("hub-network", "fail", "singleuser-server to the broker's port 8004", "networkPolicy"),
    ),
    "a network policy cuts the proxy off": (
        lambda site: site.cut("proxy"),
        *("hub-network", "fail", "proxy to the broker's port 8888", "helm-values/z2jh.yaml"),
    ),
    "a right in the whole cluster is missing": (
        lambda site: site.without_right("watch", "nodes"),
        *("rights", "fail", "This account may not: watch nodes.", "broker's Role"),
    ),
    "settings of KAI may not be read": (
        lambda site: site.without_right("list", "schedulingshards"),
        *("consolidation", "warn", "cannot be examined", "right to read it"),
    ),
    "the API server lets nothing be read": (
        lambda site: setattr(site.server, "rights", Rights.granting([], [], NS)),
        *("api-server", "fail", "cannot list", "Role in the namespace gpushare"),
    ),
    "the API server does not know the token": (
        lambda site: site.token.write_text("other"),
        *("api-server", "fail", "Unauthorized", "give a token"),
    ),
    "the API server is away": (
        lambda site: site.settings.update(api_server="http://127.0.0.1:9"),
        *("api-server", "fail", "does not answer", "c.GPUShareKube.api_server"),
    ),
    "a helper is away": (
        lambda site: (site.silent.add("n1"), site.settings.update(helper_port=9)),
        *("helpers", "fail", "does not answer on n1", "port 9"),
    ),
    "no helper runs": (
        lambda site: site.store.delete("pods", NS, "gpushare-helper-1", grace_s=0),
        *("helpers", "fail", "No pod of a device helper runs", "run one on each node"),
    ),
    "the broker has no certificate": (
        lambda site: site.settings.pop("helper_certificate_file"),
        *("helpers", "fail", "helper_certificate_file is not set", "give the broker a certificate"),
    ),
    "KAI gives out whole GPUs only": (
        lambda site: site.spec("configs", "kai-config", {"admission": {"gpuSharing": None}}),
        *("gpu-sharing", "fail", "whole GPUs only", "spec.admission.gpuSharing"),
    ),
    "a queue is missing": (
        lambda site: site.store.delete("queues", "", "nlp-train"),
        *("queues", "fail", "The cluster has no queue nlp-train.", "gpushare kube queues"),
    ),
    "a priority class is missing": (
        lambda site: site.store.delete("priorityclasses", "", "gpushare-yield"),
        *("priority-classes", "fail", "no priority class gpushare-yield.", "gpushare kube queues"),
    ),
    "a node with several GPUs is no unit pool": (
        lambda site: site.store.patch("nodes", "", "n2", {"metadata": {"labels": None}}),
        *("nodes", "warn", "(n2)", "gpushare.jupyter.org/units=1"),
    ),
    "no node has a GPU": (
        lambda site: [site.store.delete("nodes", "", name) for name in ("n1", "n2")],
        *("nodes", "fail", "No node has nvidia.com/gpu", "GPU operator"),
    ),
    "seats have no image": (
        lambda site: site.settings.update(seat_image=""),
        *("seats", "fail", "No image for seats", "c.GPUShareKube.seat_image"),
    ),
    "two brokers run": (
        lambda site: site.pod("gpushare-broker-2", {"app.kubernetes.io/name": "gpushare-broker"}),
        *("one-broker", "fail", "gpushare-broker-1, gpushare-broker-2", "Recreate"),
    ),
    "homes are one per server": (
        lambda site: site.hub.append(home("claim-ada--second")),
        *("hub-homes", "fail", "home for each server, of ada", "claim-{username}"),
    ),
    "homes are of one node at a time": (
        lambda site: site.hub.append(home("claim-cy", "cy", ("ReadWriteOnce",))),
        *("hub-homes", "fail", "claim-cy", "ReadWriteMany"),
    ),
    "a quota differs": (
        lambda site: site.spec("queues", "nlp", {"resources": {"gpu": {"quota": 2.01}}}),
        *("queues", "warn", "project nlp has other numbers", "gpushare kube queues"),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
async def test_it_is_named_alone_with_its_remedy(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    breaks, name, result, message, advice = BROKEN[what]
    async with api_server(rights()) as server:
        site = Installation(server, tmp_path)
        breaks(site)
        if "custom resource" in what:
            monkeypatch.delitem(store.KINDS, ("scheduling.run.ai", "v2", "queues"))
        found = await examined(site, monkeypatch)
    wrong = [check for check in found.values() if check.result != "ok"]
    assert [(check.name, check.result) for check in wrong] == [(name, result)]
    assert message in wrong[0].message
    assert advice in wrong[0].advice


@pytest.mark.parametrize(
    ("spec", "moves"),
    [
        ({}, True),
        ({"actions": {"consolidation": {"enabled": True}}}, True),
        ({"actions": {"consolidation": {"priority": 3}}}, True),
        ({"placementStrategy": {"gpu": "spread", "cpu": "binpack"}}, False),
        ({"placementStrategy": {"gpu": "binpack"}}, True),
    ],
)
def test_a_shard_moves_pods_unless_it_spreads_or_is_told_not_to(spec: Json, moves: bool):
    assert cluster_checks.consolidates(OtherObject(metadata=Meta(name="pool"), spec=spec)) is moves


@pytest.mark.parametrize(
    ("port", "is_let"),
    [
        ({}, True),
        ({"port": 8004}, True),
        ({"port": 8000, "endPort": 9000}, True),
        ({"port": 8000, "endPort": 8003}, False),
        ({"port": 8004, "protocol": "UDP"}, False),
        ({"port": "http", "endPort": 9000}, False),
    ],
    ids=str,
)
def test_a_rule_lets_ranges_of_ports_of_its_protocol(port: dict[str, Any], is_let: bool):
    assert msgspec.convert(port, PolicyPort).allows({8004}) is is_let


async def test_the_command_reads_the_hubs_namespace_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, listed = tmp_path / "broker_config.py", tmp_path / "hub.json"
    config.write_text('c.GPUShareKube.api_server = "http://127.0.0.1:9"\nc.GPUShareBroker.projects = {}\n')
    listed.write_text(json.dumps({"items": [home("claim-a", modes=("ReadWriteOnce",))]}))

    async def said(*words: str) -> str:
        await asyncio.to_thread(command_line.main, ["check", "--config", str(config), *words])
        return "".join(capsys.readouterr())

    assert "fail  hub-homes" in await said("--hub", str(listed))
    assert "--hub -" in await said()
    listed.write_text("no list")
    assert "not what kubectl get -o json prints" in await said("--hub", str(listed))
    assert "none.json cannot be read" in await said("--hub", str(tmp_path / "none.json"))
