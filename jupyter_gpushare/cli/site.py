"""``gpushare doctor --site``: check an installation before users log in.

It reads the configurations of Hub and broker, as they do, and examines this machine.
It starts nothing, and neither the Hub nor the broker has to run.  Run it as root or as
the user of the services: only they can read the secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jupyter_core.paths

from jupyter_gpushare import channel, native, procfs
from jupyter_gpushare.backends.base import HubError
from jupyter_gpushare.backends.hub import HubClient
from jupyter_gpushare.broker.app import GPUShareBroker, hub_base_url
from jupyter_gpushare.broker.state.culling import KERNEL_SETTING, culler_of
from jupyter_gpushare.broker.state.policy import Policy, ProjectConfig, over_capacity, parse_project
from jupyter_gpushare.broker.state.store import database_trouble, stored_overrides
from jupyter_gpushare.channel import api_url
from jupyter_gpushare.cli import checks
from jupyter_gpushare.cli.checks import Check, Probe, fail, ok, warn
from jupyter_gpushare.client import BlockingClient
from jupyter_gpushare.core.model import WHOLE_GPU
from jupyter_gpushare.errors import GpuShareError, InvalidRequest, NotSetUp
from jupyter_gpushare.hub import broker_access, compat, contract, distinct
from jupyter_gpushare.hub.spawner import JOBS_SCOPE, GPUShareMixin
from jupyter_gpushare.internal_tls import VARIABLES, internal_tls
from jupyter_gpushare.messages import duration, gibibytes
from jupyter_gpushare.protocol import wire

# ---- the facts that are checked: both configurations, files, and this machine

SERVICE = "gpushare"
_HUB_S = 5.0
_LISTENS = "0A"  # TCP_LISTEN

# A check yields the faults that it finds.
Found = Iterator[Check]


@dataclass(frozen=True, slots=True)
class SiteMachine:
    """Facts about this machine; ``driver`` is empty if no driver is found."""

    gpu_memory_bytes: tuple[int, ...]
    ram_bytes: int
    driver: str
    cgroup_v2: bool
    units: Path = Path("/etc/systemd/system")
    # See the functions of the same names below.
    ask_hub: Callable[[str, str, Mapping[str, str]], tuple[str, str] | None] = lambda *_: None
    ask_broker: Callable[[str, str], str] = lambda *_: ""
    listeners: Callable[[int], frozenset[int]] = lambda _port: frozenset()


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """The configurations of Hub and broker, and the machine."""

    hub: Any  # JupyterHub with its configuration
    broker: GPUShareBroker
    projects: tuple[ProjectConfig, ...]
    machine: SiteMachine
    broker_environment: Path  # a file with environment variables

    @property
    def spawner(self) -> dict[str, Any]:
        """Return the settings of the mixin."""
        return {
            name: self.hub.config.GPUShareMixin.get(name, "")
            for name in ("broker_url", "broker_token_file", "broker_certificate_file")
        }

    def service(self) -> dict[str, Any] | None:
        """Return the broker's entry in the Hub's services; None if there is none."""
        return next((each for each in self.hub.services if each.get("name") == SERVICE), None)


def this_machine() -> SiteMachine:
    """Return the current facts about this machine."""
    from jupyter_gpushare.errors import DeviceError
    from jupyter_gpushare.gpu.driver.nvml import Nvml

    try:
        nvml = Nvml()
        driver, memory = nvml.driver, tuple(gpu.memory_bytes for gpu in nvml.gpus)
    except DeviceError:
        driver, memory = "", ()
    return SiteMachine(
        gpu_memory_bytes=memory,
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        driver=driver,
        cgroup_v2=Path("/sys/fs/cgroup/cgroup.controllers").is_file(),
        ask_hub=ask_hub,
        ask_broker=ask_broker,
        listeners=listeners,
    )


def ask_hub(url: str, token: str, env: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what a running Hub refuses to this token, and the remedy; None if nothing or if no Hub runs.

    ``env`` is the broker's environment, which names the certificates of the Hub's internal TLS.

    Raises:
        GpuShareError: the certificates cannot be used.
    """

    async def ask() -> tuple[str, str] | None:
        client = HubClient(url, token, timeout_s=_HUB_S, tls=internal_tls(env))
        try:
            await client.servers()
        except HubError as error:
            return (f"{error}.", error.remedy) if error.remedy else None
        finally:
            await client.close()
        return None

    return asyncio.run(ask())


def ask_broker(url: str, certificate: str) -> str:
    """Return why the server at a spawner's address is not a broker; empty if it is, or if none answers."""
    try:
        with contextlib.closing(
            BlockingClient(api_url(url), "", certificate=certificate, retry_s=0.0)
        ) as client:
            client.get("health", wire.Health)
    except NotSetUp as error:
        return str(error)
    except GpuShareError:
        return ""  # other checks report that no broker runs
    return ""


def listeners(port: int) -> frozenset[int]:
    """Return the uids of the sockets that listen at a port of this machine (proc(5), net/tcp)."""
    rows: list[list[str]] = []
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            rows += [
                line.split()
                for line in Path(procfs.path(0, table)).read_text(encoding="ascii").splitlines()[1:]
            ]
    matching = [row for row in rows if row[3] == _LISTENS and int(row[1].rpartition(":")[2], 16) == port]
    return frozenset(int(row[7]) for row in matching)


# ---- checks of the services: tokens, the Hub's answers, units, sockets and ports

_VARIABLE = "JUPYTERHUB_API_TOKEN="
_BROKER_UNIT, _HELPER_UNIT = "gpushare-broker.service", "gpushare-helper.service"
# The lines that each unit must have, and the consequence without them.
_UNIT_LINES = {
    _BROKER_UNIT: {
        "Type=notify": "systemd would not wait until the broker answers",
        "WatchdogSec=": "a broker that hangs would not be replaced",
        "Requires=gpushare-broker.socket": "the broker's port would be free while it restarts",
    },
    "gpushare-broker.socket": {"ListenStream=/": "the Hub would have no socket of the broker"},
    _HELPER_UNIT: {
        "RuntimeDirectoryPreserve=yes": "a restart would take the limits of running servers away",
        "StateDirectory=": "suspended sessions would be lost at a restart",
    },
    "jupyterhub.service": {
        "KillMode=process": "stopping the Hub would kill every server and every job",
        "OOMPolicy=continue": "one kernel that is killed for want of memory would take the Hub down",
    },
}


def api_token(site: SiteFacts) -> Found:
    """Yield faults of the broker's API token: in its file, or in the Hub's copy."""
    service, path = site.service() or {}, site.broker_environment
    if service.get("command") or not service.get("api_token"):
        return  # the Hub gives its own broker a token, or the check of the service reports the fault
    try:
        about, text = path.stat(), path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        yield fail(
            f"{path} cannot be read: {error.strerror}.",
            "docs/admin.md, 2: JUPYTERHUB_API_TOKEN=..., mode 0600",
        )
        return
    if stat.S_IMODE(about.st_mode) & 0o077:
        yield fail(f"Others can read the Hub API token in {path}.", f"chmod 600 {path}")
    found = [line.partition("=")[2].strip() for line in text.splitlines() if line.startswith(_VARIABLE)]
    if found[-1:] != [service["api_token"]]:
        yield fail(
            f"The Hub's configuration and {path} have different API tokens.",
            "let the configuration read this file (docs/admin.md, 3), and restart both",
        )


def hub_answer(site: SiteFacts) -> Found:
    """Yield the Hub's refusal of the broker's token; a Hub that does not run is not a fault."""
    service, env = site.service() or {}, _broker_environment(site)
    if token := service.get("api_token"):
        scheme, host = "https" if site.hub.internal_ssl else "http", site.hub.hub_ip or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{host}:{site.hub.hub_port}{site.hub.base_url}hub/api"
        with contextlib.suppress(GpuShareError):  # the check of internal TLS reports it
            if remedy := site.machine.ask_hub(env.get("JUPYTERHUB_API_URL", url), token, env):
                yield fail(*remedy)


def hub_address(site: SiteFacts) -> Found:
    """Yield wrong addresses of the Hub in the environment of an external broker; they break its page."""
    service, hub, env = site.service() or {}, site.hub, _broker_environment(site)
    if service.get("command") or not (api := env.get("JUPYTERHUB_API_URL")):
        return
    where = f"in {site.broker_environment}"
    if hub_base_url(api) != hub.base_url:
        yield fail(
            f"The Hub's base_url is {hub.base_url}, and JUPYTERHUB_API_URL of the broker is {api}.",
            f"set JUPYTERHUB_API_URL {where} to an address that ends with {hub.base_url}hub/api",
        )
    if not hub.subdomain_host:
        return
    parts = urlsplit(hub.subdomain_host)
    domain = hub.subdomain_hook(SERVICE, parts.hostname, kind="service")
    origin = f"{parts.scheme}://{domain}{f':{parts.port}' if parts.port else ''}"
    for name, value in (
        ("JUPYTERHUB_HOST", hub.subdomain_host),
        ("JUPYTERHUB_OAUTH_CALLBACK_URL", f"{origin}{hub.base_url}services/{SERVICE}/oauth_callback"),
    ):
        if env.get(name) != value:
            yield fail(
                f"c.JupyterHub.subdomain_host is set, and {name} of the broker is not.",
                f"{name}={value} {where}",
            )


def internal_ssl(site: SiteFacts) -> Found:
    """Yield the settings that an external broker lacks for a Hub with internal TLS."""
    service, path = site.service() or {}, site.broker_environment
    if service.get("command") or not service.get("api_token"):
        return  # the Hub gives certificates to a broker that it starts
    remedy, env = "docs/operations.md, TLS and internal_ssl", _broker_environment(site)
    if not site.hub.internal_ssl:
        if used := [name for name in VARIABLES if name in env]:
            yield fail(f"{path} sets {', '.join(used)}, and c.JupyterHub.internal_ssl is off.", remedy)
        return
    try:
        if internal_tls(env) is None:
            yield fail(f"The Hub uses internal_ssl, and {path} names no certificates.", remedy)
    except GpuShareError as error:
        yield fail(f"{error}.", remedy)
    for name, url in (
        ("JUPYTERHUB_API_URL", env.get("JUPYTERHUB_API_URL", "")),
        ("JUPYTERHUB_SERVICE_URL", env.get("JUPYTERHUB_SERVICE_URL", "")),
        (f"The url of the service {SERVICE}", service.get("url") or ""),
    ):
        if not url.startswith("https://"):
            yield fail(
                f"{name} is {url or 'not set'}, but the Hub uses internal_ssl: https:// is needed.", remedy
            )


def _broker_environment(site: SiteFacts) -> dict[str, str]:
    """Return the variables of an external broker: those of its unit, then those of broker.env."""
    lines: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # the check of the units reports it
        unit = _unit_text(site.machine.units / _BROKER_UNIT)
        for setting in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE):
            lines += shlex.split(setting)
    with contextlib.suppress(OSError):  # the check of the API token reports it
        lines += site.broker_environment.read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: value.strip() for name, is_set, value in (each.partition("=") for each in lines) if is_set}


def _unit_text(path: Path) -> str:
    drop_ins = sorted(path.with_name(f"{path.name}.d").glob("*.conf"))
    return "\n".join(each.read_text(encoding="utf-8", errors="replace") for each in (path, *drop_ins))


def port(site: SiteFacts) -> Found:
    """Yield the users of this machine that hold the broker's port, and so receive what is sent there."""
    address = urlsplit((site.service() or {}).get("url") or "")
    state = Path(site.broker.state_dir)
    trusted = {0, state.stat().st_uid if state.is_dir() else 0}
    if address.port and address.hostname in ("127.0.0.1", "::1", "localhost"):
        for uid in site.machine.listeners(address.port) - trusted:
            yield fail(
                f"Port {address.port} of the service {SERVICE} is held by uid {uid}, not the broker.",
                "end that program, then start gpushare-broker.socket, which keeps the port",
            )


def units(site: SiteFacts) -> Found:
    """Yield the faults of the systemd units and their drop-ins."""
    folder = site.machine.units
    units = {name: folder / name for name in _UNIT_LINES}
    if not any(path.is_file() for path in units.values()):
        return  # the services are not started by systemd
    for name, path in units.items():
        if not path.is_file():
            yield fail(f"The unit {path} is missing.", f"copy docs/units/{name} to {folder}")
            return
        text = _unit_text(path)
        for line, why in _UNIT_LINES[name].items():
            if not re.search(rf"^{re.escape(line)}", text, re.MULTILINE):
                yield fail(f"{path} lacks {line}: {why}.", f"compare it with docs/units/{name}")
    uid = re.search(
        r"^Environment=GPUSHARE_BROKER_UID=(\d+)",
        units[_HELPER_UNIT].read_text(encoding="utf-8", errors="replace"),
        re.MULTILINE,
    )
    user = re.search(
        r"^User=(\S+)", units[_BROKER_UNIT].read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )
    if user is None:
        return
    try:
        number = pwd.getpwnam(user[1]).pw_uid
    except KeyError:
        yield fail(
            f"There is no user {user[1]}, as which {_BROKER_UNIT} runs.",
            f"useradd --system --home-dir /var/lib/gpushare --shell /usr/sbin/nologin {user[1]}",
        )
        return
    if uid and int(uid[1]) != number:
        yield fail(
            f"{units[_HELPER_UNIT]} lets uid {uid[1]} ask the helper; {user[1]} is uid {number}.",
            f"set GPUSHARE_BROKER_UID to the number of `id -u {user[1]}`",
        )


def socket_folder(site: SiteFacts) -> Found:
    """Yield a fault if another user could replace the socket to which the Hub sends its token."""
    path = Path(site.broker.api_socket).absolute()
    if not path.parent.is_dir():
        return  # the check of the socket reports that nothing listens
    try:
        channel.trusted_uids(path)
    except channel.Unverified as error:
        yield fail(f"{error}.", f"chmod go-w {path.parent}, and its parents; chown them to root")


# ---- the other checks --------------------------------------------------------

_SERVER_SCOPES = {
    "users:activity!user",
    "access:servers!server",
    f"access:services!service={SERVICE}",
    JOBS_SCOPE,
}
# Checkpoints of GPU memory (docs/admin.md).
_CHECKPOINT_DRIVER = 570


def examine(hub_config: Path, broker_config: Path, machine: SiteMachine) -> list[Check]:
    """Return all checks of a site, with the remedies of the faults."""
    name, file = "hub-config", hub_config
    try:
        hub = contract.hub_of(contract.load(file))
        name, file = "broker-config", broker_config
        broker = GPUShareBroker(config=contract.load(file))
        projects = [parse_project(*each) for each in broker.projects.items()]
    except (Exception, SystemExit) as error:
        return checks.named({name: fail(f"{file} cannot be read: {error}.", "fix this file first")})
    site = SiteFacts(hub, broker, tuple(projects), machine, broker_config.with_name("broker.env"))
    unreadable = "run doctor as root, or as the user of the services"
    return asyncio.run(checks.examine(CHECKS, site, unreadable=unreadable))


def _spawner_class(site: SiteFacts) -> Found:
    for breach in contract.breaches(site.hub.spawner_class, site.hub.config):
        yield fail(breach, "set c.JupyterHub.spawner_class to a class of docs/spawners.md")


def _named_servers(site: SiteFacts) -> Found:
    if not site.hub.allow_named_servers:
        yield fail(
            "Named servers are off, so no training job can start.",
            "c.JupyterHub.allow_named_servers = True",
        )


def _job_scope(site: SiteFacts) -> Found:
    if JOBS_SCOPE not in site.hub.custom_scopes:
        yield fail(
            f"The scope {JOBS_SCOPE} is not defined.",
            "add it to c.JupyterHub.custom_scopes (docs/admin.md)",
        )


def _user_scopes(site: SiteFacts) -> Found:
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


def _server_scopes(site: SiteFacts) -> Found:
    given = site.hub.config.Spawner.get("server_token_scopes")
    if isinstance(given, (list, tuple, set)) and (lost := _SERVER_SCOPES - set(given)):
        yield fail(
            f"c.Spawner.server_token_scopes lacks {', '.join(sorted(lost))}.",
            "name all four scopes there, or take the setting out",
        )


def _service(site: SiteFacts) -> Found:
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


def _broker_role(site: SiteFacts) -> Found:
    given = {
        scope
        for role in site.hub.load_roles
        if SERVICE in role.get("services", ())
        for scope in role.get("scopes", ())
    }
    remedy = f'add them to the role of c.JupyterHub.load_roles with "services": ["{SERVICE}"]'
    lost = [scope for scope in compat.BROKER_SCOPES if scope not in given]
    message = f"The broker's role lacks {', '.join(lost)}"
    if set(lost) - set(compat.SERVICE_SCOPES):
        yield fail(f"{message}.", remedy)
    elif lost:
        yield warn(f"{message}: no sleeping session is told when an idle culler may stop it.", remedy)


def _spawner_token(site: SiteFacts) -> Found:
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
        return  # the broker's unit creates it at its start
    try:
        tokens = other.read_text(encoding="utf-8", errors="replace").split()
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


def _broker_socket(site: SiteFacts) -> Found:
    url = site.spawner["broker_url"] or GPUShareMixin.broker_url.default_value
    try:
        address = channel.parse(url)
    except InvalidRequest as error:
        yield fail(f"c.GPUShareMixin.broker_url: {error}.", "name the broker's socket (docs/admin.md, 3)")
        return
    if address.socket is None:
        with contextlib.suppress(GpuShareError):  # the check of the spawner reports it
            certificate = broker_access.read_certificate(Path(site.spawner["broker_certificate_file"]))
            if wrong := site.machine.ask_broker(url, certificate):
                yield fail(f"{wrong}.", broker_access.WRONG_PATH)
    elif address.socket != Path(site.broker.api_socket).absolute():
        yield fail(
            f"The Hub asks {address.socket}, the broker listens at {site.broker.api_socket}.",
            "make c.GPUShareMixin.broker_url and c.GPUShareBroker.api_socket the same path",
        )
    elif not address.socket.is_socket():
        yield fail(f"Nothing listens at {address.socket}.", "systemctl enable --now gpushare-broker.socket")
    elif wrong := site.machine.ask_broker(url, ""):
        yield fail(f"{wrong}.", broker_access.WRONG_PATH)


def _helper_socket(site: SiteFacts) -> Found:
    path = Path(site.broker.helper_socket)
    if not path.is_socket():
        yield fail(f"The device helper does not listen at {path}.", "systemctl enable --now gpushare-helper")


def _state_dir(site: SiteFacts) -> Found:
    folder = Path(site.broker.state_dir)
    if not folder.is_dir():
        yield fail(
            f"The broker's folder {folder} is missing.",
            f"install -d -m 700 -o gpushare -g gpushare {folder}",
        )
    elif stat.S_IMODE(folder.stat().st_mode) & 0o022:
        yield fail(f"Others can write into {folder}.", f"chmod 700 {folder}")


def _database(site: SiteFacts) -> Found:
    if site.broker.db_url == site.hub.db_url:
        yield fail("The broker uses the Hub's database.", "give c.GPUShareBroker.db_url one of its own")
    if trouble := database_trouble(site.broker.db_url):
        yield fail(f"The broker's database: {trouble}.", "see docs/troubleshooting.md, or restore a backup")


def _quotas(site: SiteFacts) -> Found:
    gpus, policy = len(site.machine.gpu_memory_bytes), Policy(projects=site.projects)
    if not policy.projects:
        yield fail("No project is configured, so no user gets a GPU.", "set c.GPUShareBroker.projects")
    percent = sum(each.quota_percent or 0 for each in policy.projects)
    lower = "lower the quotas in c.GPUShareBroker.projects"
    if percent > 100:
        yield fail(f"Projects are guaranteed {percent:g} % of the GPUs.", lower)
    if excess := over_capacity(policy.in_force(gpus * WHOLE_GPU, {}), gpus * WHOLE_GPU):
        yield fail(excess, lower)
    overrides = stored_overrides(site.broker.db_url)
    if excess := over_capacity(policy.in_force(gpus * WHOLE_GPU, overrides), gpus * WHOLE_GPU):
        names = ", ".join(each.name for each in policy.projects if each.name in overrides)
        yield fail(
            f"{excess} An administrator has changed {names}.",
            "`gpushare admin quota PROJECT --reset` takes the numbers of the configuration again",
        )


# Settings of Jupyter Server that end sleeping kernels and terminals.
_SERVER_SETTINGS = {
    KERNEL_SETTING: "ends idle kernels",
    "cull_inactive_timeout": "ends idle terminals, and the programs in them",
}
_READ_BYTES = 1 << 20
_SHOWN_CHARS = 120


def _culling(site: SiteFacts) -> list[Check]:
    """Return the services and settings of this site that end idle sessions, asleep or not."""
    found, idle_timeout_s = [], float(site.broker.idle_timeout)
    for service in site.hub.services:
        culler = culler_of(str(service.get("name")), service.get("command") or ())
        if culler is None:
            continue
        message = f"The service {culler.service} stops idle servers, asleep or not"
        if culler.max_age_s:
            message += f", and all servers {duration(culler.max_age_s)} after their start"
        if culler.timeout_s is None:
            found.append(ok(f"{message}, after a time that is not in its command: users are not told when."))
        elif culler.timeout_s <= idle_timeout_s:
            found.append(
                warn(
                    f"{message}, after {culler.timeout_s:g} s: before they are put to sleep, "
                    f"after {idle_timeout_s:g} s (c.GPUShareBroker.idle_timeout).",
                    "give it a longer --timeout (docs/beside.md)",
                )
            )
        else:
            found.append(ok(f"{message}, after {duration(culler.timeout_s)}: users are told when."))
    for where, text in _server_settings(site).items():
        for line in text.splitlines():
            setting = next((name for name in _SERVER_SETTINGS if name in line), "")
            if setting and not line.lstrip().startswith("#"):
                at = max(0, line.index(setting) - _SHOWN_CHARS // 2)
                shown = line[at : at + _SHOWN_CHARS].strip()
                found.append(ok(f"{where}: `{shown}` {_SERVER_SETTINGS[setting]}, if it is above 0."))
    return found or [ok("Nothing is known here that ends sleeping sessions.")]


def _server_settings(site: SiteFacts) -> dict[str, str]:
    """Return texts that may have settings of servers: the spawner's arguments, and files of this machine."""
    texts = {}
    with contextlib.suppress(Exception):  # the check of the spawner reports it
        spawner = distinct.sample(site.hub.spawner_class, site.hub.config, "")
        texts["c.Spawner"] = "\n".join(map(str, [*spawner.cmd, *spawner.args]))
    for folder in (*jupyter_core.paths.ENV_CONFIG_PATH, *jupyter_core.paths.SYSTEM_CONFIG_PATH):
        for path in sorted([*Path(folder).glob("jupyter*config.*"), *Path(folder).glob("*config.d/*.json")]):
            with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
                texts[str(path)] = file.read(_READ_BYTES)
    return texts


def _library(site: SiteFacts) -> Found:
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


def _driver(site: SiteFacts) -> Found:
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


def _host_memory(site: SiteFacts) -> Found:
    largest = max(site.machine.gpu_memory_bytes, default=0)
    if site.machine.ram_bytes // 2 < largest:
        yield warn(
            f"Half of the RAM ({gibibytes(site.machine.ram_bytes // 2)}) is smaller than the largest GPU "
            f"({gibibytes(largest)}): a session that fills it cannot be put to sleep.",
            "add memory, or raise --host-budget-percent of the device helper",
        )


def _cgroups(site: SiteFacts) -> Found:
    if not site.machine.cgroup_v2:
        yield warn(
            "This machine has no cgroup v2: the driver's own limits (r615) cannot be used.",
            "boot with systemd.unified_cgroup_hierarchy=1",
        )


CHECKS: dict[str, Probe[SiteFacts]] = {
    "spawner": _spawner_class,
    "named-servers": _named_servers,
    "job-scope": _job_scope,
    "user-scopes": _user_scopes,
    "server-scopes": _server_scopes,
    "service": _service,
    "broker-role": _broker_role,
    "api-token": api_token,
    "internal-ssl": internal_ssl,
    "hub": hub_answer,
    "hub-address": hub_address,
    "spawner-token": _spawner_token,
    "broker-socket": _broker_socket,
    "socket-folder": socket_folder,
    "port": port,
    "units": units,
    "helper-socket": _helper_socket,
    "state-dir": _state_dir,
    "database": _database,
    "quotas": _quotas,
    "culling": _culling,
    "library": _library,
    "driver": _driver,
    "host-memory": _host_memory,
    "cgroups": _cgroups,
}
