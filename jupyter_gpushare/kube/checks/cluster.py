"""The checks of ``gpushare kube check``: one `Check` for each part of a cluster that can be wrong.

They ask only the API server and the device helpers, with the broker's rights.  A broker runs the checks at
its start without which no session with a GPU can start (`find_missing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from jupyter_gpushare.backends.helper_client import HelperAddress, HelperClient
from jupyter_gpushare.cli import checks
from jupyter_gpushare.cli.checks import Check, Probe, fail, ok, warn
from jupyter_gpushare.core.model import Project
from jupyter_gpushare.errors import GpuShareError, HelperError
from jupyter_gpushare.kube.checks.hub import BROKER
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import ApiClient
from jupyter_gpushare.kube.cluster.helpers import running_helpers
from jupyter_gpushare.kube.cluster.objects import (
    CLUSTER_POLICIES,
    CONFIGS,
    GPU_RESOURCE,
    NODES,
    POD_GROUPS,
    PODS,
    PRIORITY_CLASSES,
    QUEUES,
    SHARDS,
    Node,
    OtherObject,
    Queue,
    Resource,
)
from jupyter_gpushare.kube.cluster.queues import in_force, misplaced, missing, priority_classes
from jupyter_gpushare.kube.rules.pools import LABEL
from jupyter_gpushare.kube.settings import GPUShareKube
from jupyter_gpushare.protocol.helper import Hello

_KAI = "scheduling.run.ai"
# Verb, group and resource of the rights that broker and checks need, in the namespace and in the cluster.
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
# Setting of NVIDIA's container toolkit: whether a container that requests no GPU may name its GPUs.
ENV_ACCEPTED = "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED"
_NOT_FOUND, _FORBIDDEN = 404, 403
_NO_RIGHT = "give this account the right to read it"
_APPLY = "gpushare kube queues --config FILE | kubectl apply -f -"


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """The input of each check.  ``levels`` is the number of LAS queues of jobs."""

    client: ApiClient
    kube: GPUShareKube
    projects: Sequence[Project]
    levels: int


async def examine(kube: GPUShareKube, projects: Sequence[Project], levels: int) -> list[Check]:
    """Run all checks; return one `Check` each, with the remedy.

    Raises:
        KubeError: no API server is configured.
    """
    client = ApiClient(kube.address(), deadline_s=5.0)
    cluster = CheckedCluster(client, kube, projects, levels)
    try:
        return await checks.examine(_CHECKS, cluster, unreadable=_NO_RIGHT, gate="api-server")
    finally:
        await client.close()


async def find_missing(client: ApiClient, kube: GPUShareKube, projects: Sequence[Project]) -> list[str]:
    """Return one sentence for each missing part without which no session with a GPU can start.

    Raises:
        KubeError: the API server does not answer, or denies access.
    """
    cluster = CheckedCluster(client, kube, projects, levels=0)
    if fault := await _kai(cluster):
        return [_in_one(fault)]
    faults = [await probe(cluster) for probe in (_missing_queues, _whole_gpus_only, _no_helper)]
    return [_in_one(fault) for fault in faults if fault is not None]


def _in_one(check: Check) -> str:
    """Return the fault and its remedy as one clause."""
    return f"{check.message[0].lower()}{check.message[1:].rstrip('.')}: {check.advice}"


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
            if not await cluster.client.is_allowed(verb, group, resource, namespace):
                lacking.append(f"{verb} {resource}")
    if not lacking:
        return ok("This account has all rights that the broker needs.")
    return fail(f"This account may not: {', '.join(lacking)}.", "add these verbs to the broker's Role")


async def _kai(cluster: CheckedCluster) -> Check | None:
    """Return the fault if KAI-Scheduler is not installed."""
    try:
        await cluster.client.list(POD_GROUPS, cluster.kube.namespace)
        await cluster.client.list(QUEUES)
    except KubeError as error:
        if error.status != _NOT_FOUND:
            raise
        text = "The cluster has no PodGroups and Queues, as KAI-Scheduler is not installed."
        return fail(text, "install KAI-Scheduler")
    return None


async def _missing_queues(cluster: CheckedCluster) -> Check | None:
    """Return the fault if a project lacks its Queues."""
    if names := missing(cluster.projects, await _list_queues(cluster)):
        return fail(f"The cluster has no queue {', '.join(names)}.", f"run {_APPLY}")
    return None


async def _list_queues(cluster: CheckedCluster) -> dict[str, Queue]:
    return {queue.metadata.name: queue for queue in (await cluster.client.list(QUEUES)).items}


async def _queues(cluster: CheckedCluster) -> Check:
    if fault := await _kai(cluster) or await _missing_queues(cluster):
        return fault
    existing = await _list_queues(cluster)
    if wrong := misplaced(cluster.projects, existing):
        places = ", ".join(f"{name} ({f'below {parent}' if parent else 'a root'})" for name, parent in wrong)
        return fail(
            f"Queues have another parent than they need: {places}. An idle session below its project "
            "would be protected by the quota of the project and never lent; a returning one would wait.",
            f"delete them, then run {_APPLY}",
        )
    differing = [p.name for p in cluster.projects if in_force(p, existing) != p]
    if differing:
        text = f"The Queue of project {', '.join(differing)} has other numbers than the configuration."
        return warn(text, f"the Queue's numbers count; to set those configured: {_APPLY}")
    return ok("Every project has its Queues, with the configured numbers.")


async def _priority_classes(cluster: CheckedCluster) -> Check:
    existing = {each.metadata.name for each in (await cluster.client.list(PRIORITY_CLASSES)).items}
    names = [
        c["metadata"]["name"]
        for c in priority_classes(cluster.levels)
        if c["metadata"]["name"] not in existing
    ]
    if names:
        return fail(f"The cluster has no priority class {', '.join(names)}.", f"run {_APPLY}")
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
    """Return whether KAI moves running pods to make room for a new one.

    The default is to do so, unless the shard spreads pods (KAI-Scheduler d5bc503a,
    ``pkg/apis/kai/v1/schedulingshard_types.go``, setDefaultActions).
    """
    setting = shard.field("actions", "consolidation", "enabled")
    spreads = "spread" in (shard.field("placementStrategy", resource) for resource in ("gpu", "cpu"))
    return not spreads if setting is None else bool(setting)


async def _sharing(cluster: CheckedCluster) -> Check:
    return await _whole_gpus_only(cluster) or ok("KAI gives out parts of GPUs.")


async def _whole_gpus_only(cluster: CheckedCluster) -> Check | None:
    """Return the fault if KAI gives out only whole GPUs."""
    if await shares_gpus(cluster.client):
        return None
    return fail(
        "This KAI-Scheduler gives out whole GPUs only.",
        "set spec.admission.gpuSharing of KAI's Config to true (global.gpuSharing in its chart's values)",
    )


async def shares_gpus(client: ApiClient) -> bool:
    """Return whether KAI gives out parts of GPUs; True if this account may not read KAI's settings.

    The default of its Config is off (KAI-Scheduler v0.16.8, ``pkg/apis/kai/v1/admission/admission.go``,
    SetDefaultsWhereNeeded).

    Raises:
        KubeError: the API server does not answer, or denies access.
    """
    try:
        configs = (await client.list(CONFIGS)).items
    except KubeError as error:
        if error.status in (_NOT_FOUND, _FORBIDDEN):  # installed without its operator; no right to read it
            return True
        raise
    return not configs or any(config.field("admission", "gpuSharing") for config in configs)


async def _variable(cluster: CheckedCluster) -> Check:
    """Check that NVIDIA_VISIBLE_DEVICES can name the GPUs of a server."""
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
    """Return all objects of a kind; none if the cluster does not know the kind."""
    try:
        return (await cluster.client.list(kind)).items
    except KubeError as error:
        if error.status == _NOT_FOUND:
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


async def _no_helper(cluster: CheckedCluster) -> Check | None:
    """Return the fault if no pod of a device helper exists, not even one that is starting."""
    kube = cluster.kube
    if (await cluster.client.list(PODS, kube.namespace, kube.helper_selector)).items:
        return None
    return _no_helper_runs(kube)


def _no_helper_runs(kube: GPUShareKube) -> Check:
    return fail(
        f"No pod of a device helper runs ({kube.helper_selector}).",
        "run one on each node with GPUs, in the namespace of the broker",
    )


async def _helpers(cluster: CheckedCluster) -> Check:
    kube = cluster.kube
    try:
        settings = kube.helpers()
    except GpuShareError as error:
        return fail(
            f"{error}.", "give the broker a certificate, its key and their authority (docs/kubernetes.md)"
        )
    pods = (await cluster.client.list(PODS, kube.namespace, kube.helper_selector)).items
    addresses = running_helpers(pods, settings)
    if not addresses:
        return _no_helper_runs(kube)
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
    counts = {node.metadata.name: count for node in nodes if (count := _gpus(node))}
    if not counts:
        return fail(
            f"No node has {GPU_RESOURCE} to allocate.",
            "install NVIDIA's GPU operator, or its device plugin",
        )
    pools = {node.metadata.name for node in nodes if node.metadata.labels.get(LABEL) in ("1", "2", "4", "8")}
    several = sorted(name for name, count in counts.items() if count > 1 and name not in pools)
    if several:
        return warn(
            f"{len(counts)} nodes with GPUs. Those with several ({', '.join(several[:5])}): only sessions "
            "that have all GPUs of their node are lent.",
            f"nothing, if that is enough; else make them unit pools: kubectl label node NAME {LABEL}=1, or "
            "2, 4, 8 for as many parts of each GPU (docs/kubernetes.md)",
        )
    mixed = f"{len(counts)} nodes with GPUs, {len(pools)} of them unit pools; the others have one GPU each."
    return ok(mixed if pools else f"{len(counts)} nodes with one GPU each.")


def _gpus(node: Node) -> int:
    text = node.status.allocatable.get(GPU_RESOURCE, "0")
    return int(text) if text.isascii() and text.isdigit() else 0


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
