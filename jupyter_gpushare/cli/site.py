"""``gpushare doctor --site``: examine an installation before users log in.

Reads the configurations of Hub and broker, as they read them, and this machine.
Nothing is started, and neither Hub nor broker has to run.  Run it as root or as
the user of the services: only they can read the secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import stat
from pathlib import Path

from jupyter_gpushare import channel, native
from jupyter_gpushare.broker.app import GPUShareBroker
from jupyter_gpushare.broker.state.policy import Policy, beyond_machine, parse_project
from jupyter_gpushare.broker.state.schema import database_trouble, stored_overrides
from jupyter_gpushare.cli import checks
from jupyter_gpushare.cli import site_services as services
from jupyter_gpushare.cli.checks import Check, Probe, fail, warn
from jupyter_gpushare.cli.site_facts import SERVICE, Files, Found, Machine, Site
from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.errors import GpuShareError, InvalidRequest
from jupyter_gpushare.hub import broker_access, compat, contract
from jupyter_gpushare.hub.spawner import JOBS_SCOPE, GPUShareMixin
from jupyter_gpushare.messages import gibibytes

_SERVER_SCOPES = {
    "users:activity!user",
    "access:servers!server",
    f"access:services!service={SERVICE}",
    JOBS_SCOPE,
}
# Checkpoints of GPU memory (docs/admin.md).
_CHECKPOINT_DRIVER = 570


def examine(
    hub_config: Path, broker_config: Path, machine: Machine, files: Files | None = None
) -> list[Check]:
    """Return one check per thing that can be wrong with a site, with the remedy."""
    if files is None:
        files = Files(broker_environment=broker_config.with_name("broker.env"))
    name, file = "hub-config", hub_config
    try:
        hub = contract.hub_of(contract.load(file))
        name, file = "broker-config", broker_config
        broker = GPUShareBroker(config=contract.load(file))
        projects = [parse_project(*each) for each in broker.projects.items()]
    except (Exception, SystemExit) as error:
        return checks.named({name: fail(f"{file} cannot be read: {error}.", "mend this file first")})
    site = Site(hub, broker, tuple(projects), machine, files)
    unreadable = "run doctor as root, or as the user of the services"
    return asyncio.run(checks.examine(CHECKS, site, unreadable=unreadable))


def _spawner_class(site: Site) -> Found:
    for said in contract.breaches(site.hub.spawner_class, site.hub.config):
        yield fail(said, "set c.JupyterHub.spawner_class to a class of docs/spawners.md")


def _named_servers(site: Site) -> Found:
    if not site.hub.allow_named_servers:
        yield fail(
            "Named servers are off, so no training job can start.",
            "c.JupyterHub.allow_named_servers = True",
        )


def _job_scope(site: Site) -> Found:
    if JOBS_SCOPE not in site.hub.custom_scopes:
        yield fail(
            f"The scope {JOBS_SCOPE} is not defined.",
            "add it to c.JupyterHub.custom_scopes (docs/admin.md)",
        )


def _user_scopes(site: Site) -> Found:
    given = set(getattr(site.hub, "extra_user_scopes", ()))
    for role in site.hub.load_roles:
        if role.get("name") == "user":
            given = set(role.get("scopes", ()))
    service = {"access:services", f"access:services!service={SERVICE}"}
    if not given & service:
        yield fail(
            "Users may not ask the broker: they lack access:services!service=gpushare.",
            "add it to c.JupyterHub.extra_user_scopes (JupyterHub 5.5: to the role user)",
        )
    if JOBS_SCOPE not in given:
        yield fail(
            f"Users may not submit jobs: they lack {JOBS_SCOPE}.",
            "add it to c.JupyterHub.extra_user_scopes (JupyterHub 5.5: to the role user)",
        )


def _server_scopes(site: Site) -> Found:
    given = site.hub.config.Spawner.get("server_token_scopes")
    if isinstance(given, (list, tuple, set)) and (lost := _SERVER_SCOPES - set(given)):
        yield fail(
            f"c.Spawner.server_token_scopes lacks {', '.join(sorted(lost))}.",
            "name all four scopes there, or take the setting out",
        )


def _service(site: Site) -> Found:
    service = site.service()
    if service is None:
        yield fail(
            f"The Hub knows no service {SERVICE}.", "add it to c.JupyterHub.services (docs/admin.md, 3)"
        )
    elif not service.get("api_token") and not service.get("command"):
        yield fail(
            f"The service {SERVICE} has neither an API token nor a command.",
            "set api_token to the one of broker.env",
        )


def _broker_role(site: Site) -> Found:
    given = {
        scope
        for role in site.hub.load_roles
        if SERVICE in role.get("services", ())
        for scope in role.get("scopes", ())
    }
    if lost := [scope for scope in compat.BROKER_SCOPES if scope not in given]:
        yield fail(
            f"The broker's role lacks {', '.join(lost)}.",
            f'add them to the role of c.JupyterHub.load_roles with "services": ["{SERVICE}"]',
        )


def _spawner_token(site: Site) -> Found:
    path = site.spawner["broker_token_file"]
    try:
        hub_token = broker_access.read_token(Path(path))
    except GpuShareError as error:
        yield fail(
            f"The Hub's spawner token: {error}.",
            "docs/admin.md, 2: both sides need the same file, mode 0600",
        )
        return
    other = Path(site.broker.spawner_token_file)
    if not other.is_file():
        return  # the broker's unit makes it when it starts
    try:
        tokens = other.read_text(errors="replace").split()
    except OSError as error:
        yield fail(f"{other} cannot be read: {error.strerror}.", "run doctor as root or as the broker's user")
        return
    if stat.S_IMODE(other.stat().st_mode) & 0o077:
        yield fail(f"Others can read the broker's spawner token {other}.", f"chmod 600 {other}")
    if hub_token not in tokens:
        yield fail(
            f"Hub ({path}) and broker ({other}) have different spawner tokens.",
            "copy one over the other and restart both",
        )


def _broker_socket(site: Site) -> Found:
    url = site.spawner["broker_url"] or GPUShareMixin.broker_url.default_value
    try:
        address = channel.parse(url)
    except InvalidRequest as error:
        yield fail(f"c.GPUShareMixin.broker_url: {error}.", "name the broker's socket (docs/admin.md, 3)")
        return
    if address.socket is None:
        with contextlib.suppress(GpuShareError):  # the check of the spawner has said it
            certificate = broker_access.read_certificate(Path(site.spawner["broker_certificate_file"]))
            if said := site.machine.ask_broker(url, certificate):
                yield fail(f"{said}.", broker_access.WRONG_PATH)
    elif address.socket != Path(site.broker.api_socket).absolute():
        yield fail(
            f"The Hub asks {address.socket}, the broker listens at {site.broker.api_socket}.",
            "make c.GPUShareMixin.broker_url and c.GPUShareBroker.api_socket the same path",
        )
    elif not address.socket.is_socket():
        yield fail(f"Nothing listens at {address.socket}.", "systemctl enable --now gpushare-broker.socket")
    elif said := site.machine.ask_broker(url, ""):
        yield fail(f"{said}.", broker_access.WRONG_PATH)


def _helper_socket(site: Site) -> Found:
    path = Path(site.broker.helper_socket)
    if not path.is_socket():
        yield fail(f"The device helper does not listen at {path}.", "systemctl enable --now gpushare-helper")


def _state_dir(site: Site) -> Found:
    folder = Path(site.broker.state_dir)
    if not folder.is_dir():
        yield fail(
            f"The broker's folder {folder} is missing.",
            f"install -d -m 700 -o gpushare -g gpushare {folder}",
        )
    elif stat.S_IMODE(folder.stat().st_mode) & 0o022:
        yield fail(f"Others can write into {folder}.", f"chmod 700 {folder}")


def _database(site: Site) -> Found:
    if site.broker.db_url == site.hub.db_url:
        yield fail("The broker uses the Hub's database.", "give c.GPUShareBroker.db_url one of its own")
    if trouble := database_trouble(site.broker.db_url):
        yield fail(f"The broker's database: {trouble}.", "see docs/troubleshooting.md, or restore a backup")


def _quotas(site: Site) -> Found:
    gpus, policy = len(site.machine.gpu_memory_bytes), Policy(projects=site.projects)
    if not policy.projects:
        yield fail("No project is configured, so no user gets a GPU.", "set c.GPUShareBroker.projects")
    percent = sum(each.quota_percent or 0 for each in policy.projects)
    lower = "lower the quotas in c.GPUShareBroker.projects"
    if percent > 100:
        yield fail(f"Projects are guaranteed {percent:g} % of the GPUs.", lower)
    if said := beyond_machine(policy.in_force(gpus * WHOLE_GPU, {}), gpus * WHOLE_GPU):
        yield fail(said, lower)
    overrides = stored_overrides(site.broker.db_url)
    if said := beyond_machine(policy.in_force(gpus * WHOLE_GPU, overrides), gpus * WHOLE_GPU):
        names = ", ".join(each.name for each in policy.projects if each.name in overrides)
        yield fail(
            f"{said} An administrator has changed {names}.",
            "`gpushare admin quota PROJECT --reset` takes the numbers of the configuration again",
        )


def _library(site: Site) -> Found:
    try:
        library = native.preload_path()
    except GpuShareError as error:
        yield fail(
            f"The preload library is missing: {error}.",
            "install the wheel again, in a path without blanks and colons",
        )
        return
    for folder in library.parents:
        if not folder.stat().st_mode & stat.S_IXOTH:
            yield fail(f"Users cannot load {library}: {folder} is closed to them.", f"chmod o+x {folder}")
    if not library.stat().st_mode & stat.S_IROTH:
        yield fail(f"Users cannot read {library}.", f"chmod o+r {library}")


def _driver(site: Site) -> Found:
    machine = site.machine
    if not machine.driver:
        yield fail("No NVIDIA driver is found.", "install it; `nvidia-smi` must list the GPUs")
    elif not machine.gpu_memory_bytes:
        yield fail(
            f"The driver {machine.driver} finds no GPU.",
            "check `nvidia-smi` outside the Hub: a server shows its own GPUs alone",
        )
    elif machine.driver.split(".")[0].isdigit() and int(machine.driver.split(".")[0]) < _CHECKPOINT_DRIVER:
        yield warn(
            f"Driver {machine.driver} cannot put idle sessions to sleep.",
            "install 570 or newer (575 for PyTorch)",
        )


def _host_memory(site: Site) -> Found:
    largest = max(site.machine.gpu_memory_bytes, default=0)
    if site.machine.ram_bytes // 2 < largest:
        yield warn(
            f"Half of the RAM ({gibibytes(site.machine.ram_bytes // 2)}) is smaller than the largest GPU "
            f"({gibibytes(largest)}): a session that fills it cannot be put to sleep.",
            "add memory, or raise --host-budget-percent of the device helper",
        )


def _cgroups(site: Site) -> Found:
    if not site.machine.cgroup_v2:
        yield warn(
            "This machine has no cgroup v2: the driver's own limits (r615) cannot be used.",
            "boot with systemd.unified_cgroup_hierarchy=1",
        )


CHECKS: dict[str, Probe[Site]] = {
    "spawner": _spawner_class,
    "named-servers": _named_servers,
    "job-scope": _job_scope,
    "user-scopes": _user_scopes,
    "server-scopes": _server_scopes,
    "service": _service,
    "broker-role": _broker_role,
    "api-token": services.api_token,
    "internal-ssl": services.internal_ssl,
    "hub": services.hub_answer,
    "hub-address": services.hub_address,
    "spawner-token": _spawner_token,
    "broker-socket": _broker_socket,
    "socket-folder": services.socket_folder,
    "port": services.port,
    "units": services.units,
    "helper-socket": _helper_socket,
    "state-dir": _state_dir,
    "database": _database,
    "quotas": _quotas,
    "library": _library,
    "driver": _driver,
    "host-memory": _host_memory,
    "cgroups": _cgroups,
}
