"""A real cluster without nodes: etcd, kube-apiserver and KAI-Scheduler's own programs, on loopback.

``GPUSHARE_KUBE_BIN`` names a folder with the programs (`PROGRAMS`) and, in ``crds``, the custom resources
of KAI as YAML; neither is part of this project.  There is no controller manager, no default scheduler and
no kubelet: models of the tests replace the nodes (`Nodes`, `Kubelet`).

KAI's programs listen on loopback, except ``admission``, which has no such option: it listens on every
address of the machine while the tests run.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from jupyter_gpushare.kube.cluster.api_server import ApiServer as Address
from tests.certificates import make_certificate
from tests.kube.kubeconfig import write_kubeconfig
from tests.kube.real_store import RealStore
from tests.kube.store import Json, Refused
from tests.ports import free_ports
from tests.waiting import PATIENCE_S, until

VARIABLE = "GPUSHARE_KUBE_BIN"
KAI_PROGRAMS = ("scheduler", "binder", "admission", "podgroupcontroller", "queuecontroller")
PROGRAMS = ("etcd", "kube-apiserver", *KAI_PROGRAMS)
NAMESPACES = ("gpushare", "hub", "users", "kai-scheduler", "kai-resource-reservation", "kai-scale-adjust")
# Objects that a test may have left; in this order no program recreates an object.
_COLLECTIONS = (
    "podgroups", "pods", "bindrequests", "configmaps", "persistentvolumeclaims", "queues",
    "priorityclasses", "nodes", "configs", "schedulingshards",
)  # fmt: skip
# As in an installation with `helm-values/kai.yaml`: all actions except consolidation.  The option further
# below makes an evicted pod name the pod for which it was evicted.
_SCHEDULER = {"actions": "allocate, reclaim, preempt, stalegangeviction"}
_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "users": ["tests"]},
        {"level": "None", "nonResourceURLs": ["/*"]},
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "Metadata", "resources": [
            {"group": "", "resources": ["pods"]}, {"group": "scheduling.run.ai", "resources": ["podgroups"]},
        ]},
        {"level": "None"},
    ],
}  # fmt: skip
_METHODS = {"create": "POST", "patch": "PATCH", "update": "PUT", "delete": "DELETE"}
_running: list[RealEngine] = []


def running() -> RealEngine | None:
    """Return the engine of this module's tests, or None for the model."""
    return _running[-1] if _running else None


def why_not() -> str:
    """Return why no real engine can start, or "" if it can."""
    if not (named := os.environ.get(VARIABLE)):
        return f"{VARIABLE} names no folder with etcd, kube-apiserver and KAI-Scheduler's programs"
    folder = Path(named)
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    if not list(folder.glob("crds/*.yaml")):
        missing.append("crds/*.yaml")
    return f"{named} has no {', '.join(missing)}" if missing else ""


@dataclass
class Audit:
    """The changes that the API server was asked for, from its audit log."""

    file: Path
    entries: list[Json] = field(default_factory=list)
    _read: int = 0

    def since(self, begun: int) -> list[Json]:
        """Return the requests after the first ``begun`` ones."""
        if self.file.exists():
            with self.file.open("rb") as log:
                log.seek(self._read)
                for line in log:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    self.entries.append(json.loads(line))
        return self.entries[begun:]


class RealKai:
    """KAI's scheduler, instead of the model `Kai`: it runs its own cycles, once a second."""

    quiet_s = idle_s = 4.0  # nothing changes for so long: it has looked at everything

    def __init__(self, process: subprocess.Popen[bytes], audit: Audit) -> None:
        self._process, self._audit = process, audit
        self._begun = len(audit.since(0))

    def cycle(self) -> None:
        """Do nothing: the scheduler has its own clock."""

    def stop(self) -> None:
        """Prevent new cycles."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Allow cycles again."""
        self._process.send_signal(signal.SIGCONT)

    @property
    def evicted(self) -> list[str]:
        """Return the names of the seats' pods that it evicted."""
        return [
            entry["objectRef"]["name"]
            for entry in self._audit.since(self._begun)
            if (entry["user"]["username"], entry["verb"]) == ("scheduler", "delete")
            and entry["responseStatus"]["code"] < 300
        ]


class RealServer:
    """One cluster on the engine, instead of the tests' `ApiServer`."""

    rights = None

    def __init__(self, engine: RealEngine) -> None:
        self.engine, self.store, self.url = engine, engine.store, engine.url
        self.kai = RealKai(engine.processes["scheduler"], engine.audit)
        self._begun = len(engine.audit.since(0))

    def address(self) -> Address:
        """Return the address for a broker."""
        return self.engine.address("broker")

    def kubeconfig(self, folder: Path, token: str = "broker") -> Path:
        """Return a kubeconfig file for the cluster."""
        return write_kubeconfig(folder, self.url, "broker", ca=self.engine.certificate)

    def freeze(self) -> None:
        """Stop the API server: it sends no answers and no events until `thaw`."""
        self.engine.processes["kube-apiserver"].send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the API server."""
        self.engine.processes["kube-apiserver"].send_signal(signal.SIGCONT)

    @property
    def requests(self) -> list[tuple[str, str]]:
        """Return the changes that brokers requested, as method and path."""
        return [
            (_METHODS[entry["verb"]], entry["requestURI"].partition("?")[0])
            for entry in self.engine.audit.since(self._begun)
            if entry["user"]["username"] == "broker"
        ]


class RealEngine:
    """The programs of one run."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.programs, self.folder = programs, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"https://127.0.0.1:{free_ports()}"
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        make_certificate(self.certificate, self.key)
        self.audit = Audit(folder / "audit.log")
        self.store: RealStore

    def address(self, user: str) -> Address:
        """Return the API server's address for a user whose token is the name; each may do everything."""
        return Address(url=self.url, token=user, ca_file=self.certificate)

    def start(self) -> None:
        """Start all programs, and return once the scheduler schedules."""
        self._start_etcd()
        self._start_api_server()
        for file in sorted(self.programs.glob("crds/*.yaml")):
            for body in filter(None, yaml.safe_load_all(file.read_text())):
                self._install("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", body)
                spec = body["spec"]
                for version in spec["versions"]:
                    path = f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}"
                    self._wait("kube-apiserver", self.url + path)
        for name in NAMESPACES:
            self._install("/api/v1/namespaces", {"metadata": {"name": name}})
        runtime = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
        self._install("/apis/node.k8s.io/v1/runtimeclasses", runtime)
        self.store = RealStore(self.address("tests"))
        self._start_kai()

    def close(self) -> None:
        """End all programs, first the others, then the API server, then etcd."""
        order = sorted(self.processes, key=lambda name: ("etcd", "kube-apiserver").count(name))
        for name in (*[n for n in order if n != "etcd"], "etcd"):
            if (process := self.processes.get(name)) is not None:
                process.send_signal(signal.SIGCONT)
                process.kill()  # its data go with the folder
                process.wait()
        if hasattr(self, "store"):
            self.store.close()

    def log(self, name: str) -> Path:
        """Return the output of a program."""
        return self.folder / f"{name}.log"

    def cluster(self) -> RealServer:
        """Return an empty cluster, after deleting all objects."""
        for plural in _COLLECTIONS:
            self.store.delete_all(plural)
        server = RealServer(self)
        server.kai.go_on()  # a test may have ended while it was stopped
        return server

    def check(self) -> None:
        """Fail if a program has ended."""
        for name, process in self.processes.items():
            said = self.log(name).read_text(errors="replace")[-3000:]
            assert process.poll() is None, f"{name} has ended:\n{said}"

    # ---- programs ------------------------------------------------------------

    def _run(self, name: str, *words: str, **environ: str) -> None:
        with self.log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(self.programs / name), *words],
                cwd=self.folder,
                env={**os.environ, **environ},
                stdout=log,
                stderr=log,
            )

    def _start_etcd(self) -> None:
        port = free_ports(2)
        self._etcd, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
        self._run(
            "etcd",
            *("--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync", "--log-level", "error"),
            *("--listen-client-urls", self._etcd, "--advertise-client-urls", self._etcd),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        )

    def _start_api_server(self) -> None:
        tokens, policy = self.folder / "tokens.csv", self.folder / "audit.yaml"
        users = ("tests", "broker", *KAI_PROGRAMS)
        tokens.write_text("".join(f'{user},{user},{user},"system:masters"\n' for user in users))
        policy.write_text(yaml.safe_dump(_POLICY))
        self._run(
            "kube-apiserver",
            *("--etcd-servers", self._etcd, "--endpoint-reconciler-type=none", "--profiling=false"),
            *("--bind-address=127.0.0.1", "--advertise-address=127.0.0.1"),
            *("--secure-port", self.url.rpartition(":")[2], "--service-cluster-ip-range=10.0.0.0/24"),
            *("--tls-cert-file", str(self.certificate), "--tls-private-key-file", str(self.key)),
            *("--token-auth-file", str(tokens), "--authorization-mode=RBAC"),
            *("--service-account-issuer=https://kubernetes.default.svc.cluster.local",),
            *("--service-account-key-file", str(self.certificate)),
            *("--service-account-signing-key-file", str(self.key)),
            # No controller creates service accounts, or removes the taint of a new node or the protection
            # of a claim.
            *(
                "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition,"
                "StorageObjectInUseProtection",
            ),
            *("--audit-policy-file", str(policy), "--audit-log-path", str(self.audit.file)),
            "--audit-log-mode=blocking",
        )
        self._wait("kube-apiserver", f"{self.url}/readyz")

    def _start_kai(self) -> None:
        port = free_ports(8)
        conf = self.folder / "scheduler.yaml"
        conf.write_text(yaml.safe_dump(_SCHEDULER))
        serving = self.folder / "k8s-webhook-server" / "serving-certs"
        serving.mkdir(parents=True)
        for file in (self.certificate, self.key):
            (serving / file.name).write_bytes(file.read_bytes())
        probes = {"admission": port, "binder": port + 1, "podgroupcontroller": port + 2}
        given: dict[str, tuple[str, ...]] = {
            "scheduler": (
                *("--scheduler-conf", str(conf), "--listen-address", f"127.0.0.1:{port + 3}"),
                *("--plugin-server-port", str(port + 4), "--log-json", "--update-pod-eviction-condition"),
            ),
            "binder": ("--metrics-bind-address=0", "--resource-reservation-pod-image=reservation"),
            "admission": (
                *("--metrics-bind-address=0", "--gpu-sharing-enabled"),
                *("--webhook-addr", str(port + 5)),
            ),
            "podgroupcontroller": ("--metrics-bind-address=0", "--enable-podgroup-webhook=false"),
            "queuecontroller": (
                *("--enable-webhook=false", "--metrics-listen-address", f"127.0.0.1:{port + 6}"),
            ),
        }
        for name, words in given.items():
            config = write_kubeconfig(self.folder, self.url, name, ca=self.certificate)
            probe = ("--health-probe-bind-address", f"127.0.0.1:{probes[name]}") if name in probes else ()
            self._run(name, *words, *probe, KUBECONFIG=str(config), TMPDIR=str(self.folder))
        for name, number in probes.items():
            self._wait(name, f"http://127.0.0.1:{number}/readyz")
        self._install_webhooks(port + 5)

    def _install_webhooks(self, port: int) -> None:
        """Install KAI's webhooks as its operator does.

        Source: v0.16.8, ``pkg/operator/operands/admission/resources.go:228-326``."""
        authority = base64.b64encode(self.certificate.read_bytes()).decode()
        for kind, path, verbs in (
            ("mutating", "mutate--v1-pod", ["CREATE"]),
            ("validating", "validate--v1-pod", ["CREATE", "UPDATE"]),
        ):
            hook: Json = {
                "name": "admission.run.ai",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "clientConfig": {"url": f"https://127.0.0.1:{port}/{path}", "caBundle": authority},
                "matchConditions": [
                    {"name": "scheduler", "expression": "object.spec.schedulerName == 'kai-scheduler'"}
                ],
                "rules": [
                    {"operations": verbs, "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
                ],
            }
            body = {"metadata": {"name": "kai-admission"}, "webhooks": [hook]}
            self._install(f"/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations", body)

    def _wait(self, name: str, url: str) -> None:
        """Return once a program reports that it is ready."""

        def is_ready() -> bool:
            try:
                status = self._ask("GET", url).status_code
                return status == 200 or (status == 404 and name in KAI_PROGRAMS)  # binder has no checks
            except httpx.HTTPError:
                return False

        until(is_ready, f"{name} is ready", process=self.processes[name], log=self.log(name))

    def _ask(self, method: str, url: str, body: Any = None) -> httpx.Response:
        verify = ssl.create_default_context(cafile=self.certificate) if url.startswith("https") else True
        with httpx.Client(verify=verify, trust_env=False, timeout=PATIENCE_S) as client:
            return client.request(method, url, json=body, headers={"Authorization": "Bearer tests"})

    def _install(self, path: str, body: Json) -> None:
        answer = self._ask("POST", self.url + path, body)
        if answer.status_code >= 300:
            raise Refused(answer.status_code, "", f"{path}: {answer.text}")


@contextlib.contextmanager
def real_engine() -> Iterator[RealEngine]:
    """Yield the engine of the programs in GPUSHARE_KUBE_BIN; clusters of tests run on it meanwhile."""
    with tempfile.TemporaryDirectory(prefix="gps-kai-") as name:
        engine = RealEngine(Path(os.environ[VARIABLE]).absolute(), Path(name))
        try:
            engine.start()
            _running.append(engine)
            yield engine
        finally:
            if engine in _running:
                _running.remove(engine)
            engine.close()
