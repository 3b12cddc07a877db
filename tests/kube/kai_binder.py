"""A model of KAI's binder: it carries out BindRequests, and reserves shared GPUs.

Each rule names its source in kai-scheduler v0.16.8 (commit 40da4c87106f28cc6ca3a1c08d89473474cbe3f3),
below ``pkg/binder``.  Not modelled: its plugins (volumes, the variable of a shared GPU), backoff.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from tests.kube.kubelet import RESERVATIONS, RESERVED
from tests.kube.store import Json, Store

GPU_GROUP = "runai-gpu-group"
# ../../cmd/binder/app/options.go:63-65
RESERVATION_S = 40.0
_OVER = ("Succeeded", "Failed")


class Binder:
    """The binder; without ``works`` it does nothing.  Nodes run its reservation pods (`reserves`)."""

    def __init__(self, store: Store, now: Callable[[], datetime]) -> None:
        self.store, self.now = store, now
        self.works = True

    def step(self) -> None:
        """Carry out every BindRequest as far as possible."""
        self._collect()
        for request in self._requests() if self.works else ():
            self._bind(request)
        self._sync()

    def _requests(self) -> Iterator[Json]:
        for request in self.store.all("bindrequests"):
            if request.get("status", {}).get("phase") not in _OVER:
                yield request

    def _collect(self) -> None:
        """Delete the BindRequests of deleted pods, their owners (Kubernetes' garbage collector)."""
        there = {pod["metadata"]["uid"] for pod in self.store.all("pods")}
        for request in self.store.all("bindrequests"):
            if request["metadata"]["ownerReferences"][0]["uid"] not in there:
                self.store.delete(
                    "bindrequests", request["metadata"]["namespace"], request["metadata"]["name"]
                )

    def _bind(self, request: Json) -> None:
        """Reserve, label, bind (``binding/binder.go:43-87``, ``controllers/bindrequest_controller.go``)."""
        meta, spec = request["metadata"], request["spec"]
        pod = self.store.get("pods", meta["namespace"], spec["podName"])
        for group in spec["selectedGPUGroups"]:
            reservation = self._reservation(spec["selectedNode"], group)
            if RESERVED not in reservation["metadata"]["annotations"]:
                if self._age(reservation) > timedelta(seconds=RESERVATION_S):
                    self.store.delete("pods", RESERVATIONS, reservation["metadata"]["name"], grace_s=0)
                    self._say(request, "Failed", "failed waiting for GPU reservation pod to allocate")
                return
        for group in spec["selectedGPUGroups"]:  # only once the GPU is named (resource_reservation.go)
            labels = {"metadata": {"labels": {GPU_GROUP: group}}}
            self.store.patch("pods", meta["namespace"], spec["podName"], labels)
        if not pod["spec"].get("nodeName"):
            self.store.bind(meta["namespace"], spec["podName"], spec["selectedNode"])
        self._say(request, "Succeeded", "")

    def _reservation(self, node: str, group: str) -> Json:
        """Return the pod of a shared GPU (``binding/resourcereservation/resource_reservation.go``)."""
        name = f"gpu-reservation-{hashlib.sha256(f'{node}/{group}'.encode()).hexdigest()[:16]}"
        found = [pod for pod in self.store.all("pods", RESERVATIONS) if pod["metadata"]["name"] == name]
        if found:
            return found[0]
        limits = {"limits": {"nvidia.com/gpu": "1"}}
        container = {"name": "resource-reservation", "image": "reservation", "resources": limits}
        body = {"metadata": {"name": name, "labels": {GPU_GROUP: group}, "annotations": {}}}
        spec = {"nodeName": node, "containers": [container]}
        return self.store.create("pods", RESERVATIONS, body | {"spec": spec})

    def _sync(self) -> None:
        """Delete the reservations of GPUs that no pod shares (same file, ``syncForPods``)."""
        used = {group for request in self._requests() for group in request["spec"]["selectedGPUGroups"]}
        for pod in self.store.all("pods"):
            if pod["metadata"]["namespace"] != RESERVATIONS and pod["status"]["phase"] in (
                "Pending",
                "Running",
            ):
                used.add(pod["metadata"].get("labels", {}).get(GPU_GROUP, ""))
        for pod in self.store.all("pods", RESERVATIONS):
            if pod["metadata"]["labels"][GPU_GROUP] not in used:
                self.store.delete("pods", RESERVATIONS, pod["metadata"]["name"], grace_s=0)

    def _age(self, pod: Json) -> timedelta:
        created = datetime.strptime(pod["metadata"]["creationTimestamp"], "%Y-%m-%dT%H:%M:%SZ")
        return self.now() - created.replace(tzinfo=UTC)

    def _say(self, request: Json, phase: str, reason: str) -> None:
        meta, status = request["metadata"], {"phase": phase, "reason": reason}
        self.store.patch("bindrequests", meta["namespace"], meta["name"], {"status": status}, part="status")
