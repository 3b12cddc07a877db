"""The canary of ``gpushare kube check --canary``: a pod that gets a GPU in the same way as a server.

Like the pod of a server, it requests no GPU.  It asks the driver which GPUs it sees.  The check tries each
form of ``c.GPUShareKubeSpawner.gpu_names`` until one works, because only a pod shows the effect of the GPU
operator's settings.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import closing
from typing import Any

from kubernetes_asyncio import client as models

from jupyter_gpushare.backends.helper_client import HelperAddress, HelperClient
from jupyter_gpushare.cli.checks import Check, fail, ok, warn
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.kube.cluster.client import ApiClient
from jupyter_gpushare.kube.cluster.helpers import running_helpers
from jupyter_gpushare.kube.cluster.objects import PODS
from jupyter_gpushare.kube.pod import Form, PodPlace, Runtime, adapt, on_node
from jupyter_gpushare.kube.settings import GPUShareKube
from jupyter_gpushare.protocol.helper import Hello, Inventory

NAME = "canary"
# The node already has the image: its device helper runs it.
PATIENCE_S = 60.0
_POLL_S = 0.5


async def canary(kube: GPUShareKube, patience_s: float = PATIENCE_S) -> Check:
    """Return a check that says which form gives a pod exactly its GPU.

    Raises:
        KubeError: no API server is configured.
    """
    client = ApiClient(kube.address(), deadline_s=5.0)
    try:
        node, uuid = await _gpu(client, kube)
        for form in Form:
            if await _sees(client, kube, await _pod(kube, form, node, uuid), patience_s):
                setting = f'c.GPUShareKubeSpawner.gpu_names = "{form}"'
                return ok(f"A pod on {node} sees its GPU alone with {setting}.")
    except GpuShareError as error:
        return warn(f"No pod can be tried: {error}.", "mend the checks above first")
    finally:
        await client.close()
    return fail(
        f"A pod on {node} that is told its GPU does not see exactly that one ({', '.join(Form)}).",
        f"look at the runtime class {kube.seat_runtime_class}, and at cdi and toolkit of the GPU operator",
    )


async def _gpu(client: ApiClient, kube: GPUShareKube) -> tuple[str, str]:
    """Return the node with the most GPUs and one of its GPUs; with several, a pod may see too many."""
    pods = (await client.list(PODS, kube.namespace, kube.helper_selector)).items
    helpers = running_helpers(pods, kube.helpers())
    devices = {node: (await _inventory(address)).devices for node, address in sorted(helpers.items())}
    if not any(devices.values()):
        raise GpuShareError("no device helper has a GPU")
    node = max(devices, key=lambda each: len(devices[each]))
    return node, devices[node][0].uuid


async def _inventory(address: HelperAddress) -> Inventory:
    """Return the inventory of a helper; ask with its broker's epoch, so that it still obeys that broker."""
    epoch = 0
    with closing(HelperClient(address, lambda: epoch)) as client:
        epoch = (await client.ask("hello", None, Hello)).epoch
        return await client.ask("inventory", None, Inventory)


async def _pod(kube: GPUShareKube, form: Form, node: str, uuid: str) -> dict[str, Any]:
    """Return the pod, without the label of seats, so that no broker takes it for one."""
    container: Any = models.V1Container(name=NAME, image=kube.seat_image, args=[NAME, uuid])
    container.resources = kube.seat_resources
    spec: Any = models.V1PodSpec(
        restart_policy="Never",
        automount_service_account_token=False,
        enable_service_links=False,
        containers=[container],
    )
    spec.tolerations = kube.seat_tolerations
    spec.image_pull_secrets = [{"name": secret} for secret in kube.seat_pull_secrets]
    name = f"gpushare-canary-{secrets.token_hex(8)}"
    pod = models.V1Pod(api_version="v1", kind="Pod", metadata=models.V1ObjectMeta(name=name), spec=spec)
    place = PodPlace(node=node, devices=(uuid,), mounts={})
    adapt(pod, place, Runtime(form=form, runtime_class=kube.seat_runtime_class, tolerations=()))
    async with models.ApiClient() as api:
        plain: dict[str, Any] = api.sanitize_for_serialization(pod)
    plain["spec"]["affinity"] = on_node(None, node)
    return plain


async def _sees(client: ApiClient, kube: GPUShareKube, pod: dict[str, Any], patience_s: float) -> bool:
    """Run a pod and delete it in any case; return whether it succeeded, that is, saw only its GPU."""
    name = pod["metadata"]["name"]
    try:
        await client.create(PODS, kube.namespace, pod)
        async with asyncio.timeout(patience_s):
            while True:
                pods = (await client.list(PODS, kube.namespace)).items
                found = next((each for each in pods if each.metadata.name == name), None)
                if found is None or found.has_ended:
                    return found is not None and found.status.phase == "Succeeded"
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return False
    finally:
        await client.delete(PODS, kube.namespace, name)
