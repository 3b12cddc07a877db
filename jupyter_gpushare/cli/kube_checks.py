"""The checks of ``gpushare kube check``: one `Check` per thing of a cluster that can be wrong.

They ask the API server only, with the rights that the broker has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from jupyter_gpushare.backends.helper_client import Address, HelperClient
from jupyter_gpushare.backends.kubernetes.api_server import KubeError
from jupyter_gpushare.backends.kubernetes.client import (
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
from jupyter_gpushare.backends.kubernetes.helpers import Helpers
from jupyter_gpushare.backends.kubernetes.objects import GPU_RESOURCE, Node, Object
from jupyter_gpushare.backends.kubernetes.queues import in_force, misplaced, missing, priority_classes
from jupyter_gpushare.backends.kubernetes.readiness import shares_gpus
from jupyter_gpushare.backends.kubernetes.surroundings import ENV_ACCEPTED
from jupyter_gpushare.broker.kube_settings import GPUShareKube
from jupyter_gpushare.cli import checks
from jupyter_gpushare.cli.checks import Check, Probe, fail, ok, warn
from jupyter_gpushare.cli.kube_hub import BROKER
from jupyter_gpushare.core.kube.pools import LABEL
from jupyter_gpushare.core.model import Project
from jupyter_gpushare.errors import GpuShareError, HelperError
from jupyter_gpushare.protocol.helper import Hello

T = TypeVar("T", bound=Object)

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
_NO_RIGHT = "give this account the right to read it"
_APPLY = "gpushare kube queues --config FILE | kubectl apply -f -"


@dataclass(frozen=True, slots=True)
class Cluster:
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
    cluster = Cluster(client, kube, projects, levels)
    try:
        return await checks.examine(_CHECKS, cluster, unreadable=_NO_RIGHT, gate="api-server")
    finally:
        await client.close()


async def _api_server(cluster: Cluster) -> Check:
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


async def _rights(cluster: Cluster) -> Check:
    lacking = []
    for rights, namespace in ((RIGHTS, cluster.kube.namespace), (CLUSTER_RIGHTS, "")):
        for verb, group, resource in rights:
            if not await cluster.client.may(verb, group, resource, namespace):
                lacking.append(f"{verb} {resource}")
    if not lacking:
        return ok("This account has all rights that the broker needs.")
    return fail(f"This account may not: {', '.join(lacking)}.", "add these verbs to the broker's Role")


async def _queues(cluster: Cluster) -> Check:
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


async def _priority_classes(cluster: Cluster) -> Check:
    there = {found.metadata.name for found in (await cluster.client.list(PRIORITY_CLASSES)).items}
    lost = [
        c["metadata"]["name"] for c in priority_classes(cluster.levels) if c["metadata"]["name"] not in there
    ]
    if lost:
        return fail(f"The cluster has no priority class {', '.join(lost)}.", f"run {_APPLY}")
    return ok("All are there.")


async def _consolidation(cluster: Cluster) -> Check:
    shards = (await cluster.client.list(SHARDS)).items
    moving = [shard.metadata.name for shard in shards if shard.spec.consolidates]
    if not moving:
        return ok("KAI does not move running pods for newcomers.")
    return fail(
        f"KAI's action consolidation is on in shard {', '.join(moving)}: it moves running jobs for any "
        "newcomer, past quota and minimum run time.",
        "set spec.actions.consolidation.enabled of the SchedulingShard to false "
        "(scheduler.actions.consolidation.enabled in the values of KAI's chart)",
    )


async def _sharing(cluster: Cluster) -> Check:
    if await shares_gpus(cluster.client):
        return ok("KAI gives out parts of GPUs.")
    return fail(
        "This KAI-Scheduler gives out whole GPUs only.",
        "set spec.admission.gpuSharing of KAI's Config to true (global.gpuSharing in its chart's values)",
    )


async def _variable(cluster: Cluster) -> Check:
    """Whether a server may be told its GPUs in NVIDIA_VISIBLE_DEVICES."""
    for found in await _listed(cluster, CONFIGS):
        if found.spec.admission.block_nvidia_visible_devices:
            return fail(
                "KAI overwrites NVIDIA_VISIBLE_DEVICES, by which servers are told their GPUs.",
                "set spec.admission.blockNvidiaVisibleDevices of KAI's Config to false "
                "(global.blockNvidiaVisibleDevices in its chart's values)",
            )
    for policy in await _listed(cluster, CLUSTER_POLICIES):
        if policy.spec.cdi.nri_plugin_enabled:
            return warn(
                "The GPU operator's NRI plugin is on: containers get GPUs by an annotation alone.",
                "set cdi.nriPluginEnabled of the operator's chart to false, or "
                'c.GPUShareKubeSpawner.gpu_names = "annotation"',
            )
        if not policy.takes_variable:
            return fail(
                f"The container toolkit ignores NVIDIA_VISIBLE_DEVICES of servers ({ENV_ACCEPTED} is false).",
                f"set {ENV_ACCEPTED} to true in toolkit.env of the GPU operator's chart",
            )
    return ok("Servers can be told their GPUs.")


async def _listed(cluster: Cluster, kind: Resource[T]) -> list[T]:
    """All objects of a kind; none where the cluster does not have it."""
    try:
        return (await cluster.client.list(kind)).items
    except KubeError as error:
        if error.status == 404:
            return []
        raise


async def _one_broker(cluster: Cluster) -> Check:
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


async def _helpers(cluster: Cluster) -> Check:
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


async def _answers(address: Address) -> bool:
    try:
        await HelperClient(address, lambda: 0).ask("hello", None, Hello)
    except HelperError:
        return False
    return True


async def _nodes(cluster: Cluster) -> Check:
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


async def _seats(cluster: Cluster) -> Check:
    if not cluster.kube.seat_image:
        return fail(
            "No image for seats is configured.",
            "c.GPUShareKube.seat_image = the image of the device helper",
        )
    return ok(f"Their image is {cluster.kube.seat_image}.")


_CHECKS: dict[str, Probe[Cluster]] = {
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
