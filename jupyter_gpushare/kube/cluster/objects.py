"""Objects of the Kubernetes API: their paths, the fields that we read, and the objects that we create.

A seat is a PodGroup and a pod of the same name.  The PodGroup is created first, because KAI ignores a pod
without one.  KAI makes its own PodGroup for a pod that has an owner, so a seat has no ownerReferences and its
pod has ``skip-podgrouper``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

from jupyter_gpushare.kube.rules.seats import Demand, Request, Terms, terms

Json = dict[str, Any]

LEASE_LABEL = "gpushare.jupyter.org/lease"
EPOCH_ANNOTATION = "gpushare.jupyter.org/epoch"
INSTEAD_OF_ANNOTATION = "gpushare.jupyter.org/instead-of"
NOT_NODES_ANNOTATION = "gpushare.jupyter.org/not-nodes"
MANAGED_BY = "app.kubernetes.io/managed-by"
SELECTOR = f"{MANAGED_BY}=gpushare"
POD_GROUP_ANNOTATION = "pod-group-name"
SKIP_PODGROUPER = "kai.scheduler/skip-podgrouper"
GPU_RESOURCE = "nvidia.com/gpu"
# Label of the pods that share a GPU; the value is KAI's name of that GPU.
GPU_GROUP = "runai-gpu-group"
UNSCHEDULABLE = "UnschedulableOnNodePool"
_PREEMPTOR = re.compile(r"workload \S+/(seat-[0-9a-f]{32})\b")


class Struct(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """Part of an object; unknown fields are ignored."""


class Meta(Struct, frozen=True):
    """``metadata`` of an object; times are in RFC 3339, or empty."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str = ""


class Object(Struct, frozen=True):
    """An object of any kind; only its metadata is read."""

    metadata: Meta


T = TypeVar("T", bound=Object)


class Resources(Struct, frozen=True):
    """Limits of a container, as Kubernetes quantities."""

    limits: dict[str, str] = {}


class Container(Struct, frozen=True):
    """A container of a pod."""

    resources: Resources = Resources()


class PodSpec(Struct, frozen=True):
    """Node and containers of a pod."""

    node_name: str = ""
    containers: list[Container] = []


class PodCondition(Struct, frozen=True):
    """One condition of a pod."""

    type: str = ""
    status: str = ""
    message: str = ""


class PodStatus(Struct, frozen=True):
    """Phase, address and conditions of a pod."""

    phase: str = "Pending"
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[PodCondition] = []


class Pod(Object, frozen=True):
    """A pod; one with our labels is a seat."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def not_nodes(self) -> tuple[str, ...]:
        """Nodes that a seat may not be placed on."""
        return self._names(NOT_NODES_ANNOTATION)

    @property
    def instead_of(self) -> tuple[str, ...]:
        """Names of abandoned seats that this one replaces."""
        return self._names(INSTEAD_OF_ANNOTATION)

    def _names(self, annotation: str) -> tuple[str, ...]:
        return tuple(filter(None, self.metadata.annotations.get(annotation, "").split(",")))

    @property
    def requested(self) -> Request | None:
        """The GPUs that a seat requests from KAI; None if it requests none, or not as `seat_pod` does."""
        annotations = self.metadata.annotations
        limits = self.spec.containers[0].resources.limits if self.spec.containers else {}
        try:
            if "gpu-memory" in annotations:
                return Request(memory_mib=int(annotations["gpu-memory"]))
            if "gpu-fraction" in annotations:
                return Request(fraction_milli=round(float(annotations["gpu-fraction"]) * 1000))
            return Request(gpus=int(limits[GPU_RESOURCE])) if GPU_RESOURCE in limits else None
        except (ValueError, OverflowError):
            return None

    @property
    def evicted_for(self) -> str:
        """Name of the seat for which KAI evicts this pod; empty if it does not.

        KAI reports this only with ``--update-pod-eviction-condition`` (v0.16.8,
        ``pkg/scheduler/cache/evictor/default_evictor.go``, ``pkg/scheduler/api/unschedule_info.go:117-125``).
        """
        for condition in self.status.conditions:
            if (condition.type, condition.status) == ("DisruptionTarget", "True"):
                found = _PREEMPTOR.search(condition.message)
                return found[1] if found else ""
        return ""

    @property
    def has_ended(self) -> bool:
        """Whether its containers have ended, for any reason."""
        return self.status.phase in ("Succeeded", "Failed")


class Reason(Struct, frozen=True):
    """One of KAI's reasons why a PodGroup waits."""

    reason: str = ""
    message: str = ""


class SchedulingCondition(Struct, frozen=True):
    """KAI's last result for a PodGroup."""

    type: str = ""
    status: str = "True"
    reasons: list[Reason] = []


class PodGroupSpec(Struct, frozen=True):
    """Terms of a PodGroup."""

    queue: str = ""
    priority_class_name: str = ""
    preemptibility: str = ""


class PodGroupStatus(Struct, frozen=True):
    """KAI's report on a PodGroup."""

    scheduling_conditions: list[SchedulingCondition] = []


class PodGroup(Object, frozen=True):
    """A PodGroup of KAI (``scheduling.run.ai/v2alpha2``)."""

    spec: PodGroupSpec = PodGroupSpec()
    status: PodGroupStatus = PodGroupStatus()

    @property
    def terms(self) -> Terms:
        """Queue, priority class and preemptibility."""
        return Terms(self.spec.queue, self.spec.priority_class_name, self.spec.preemptibility)

    @property
    def refusals(self) -> list[Reason]:
        """KAI's last reasons why it waited; empty if it never waited at the end of a cycle.

        KAI removes none of them, even when it places the pod (v0.16.8,
        ``pkg/scheduler/cache/status_updater/default_status_updater.go:427-580``).
        """
        return [
            reason
            for condition in self.status.scheduling_conditions
            if condition.type == UNSCHEDULABLE and condition.status == "True"
            for reason in condition.reasons or [Reason(reason="Unschedulable")]
        ]


class BindRequestStatus(Struct, frozen=True):
    """Result of a BindRequest."""

    phase: str = ""  # ``Pending``, ``Succeeded`` or ``Failed``


class BindRequest(Object, frozen=True):
    """KAI's choice of a node for the pod of the same name (``scheduling.run.ai/v1alpha2``)."""

    status: BindRequestStatus = BindRequestStatus()

    @property
    def has_failed(self) -> bool:
        """Whether binding failed, so that KAI chooses again."""
        return self.status.phase == "Failed"


class QueueResource(Struct, frozen=True):
    """Quota, limit and weight of a queue for one resource; -1 is unlimited."""

    quota: float = 0.0
    limit: float = -1.0
    over_quota_weight: float = 1.0


class QueueResources(Struct, frozen=True):
    """Quota, limit and weight of a queue for GPUs."""

    gpu: QueueResource = QueueResource()


class QueueSpec(Struct, frozen=True):
    """Parent, priority and resources of a queue."""

    parent_queue: str = ""
    priority: int = 100
    resources: QueueResources = QueueResources()


class Queue(Object, frozen=True):
    """A queue of KAI (``scheduling.run.ai/v2``)."""

    spec: QueueSpec = QueueSpec()


class NodeStatus(Struct, frozen=True):
    """Allocatable resources of a node, as Kubernetes quantities."""

    allocatable: dict[str, str] = {}


class Node(Object, frozen=True):
    """A node."""

    status: NodeStatus = NodeStatus()


class OtherObject(Object, frozen=True):
    """An object of any kind; checks read a few fields of its ``spec``."""

    kind: str = ""
    spec: Json = {}

    def field(self, *path: str) -> Any:
        """Return the field at a path in the spec, or None if it is not set."""
        found: Any = self.spec
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """A kind of object: its path in the API and its type."""

    group: str  # "" for the core group
    version: str
    plural: str
    type: type[T]
    namespaced: bool = True

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of the collection, or of the object ``name``."""
        head = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        inside = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{head}{inside}/{self.plural}" + (f"/{name}" if name else "")


PODS = Resource("", "v1", "pods", Pod)
POD_GROUPS = Resource("scheduling.run.ai", "v2alpha2", "podgroups", PodGroup)
BIND_REQUESTS = Resource("scheduling.run.ai", "v1alpha2", "bindrequests", BindRequest)
QUEUES = Resource("scheduling.run.ai", "v2", "queues", Queue, namespaced=False)
NODES = Resource("", "v1", "nodes", Node, namespaced=False)
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", Object, namespaced=False)
SHARDS = Resource("kai.scheduler", "v1", "schedulingshards", OtherObject, namespaced=False)
CLUSTER_POLICIES = Resource("nvidia.com", "v1", "clusterpolicies", OtherObject, namespaced=False)
CONFIGS = Resource("kai.scheduler", "v1", "configs", OtherObject, namespaced=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatPod:
    """A site's settings of seat pods; memory and CPU are Kubernetes quantities."""

    namespace: str = "gpushare"
    scheduler_name: str = "kai-scheduler"
    image: str = ""
    runtime_class: str = "nvidia"
    grace_s: int = 180
    host_dir: str = "/run/gpushare"
    resources: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}}
    )
    tolerations: tuple[Mapping[str, str], ...] = ()
    pull_secrets: tuple[str, ...] = ()


def unix_time(timestamp: str) -> float:
    """Return the Unix time of a timestamp in an object's metadata; 0 if it is empty."""
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0


def pod_group(name: str, demand: Demand, epoch: int) -> Json:
    """Return the PodGroup of a seat."""
    return {
        "apiVersion": "scheduling.run.ai/v2alpha2",
        "kind": "PodGroup",
        "metadata": {"name": name, "labels": _labels(demand), "annotations": _stamp(epoch)},
        "spec": {"minMember": 1, **_spec(terms(demand))},
    }


def pod_group_patch(to: Terms, epoch: int) -> Json:
    """Return the merge patch that changes the terms of a PodGroup."""
    return {"metadata": {"annotations": _stamp(epoch)}, "spec": _spec(to)}


def stamp_patch(found: Object, epoch: int) -> Json:
    """Return the merge patch that writes a broker's epoch on an object, only to its known version."""
    version = found.metadata.resource_version
    return {"metadata": {"annotations": _stamp(epoch), "resourceVersion": version}}


def epoch_of(found: Object) -> int:
    """Return the epoch of the broker that changed an object last; 0 if it has none."""
    epoch = found.metadata.annotations.get(EPOCH_ANNOTATION, "")
    return int(epoch) if epoch.isascii() and epoch.isdigit() else 0


def seat_pod(name: str, demand: Demand, requested: Request, site: SeatPod, epoch: int) -> Json:
    """Return the pod of a seat."""
    annotations = {POD_GROUP_ANNOTATION: name, SKIP_PODGROUPER: "true", **_stamp(epoch)}
    if demand.not_nodes and not demand.node:
        annotations[NOT_NODES_ANNOTATION] = ",".join(demand.not_nodes)
    if demand.instead_of:
        annotations[INSTEAD_OF_ANNOTATION] = ",".join(demand.instead_of)
    resources: Json = {kind: dict(values) for kind, values in site.resources.items()}
    if requested.gpus:
        resources.setdefault("limits", {})[GPU_RESOURCE] = str(requested.gpus)
    elif requested.memory_mib:
        annotations["gpu-memory"] = str(requested.memory_mib)
    else:
        annotations["gpu-fraction"] = requested.fraction
    spec: Json = {
        "schedulerName": site.scheduler_name,
        "priorityClassName": terms(demand).priority_class,
        "restartPolicy": "Never",
        "runtimeClassName": site.runtime_class,
        "terminationGracePeriodSeconds": site.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [
            {
                "name": "seat",
                "image": site.image,
                "args": [
                    *("seat", "--lease", demand.lease, "--name", name),
                    *("--epoch", str(epoch), "--grace-s", str(site.grace_s)),
                    *("--host-dir", site.host_dir),
                ],
                "resources": resources,
                "volumeMounts": [{"name": "host", "mountPath": site.host_dir}],
            }
        ],
        "volumes": [{"name": "host", "hostPath": {"path": site.host_dir, "type": "Directory"}}],
        "tolerations": [dict(toleration) for toleration in site.tolerations],
        "imagePullSecrets": [{"name": secret} for secret in site.pull_secrets],
    }
    if demand.node:
        spec["affinity"] = node_affinity("In", [demand.node])
    elif demand.not_nodes:  # nodes that are full of guarantees
        spec["affinity"] = node_affinity("NotIn", demand.not_nodes)
    metadata = {"name": name, "labels": _labels(demand), "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _labels(demand: Demand) -> dict[str, str]:
    return {
        MANAGED_BY: "gpushare",
        LEASE_LABEL: demand.lease,
        "gpushare.jupyter.org/project": demand.project,
    }


def _stamp(epoch: int) -> dict[str, str]:
    return {EPOCH_ANNOTATION: str(epoch)}


def _spec(to: Terms) -> dict[str, str]:
    return {"queue": to.queue, "priorityClassName": to.priority_class, "preemptibility": to.preemptibility}


def node_affinity(operator: str, nodes: Iterable[str]) -> Json:
    """Return the affinity of a pod that runs ``In`` one node, or ``NotIn`` any of several, by name.

    A node's label ``kubernetes.io/hostname`` may differ from its name.  The API takes one value per field.
    """
    fields = [{"key": "metadata.name", "operator": operator, "values": [node]} for node in nodes]
    required = {"nodeSelectorTerms": [{"matchFields": fields}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
