"""``gpushare kube``: Queues of the configured projects, and what is wrong with a cluster."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from traitlets import TraitError
from traitlets.config import Config

from jupyter_gpushare.backends.kubernetes.api_server import ApiServer as Address
from jupyter_gpushare.backends.kubernetes.api_server import KubeError
from jupyter_gpushare.backends.kubernetes.queues import priority_classes, queues
from jupyter_gpushare.broker.http.secret_files import tls_context
from jupyter_gpushare.broker.kube_settings import GPUShareKube
from jupyter_gpushare.cli import main
from jupyter_gpushare.cli.kube_checks import CLUSTER_RIGHTS, RIGHTS, examine
from jupyter_gpushare.core.model import Project
from tests.certificates import broker_and_helper, broker_settings
from tests.kube.apiserver import ApiServer, api_server
from tests.kube.rbac import Rights

NS = "gpushare"
PROJECTS = (Project(name="vision", quota_milli=4000), Project(name="nlp", quota_milli=4000, weight=2))


def gpushare(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jupyter_gpushare.cli", "kube", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "120"}
    )


class TestQueuesCommand:
    def config(self, folder: Path, text: str) -> str:
        file = folder / "broker_config.py"
        file.write_text(text)
        return str(file)

    def test_it_prints_what_kubectl_applies(self, tmp_path: Path):
        config = self.config(
            tmp_path,
            "c.GPUShareBroker.projects = {'vision': {'quota': 4}, 'nlp': {'quota': 1.5, 'limit': 3}}\n"
            "c.GPUShareBroker.min_run = 600\n"
            "c.GPUShareBroker.las_thresholds = [60, 600, 6000]\n",
        )
        done = gpushare("queues", "--config", config)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert (said["kind"], said["apiVersion"]) == ("List", "v1")
        projects = (
            Project(name="vision", quota_milli=4000),
            Project(name="nlp", quota_milli=1500, limit_milli=3000),
        )
        assert said["items"] == [*queues(projects, 600), *priority_classes(4)]

    @pytest.mark.parametrize(
        ("projects", "named"),
        [
            ("{'vision': {'quota': '50%'}}", "write quota = 4"),
            ("{'a.b': {'quota': 1}}", "cannot be the name of a queue"),
            ("{'gpushare-x': {'quota': 1}}", "cannot be the name of a queue"),
        ],
    )
    def test_what_cannot_be_a_queue_is_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], projects: str, named: str
    ):
        config = self.config(tmp_path, f"c.GPUShareBroker.projects = {projects}\n")
        assert main(["kube", "queues", "--config", config]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert named in said.err
        assert "Traceback" not in said.err

    def test_an_unknown_key_of_a_project_is_named(self, tmp_path: Path):
        projects = "{'vision': {'quotas': 1}}"
        done = gpushare(
            "queues", "--config", self.config(tmp_path, f"c.GPUShareBroker.projects = {projects}\n")
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert "unknown key 'quotas'" in done.stderr
        assert "Traceback" not in done.stderr

    def test_check_outside_of_a_cluster_says_what_to_set(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        config = self.config(tmp_path, "c.GPUShareBroker.projects = {}\n")
        assert main(["kube", "check", "--config", config]) == 1
        assert "c.GPUShareKube.kubeconfig" in capsys.readouterr().err

    async def test_check_prints_one_line_per_check_and_its_remedy(self, tmp_path: Path):
        async with api_server() as server:
            config = self.config(tmp_path, f"c.GPUShareKube.api_server = {server.url!r}\n")
            done = await asyncio.to_thread(gpushare, "check", "--config", config)
            assert done.returncode == 1
            assert "fail  nodes" in done.stdout
            assert "-> install NVIDIA's GPU operator" in done.stdout
            done = await asyncio.to_thread(gpushare, "check", "--json", "--config", config)
            assert json.loads(done.stdout)["ok"] is False


def manifests(drop: tuple[str, str] = ("", "")) -> list[Any]:
    """Role and ClusterRole of the broker, without one right."""

    def rules(rights: tuple[tuple[str, str, str], ...]) -> list[Any]:
        return [
            {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
            for verb, group, resource in rights
            if (verb, resource) != drop
        ]

    more = [
        {"apiGroups": ["scheduling.k8s.io"], "resources": ["priorityclasses"], "verbs": ["list"]},
        {"apiGroups": ["kai.scheduler"], "resources": ["schedulingshards", "configs"], "verbs": ["list"]},
        {"apiGroups": ["nvidia.com"], "resources": ["clusterpolicies"], "verbs": ["list"]},
    ]
    subject = {"kind": "ServiceAccount", "name": "broker", "namespace": NS}
    here, meta = {"namespace": NS}, {"name": "broker"}
    return [
        {"kind": "Role", "metadata": meta | here, "rules": rules(RIGHTS)},
        {"kind": "ClusterRole", "metadata": meta, "rules": [*rules(CLUSTER_RIGHTS), *more]},
        {
            "kind": "RoleBinding",
            "metadata": meta | here,
            "roleRef": {"kind": "Role", "name": "broker"},
            "subjects": [subject],
        },
        {
            "kind": "ClusterRoleBinding",
            "metadata": meta,
            "roleRef": {"kind": "ClusterRole", "name": "broker"},
            "subjects": [subject],
        },
    ]


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    """A cluster that is ready."""
    async with api_server(Rights.of(manifests(), {"t": (NS, "broker")})) as found:
        for body in queues(PROJECTS, 600):
            found.store.create("queues", "", body)
        for body in priority_classes(3):
            found.store.create("priorityclasses", "", body)
        shard = {"actions": {"consolidation": {"enabled": False}}}
        found.store.create("schedulingshards", "", {"metadata": {"name": "default"}, "spec": shard})
        for n in range(2):
            status = {"allocatable": {"nvidia.com/gpu": "1", "cpu": "8"}}
            found.store.create("nodes", "", {"metadata": {"name": f"n{n}"}, "status": status})
        yield found


async def check(server: ApiServer, tmp_path: Path, token: str = "t", **settings: Any) -> dict[str, Any]:
    (tmp_path / "token").write_text(token)
    given = {"api_server": server.url, "token_file": str(tmp_path / "token"), "seat_image": "gpushare:1"}
    kube = GPUShareKube(config=Config(GPUShareKube=given | settings))
    return {found.name: found for found in await examine(kube, PROJECTS, 3)}


class TestCheck:
    async def test_a_cluster_that_is_ready(self, server: ApiServer, tmp_path: Path):
        found = await check(server, tmp_path)
        helpers = found.pop("helpers")
        assert "helper_certificate_file is not set" in helpers.message
        assert "certificate" in helpers.advice
        assert {name: each.result for name, each in found.items()} == dict.fromkeys(found, "ok"), found
        assert len(found) == 10

    async def test_helpers_that_are_missing_or_do_not_answer_are_named(
        self, server: ApiServer, tmp_path: Path
    ):
        broker, _ = broker_and_helper(tmp_path)
        given = broker_settings(broker) | {"helper_selector": "app=helper", "helper_port": 9}
        assert "No pod" in (await check(server, tmp_path, **given))["helpers"].message
        meta = {"name": "helper-1", "labels": {"app": "helper"}}
        status = {"phase": "Running", "podIP": "127.0.0.1"}
        body = {"metadata": meta, "spec": {"nodeName": "n1"}, "status": status}
        server.store.create("pods", NS, body)
        found = (await check(server, tmp_path, **given))["helpers"]
        assert found.message == "The device helper does not answer on n1."

    async def test_a_kai_that_gives_out_whole_gpus_only_is_named(self, server: ApiServer, tmp_path: Path):
        assert (await check(server, tmp_path))["gpu-sharing"].result == "ok"
        server.store.create("configs", "", {"metadata": {"name": "kai-config"}, "spec": {}})
        assert "whole GPUs only" in (await check(server, tmp_path))["gpu-sharing"].message

    @pytest.mark.parametrize(
        ("verb", "resource"), [("patch", "podgroups"), ("patch", "pods"), ("list", "queues")]
    )
    async def test_a_missing_right_is_named(
        self, server: ApiServer, tmp_path: Path, verb: str, resource: str
    ):
        server.rights = Rights.of(manifests((verb, resource)), {"t": (NS, "broker")})
        found = await check(server, tmp_path)
        assert found["rights"].result == "fail"
        assert found["rights"].message == f"This account may not: {verb} {resource}."

    async def test_an_api_server_that_refuses_or_is_away(self, server: ApiServer, tmp_path: Path):
        server.rights = Rights.of([], {"t": (NS, "broker")})
        (found,) = (await check(server, tmp_path)).values()
        assert "Role in the namespace gpushare" in found.advice
        (found,) = (await check(server, tmp_path, token="other")).values()
        assert "token" in found.advice
        (found,) = (await check(server, tmp_path, api_server="http://127.0.0.1:9")).values()
        assert "does not answer" in found.message

    async def test_what_kai_lacks_is_named(self, server: ApiServer, tmp_path: Path):
        store = server.store
        store.delete("queues", "", "nlp-train")
        store.delete("priorityclasses", "", "gpushare-yield")
        found = await check(server, tmp_path)
        assert found["queues"].message == "The cluster has no queue nlp-train."
        assert found["priority-classes"].message == "The cluster has no priority class gpushare-yield."
        store.create(
            "queues", "", next(q for q in queues(PROJECTS, 0) if q["metadata"]["name"] == "nlp-train")
        )
        store.patch("queues", "", "nlp", {"spec": {"resources": {"gpu": {"quota": 2.01}}}})
        found = await check(server, tmp_path)
        assert (found["queues"].result, "project nlp has other numbers" in found["queues"].message) == (
            "warn",
            True,
        )

    @pytest.mark.parametrize(
        ("spec", "moves"),
        [
            ({}, True),
            ({"actions": {"consolidation": {"enabled": True}}}, True),
            ({"actions": {"consolidation": {"priority": 3}}}, True),
            ({"placementStrategy": {"gpu": "spread", "cpu": "binpack"}}, False),
            ({"placementStrategy": {"gpu": "binpack"}}, True),
        ],
    )
    async def test_a_shard_that_moves_pods_is_named(
        self, server: ApiServer, tmp_path: Path, spec: dict[str, Any], moves: bool
    ):
        server.store.create("schedulingshards", "", {"metadata": {"name": "pool"}, "spec": spec})
        found = (await check(server, tmp_path))["consolidation"]
        assert (found.result == "fail", "pool" in found.message) == (moves, moves)

    async def test_what_may_not_be_read_is_said(self, server: ApiServer, tmp_path: Path):
        assert server.rights is not None
        for rule in server.rights.manifests[1]["rules"]:
            if "schedulingshards" in rule["resources"]:
                rule["verbs"] = []
        found = (await check(server, tmp_path))["consolidation"]
        assert (found.result, "cannot be examined" in found.message) == ("warn", True)

    async def test_nodes_with_several_gpus_and_none(self, server: ApiServer, tmp_path: Path):
        server.store.patch(
            "nodes", "", "n1", {"status": {"allocatable": {"nvidia.com/gpu": "8"}}}, part="status"
        )
        found = (await check(server, tmp_path))["nodes"]
        assert (found.result, "(n1)" in found.message) == ("warn", True)
        server.store.patch("nodes", "", "n1", {"metadata": {"labels": {"gpushare.jupyter.org/units": "2"}}})
        found = (await check(server, tmp_path))["nodes"]
        assert (found.result, "1 of them unit pools" in found.message) == ("ok", True)
        for name in ("n0", "n1"):
            server.store.delete("nodes", "", name)
        assert (await check(server, tmp_path))["nodes"].result == "fail"

    async def test_seats_need_an_image(self, server: ApiServer, tmp_path: Path):
        assert (await check(server, tmp_path, seat_image=""))["seats"].result == "fail"


class TestSettings:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"namespace": "Gpu_Share"},
            {"api_server": "10.0.0.1"},
            {"place_timeout": 0.0},
            {"seat_timeout": -1.0},
            {"seat_grace_s": 5},
        ],
    )
    def test_nonsense_is_refused(self, wrong: dict[str, Any]):
        with pytest.raises(TraitError):
            GPUShareKube(config=Config(GPUShareKube=wrong))

    def test_seats_are_as_configured(self):
        kube = GPUShareKube(
            config=Config(GPUShareKube={"namespace": "x", "seat_grace_s": 60, "seat_image": "i:1"})
        )
        seat = kube.seat()
        assert (seat.namespace, seat.grace_s, seat.image) == ("x", 60, "i:1")


class TestKubeconfig:
    def config(self, folder: Path, cluster: Any = None, user: Any = None, current: str = "here") -> Path:
        config = {
            "current-context": current,
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": cluster or {"server": "https://k:6443"}}],
            "users": [{"name": "u", "user": user or {"token": "secret"}}],
        }
        file = folder / "kubeconfig"
        file.write_text(json.dumps(config))
        return file

    def test_cluster_and_user_of_the_current_context(self, tmp_path: Path):
        found = Address.of_kubeconfig(self.config(tmp_path))
        assert found == Address(url="https://k:6443", token="secret")
        kube = GPUShareKube(config=Config(GPUShareKube={"kubeconfig": str(tmp_path / "kubeconfig")}))
        assert kube.address() == found

    def test_certificates_from_files_and_from_data(self, tmp_path: Path):
        key, pem = certificate(tmp_path)
        data = base64.b64encode(pem.read_bytes()).decode()
        found = Address.of_kubeconfig(
            self.config(
                tmp_path,
                {"server": "https://k:6443", "certificate-authority-data": data},
                {"client-certificate": pem.name, "client-key": str(key)},
            )
        )
        assert found.ca_pem == pem.read_text()
        assert isinstance(found.tls(), ssl.SSLContext)
        assert found.client_pem.count("-----BEGIN") == 2

    @pytest.mark.parametrize(
        ("more", "named"),
        [
            ({"current": "there"}, "has no context 'there'"),
            ({"user": {"exec": {"command": "aws"}}}, "kubectl create token"),
            ({"cluster": {"server": "https://k", "insecure-skip-tls-verify": True}}, "certificate-authority"),
            (
                {"cluster": {"server": "https://k", "certificate-authority": "no-file"}},
                "no-file cannot be read",
            ),
            ({"cluster": {"server": "https://k", "certificate-authority-data": "?"}}, "not understood"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path: Path, more: dict[str, Any], named: str):
        with pytest.raises(KubeError, match=named):
            Address.of_kubeconfig(self.config(tmp_path, **more))

    @pytest.mark.parametrize("text", ["[1", "- 1"])
    def test_a_file_that_is_none(self, tmp_path: Path, text: str):
        file = tmp_path / "kubeconfig"
        with pytest.raises(KubeError, match="cannot be read"):
            Address.of_kubeconfig(file)
        file.write_text(text)
        with pytest.raises(KubeError, match="is no"):
            Address.of_kubeconfig(file)

    def test_a_certificate_that_is_none(self):
        with pytest.raises(KubeError, match="cannot be used"):
            Address(url="https://k", ca_pem="nonsense").tls()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate signed with it."""
    key, pem = folder / "key.pem", folder / "certificate.pem"
    tls_context(pem, key)
    return key, pem
