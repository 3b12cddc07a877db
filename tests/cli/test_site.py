"""`gpushare doctor --site`: each broken set-up is named with its remedy, before users come."""

# ruff: noqa: E501
from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jupyter_core.paths
import jupyterhub
import pytest
from certipy import Certipy

from jupyter_gpushare import native
from jupyter_gpushare.broker.state.store import Store
from jupyter_gpushare.cli.checks import Result
from jupyter_gpushare.cli.site import CHECKS, SiteMachine, ask_hub, examine, listeners

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
        "scopes": ["list:users", "read:users", "read:groups", "read:servers", "servers", "delete:servers", "list:services", "read:services"],
    }},
]
c.JupyterHub.services = [
    {{"name": "gpushare", "url": "http://127.0.0.1:8011", "api_token": "0123456789abcdef"}}]
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
MACHINE = SiteMachine(
    gpu_memory_bytes=(80 * GIB, 80 * GIB), ram_bytes=512 * GIB, driver="580.65", cgroup_v2=True
)


@dataclass
class Setup:
    folder: Path
    machine: SiteMachine = MACHINE

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
        machine = replace(self.machine, units=self.folder / "units")
        checks = examine(self.hub_config, self.broker_config, machine)
        return {each.name: (each.result, f"{each.message} -> {each.advice}") for each in checks}


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    for token in (tmp_path / "spawner-token", state / "spawner-token"):
        token.write_text("a" * 64)
        token.chmod(0o600)
    environment = tmp_path / "broker.env"
    environment.write_text("JUPYTERHUB_API_TOKEN=0123456789abcdef\n")
    environment.chmod(0o600)
    units = tmp_path / "units"
    shutil.copytree(Path(__file__).parents[2] / "docs/units", units)
    # The user of these tests stands for gpushare.
    me = pwd.getpwuid(os.getuid()).pw_name
    for path in units.iterdir():
        text = path.read_text().replace("User=gpushare", f"User={me}")
        path.write_text(text.replace("GPUSHARE_BROKER_UID=985", f"GPUSHARE_BROKER_UID={os.getuid()}"))
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


def test_what_ends_sleeping_sessions_is_named_with_its_time(setup, monkeypatch, tmp_path):
    monkeypatch.setattr(jupyter_core.paths, "SYSTEM_CONFIG_PATH", [str(tmp_path / "etc")])
    monkeypatch.setattr(jupyter_core.paths, "ENV_CONFIG_PATH", [])
    hub(
        "c.JupyterHub.services = [\n",
        """c.Spawner.args.append("--MappingKernelManager.cull_idle_timeout=3600")
c.JupyterHub.services = [
    {"name": "cull", "command": ["python3", "-m", "jupyterhub_idle_culler", "--timeout=28800"]},
    {"name": "mine", "command": "jupyterhub-idle-culler --config=/etc/culler.py --max-age=172800"},""",
    )(setup)
    folder = tmp_path / "etc/jupyter_server_config.d"
    folder.mkdir(parents=True)
    (folder / "idle.json").write_text(
        json.dumps({"MappingKernelManager": {"cull_idle_timeout": 7200}}, indent=2)
    )
    (tmp_path / "etc/jupyter_server_config.py").write_text(
        "c.TerminalManager.cull_inactive_timeout = 86400*2\n"
    )
    checks = examine(setup.hub_config, setup.broker_config, setup.machine)
    said = {each.message: each.result for each in checks if each.name == "culling"}
    assert list(said) == [
        "The service cull stops idle servers, asleep or not, after 8 h: users are told when.",
        "The service mine stops idle servers, asleep or not, and all servers 48 h after their start, after a time "
        "that is not in its command: users are not told when.",
        "c.Spawner: `--MappingKernelManager.cull_idle_timeout=3600` ends idle kernels, if it is above 0.",
        f'{folder}/idle.json: `"cull_idle_timeout": 7200` ends idle kernels, if it is above 0.',
        f"{tmp_path}/etc/jupyter_server_config.py: `c.TerminalManager.cull_inactive_timeout = 86400*2` ends idle "
        "terminals, and the programs in them, if it is above 0.",
    ]
    assert set(said.values()) == {Result.OK}


def test_a_site_with_internal_tls_in_order_passes(setup):
    with_certificates(lambda _: None)(setup)
    assert setup.found()["internal-ssl"][0] is Result.OK


def hub(old: str, new: str) -> Callable[[Setup], None]:
    return lambda setup: setup.edit(setup.hub_config, old, new)


def broker(old: str, new: str) -> Callable[[Setup], None]:
    return lambda setup: setup.edit(setup.broker_config, old, new)


def machine(**changes: object) -> Callable[[Setup], None]:
    def change(setup: Setup) -> None:
        setup.machine = replace(MACHINE, **changes)  # type: ignore[arg-type]

    return change


def unit(name: str, old: str, new: str) -> Callable[[Setup], None]:
    return lambda setup: setup.edit(setup.folder / "units" / name, old, new)


def newer_database(setup: Setup) -> None:
    path = setup.folder / "state/broker.sqlite"
    Store(f"sqlite:///{path}", "boot").close()
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("update alembic_version set version_num = '9999'")


def higher_quota(setup: Setup) -> None:
    path = setup.folder / "state/broker.sqlite"
    Store(f"sqlite:///{path}", "boot").close()
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("insert into projects (name, quota_milli) values ('nlp', 1500)")


def with_internal_ssl(setup: Setup) -> None:
    setup.edit(
        setup.hub_config, "c.JupyterHub.services", "c.JupyterHub.internal_ssl = True\nc.JupyterHub.services"
    )
    setup.edit(setup.hub_config, '"http://127.0.0.1:8011"', '"https://127.0.0.1:8011"')


def with_certificates(change: Callable[[Setup], None]) -> Callable[[Setup], None]:
    """A Hub with internal TLS and a broker with certificates, then ``change``."""

    def changed(setup: Setup) -> None:
        with_internal_ssl(setup)
        folder = setup.folder / "tls"
        store = Certipy(store_dir=str(folder))
        store.create_ca("ca")
        files = store.create_signed_pair("gpushare", "ca")["files"]
        for name, path in (("key", files["key"]), ("pair", files["cert"]), ("authorities", files["ca"])):
            shutil.copy(path, folder / name)
        with (setup.folder / "broker.env").open("a") as file:
            file.write(
                "JUPYTERHUB_API_URL=https://127.0.0.1:8081/hub/api\n"
                "JUPYTERHUB_SERVICE_URL=https://127.0.0.1:8011\n"
                f"JUPYTERHUB_SSL_KEYFILE={folder}/key\n"
                f"JUPYTERHUB_SSL_CERTFILE={folder}/pair\n"
                f"JUPYTERHUB_SSL_CLIENT_CA={folder}/authorities\n"
            )
        change(setup)

    return changed


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
    "an API token that others can read": (
        lambda s: (s.folder / "broker.env").chmod(0o644), "api-token", "chmod 600"),
    "two different API tokens": (
        lambda s: (s.folder / "broker.env").write_text("JUPYTERHUB_API_TOKEN=other"), "api-token", "different API tokens"),
    "no file with the API token": (lambda s: (s.folder / "broker.env").unlink(), "api-token", "cannot be read"),
    "an API token that the Hub refuses": (
        machine(ask_hub=lambda _url, token, _env: (f"The Hub refuses {token[:4]}.", "restart both after a change")),
        "hub", "The Hub refuses 0123."),
    "an address of the Hub without its base_url": (
        hub("c.JupyterHub.services", 'c.JupyterHub.bind_url = "http://:8000/jupyter/"\nc.JupyterHub.services'),
        "hub-address", "ends with /jupyter/hub/api"),
    "subdomains that the broker does not know": (
        hub("c.JupyterHub.services", 'c.JupyterHub.subdomain_host = "https://hub.test:8443"\nc.JupyterHub.services'),
        "hub-address", "JUPYTERHUB_HOST=https://hub.test:8443 in "),
    "a callback that the broker does not know": (
        lambda s: (
            hub("c.JupyterHub.services", 'c.JupyterHub.subdomain_host = "https://hub.test"\nc.JupyterHub.services')(s),
            s.edit(s.folder / "broker.env", "JUPYTERHUB_API_TOKEN", "JUPYTERHUB_HOST=https://hub.test\nJUPYTERHUB_API_TOKEN"),
        )[0],
        "hub-address", "CALLBACK_URL=https://gpushare--service.hub.test/services/gpushare/oauth_callback in "),
    "a broker that has not the spawner's path": (
        machine(ask_broker=lambda url, _: f"no GPU broker answers at {url[:12]}"),
        "broker-socket", "broker_url without a path"),
    "a Hub with internal TLS and a broker without": (
        with_internal_ssl, "internal-ssl", "names no certificates"),
    "a certificate of the broker that is missing": (
        with_certificates(lambda s: (s.folder / "tls/key").unlink()), "internal-ssl", "tls/key: No such file"),
    "a plain address of the Hub beside internal TLS": (
        with_certificates(lambda s: s.edit(s.folder / "broker.env", "API_URL=https", "API_URL=http")),
        "internal-ssl", "JUPYTERHUB_API_URL is http://"),
    "a plain address of the service beside internal TLS": (
        with_certificates(lambda s: s.edit(s.hub_config, "https://127", "http://127")),
        "internal-ssl", "https:// is needed"),
    "certificates of a Hub without internal TLS": (
        with_certificates(lambda s: s.edit(s.hub_config, "internal_ssl = True", "internal_ssl = False")),
        "internal-ssl", "internal_ssl is off"),
    "a port that a user holds": (
        machine(listeners=lambda port: frozenset({4242} if port == 8011 else ())), "port", "held by uid 4242"),
    "a missing unit": (lambda s: (s.folder / "units/gpushare-broker.socket").unlink(), "units", "docs/units"),
    "a unit that kills servers": (
        unit("jupyterhub.service", "KillMode=process", ""), "units", "kill every server and every job"),
    "a unit of an old version": (
        unit("gpushare-broker.service", "Type=notify", "Type=simple"), "units", "lacks Type=notify"),
    "another user's number for the helper": (
        unit("gpushare-helper.service", "GPUSHARE_BROKER_UID=", "GPUSHARE_BROKER_UID=77"), "units", "id -u"),
    "no user for the broker": (
        unit("gpushare-broker.service", "\nUser=", "\nUser=nosuch"), "units", "useradd --system"),
    "a folder of the socket that others write": (
        lambda s: s.folder.chmod(0o777), "socket-folder", "chmod go-w"),
    "a broker's token that others can read": (
        lambda s: (s.folder / "state/spawner-token").chmod(0o644), "spawner-token", "chmod 600"),
    "a database of a newer version": (newer_database, "database", "it has the schema 9999"),
    "a broken database": (
        lambda s: (s.folder / "state/broker.sqlite").write_bytes(b"x" * 4096), "database", "not a database"),
    "no service": (hub('{"name": "gpushare", "url"', '{"name": "x", "url"'), "service", "knows no service"),
    "a service without token": (
        hub(', "api_token": "0123456789abcdef"', ""), "service", "neither an API token nor a command"),
    "a role without servers": (hub('"servers", "delete', '"delete'), "broker-role", "lacks servers."),
    "a role that does not see services": (
        hub('"list:services", ', ""), "broker-role", "lacks list:services: no sleeping session is told"),
    "a culler that comes before sleep": (
        hub("c.JupyterHub.services = [\n", '''c.JupyterHub.services = [
    {"name": "cull", "command": ["python3", "-m", "jupyterhub_idle_culler", "--timeout=600"]},'''),
        "culling", "after 600 s: before they are put to sleep, after 900 s"),
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
    "quotas beyond the machine": (broker('"quota": 1}', '"quota": 1.5}'), "quotas", "guaranteed 2.5 GPUs together, and there are 2"),
    "percentages beyond the machine": (
        broker('"quota": 1}', '"quota": "60%"}'), "quotas", "guaranteed 110 % of the GPUs"),
    "quotas that an administrator set beyond the machine": (
        higher_quota, "quotas", "An administrator has changed nlp. -> `gpushare admin quota"),
    "no project": (broker('{"vision": {"quota": "50%"}, "nlp": {"quota": 1}}', "{}"), "quotas", "No project"),
    "no driver": (machine(driver="", gpu_memory_bytes=()), "driver", "No NVIDIA driver"),
    "no GPU": (machine(gpu_memory_bytes=()), "driver", "finds no GPU"),
    "an old driver": (machine(driver="550.90"), "driver", "install 570 or newer"),
    "less memory than GPU memory": (machine(ram_bytes=128 * GIB), "host-memory", "cannot be put to sleep"),
    "cgroup v1": (machine(cgroup_v2=False), "cgroups", "unified_cgroup_hierarchy"),
}  # fmt: skip
WARNINGS = {"an old driver", "less memory than GPU memory", "cgroup v1", "a role that does not see services",
            "a culler that comes before sleep"}  # fmt: skip


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


def test_a_missing_library_is_named(setup, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_HERE", tmp_path)
    result, text = setup.found()["library"]
    assert result is Result.FAIL
    assert "The preload library is missing" in text


def test_two_lines_of_a_token_are_a_rotation_and_no_fault(setup):
    (setup.folder / "state/spawner-token").write_text("a" * 64 + "\n" + "b" * 64 + "\n")
    assert setup.found()["spawner-token"][0] is Result.OK


def test_a_file_that_may_not_be_read_is_a_warning_with_the_way_out(setup, monkeypatch):
    def refuse(_site):
        raise PermissionError(13, "Permission denied", "/var/lib/gpushare")
        yield

    monkeypatch.setitem(CHECKS, "state-dir", refuse)
    result, text = setup.found()["state-dir"]
    assert result is Result.WARN
    assert "run doctor as root" in text


@pytest.mark.parametrize("here", ["127.0.0.1", "::1"])
def test_a_listener_of_this_machine_is_known_by_its_user(here):
    with socket.socket(socket.AF_INET6 if ":" in here else socket.AF_INET) as listener:
        listener.bind((here, 0))
        port = listener.getsockname()[1]
        assert listeners(port) == frozenset()
        listener.listen()
        assert listeners(port) == {os.getuid()}


def test_a_hub_that_does_not_run_is_no_fault():
    assert ask_hub("http://127.0.0.1:9/hub/api", "token", {}) is None
