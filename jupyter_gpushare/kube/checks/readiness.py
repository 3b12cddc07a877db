"""What a cluster lacks without which no session with a GPU can start."""

from __future__ import annotations

from collections.abc import Iterable

from jupyter_gpushare.core.model import Project
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import CONFIGS, POD_GROUPS, PODS, QUEUES, ApiClient
from jupyter_gpushare.kube.cluster.helpers import HelperPods
from jupyter_gpushare.kube.cluster.queues import missing

_NOT_FOUND, _FORBIDDEN = 404, 403


async def lacks(client: ApiClient, helpers: HelperPods, projects: Iterable[Project]) -> list[str]:
    """Return one sentence for each thing that is missing, with the remedy; empty: all is there.

    Raises:
        KubeError: the API server does not answer, or refuses to say.
    """
    try:
        await client.list(POD_GROUPS, helpers.namespace)
        there = {queue.metadata.name: queue for queue in (await client.list(QUEUES)).items}
    except KubeError as error:
        if error.status != _NOT_FOUND:
            raise
        return ["the cluster has no PodGroups and Queues of scheduling.run.ai: install KAI-Scheduler"]
    sentences = []
    if lost := missing(projects, there):
        sentences.append(
            f"the cluster has no queue {', '.join(lost)}: "
            "run gpushare kube queues --config FILE | kubectl apply -f -"
        )
    if not await shares_gpus(client):
        sentences.append(
            "this KAI-Scheduler gives out whole GPUs only: set spec.admission.gpuSharing of its "
            "Config to true (global.gpuSharing in the values of its chart)"
        )
    if not (await client.list(PODS, helpers.namespace, helpers.selector)).items:
        sentences.append(
            f"the namespace {helpers.namespace} has no pod of a device helper ({helpers.selector}): run "
            "one on each node with GPUs"
        )
    return sentences


async def shares_gpus(client: ApiClient) -> bool:
    """Return whether KAI gives out parts of GPUs; True where this account may not see its settings.

    They are off unless its Config says otherwise (KAI-Scheduler v0.16.8,
    ``pkg/apis/kai/v1/admission/admission.go``, SetDefaultsWhereNeeded).

    Raises:
        KubeError: the API server does not answer, or refuses to say.
    """
    try:
        configs = (await client.list(CONFIGS)).items
    except KubeError as error:
        if error.status in (_NOT_FOUND, _FORBIDDEN):  # installed without its operator; not for this account
            return True
        raise
    return not configs or any(config.field("admission", "gpuSharing") for config in configs)
