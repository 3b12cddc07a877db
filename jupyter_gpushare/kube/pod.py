"""Pods of servers and jobs on Kubernetes: the changes that a lease needs in the pod of its spawner.

===========================  =============================================================
a lease needs                the pod gets
===========================  =============================================================
its node                     a required affinity with the node's name, and the site's tolerations
its files and its library    ``hostPath`` mounts, under the same path inside and outside
its GPUs                     their names in the form that the site's runtime expects (`Form`)
no GPU without a lease       ``NVIDIA_VISIBLE_DEVICES=void`` in every container, whatever its
                             image says, and no runtime class for GPUs
===========================  =============================================================

The pod of a server never requests a GPU.  The seat of its lease does, so the cluster would count it twice.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from kubernetes_asyncio import client as models

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
VOID = "void"
_CDI_KIND = "k8s.device-plugin.nvidia.com/gpu"
_NRI_ANNOTATION = "nvidia.cdi.k8s.io/container."
# Annotations that request a GPU for the pod itself (KAI-Scheduler v0.16.8, docs/gpu-sharing/README.md).
_KAI_REQUESTS = ("gpu-fraction", "gpu-memory", "gpu-fraction-num-devices")
NODE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class Form(enum.StrEnum):
    """How a pod names the GPUs of a container to the site's container runtime."""

    CDI = "cdi"  # NVIDIA_VISIBLE_DEVICES with names of CDI: the default of NVIDIA's GPU operator
    UUID = "uuid"  # NVIDIA_VISIBLE_DEVICES with UUIDs: the runtime's legacy mode
    ANNOTATION = "annotation"  # an annotation of the pod, with names of CDI: the operator's NRI plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlace:
    """The node of a server with a lease, and the devices and mounts that it gets there."""

    node: str
    devices: tuple[str, ...]  # UUIDs
    mounts: Mapping[str, bool]  # whether each mount is read-only, by its path on the node


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The site's settings for containers with GPUs."""

    form: Form
    runtime_class: str
    tolerations: Sequence[Mapping[str, Any]]


def adapt(pod: Any, place: PodPlace | None, runtime: Runtime) -> Any:
    """Change a spawner's pod as its lease needs and return it; ``place`` is None without a lease."""
    spec = pod.spec
    for container in (*spec.containers, *(spec.init_containers or ())):
        _set_variable(container, VISIBLE, VOID)
    if place is None:
        if is_gpu_class(spec.runtime_class_name, runtime):
            spec.runtime_class_name = None
        return pod
    server, names = spec.containers[0], _names(place.devices, runtime.form)
    if runtime.form is Form.ANNOTATION:
        pod.metadata.annotations = {**(pod.metadata.annotations or {}), _NRI_ANNOTATION + server.name: names}
    else:
        _set_variable(server, VISIBLE, names)
    spec.runtime_class_name = runtime.runtime_class or spec.runtime_class_name
    spec.tolerations = [
        *(spec.tolerations or ()),
        *(models.V1Toleration(**each) for each in runtime.tolerations),
    ]
    for number, (path, read_only) in enumerate(place.mounts.items()):
        name, source = f"gpushare-{number}", models.V1HostPathVolumeSource(path=path)
        mount = models.V1VolumeMount(name=name, mount_path=path, read_only=read_only)
        spec.volumes = [*(spec.volumes or ()), models.V1Volume(name=name, host_path=source)]
        server.volume_mounts = [*(server.volume_mounts or ()), mount]
    return pod


def on_node(affinity: Mapping[str, Any] | None, node: str) -> dict[str, Any]:
    """Return the affinity of a pod, in the API's form, with a requirement for this node.

    The requirement names the node, because its label ``kubernetes.io/hostname`` may differ from its name.
    """
    whole = affinity or {}
    of_nodes = whole.get("nodeAffinity") or {}
    terms = (of_nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    has_name = {"key": "metadata.name", "operator": "In", "values": [node]}
    # A node that matches one of the terms is enough, so each term gets the requirement.
    bound = [{**term, "matchFields": [*term.get("matchFields", ()), has_name]} for term in terms]
    return {**whole, "nodeAffinity": {**of_nodes, _REQUIRED: {"nodeSelectorTerms": bound}}}


def find_fault(pod: Mapping[str, Any], place: PodPlace | None, runtime: Runtime) -> str:
    """Return why a pod must not be created; empty if it may be.

    ``pod`` is in the API's form, after the site's profile and hook have changed it.
    """
    spec, metadata = pod["spec"], pod["metadata"]
    containers = [*spec["containers"], *spec.get("initContainers", ())]
    for container in containers:
        resources = container.get("resources") or {}
        for name in (*(resources.get("limits") or ()), *(resources.get("requests") or ())):
            if name.startswith("nvidia.com/") or "/gpu" in name:
                return f"its container {container['name']} requests {name}: the seat of its lease does"
        if resources.get("claims"):
            return (
                f"its container {container['name']} has claims of devices: the seat of its lease has the GPU"
            )
    if spec.get("resourceClaims"):
        return "it has resourceClaims: the seat of its lease has the GPU"
    for name in _KAI_REQUESTS:
        if name in metadata.get("annotations", {}):
            return f"it has the annotation {name}: the seat of its lease has it"
    if place is not None and (missing := _find_missing(spec, place, runtime)):
        return f"it lost what its lease needs: {missing}"
    if place is None and is_gpu_class(spec.get("runtimeClassName"), runtime):
        return f"it has no lease, and its runtime class is {spec['runtimeClassName']}"
    names = "" if place is None or runtime.form is Form.ANNOTATION else _names(place.devices, runtime.form)
    for number, container in enumerate(containers):
        expected = names if names and not number else VOID
        if _variables(container).get(VISIBLE) != expected:
            return f"{VISIBLE} of its container {container['name']} is not {expected}"
    return ""


def find_unisolated(pod: Mapping[str, Any]) -> str:
    """Return the setting that removes a server's isolation from its node and other pods; empty if none.

    The site's sidecars and init containers may be privileged: JupyterHub's chart has some.
    """
    spec = pod["spec"]
    if (spec["containers"][0].get("securityContext") or {}).get("privileged"):
        return "securityContext.privileged"
    return next((name for name in ("hostPID", "hostIPC", "hostNetwork") if spec.get(name)), "")


def _find_missing(spec: Mapping[str, Any], place: PodPlace, runtime: Runtime) -> str:
    """Return the runtime class or mount of a lease that a pod lacks; empty if it has all."""
    if runtime.runtime_class and spec.get("runtimeClassName") != runtime.runtime_class:
        return f"the runtime class {runtime.runtime_class}"
    sources = {each["name"]: (each.get("hostPath") or {}).get("path") for each in spec.get("volumes") or ()}
    mounted = {
        (sources.get(each["name"]), each["mountPath"], bool(each.get("readOnly")))
        for each in spec["containers"][0].get("volumeMounts") or ()
    }
    for path, read_only in place.mounts.items():
        if (path, path, read_only) not in mounted:
            return f"the {'read-only ' if read_only else ''}mount of {path}"
    return ""


def is_gpu_class(name: str | None, runtime: Runtime) -> bool:
    """Return whether a runtime class gives access to GPUs: the site's class or one of the GPU operator."""
    return bool(name) and (name == runtime.runtime_class or str(name).startswith("nvidia"))


def is_outside(path: str, folders: Sequence[str]) -> bool:
    """Return whether a path on a node lies in none of these folders."""
    pure = PurePosixPath(path)
    return ".." in pure.parts or not any(PurePosixPath(each) in pure.parents for each in folders)


def escape(value: str) -> str:
    """Return the value of a variable so that Kubernetes expands no ``$(NAME)`` or ``$$`` in it."""
    return value.replace("$", "$$")


def _names(devices: Sequence[str], form: Form) -> str:
    return ",".join(uuid if form is Form.UUID else f"{_CDI_KIND}={uuid}" for uuid in devices)


def _set_variable(container: Any, name: str, value: str) -> None:
    # The entries are dicts in containers that the site configures.
    others = [e for e in container.env or () if (e["name"] if isinstance(e, dict) else e.name) != name]
    container.env = [*others, models.V1EnvVar(name=name, value=value)]


def _variables(container: Mapping[str, Any]) -> dict[str, str | None]:
    return {entry["name"]: entry.get("value") for entry in container.get("env", ())}
