"""An installation without the folder `kube` serves one machine, and says what is missing on a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpushare import __version__
from tests.broker.processes import Brokers
from tests.e2e.conftest import running
from tests.e2e.demo import ROOT, DemoHub, until
from tests.e2e.test_story import ALLOCATE, is_asleep, steps_done, submit
from tests.ports import free_ports
from tests.simulator import Simulator

# Shows in a log which package a process imports.
VERSION = f"{__version__}+one.machine"
INSTALL = 'pip install --force-reinstall "jupyter-gpushare[kube]"'


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a wheel has it, but for `kube`."""
    tree = tmp_path_factory.mktemp("one-machine")
    package = tree / "jupyter_gpushare"
    left_out = shutil.ignore_patterns("kube", "ui", "__pycache__")
    shutil.copytree(ROOT / "jupyter_gpushare", package, ignore=left_out)
    own = package / "__init__.py"
    own.write_text(own.read_text().replace(f'"{__version__}"', f'"{VERSION}"'))
    return tree


def gpushare(tree: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jupyter_gpushare.cli", *words]
    env = os.environ | environment | {"PYTHONPATH": str(tree)}
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_session_lends_its_gpu_and_gets_it_back(tree: Path, tmp_path: Path) -> None:
    with running(DemoHub(tmp_path / "demo", tree=tree)) as hub:
        assert f"broker {VERSION}" in hub.log.read_text()
        ada, bo = hub.person("ada"), hub.person("bo")
        ada.start_server(fraction="1/2")
        kernel = ada.kernel()
        assert kernel.run(ALLOCATE).startswith("True")
        job = submit(bo, tmp_path)
        until("ada sleeps", lambda: is_asleep(ada))
        until("the job makes steps", lambda: len(steps_done(tmp_path)) > 3)
        assert kernel.run("weights.is_intact()") == "True"
        (tmp_path / "enough").touch()
        until("the job ends", lambda: bo.job(job["id"])["state"] == "succeeded")


def test_its_help_names_no_verb_of_kubernetes(tree: Path) -> None:
    verbs = {"kube", "seat", "canary"}

    def listed(folder: Path) -> set[str]:
        return verbs & set(gpushare(folder, "--help").stdout.split())

    assert listed(tree) == set()
    assert listed(ROOT) == verbs


@pytest.mark.parametrize("verb", ["kube", "seat", "canary"])
def test_a_verb_of_kubernetes_says_what_to_install(tree: Path, verb: str) -> None:
    done = gpushare(tree, verb, "--help")
    assert (done.returncode, done.stdout) == (1, "")
    assert INSTALL in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broker_with_the_engine_kai_says_what_to_install(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    brokers = Brokers(tmp_path, free_ports(1))
    try:
        refused = brokers.refused("--GPUShareBroker.engine=kai", PYTHONPATH=str(tree))
    finally:
        brokers.close()
    assert INSTALL in refused


def test_a_helper_that_is_to_ask_the_kubelet_says_what_to_install(tree: Path, tmp_path: Path) -> None:
    machine = Simulator(tmp_path, "1xH100-80GB,host=64GiB").env()
    words = ["--state-dir", str(tmp_path / "state"), "--pod-resources", str(tmp_path / "kubelet.sock")]
    done = gpushare(tree, "helper", *words, **machine)
    assert done.returncode == 1
    assert INSTALL in done.stderr
