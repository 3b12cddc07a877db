"""``gpushare kube``: Queues of the configured projects, its settings, and where the API server is."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from traitlets import TraitError
from traitlets.config import Config

from jupyter_gpushare.cli import main
from jupyter_gpushare.core.model import Project
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.find_kube import find_kube
from jupyter_gpushare.kube.cluster.api_server import ApiServer as Address
from jupyter_gpushare.kube.cluster.api_server import KubeError
from jupyter_gpushare.kube.cluster.client import ApiClient
from jupyter_gpushare.kube.cluster.objects import PODS
from jupyter_gpushare.kube.cluster.queues import priority_classes, queues
from jupyter_gpushare.kube.settings import GPUShareKube
from tests.certificates import make_certificate
from tests.kube.apiserver import api_server
from tests.kube.rbac import Rights


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

    async def test_cluster_and_user_of_the_current_context(self, tmp_path: Path):
        kube = GPUShareKube(config=Config(GPUShareKube={"kubeconfig": str(self.config(tmp_path))}))
        found = await kube.address().configuration()
        assert (found.host, found.api_key) == ("https://k:6443", {"BearerToken": "Bearer secret"})

    async def test_certificates_from_files_and_from_data(self, tmp_path: Path):
        key, pem = tmp_path / "key.pem", tmp_path / "certificate.pem"
        make_certificate(pem, key)
        data = base64.b64encode(pem.read_bytes()).decode()
        file = self.config(
            tmp_path,
            {"server": "https://k:6443", "certificate-authority-data": data},
            {"client-certificate": pem.name, "client-key": str(key)},
        )
        client = ApiClient(Address(kubeconfig=file))
        found = (await client.connect()).configuration
        assert not Path(found.ssl_ca_cert).exists(), "it was loaded, and was a copy"
        assert (found.cert_file, found.key_file) == (str(pem), str(key))
        assert pem.exists()
        await client.close()

    @pytest.mark.parametrize(
        ("more", "named"),
        [
            ({"current": "there"}, "name there in"),
            ({"user": {"exec": {"command": "aws"}}}, "a program to log in"),
            ({"user": {"auth-provider": {"name": "oidc"}, "token": "t"}}, "a program to log in"),
            ({"user": {"tokenFile": "no-file"}}, "no-file"),
            ({"cluster": {"server": "https://k", "insecure-skip-tls-verify": True}}, "certificate-authority"),
            ({"cluster": {"server": "http://k"}}, "over https:// only"),
            ({"cluster": {"server": "https://k", "certificate-authority": "no-file"}}, "no-file"),
            ({"cluster": {"server": "https://k", "certificate-authority-data": "?"}}, "cannot be used"),
        ],
        ids=str,
    )
    async def test_what_is_wrong_is_named(self, tmp_path: Path, more: dict[str, Any], named: str):
        client = ApiClient(Address(kubeconfig=self.config(tmp_path, **more)))
        with pytest.raises(KubeError, match=named):
            await client.connect()

    @pytest.mark.parametrize("text", ["[1", "- 1", ""])
    async def test_a_file_that_is_none(self, tmp_path: Path, text: str):
        file = tmp_path / "kubeconfig"
        with pytest.raises(KubeError, match="No such file"):
            await Address(kubeconfig=file).configuration()
        file.write_text(text)
        with pytest.raises(KubeError, match="kubeconfig cannot be used"):
            await Address(kubeconfig=file).configuration()

    async def test_a_secret_in_a_file_that_is_wrong_is_not_told(self, tmp_path: Path):
        wrong = {"certificate-authority-data": {"password": "hush"}, "server": "https://k"}
        with pytest.raises(KubeError, match="cannot be used") as found:
            await Address(kubeconfig=self.config(tmp_path, wrong)).configuration()
        assert "hush" not in str(found.value)

    async def test_a_certificate_that_is_none(self, tmp_path: Path):
        for file in (tmp_path / "none", tmp_path):
            with pytest.raises(KubeError, match="cannot be used"):
                await ApiClient(Address(url="https://k", ca_file=file)).connect()

    async def test_a_token_file_is_read_again_once_its_token_has_ended(self, tmp_path: Path):
        (tmp_path / "token").write_text("first\n")
        rights = Rights.granting([("list", "", "pods")], [], "gpushare")
        async with api_server(rights) as server:
            (account,) = rights.tokens.values()
            user = {"tokenFile": "token"}
            client = ApiClient(Address(kubeconfig=self.config(tmp_path, {"server": server.url}, user)))
            for each in ("first", "second"):
                rights.tokens = {each: account}
                (tmp_path / "token").write_text(f"{each}\n")
                assert (await client.list(PODS, "gpushare")).items == []
            await client.close()


@pytest.mark.parametrize("begun", ["", "import kubernetes_asyncio"], ids=["alone", "after the whole package"])
def test_a_broker_has_no_models_of_the_client_library_and_others_have_all(begun: str):
    code = f"""
{begun}
import gc, sys
def modules():
    return {{name: module for name, module in sys.modules.items() if name.startswith("kubernetes_asyncio")}}
def classes():
    types = [x for x in gc.get_objects() if isinstance(x, type)]
    return sum(str(x.__module__).startswith("kubernetes_asyncio") for x in types)
had, before = classes(), modules()
from jupyter_gpushare.kube.cluster import library
assert classes() - had < 30, classes()
assert modules() == before
from kubernetes_asyncio import client, config, watch
assert client.V1Pod().to_dict() and client.CoreV1Api and watch.Watch
assert client.ApiClient.__module__ == library.ApiClient.__module__
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_package_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    for name in [each for each in sys.modules if each.split(".")[0] == "kubernetes_asyncio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    for name in ("checks.canary", "pod"):
        monkeypatch.delitem(sys.modules, f"jupyter_gpushare.kube.{name}", raising=False)
    with pytest.raises(GpuShareError, match=r"kubernetes_asyncio.*jupyter-gpushare\[kube\]"):
        find_kube("checks.canary")
