"""The checks of ``gpushare kube check``: one `Check` per thing of a cluster that can be wrong.

They ask the API server only, with the rights that the broker has.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from jupyter_gpushare.backends.helper_client import HelperAddress, HelperClient
from jupyter_gpushare.cli import checks
from jupyter_gpushare.cli.checks import Check, Probe, fail, named, ok, warn
from jupyter_gpushare.core.model import Project
from jupyter_gpushare.errors import GpuShareError, HelperError
from jupyter_gpushare.kube.checks.readiness import shares_gpus
from jupyter_gpushare.kube.checks.surroundings import (
    NetworkPolicySpec,
    Peer,
    PolicyRule,
    network_policies,
)
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import (
    CLUSTER_POLICIES,
    CONFIGS,
    NODES,
    PODS,
    PRIORITY_CLASSES,
    QUEUES,
    SHARDS,
    ApiClient,
    Resource,
)
from jupyter_gpushare.kube.cluster.helpers import Helpers
from jupyter_gpushare.kube.cluster.objects import GPU_RESOURCE, Node, OtherObject, node_affinity
from jupyter_gpushare.kube.cluster.queues import in_force, misplaced, missing, priority_classes
from jupyter_gpushare.kube.rules.pools import LABEL
from jupyter_gpushare.kube.settings import GPUShareKube
from jupyter_gpushare.protocol.helper import Hello, Inventory

# ---- checks of the Hub's namespace, from what ``kubectl get -o json`` prints of it
# The broker has no right to read there, and needs none: an administrator pipes the objects in.

COMMAND = "kubectl -n HUB get deployments,persistentvolumeclaims,networkpolicies -o json"
# Labels of pods and claims in JupyterHub's chart, and of the broker in ours.
_COMPONENT = "component"
BROKER = {"app.kubernetes.io/name": "gpushare-broker"}
_USER = "hub.jupyter.org/username"
_NAMESPACE = "kubernetes.io/metadata.name"


@dataclass(frozen=True, slots=True)
class BrokerPod:
    """Where network policies find the broker; ``address`` may be unknown (empty)."""

    namespace: str
    address: str
    http_port: int
    tls_port: int


def hub_checks(objects: Sequence[OtherObject], broker: BrokerPod) -> list[Check]:
    """Return one check per thing in the Hub's namespace that can be wrong.

    Raises:
        KubeError: a network policy is malformed.
    """
    return named(
        {
            "hub-scheduler": _scheduler([each for each in objects if each.kind == "Deployment"]),
            "hub-homes": _homes([each for each in objects if each.kind == "PersistentVolumeClaim"]),
            "hub-network": _network(network_policies(objects), broker),
        }
    )


def not_examined() -> list[Check]:
    """Return that the Hub's namespace was not examined, and how to do it."""
    advice = f"{COMMAND} | gpushare kube check --hub -"
    return named({"hub": warn("The Hub's namespace was not examined.", advice)})


def _scheduler(deployments: list[OtherObject]) -> Check:
    for each in deployments:
        if each.metadata.labels.get(_COMPONENT) == "user-scheduler" and each.field("replicas") != 0:
            return fail(
                f"JupyterHub's own scheduler ({each.metadata.name}) places servers.",
                "set scheduling.userScheduler.enabled to false in the values of JupyterHub's chart",
            )
    return ok("Servers are placed by the cluster's own scheduler.")


def _homes(claims: list[OtherObject]) -> Check:
    homes = [each for each in claims if each.metadata.labels.get(_COMPONENT) == "singleuser-storage"]
    of_one_node = (each for each in homes if "ReadWriteMany" not in (each.field("accessModes") or ()))
    if single := [each.metadata.name for each in of_one_node]:
        return fail(
            f"Homes that one node at a time can mount: {_some(single)}. A job runs on another one.",
            "make them ReadWriteMany (singleuser.storage.dynamic.storageAccessModes)",
        )
    of_user: dict[str, set[str]] = defaultdict(set)
    for each in homes:
        of_user[each.metadata.annotations.get(_USER, each.metadata.name)].add(each.metadata.name)
    if several := [user for user, names in of_user.items() if len(names) > 1]:
        return fail(
            f"A home for each server, of {_some(several)}: a second server begins with an empty one.",
            "set singleuser.storage.dynamic.pvcNameTemplate to claim-{username}",
        )
    return ok(f"{len(homes)} homes, one for each user." if homes else "There is no home yet.")


def _network(policies: list[NetworkPolicySpec], broker: BrokerPod) -> Check:
    cut = [
        f"{component} to the broker's port {port}"
        for component, port in (
            ("singleuser-server", broker.tls_port),
            ("hub", broker.tls_port),
            ("proxy", broker.http_port),
        )
        if not _is_let(policies, component, "Egress", broker, {port})
    ]
    if not _is_let(policies, "hub", "Ingress", broker, {8081, "http"}):
        cut.append("the broker to the Hub's port 8081")
    if cut:
        return fail(
            f"Network policies of the Hub's namespace cut: {', '.join(cut)}.",
            "add the rules of helm-values/z2jh.yaml (networkPolicy)",
        )
    return ok("Its network policies let the Hub, its proxy and servers reach the broker.")


def _is_let(
    policies: list[NetworkPolicySpec], component: str, way: str, broker: BrokerPod, ports: set[int | str]
) -> bool:
    mine = [
        each
        for each in policies
        if each.pod_selector.matches({_COMPONENT: component, "app": "jupyterhub"} | _release(each))
        and way in each.policy_types
    ]
    rules = [rule for spec in mine for rule in (spec.egress if way == "Egress" else spec.ingress)]
    return not mine or any(_lets(rule, way, broker, ports) for rule in rules)


def _release(policy: NetworkPolicySpec) -> dict[str, str]:
    """Labels that a policy selects beside the component: those of its release."""
    wanted = policy.pod_selector.match_labels
    return {key: value for key, value in wanted.items() if key != _COMPONENT}


def _lets(rule: PolicyRule, way: str, broker: BrokerPod, ports: set[int | str]) -> bool:
    peers = rule.to if way == "Egress" else rule.from_
    at_port = not rule.ports or any(each.lets(ports) for each in rule.ports)
    return at_port and (not peers or any(_is_broker(peer, broker) for peer in peers))


def _is_broker(peer: Peer, broker: BrokerPod) -> bool:
    if peer.ip_block is not None:
        return (
            bool(broker.address)
            and _in(peer.ip_block.cidr, broker.address)
            and not any(_in(each, broker.address) for each in peer.ip_block.except_)
        )
    if peer.namespace_selector is None or not peer.namespace_selector.matches({_NAMESPACE: broker.namespace}):
        return False
    return peer.pod_selector is None or peer.pod_selector.matches(BROKER)


def _in(network: str, address: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)


def _some(names: list[str]) -> str:
    return ", ".join(sorted(names)[:5])


# ---- the canary of ``gpushare kube check --canary``: a pod that is told a GPU as a server is
# It requests no GPU, like the pod of a server, and asks the driver which it sees.  Each form of
# ``c.GPUShareKubeSpawner.gpu_names`` is tried until one works: what settings of the GPU operator make of
# it is known only then.

NAME = "canary"
# With an image that the node has: the device helper runs there.
PATIENCE_S = 60.0
_LOOK_S = 0.5
_CDI_KIND = "k8s.device-plugin.nvidia.com/gpu"
_FORMS = ("cdi", "uuid", "annotation")


async def canary(kube: GPUShareKube, patience_s: float = PATIENCE_S) -> Check:
    """Return which form shows a pod exactly the GPU that it was told.

    Raises:
        KubeError: no API server is configured, or its file cannot be read.
    """
    client = ApiClient(kube.address(), deadline_s=5.0)
    try:
        node, uuid = await _gpu(client, kube)
        for form in _FORMS:
            if await _sees(client, kube, _pod(kube, form, node, uuid), patience_s):
                setting = f'c.GPUShareKubeSpawner.gpu_names = "{form}"'
                return ok(f"A pod on {node} sees its GPU alone with {setting}.")
    except GpuShareError as error:
        return warn(f"No pod can be tried: {error}.", "mend the checks above first")
    finally:
        await client.close()
    return fail(
        f"A pod on {node} that is told its GPU does not see exactly that one ({', '.join(_FORMS)}).",
        f"look at the runtime class {kube.seat_runtime_class}, and at cdi and toolkit of the GPU operator",
    )


async def _gpu(client: ApiClient, kube: GPUShareKube) -> tuple[str, str]:
    """Return the node with most GPUs, where seeing too many shows, and one of them."""
    pods = (await client.list(PODS, kube.namespace, kube.helper_selector)).items
    helpers = Helpers(client, kube.helpers()).of(pods)
    found = {node: (await _inventory(address)).devices for node, address in sorted(helpers.items())}
    if not any(found.values()):
        raise GpuShareError("no device helper has a GPU")
    node = max(found, key=lambda each: len(found[each]))
    return node, found[node][0].uuid


async def _inventory(address: HelperAddress) -> Inventory:
    """Ask with the epoch of the broker that the helper obeys, which stays the newest."""
    epoch = 0
    with closing(HelperClient(address, lambda: epoch)) as client:
        epoch = (await client.ask("hello", None, Hello)).epoch
        return await client.ask("inventory", None, Inventory)


def _pod(kube: GPUShareKube, form: str, node: str, uuid: str) -> dict[str, Any]:
    """Return the pod; without the label of seats, so that no broker takes it for one."""
    name = f"gpushare-canary-{secrets.token_hex(8)}"
    told = uuid if form == "uuid" else f"{_CDI_KIND}={uuid}"
    by_annotation = form == "annotation"
    container = {
        "name": NAME,
        "image": kube.seat_image,
        "args": [NAME, uuid],
        "resources": kube.seat_resources,
        "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void" if by_annotation else told}],
    }
    spec = {
        "restartPolicy": "Never",
        "runtimeClassName": kube.seat_runtime_class,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "affinity": node_affinity("In", [node]),
        "tolerations": kube.seat_tolerations,
        "imagePullSecrets": [{"name": secret} for secret in kube.seat_pull_secrets],
        "containers": [container],
    }
    annotations = {f"nvidia.cdi.k8s.io/container.{NAME}": told} if by_annotation else {}
    metadata = {"name": name, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


async def _sees(client: ApiClient, kube: GPUShareKube, pod: dict[str, Any], patience_s: float) -> bool:
    """Return whether the pod ends and says that it sees its GPU alone; it is deleted in any case."""
    name = pod["metadata"]["name"]
    try:
        await client.create(PODS, kube.namespace, pod)
        async with asyncio.timeout(patience_s):
            while True:
                pods = (await client.list(PODS, kube.namespace)).items
                found = next((each for each in pods if each.metadata.name == name), None)
                if found is None or found.has_ended:
                    return found is not None and found.status.phase == "Succeeded"
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        return False
    finally:
        await client.delete(PODS, kube.namespace, name)


# ---- the cluster -------------------------------------------------------------

_KAI = "scheduling.run.ai"
# Verb, group and resource of what broker and checks cannot do without: in its namespace, in the cluster.
_ALL = ("get", "list", "watch", "create", "patch", "delete")
RIGHTS = (
    *((verb, "", "pods") for verb in _ALL),
    *((verb, _KAI, "podgroups") for verb in _ALL),
    ("list", _KAI, "bindrequests"),
    ("watch", _KAI, "bindrequests"),
)
CLUSTER_RIGHTS = (
    ("list", _KAI, "queues"),
    ("watch", _KAI, "queues"),
    ("list", "", "nodes"),
    ("watch", "", "nodes"),
)
# Of NVIDIA's container toolkit: whether a container without a request for a GPU may name its GPUs.
ENV_ACCEPTED = "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED"
_NO_RIGHT = "give this account the right to read it"
_APPLY = "gpushare kube queues --config FILE | kubectl apply -f -"


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """What the checks look at."""

    client: ApiClient
    kube: GPUShareKube
    projects: Sequence[Project]
    levels: int


async def examine(kube: GPUShareKube, projects: Sequence[Project], levels: int) -> list[Check]:
    """Return one check per thing that can be wrong, with the remedy.

    Raises:
        KubeError: no API server is configured, or its file cannot be read.
    """
    client = ApiClient(kube.address(), deadline_s=5.0)
    cluster = CheckedCluster(client, kube, projects, levels)
    try:
        return await checks.examine(_CHECKS, cluster, unreadable=_NO_RIGHT, gate="api-server")
    finally:
        await client.close()


async def _api_server(cluster: CheckedCluster) -> Check:
    try:
        await cluster.client.list(PODS, cluster.kube.namespace)
    except KubeError as error:
        advice = {
            0: "set c.GPUShareKube.api_server or kubeconfig to an API server that answers from here",
            401: "give a token that the API server accepts (c.GPUShareKube.token_file)",
            403: f"bind the broker's Role in the namespace {cluster.kube.namespace} to this account",
        }
        return fail(f"{error}.", advice.get(error.status, "look at the log of the API server"))
    return ok("It answers, and lets the broker read its namespace.")


async def _rights(cluster: CheckedCluster) -> Check:
    lacking = []
    for rights, namespace in ((RIGHTS, cluster.kube.namespace), (CLUSTER_RIGHTS, "")):
        for verb, group, resource in rights:
            if not await cluster.client.may(verb, group, resource, namespace):
                lacking.append(f"{verb} {resource}")
    if not lacking:
        return ok("This account has all rights that the broker needs.")
    return fail(f"This account may not: {', '.join(lacking)}.", "add these verbs to the broker's Role")


async def _queues(cluster: CheckedCluster) -> Check:
    try:
        there = {queue.metadata.name: queue for queue in (await cluster.client.list(QUEUES)).items}
    except KubeError as error:
        if error.status != 404:
            raise
        return fail(
            "The cluster has no Queues: KAI-Scheduler is not installed.",
            "install KAI-Scheduler, then run this check again",
        )
    if lost := missing(cluster.projects, there):
        return fail(f"The cluster has no queue {', '.join(lost)}.", f"run {_APPLY}")
    if wrong := misplaced(cluster.projects, there):
        places = ", ".join(f"{name} ({f'below {parent}' if parent else 'a root'})" for name, parent in wrong)
        return fail(
            f"Queues have another parent than they need: {places}. An idle session below its project "
            "would be protected by the quota of the project and never lent; a returning one would wait.",
            f"delete them, then run {_APPLY}",
        )
    differing = [p.name for p in cluster.projects if in_force(p, there) != p]
    if differing:
        text = f"The Queue of project {', '.join(differing)} has other numbers than the configuration."
        return warn(text, f"the Queue's numbers count; to set those configured: {_APPLY}")
    return ok("Every project has its Queues, with the configured numbers.")


async def _priority_classes(cluster: CheckedCluster) -> Check:
    there = {found.metadata.name for found in (await cluster.client.list(PRIORITY_CLASSES)).items}
    lost = [
        c["metadata"]["name"] for c in priority_classes(cluster.levels) if c["metadata"]["name"] not in there
    ]
    if lost:
        return fail(f"The cluster has no priority class {', '.join(lost)}.", f"run {_APPLY}")
    return ok("All are there.")


async def _consolidation(cluster: CheckedCluster) -> Check:
    shards = (await cluster.client.list(SHARDS)).items
    moving = [shard.metadata.name for shard in shards if consolidates(shard)]
    if not moving:
        return ok("KAI does not move running pods for newcomers.")
    return fail(
        f"KAI's action consolidation is on in shard {', '.join(moving)}: it moves running jobs for any "
        "newcomer, past quota and minimum run time.",
        "set spec.actions.consolidation.enabled of the SchedulingShard to false "
        "(scheduler.actions.consolidation.enabled in the values of KAI's chart)",
    )


def consolidates(shard: OtherObject) -> bool:
    """Return whether KAI moves running pods to make a newcomer fit: unless it spreads, or is told not to.

    So in KAI-Scheduler d5bc503a, ``pkg/apis/kai/v1/schedulingshard_types.go`` (setDefaultActions).
    """
    said = shard.field("actions", "consolidation", "enabled")
    spreads = "spread" in (shard.field("placementStrategy", resource) for resource in ("gpu", "cpu"))
    return not spreads if said is None else bool(said)


async def _sharing(cluster: CheckedCluster) -> Check:
    if await shares_gpus(cluster.client):
        return ok("KAI gives out parts of GPUs.")
    return fail(
        "This KAI-Scheduler gives out whole GPUs only.",
        "set spec.admission.gpuSharing of KAI's Config to true (global.gpuSharing in its chart's values)",
    )


async def _variable(cluster: CheckedCluster) -> Check:
    """Whether a server may be told its GPUs in NVIDIA_VISIBLE_DEVICES."""
    for found in await _listed(cluster, CONFIGS):
        if found.field("admission", "blockNvidiaVisibleDevices"):
            return fail(
                "KAI overwrites NVIDIA_VISIBLE_DEVICES, by which servers are told their GPUs.",
                "set spec.admission.blockNvidiaVisibleDevices of KAI's Config to false "
                "(global.blockNvidiaVisibleDevices in its chart's values)",
            )
    for policy in await _listed(cluster, CLUSTER_POLICIES):
        if policy.field("cdi", "nriPluginEnabled"):
            return warn(
                "The GPU operator's NRI plugin is on: containers get GPUs by an annotation alone.",
                "set cdi.nriPluginEnabled of the operator's chart to false, or "
                'c.GPUShareKubeSpawner.gpu_names = "annotation"',
            )
        variables = {each.get("name"): each.get("value") for each in policy.field("toolkit", "env") or ()}
        if str(variables.get(ENV_ACCEPTED)).lower() == "false":
            return fail(
                f"The container toolkit ignores NVIDIA_VISIBLE_DEVICES of servers ({ENV_ACCEPTED} is false).",
                f"set {ENV_ACCEPTED} to true in toolkit.env of the GPU operator's chart",
            )
    return ok("Servers can be told their GPUs.")


async def _listed(cluster: CheckedCluster, kind: Resource[OtherObject]) -> list[OtherObject]:
    """All objects of a kind; none where the cluster does not have it."""
    try:
        return (await cluster.client.list(kind)).items
    except KubeError as error:
        if error.status == 404:
            return []
        raise


async def _one_broker(cluster: CheckedCluster) -> Check:
    selector = ",".join(f"{key}={value}" for key, value in BROKER.items())
    pods = (await cluster.client.list(PODS, cluster.kube.namespace, selector)).items
    running = [
        p.metadata.name for p in pods if p.status.phase == "Running" and not p.metadata.deletion_timestamp
    ]
    if len(running) > 1:
        return fail(
            f"Several brokers run: {', '.join(sorted(running)[:5])}. The helpers obey the newest alone.",
            "scale the broker's Deployment to 1, with strategy Recreate",
        )
    return ok("No second broker runs.")


async def _helpers(cluster: CheckedCluster) -> Check:
    kube = cluster.kube
    try:
        site = kube.helpers()
    except GpuShareError as error:
        return fail(
            f"{error}.", "give the broker a certificate, its key and their authority (docs/kubernetes.md)"
        )
    helpers = Helpers(cluster.client, site)
    pods = (await cluster.client.list(PODS, kube.namespace, kube.helper_selector)).items
    addresses = helpers.of(pods)
    if not addresses:
        return fail(
            f"No pod of a device helper runs ({kube.helper_selector}).",
            "run one on each node with GPUs, in the namespace of the broker",
        )
    silent = [node for node, address in addresses.items() if not await _answers(address)]
    if silent:
        return fail(
            f"The device helper does not answer on {', '.join(sorted(silent)[:5])}.",
            f"let this pod reach port {kube.helper_port} of its pod, and see why in the log of the helper",
        )
    return ok(f"They answer on {len(addresses)} nodes.")


async def _answers(address: HelperAddress) -> bool:
    try:
        with closing(HelperClient(address, lambda: 0)) as client:
            await client.ask("hello", None, Hello)
    except HelperError:
        return False
    return True


async def _nodes(cluster: CheckedCluster) -> Check:
    nodes = (await cluster.client.list(NODES)).items
    having = {node.metadata.name: count for node in nodes if (count := _gpus(node))}
    if not having:
        return fail(
            f"No node has {GPU_RESOURCE} to allocate.",
            "install NVIDIA's GPU operator, or its device plugin",
        )
    pools = {node.metadata.name for node in nodes if node.metadata.labels.get(LABEL) in ("1", "2", "4", "8")}
    several = sorted(name for name, count in having.items() if count > 1 and name not in pools)
    if several:
        return warn(
            f"{len(having)} nodes with GPUs. Those with several ({', '.join(several[:5])}): only sessions "
            "that have all GPUs of their node are lent.",
            f"nothing, if that is enough; else make them unit pools: kubectl label node NAME {LABEL}=1, or "
            "2, 4, 8 for as many parts of each GPU (docs/kubernetes.md)",
        )
    said = f"{len(having)} nodes with GPUs, {len(pools)} of them unit pools; the others have one GPU each."
    return ok(said if pools else f"{len(having)} nodes with one GPU each.")


def _gpus(node: Node) -> int:
    said = node.status.allocatable.get(GPU_RESOURCE, "0")
    return int(said) if said.isascii() and said.isdigit() else 0


async def _seats(cluster: CheckedCluster) -> Check:
    if not cluster.kube.seat_image:
        return fail(
            "No image for seats is configured.",
            "c.GPUShareKube.seat_image = the image of the device helper",
        )
    return ok(f"Their image is {cluster.kube.seat_image}.")


_CHECKS: dict[str, Probe[CheckedCluster]] = {
    "api-server": _api_server,
    "rights": _rights,
    "queues": _queues,
    "priority-classes": _priority_classes,
    "consolidation": _consolidation,
    "gpu-sharing": _sharing,
    "visible-devices": _variable,
    "one-broker": _one_broker,
    "nodes": _nodes,
    "helpers": _helpers,
    "seats": _seats,
}
