"""Nodes for tests: a kubelet that runs the containers of real pods as processes of this machine.

A node is a folder with its own environment, such as that of a simulated driver.  Only the first container
of a pod runs.  It has its command, arguments, variables (with ``$(NAME)`` and ``$$``), ``hostPath`` folders
under their own path or in a folder of the node, claims as folders for the home, a separate loopback
address, SIGTERM, grace period, SIGKILL, phase and exit status.  Its environment has the node's GPU
variables only if a container runtime would give it devices.

Not modelled: images, mount and pid namespaces, restarts of containers, limits of CPU and memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from tests.kube.real_store import RealStore
from tests.kube.store import HOSTNAME, Json, Refused, Store, allows, host_name

KAI = "kai-scheduler"
# The namespace in which KAI's binder makes a pod for every shared GPU; the binder waits for the GPU's name.
RESERVATIONS = "kai-resource-reservation"
RESERVED = "run.ai/reserve_for_gpu_index"
MIB = 81920  # of each GPU
_PODS = IPv4Address("127.64.0.0")  # the lowest address of a pod
MARK = "GPUSHARE_TEST_POD"  # in the environment of every process of a pod: its uid
_CDI = "k8s.device-plugin.nvidia.com/gpu="
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


def expanded(text: str, known: Mapping[str, str]) -> str:
    """Return a value with its references expanded.

    ``$(NAME)`` of an unknown variable stays, ``$$`` is one dollar
    (https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/).
    """

    def of(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else known.get(found[1], found[0])

    return _REFERENCE.sub(of, text)


def node_body(name: str, gpus: int) -> Json:
    """Return a node as the GPU operator labels it."""
    labels = {HOSTNAME: host_name(name), "nvidia.com/gpu.memory": str(MIB), "nvidia.com/gpu.count": str(gpus)}
    has = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    status = {"capacity": has, "allocatable": has, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}


def reserve(store: Store | RealStore, pod: Json, free: Sequence[str]) -> str:
    """Hold one of the free GPUs and report it, as a reservation pod of KAI does; return its UUID.

    KAI-Scheduler v0.16.8, ``pkg/binder/binding/resourcereservation/resource_reservation.go:391-445``.
    """
    meta = pod["metadata"]
    if said := meta.get("annotations", {}).get(RESERVED):
        return str(said)
    store.patch("pods", meta["namespace"], meta["name"], {"status": {"phase": "Running"}}, part="status")
    named = {"metadata": {"annotations": {RESERVED: free[0]}}}
    store.patch("pods", meta["namespace"], meta["name"], named)
    return free[0]


@contextlib.contextmanager
def _unless_gone() -> Iterator[None]:
    """Stop the work for a pod that was deleted after it was listed.

    So does the kubelet (v1.35, ``pkg/kubelet/status/status_manager.go``, syncPod).
    """
    try:
        yield
    except Refused as refused:
        if refused.status != 404:
            raise


@dataclass
class Node:
    """One machine; ``environ`` has the variables of its driver."""

    name: str
    gpus: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    cdi: bool = True  # its container runtime knows GPUs by their names of CDI, else by UUID
    accepts: bool = True  # has CPU and memory for more pods of servers
    folders: dict[str, str] = field(default_factory=dict)  # of `hostPath`: where this machine has its own


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    asked_at: float | None = None  # when it was sent SIGTERM


class Kubelet:
    """All nodes of a cluster; `step` runs the next step of each node and of the default scheduler."""

    def __init__(
        self,
        store: Store | RealStore,
        folder: Path,
        nodes: Iterable[Node],
        images: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.store, self.folder = store, folder
        self.images = dict(images or {})  # what an image runs before its arguments
        self.reserves = True  # KAI's reservation pods run
        self.nodes = {node.name: node for node in nodes}
        self.running: dict[str, Running] = {}  # by uid of their pod
        # Pods of other kubelets on this machine listen on the same ports.
        self._addresses = itertools.count(random.randrange(1 << 21))
        for node in self.nodes.values():
            store.create("nodes", "", node_body(node.name, len(node.gpus)))

    def step(self) -> None:
        pods = list(self.store.all("pods"))
        for pod in pods:
            with _unless_gone():
                self._look_at(pod)
        for uid in self.running.keys() - {pod["metadata"]["uid"] for pod in pods}:
            self._kill(uid)  # deleted without grace

    def close(self) -> None:
        """End every process of every pod."""
        for uid in list(self.running):
            self._kill(uid)

    def lose(self, name: str) -> None:
        """Lose a node: its object and its processes.

        Kubernetes then deletes its pods (v1.35, ``pkg/controller/podgc/gc_controller.go``, gcOrphaned).
        """
        del self.nodes[name]
        self.store.delete("nodes", "", name)
        for pod in [p for p in self.store.all("pods") if p["spec"].get("nodeName") == name]:
            self._kill(pod["metadata"]["uid"])
            with _unless_gone():
                self.store.delete("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], grace_s=0)

    def log(self, pod: str) -> str:
        """Return the output of a pod's container."""
        file = self.folder / "logs" / pod
        return file.read_text(errors="replace") if file.exists() else ""

    def claim(self, name: str) -> Path:
        """Return the folder of a volume."""
        folder = self.folder / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ---- one pod -------------------------------------------------------------

    def _look_at(self, pod: Json) -> None:
        node = self.nodes.get(pod["spec"].get("nodeName", ""))
        if not pod["spec"].get("nodeName"):
            self._bind(pod)
        elif node is not None and pod["metadata"]["namespace"] == RESERVATIONS:
            if self.reserves:
                reserve(self.store, pod, node.gpus)  # here nodes have one GPU
        elif node is not None:
            self._follow(pod)

    def _bind(self, pod: Json) -> None:
        """Bind a pod as the default scheduler does, if it is not KAI's."""
        if pod["spec"].get("schedulerName") == KAI or "deletionTimestamp" in pod["metadata"]:
            return
        fitting = [n for n in self.nodes.values() if n.accepts and allows(pod["spec"], n.name)]
        if fitting:
            self.store.bind(pod["metadata"]["namespace"], pod["metadata"]["name"], fitting[0].name)

    def _follow(self, pod: Json) -> None:
        meta, mine = pod["metadata"], self.running.get(pod["metadata"]["uid"])
        if "deletionTimestamp" in meta:
            if mine is None or self._has_ended(mine, meta.get("deletionGracePeriodSeconds", 0)):
                self._kill(meta["uid"])
                self.store.delete("pods", meta["namespace"], meta["name"], grace_s=0)
        elif mine is None and pod["status"]["phase"] == "Pending":
            self._start(pod)
        elif mine is not None and mine.process.poll() is not None:
            self._kill(meta["uid"])
            code = mine.process.returncode
            self._say(pod, "Succeeded" if code == 0 else "Failed", {"terminated": {"exitCode": code % 256}})

    def _has_ended(self, mine: Running, grace_s: float) -> bool:
        if mine.process.poll() is not None:
            return True
        if mine.asked_at is None:
            mine.asked_at = time.monotonic()
            mine.process.send_signal(signal.SIGTERM)
        return time.monotonic() - mine.asked_at >= grace_s

    def _start(self, pod: Json) -> None:
        spec, meta = pod["spec"], pod["metadata"]
        node, container = self.nodes[spec["nodeName"]], spec["containers"][0]
        folders = [v["hostPath"]["path"] for v in spec.get("volumes") or () if "hostPath" in v]
        folders = [node.folders.get(each, each) for each in folders]
        devices = self._devices(pod, node)
        if devices is None or not all(Path(each).exists() for each in folders):
            return  # ContainerCreating, as long as that is so
        address = str(_PODS + next(self._addresses))
        environ = self._environ(pod, node, address, has_gpus=bool(devices))
        begins = container.get("command") or self.images.get(container["image"], ())
        words = [*begins, *(container.get("args") or ())]
        log = self.folder / "logs" / meta["name"]
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [expanded(node.folders.get(word, word), environ) for word in words],
                cwd=environ["HOME"],
                env=environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.running[meta["uid"]] = Running(process)
        self._say(pod, "Running", {"running": {}}, podIP=address)

    def _devices(self, pod: Json, node: Node) -> list[str] | None:
        """Return the UUIDs that the runtime gives the first container, or None if it cannot be created."""
        if pod["spec"].get("schedulerName") == KAI:  # as KAI's binder says; here nodes have one GPU
            return list(node.gpus)
        variables = {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0].get("env", ())}
        named = variables.get("NVIDIA_VISIBLE_DEVICES", "")
        if pod["spec"].get("runtimeClassName") != "nvidia" or named in ("", "void"):
            return []
        return self._named(named.split(","), node)

    @staticmethod
    def _named(names: list[str], node: Node) -> list[str] | None:
        """Return the GPUs with these names, or None if the runtime refuses the container.

        With CDI a bare UUID gets the kind of the management device, which has no such device
        (nvidia-container-toolkit 1.20, ``internal/modifier/cdi.go``, ``pkg/nvcdi/management.go:56``);
        without CDI a CDI name is no device.
        """
        if any(each.startswith(_CDI) is not node.cdi for each in names):
            return None
        found = [each.removeprefix(_CDI) for each in names]
        return found if all(each in node.gpus for each in found) else None

    def _environ(self, pod: Json, node: Node, address: str, *, has_gpus: bool) -> dict[str, str]:
        spec, meta = pod["spec"], pod["metadata"]
        claims = [v["persistentVolumeClaim"]["claimName"] for v in spec.get("volumes") or ()
                  if "persistentVolumeClaim" in v]  # fmt: skip
        home = self.claim(claims[0] if claims else f"none-{meta['uid']}")
        given = {key: os.environ[key] for key in ("PATH", "GPUSHARE_TEST_RUN") if key in os.environ}
        given |= {"HOME": str(home), MARK: meta["uid"]} | (node.environ if has_gpus else {})
        facts = {"spec.nodeName": node.name, "status.podIP": address}
        facts |= {f"metadata.{key}": meta[key] for key in ("name", "namespace", "uid")}
        for source in spec["containers"][0].get("envFrom") or ():
            given |= self._config(meta["namespace"], source["configMapRef"]["name"])
        for entry in spec["containers"][0].get("env") or ():
            value = entry.get("value") or ""
            if field_ := entry.get("valueFrom", {}).get("fieldRef"):
                value = facts[field_["fieldPath"]]
            elif key := entry.get("valueFrom", {}).get("configMapKeyRef"):
                value = self._config(meta["namespace"], key["name"]).get(key["key"], "")
            given[entry["name"]] = expanded(value, given)
        if url := given.get("JUPYTERHUB_SERVICE_URL"):
            given["JUPYTERHUB_SERVICE_URL"] = url.replace("//0.0.0.0:", f"//{address}:")
        return given

    def _config(self, namespace: str, name: str) -> dict[str, str]:
        return dict(self.store.get("configmaps", namespace, name).get("data") or {})

    def _say(self, pod: Json, phase: str, state: Json, **more: str) -> None:
        meta, container = pod["metadata"], pod["spec"]["containers"][0]["name"]
        status: dict[str, Any] = {"phase": phase, **more}
        status["containerStatuses"] = [{"name": container, "ready": "running" in state, "state": state}]
        if phase == "Running":
            status["startTime"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.store.patch("pods", meta["namespace"], meta["name"], {"status": status}, part="status")

    def _kill(self, uid: str) -> None:
        """End the remaining processes of a pod, whatever sessions and groups they created."""
        mine = self.running.pop(uid, None)
        if mine is None:
            return
        while found := _processes(uid):
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            mine.process.poll()
            time.sleep(0.01)
        mine.process.wait()


def _processes(uid: str) -> list[int]:
    """Return the running processes (no zombies) with the mark of a pod."""
    mark, found = f"{MARK}={uid}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
