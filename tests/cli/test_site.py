"""`gpushare doctor --site`: each broken set-up is named with its remedy, before users come."""

# ruff: noqa: E501
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jupyterhub
import pytest

from jupyter_gpushare.cli.doctor import Result
from jupyter_gpushare.cli.site import CHECKS, Machine, examine

GIB = 1 << 30
HUB = """
c.JupyterHub.spawner_class = "jupyter_gpushare.hub.GPUShareSimpleSpawner"
c.JupyterHub.allow_named_servers = True
c.JupyterHub.custom_scopes = {{"custom:gpushare:jobs": {{"description": "Submit jobs"}}}}
c.JupyterHub.load_roles = [
    {{"name": "user", "scopes": ["self", "custom:gpushare:jobs", "access:services!service=gpushare"]}},
    {{
        "name": "gpushare-broker",
        "services": ["gpushare"],
        "scopes": ["list:users", "read:users", "read:groups", "read:servers", "servers", "delete:servers"],
    }},
]
c.JupyterHub.services = [{{"name": "gpushare", "api_token": "0123456789abcdef"}}]
c.GPUShareMixin.broker_url = "http+unix://{socket}/services/gpushare"
c.GPUShareMixin.broker_token_file = "{folder}/spawner-token"
"""
BROKER = """
c.GPUShareBroker.state_dir = "{folder}/state"
c.GPUShareBroker.api_socket = "{folder}/api.sock"
c.GPUShareBroker.helper_socket = "{folder}/helper.sock"
c.GPUShareBroker.spawner_token_file = "{folder}/state/spawner-token"
c.GPUShareBroker.projects = {{"vision": {{"quota": "50%"}}, "nlp": {{"quota": 1}}}}
"""
MACHINE = Machine(gpu_memory_bytes=(80 * GIB, 80 * GIB), ram_bytes=512 * GIB, driver="580.65", cgroup_v2=True)


@dataclass
class Setup:
    folder: Path
    machine: Machine = MACHINE

    @property
    def hub_config(self) -> Path:
        return self.folder / "hub.py"

    @property
    def broker_config(self) -> Path:
        return self.folder / "broker.py"

    def edit(self, path: Path, old: str, new: str) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def found(self) -> dict[str, tuple[Result, str]]:
        checks = examine(self.hub_config, self.broker_config, self.machine)
        return {each.name: (each.result, f"{each.message} -> {each.advice}") for each in checks}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    for token in (tmp_path / "spawner-token", state / "spawner-token"):
        token.write_text("a" * 64)
        token.chmod(0o600)
    for name in ("api.sock", "helper.sock"):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / name))
    setup = Setup(tmp_path)
    quoted = str(tmp_path / "api.sock").replace("/", "%2F")
    setup.hub_config.write_text(HUB.format(folder=tmp_path, socket=quoted))
    setup.broker_config.write_text(BROKER.format(folder=tmp_path))
    return setup


def test_a_site_in_order_passes_every_check(setup):
    found = setup.found()
    # This checkout may lie in a folder that is closed to users.
    found.pop("library")
    assert {name: said for name, (result, said) in found.items() if result is not Result.OK} == {}
    assert set(found) == set(CHECKS) - {"library"}


def hub(old: str, new: str) -> Callable[[Setup], None]:
    return lambda setup: setup.edit(setup.hub_config, old, new)


def broker(old: str, new: str) -> Callable[[Setup], None]:
    return lambda setup: setup.edit(setup.broker_config, old, new)


def machine(**changes: object) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        setup.machine = replace(MACHINE, **changes)  # type: ignore[arg-type]

    return change


BROKEN = {
    "a typing error in the Hub's configuration": (
        hub("allow_named_servers = True", "allow_named_servers = Yes"), "hub-config", "cannot be read"),
    "no configuration of the Hub": (lambda s: s.hub_config.unlink(), "hub-config", "there is no file"),
    "a project with a bad quota": (
        broker('"quota": 1', '"quota": -1'), "broker-config", "quota is a number of GPUs"),
    "a spawner without GPUs": (
        hub("jupyter_gpushare.hub.GPUShareSimpleSpawner", "jupyterhub.spawner.LocalProcessSpawner"),
        "spawner", "gives no GPUs"),
    "units named by the user alone": (
        hub("jupyter_gpushare.hub.GPUShareSimpleSpawner", "jupyter_gpushare.hub.systemd.GPUShareSystemdSpawner"
            '"\nc.SystemdSpawner.unit_name_template = "jupyter-{USERNAME}'),
        "spawner", "put {SERVERNAME} into c.SystemdSpawner.unit_name_template"),
    "named servers are off": (
        hub("allow_named_servers = True", "allow_named_servers = False"), "named-servers", "no training job"),
    "no scope for jobs": (
        hub('"custom:gpushare:jobs": {', '"custom:other": {'), "job-scope", "c.JupyterHub.custom_scopes"),
    "users may not ask the broker": (
        hub(', "access:services!service=gpushare"]', "]"), "user-scopes", "Users may not ask the broker"),
    "users may not submit jobs": (
        hub('"self", "custom:gpushare:jobs",', '"self",'), "user-scopes", "Users may not submit jobs"),
    "server scopes without jobs": (
        hub("c.GPUShareMixin.broker_url",
            'c.Spawner.server_token_scopes = ["users:activity!user"]\nc.GPUShareMixin.broker_url'),
        "server-scopes", "lacks access:servers!server"),
    "no service": (hub('{"name": "gpushare", "api_token"', '{"name": "x", "api_token"'), "service", "knows no service"),
    "a service without token": (
        hub(', "api_token": "0123456789abcdef"', ""), "service", "neither an API token nor a command"),
    "a role without servers": (hub('"servers", "delete', '"delete'), "broker-role", "lacks servers."),
    "a token that others can read": (
        lambda s: (s.folder / "spawner-token").chmod(0o644), "spawner-token", "chmod 600"),
    "no token": (lambda s: (s.folder / "spawner-token").unlink(), "spawner-token", "cannot be read"),
    "two different tokens": (
        lambda s: (s.folder / "state/spawner-token").write_text("b" * 64), "spawner-token", "different spawner tokens"),
    "a port for the broker": (
        hub("http+unix://", "ftp://"), "spawner", "broker_url: 'ftp://"),
    "another socket than the broker's": (
        broker("/api.sock", "/other.sock"), "broker-socket", "the broker listens at"),
    "a broker that does not listen": (
        lambda s: (s.folder / "api.sock").unlink(), "broker-socket", "systemctl enable --now gpushare-broker.socket"),
    "a helper that does not listen": (
        lambda s: (s.folder / "helper.sock").unlink(), "helper-socket", "systemctl enable --now gpushare-helper"),
    "a state folder that others write": (
        lambda s: (s.folder / "state").chmod(0o777), "state-dir", "chmod 700"),
    "no state folder": (broker("/state\"\n", "/nowhere\"\n"), "state-dir", "is missing"),
    "the Hub's database": (
        broker("c.GPUShareBroker.projects",
               'c.GPUShareBroker.db_url = "sqlite:///jupyterhub.sqlite"\nc.GPUShareBroker.projects'),
        "database", "uses the Hub's database"),
    "quotas beyond the machine": (broker('"quota": 1}', '"quota": 1.5}'), "quotas", "guaranteed 2.5 GPUs"),
    "no project": (broker('{"vision": {"quota": "50%"}, "nlp": {"quota": 1}}', "{}"), "quotas", "No project"),
    "no driver": (machine(driver="", gpu_memory_bytes=()), "driver", "No NVIDIA driver"),
    "no GPU": (machine(gpu_memory_bytes=()), "driver", "finds no GPU"),
    "an old driver": (machine(driver="550.90"), "driver", "install 570 or newer"),
    "less memory than GPU memory": (machine(ram_bytes=128 * GIB), "host-memory", "cannot be put to sleep"),
    "cgroup v1": (machine(cgroup_v2=False), "cgroups", "unified_cgroup_hierarchy"),
}  # fmt: skip
WARNINGS = {"an old driver", "less memory than GPU memory", "cgroup v1"}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_set_up_is_named_with_its_remedy(setup, case):
    damage, check, said = BROKEN[case]
    damage(setup)
    result, text = setup.found()[check]
    assert result is (Result.WARN if case in WARNINGS else Result.FAIL)
    assert said in text
    assert len(text.rpartition("-> ")[2]) > 10


@pytest.mark.skipif(jupyterhub.version_info[0] < 6, reason="a setting of JupyterHub 6")
def test_scopes_of_users_may_stand_in_the_setting_of_jupyterhub_6(setup):
    setup.edit(setup.hub_config, '"name": "user"', '"name": "other"')
    setup.edit(
        setup.hub_config,
        "c.JupyterHub.services",
        'c.JupyterHub.extra_user_scopes = {"custom:gpushare:jobs", "access:services"}\nc.JupyterHub.services',
    )
    assert setup.found()["user-scopes"][0] is Result.OK


def test_the_command_tells_it_by_its_exit_code_and_as_json(setup):
    (setup.folder / "helper.sock").unlink()
    command = [sys.executable, "-m", "jupyter_gpushare.cli", "doctor", "--site", "--json"]
    done = subprocess.run(
        [*command, "--hub-config", setup.hub_config, "--broker-config", setup.broker_config],
        env={**os.environ, "LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    checks = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    assert checks["helper-socket"]["result"] == "fail"
    assert "gpushare-helper" in checks["helper-socket"]["advice"]
