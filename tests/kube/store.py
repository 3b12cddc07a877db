"""Objects of a Kubernetes API server, in memory: versions, conflicts, graceful deletion, history.

The rules are those of the API conventions
(https://github.com/kubernetes/community/blob/master/contributors/devel/sig-architecture/api-conventions.md)
and of ``pkg/registry/core/pod/strategy.go`` for the deletion of pods.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

Json = dict[str, Any]
HOSTNAME = "kubernetes.io/hostname"

# The collections of this API server by (group, version, plural): whether they are namespaced, and the kind.
KINDS: dict[tuple[str, str, str], tuple[bool, str]] = {
    ("", "v1", "pods"): (True, "Pod"),
    ("", "v1", "nodes"): (False, "Node"),
    ("", "v1", "configmaps"): (True, "ConfigMap"),
    ("", "v1", "events"): (True, "Event"),
    ("", "v1", "persistentvolumeclaims"): (True, "PersistentVolumeClaim"),
    ("scheduling.run.ai", "v2alpha2", "podgroups"): (True, "PodGroup"),
    ("scheduling.run.ai", "v1alpha2", "bindrequests"): (True, "BindRequest"),
    ("scheduling.run.ai", "v2", "queues"): (False, "Queue"),
    ("kai.scheduler", "v1", "configs"): (False, "Config"),
    ("kai.scheduler", "v1", "schedulingshards"): (False, "SchedulingShard"),
    ("nvidia.com", "v1", "clusterpolicies"): (False, "ClusterPolicy"),
    ("scheduling.k8s.io", "v1", "priorityclasses"): (False, "PriorityClass"),
}
PLURALS = {kind: plural for (_, _, plural), (_, kind) in KINDS.items()}


class Refused(Exception):
    """An answer other than 2xx."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def merge(target: Json, patch: Json) -> Json:
    """Return ``target`` with a merge patch applied (RFC 7386)."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            old = result.get(key)
            result[key] = merge(old if isinstance(old, dict) else {}, value)
        else:
            result[key] = value
    return result


def matches(selector: str, obj: Json) -> bool:
    """Whether labels match a selector of equalities and names of labels."""
    labels = obj["metadata"].get("labels", {})
    parts = (part.partition("=") for part in selector.split(",") if part)
    return all(labels.get(key) == value if equal else key in labels for key, equal, value in parts)


@dataclass(frozen=True)
class Happened:
    version: int
    type: str
    plural: str
    object: Json


@dataclass
class Store:
    """All objects by plural and (namespace, name); listeners get every change."""

    version: int = 0
    objects: dict[str, dict[tuple[str, str], Json]] = field(
        default_factory=lambda: {p: {} for p in PLURALS.values()}
    )
    history: list[Happened] = field(default_factory=list)
    oldest: int = 0  # versions before are compacted
    listeners: list[Callable[[Happened], None]] = field(default_factory=list)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def all(self, plural: str, namespace: str = "") -> Iterator[Json]:
        for (place, _), obj in list(self.objects[plural].items()):
            if not namespace or place == namespace:
                yield obj

    def get(self, plural: str, namespace: str, name: str) -> Json:
        try:
            return self.objects[plural][namespace, name]
        except KeyError:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found') from None

    def create(self, plural: str, namespace: str, body: Json) -> Json:
        obj = copy.deepcopy(body)
        meta = obj.setdefault("metadata", {})
        name = meta.get("name", "")
        if not name or len(name) > 253:
            raise Refused(422, "Invalid", f"{plural}: metadata.name is required")
        if (namespace, name) in self.objects[plural]:
            raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
        for key, value in (meta.get("labels") or {}).items():
            if len(value) > 63:
                raise Refused(422, "Invalid", f"label {key} has more than 63 characters")
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": _time(self.now())}
        if namespace:
            meta["namespace"] = namespace
        if plural == "pods":
            obj.setdefault("status", {}).setdefault("phase", "Pending")
        return self._stored(plural, namespace, obj, "ADDED")

    def update(self, plural: str, namespace: str, name: str, change: Callable[[Json], Json]) -> Json:
        """Replace an object; ``change`` returns the new one and the version on which it is based."""
        old = self.get(plural, namespace, name)
        new = change(copy.deepcopy(old))
        version = new["metadata"].get("resourceVersion", "")
        if version and version != old["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", f'{plural} "{name}": the object has been modified')
        kept = (
            "uid",
            "creationTimestamp",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
            "name",
            "namespace",
        )
        new["metadata"] |= {key: old["metadata"][key] for key in kept if key in old["metadata"]}
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        return old if new == old else self._stored(plural, namespace, new, "MODIFIED")

    def patch(self, plural: str, namespace: str, name: str, body: Json, *, part: str = "") -> Json:
        """Merge ``body``; ``part`` is "status" for that subresource, which only such a patch changes."""

        def change(old: Json) -> Json:
            given = {
                k: v for k, v in body.items() if (k == "status") == (part == "status") or k == "metadata"
            }
            return merge(old, given)

        return self.update(plural, namespace, name, change)

    def bind(self, namespace: str, name: str, node: str) -> Json:
        """Bind a pod to a node."""

        def change(pod: Json) -> Json:
            if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
                raise Refused(409, "Conflict", f'pod "{name}" is already assigned or being deleted')
            pod["spec"]["nodeName"] = node
            return pod

        return self.update("pods", namespace, name, change)

    def delete(
        self, plural: str, namespace: str, name: str, *, grace_s: int | None = None, version: str = ""
    ) -> Json:
        """Delete an object; a pod that runs somewhere ends first, within its grace."""
        old = self.get(plural, namespace, name)
        if version and version != old["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", f'{plural} "{name}": the precondition names another version')
        if plural == "pods":
            grace_s = old["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
            is_bound, phase = bool(old["spec"].get("nodeName")), old["status"]["phase"]
            if is_bound and grace_s and phase not in ("Succeeded", "Failed"):
                return self._begin_deletion(old, grace_s)
        return self._stored(plural, namespace, copy.deepcopy(old), "DELETED")

    def _begin_deletion(self, old: Json, grace_s: int) -> Json:
        meta = old["metadata"]
        if meta.get("deletionGracePeriodSeconds", grace_s + 1) <= grace_s:
            return old
        pod = copy.deepcopy(old)
        pod["metadata"]["deletionTimestamp"] = _time(self.now() + timedelta(seconds=grace_s))
        pod["metadata"]["deletionGracePeriodSeconds"] = grace_s
        return self._stored("pods", meta["namespace"], pod, "MODIFIED")

    def _stored(self, plural: str, namespace: str, obj: Json, type: str) -> Json:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        name = obj["metadata"]["name"]
        if type == "DELETED":
            del self.objects[plural][namespace, name]
        else:
            self.objects[plural][namespace, name] = obj
        event = Happened(self.version, type, plural, copy.deepcopy(obj))
        self.history.append(event)
        for listener in list(self.listeners):
            listener(event)
        return obj

    def since(self, version: int) -> list[Happened]:
        """Return the changes after a version, or refuse if it is compacted."""
        if version < self.oldest:
            raise Refused(410, "Expired", f"too old resource version: {version} ({self.oldest})")
        return [event for event in self.history if event.version > version]

    def compact(self) -> None:
        """Forget all history."""
        self.history.clear()
        self.oldest = self.version


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


# ---- nodes for a pod


def host_name(node: str) -> str:
    """Return a node's label `HOSTNAME`, which differs from its name in some clouds."""
    return f"{node}.internal"


def allows(spec: Json, node: str) -> bool:
    """Return whether node selector and required affinity of a pod allow a node."""
    if spec.get("nodeSelector", {}).get(HOSTNAME, host_name(node)) != host_name(node):
        return False
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms", [{"matchFields": []}])
    return any(all(_holds(rule, node) for rule in term["matchFields"]) for term in terms)


def _holds(rule: Json, node: str) -> bool:
    """A field takes one value (``pkg/apis/core/validation``, ``ValidateNodeFieldSelectorRequirement``)."""
    (name,) = rule["values"]
    assert rule["key"] == "metadata.name"
    return (name == node) == (rule["operator"] == "In")
