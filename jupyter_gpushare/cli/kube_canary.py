"""The canary of ``gpushare kube check --canary``: a pod that is told a GPU as a server is.

It requests no GPU, like the pod of a server, and asks the driver which it sees.  Each form of
``c.GPUShareKubeSpawner.gpu_names`` is tried until one works: what settings of the GPU operator make of
it is known only then.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from jupyter_gpushare.backends.helper_client import Address, HelperClient
from jupyter_gpushare.backends.kubernetes.client import PODS, ApiClient
from jupyter_gpushare.backends.kubernetes.helpers import Helpers
from jupyter_gpushare.backends.kubernetes.objects import HOSTNAME
from jupyter_gpushare.broker.kube_settings import GPUShareKube
from jupyter_gpushare.cli.checks import Check, fail, ok, warn
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.protocol.helper import Hello, Inventory

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


async def _inventory(address: Address) -> Inventory:
    """Ask with the epoch of the broker that the helper obeys, which stays the newest."""
    hello = await HelperClient(address, lambda: 0).ask("hello", None, Hello)
    return await HelperClient(address, lambda: hello.epoch).ask("inventory", None, Inventory)


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
        "nodeSelector": {HOSTNAME: node},
        "tolerations": kube.seat_tolerations,
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
