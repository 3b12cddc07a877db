"""Servers are told apart by their names, and a site's own class keeps what the mixin needs."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dockerspawner import DockerSpawner
from jupyterhub.spawner import SimpleLocalProcessSpawner
from sudospawner import SudoSpawner
from systemdspawner import SystemdSpawner
from traitlets.config import Config

from jupyter_gpushare.hub import (
    GPUShareLocalSpawner,
    GPUShareMixin,
    GPUShareSimpleSpawner,
    JobGrace,
    distinct,
)
from jupyter_gpushare.hub.contract import breaches, main
from jupyter_gpushare.hub.docker import GPUShareDockerSpawner
from jupyter_gpushare.hub.systemd import GPUShareSystemdSpawner
from tests.hub.conftest import SIMPLE, running_hub

ME = pwd.getpwuid(os.getuid()).pw_name
REPOSITORY = Path(__file__).resolve().parents[2]


class OwnSystemd(GPUShareMixin, SystemdSpawner):
    """As a site might write it."""


class OwnDocker(GPUShareMixin, DockerSpawner):
    """As a site might write it."""


class OwnSudo(GPUShareMixin, JobGrace, SudoSpawner):
    """As docs/spawners.md has it, without the user."""


class NoGrace(GPUShareMixin, SudoSpawner):
    """Stops every server as SudoSpawner does."""


class MixinLast(SimpleLocalProcessSpawner, GPUShareMixin):
    """The wrong order: the mixin's start is never called."""


class LosesVariables(GPUShareSimpleSpawner):
    def get_env(self) -> dict[str, str]:
        return {"PATH": super().get_env()["PATH"], "CUDA_VISIBLE_DEVICES": ""}


class NoNumber(GPUShareSimpleSpawner):
    def server_uid(self) -> Any:
        return self.user.name


def test_a_container_named_by_the_user_alone_is_refused_with_what_to_set():
    config = Config({"DockerSpawner": {"name_template": "jupyter-{username}"}})
    for spawner_class in (OwnDocker, GPUShareDockerSpawner):
        assert "put {servername} into c.DockerSpawner.name_template" in distinct.check_class(
            spawner_class, config
        )


def test_a_site_that_takes_the_servers_name_out_of_the_units_is_refused():
    config = Config({"SystemdSpawner": {"unit_name_template": "jupyter-{USERNAME}"}})
    assert "gpushare-systemd" in distinct.check_class(GPUShareSystemdSpawner, config)


@pytest.mark.parametrize(
    "spawner_class",
    [
        GPUShareLocalSpawner,
        GPUShareSimpleSpawner,
        GPUShareSystemdSpawner,
        GPUShareDockerSpawner,
        OwnDocker,
        OwnSudo,
    ],
)
def test_our_classes_and_simple_combinations_keep_the_contract(spawner_class):
    assert list(breaches(spawner_class, Config())) == []


@pytest.mark.parametrize(
    ("spawner_class", "said"),
    [
        (
            SimpleLocalProcessSpawner,
            "gives no GPUs: write `class X(GPUShareMixin, SimpleLocalProcessSpawner)`",
        ),
        (MixinLast, "MixinLast.start does not reach GPUShareMixin"),
        (NoGrace, "NoGrace kills training jobs before their grace period is over"),
        (OwnSystemd, f'OwnSystemd runs all servers of a user in "jupyter-{ME}-singleuser"'),
        (LosesVariables, "get_env loses variables of a lease: CUDA_VISIBLE_DEVICES, GPUSHARE_LEASE"),
        (NoNumber, f"server_uid returns '{ME}', not the number of the user"),
    ],
)
def test_each_breach_of_the_contract_is_named_with_its_remedy(spawner_class, said):
    assert said in "\n".join(breaches(spawner_class, Config()))


@pytest.mark.parametrize("name", ["broker_url", "server_broker_url"])
def test_a_broker_that_any_authority_could_vouch_for_is_refused(name, tmp_path):
    config = Config({"GPUShareMixin": {name: "https://broker.example:8004/services/gpushare"}})
    (said,) = breaches(GPUShareSimpleSpawner, config)
    assert "set c.GPUShareMixin.broker_certificate_file to a copy of api-certificate.pem" in said
    pinned = tmp_path / "api-certificate.pem"
    config.GPUShareMixin.broker_certificate_file = str(pinned)
    (said,) = breaches(GPUShareSimpleSpawner, config)
    assert f"{pinned} cannot be read" in said
    pinned.write_text("-----BEGIN CERTIFICATE-----")
    assert list(breaches(GPUShareSimpleSpawner, config)) == []


def run_contract(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jupyter_gpushare.hub.contract", config],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(REPOSITORY), os.environ.get("PYTHONPATH", ""))),
        },
        cwd=config.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


OWN_CLASS = """
from jupyter_gpushare.hub import GPUShareMixin
from systemdspawner import SystemdSpawner

class Own(GPUShareMixin, SystemdSpawner):
    pass

c.JupyterHub.spawner_class = Own
"""


def test_a_site_runs_the_contract_on_its_own_configuration(tmp_path, capsys):
    config = tmp_path / "jupyterhub_config.py"
    config.write_text(f'c.JupyterHub.spawner_class = "{SIMPLE}"\n')
    assert main(str(config)) == 0
    assert capsys.readouterr().out == "GPUShareSimpleSpawner keeps the contract.\n"
    config.write_text(OWN_CLASS)
    done = run_contract(config)
    assert done.returncode == 1
    assert "put {SERVERNAME} into c.SystemdSpawner.unit_name_template" in done.stdout


@pytest.mark.parametrize(
    ("spawner", "setting", "remedy"),
    [
        pytest.param(
            SIMPLE,
            OWN_CLASS,
            "{SERVERNAME} into c.SystemdSpawner.unit_name_template",
            id="own class",
        ),
        pytest.param(
            "gpushare-systemd",
            'c.SystemdSpawner.unit_name_template = "jupyter-{USERNAME}"',
            "{SERVERNAME} into c.SystemdSpawner.unit_name_template",
            marks=pytest.mark.long,
            id="entry point",
        ),
        pytest.param(
            "jupyter_gpushare.hub.docker.GPUShareDockerSpawner",
            'c.DockerSpawner.name_template = "jupyter-{username}"',
            "{servername} into c.DockerSpawner.name_template",
            marks=pytest.mark.long,
            id="installed class",
        ),
    ],
)
def test_the_hub_does_not_start_with_a_class_that_cannot_tell_servers_apart(
    tmp_path, spawner, setting, remedy
):
    with pytest.raises(pytest.fail.Exception) as ended, running_hub(spawner, tmp_path, extra=setting):
        pass
    assert "the Hub ended" in str(ended.value)
    log = (tmp_path / "hub.log").read_text()
    assert f"put {remedy}" in log
    assert "A training job would replace its owner's session" in log
    assert "Traceback" not in log


def test_the_hub_does_not_start_without_the_certificate_of_a_broker_over_https(tmp_path):
    setting = 'c.GPUShareMixin.broker_url = "https://127.0.0.1:8004/services/gpushare"'
    with pytest.raises(pytest.fail.Exception) as ended, running_hub(SIMPLE, tmp_path, extra=setting):
        pass
    assert "the Hub ended" in str(ended.value)
    log = (tmp_path / "hub.log").read_text()
    assert "The broker cannot be verified: over https://" in log
    assert "broker_certificate_file" in log
    assert "Traceback" not in log
