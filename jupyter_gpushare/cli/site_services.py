"""Checks of a site's services: tokens and answers of the Hub, units, sockets and ports."""

from __future__ import annotations

import contextlib
import pwd
import re
import shlex
import stat
from pathlib import Path
from urllib.parse import urlsplit

from jupyter_gpushare import channel
from jupyter_gpushare.broker.app import hub_base_url
from jupyter_gpushare.cli.checks import fail
from jupyter_gpushare.cli.site_facts import SERVICE, Found, Site
from jupyter_gpushare.errors import GpuShareError
from jupyter_gpushare.internal_tls import VARIABLES, internal_tls

_VARIABLE = "JUPYTERHUB_API_TOKEN="
_BROKER_UNIT, _HELPER_UNIT = "gpushare-broker.service", "gpushare-helper.service"
# What each unit must have, and why.
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


def api_token(site: Site) -> Found:
    """Yield what is wrong with the API token of the broker: its file, the Hub's copy, the Hub's answer."""
    service, path = site.service() or {}, site.files.broker_environment
    if service.get("command") or not service.get("api_token"):
        return  # the Hub starts the broker and gives it a token; or the check of the service has said it
    try:
        about, text = path.stat(), path.read_text(errors="replace")
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


def hub_answer(site: Site) -> Found:
    """What a running Hub says to the broker's token; a Hub that does not run is not a fault here."""
    service, env = site.service() or {}, _broker_environment(site)
    if token := service.get("api_token"):
        scheme, host = "https" if site.hub.internal_ssl else "http", site.hub.hub_ip or "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        url = f"{scheme}://{host}:{site.hub.hub_port}{site.hub.base_url}hub/api"
        with contextlib.suppress(GpuShareError):  # the check of internal TLS has said it
            if remedy := site.machine.ask_hub(env.get("JUPYTERHUB_API_URL", url), token, env):
                yield fail(*remedy)


def hub_address(site: Site) -> Found:
    """Yield what an external broker knows wrongly of the Hub's addresses: its page could not be used."""
    service, hub, env = site.service() or {}, site.hub, _broker_environment(site)
    if service.get("command") or not (api := env.get("JUPYTERHUB_API_URL")):
        return
    where = f"in {site.files.broker_environment}"
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


def internal_ssl(site: Site) -> Found:
    """Yield what an external broker lacks to talk to a Hub with internal TLS."""
    service, path = site.service() or {}, site.files.broker_environment
    if service.get("command") or not service.get("api_token"):
        return  # a broker that the Hub starts gets its certificates from it
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


def _broker_environment(site: Site) -> dict[str, str]:
    """Return the variables of an external broker: those of its unit, then of broker.env."""
    lines: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # the check of the units says so
        unit = _unit_text(site.files.units / _BROKER_UNIT)
        for setting in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE):
            lines += shlex.split(setting)
    with contextlib.suppress(OSError):  # the check of the API token says so
        lines += site.files.broker_environment.read_text(errors="replace").splitlines()
    return {name: value.strip() for name, is_set, value in (each.partition("=") for each in lines) if is_set}


def _unit_text(path: Path) -> str:
    drop_ins = sorted(path.with_name(f"{path.name}.d").glob("*.conf"))
    return "\n".join(each.read_text(errors="replace") for each in (path, *drop_ins))


def port(site: Site) -> Found:
    """Whether a user of this machine holds the broker's port, and so gets what is sent there."""
    address = urlsplit((site.service() or {}).get("url") or "")
    state = Path(site.broker.state_dir)
    trusted = {0, state.stat().st_uid if state.is_dir() else 0}
    if address.port and address.hostname in ("127.0.0.1", "::1", "localhost"):
        for uid in site.machine.listeners(address.port) - trusted:
            yield fail(
                f"Port {address.port} of the service {SERVICE} is held by uid {uid}, not the broker.",
                "end that program, then start gpushare-broker.socket, which keeps the port",
            )


def units(site: Site) -> Found:
    """Yield what is wrong with the systemd units and their drop-ins."""
    folder = site.files.units
    units = {name: folder / name for name in _UNIT_LINES}
    if not any(path.is_file() for path in units.values()):
        return  # started in another way
    for name, path in units.items():
        if not path.is_file():
            yield fail(f"The unit {path} is missing.", f"copy docs/units/{name} to {folder}")
            return
        text = _unit_text(path)
        for line, why in _UNIT_LINES[name].items():
            if not re.search(rf"^{re.escape(line)}", text, re.MULTILINE):
                yield fail(f"{path} lacks {line}: {why}.", f"compare it with docs/units/{name}")
    uid = re.search(r"^Environment=GPUSHARE_BROKER_UID=(\d+)", units[_HELPER_UNIT].read_text(), re.MULTILINE)
    user = re.search(r"^User=(\S+)", units[_BROKER_UNIT].read_text(), re.MULTILINE)
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


def socket_folder(site: Site) -> Found:
    """Whether another user could put a socket where the Hub sends its token."""
    path = Path(site.broker.api_socket).absolute()
    if not path.parent.is_dir():
        return  # the check of the socket says that nothing listens
    try:
        channel.trusted_uids(path)
    except channel.Unverified as error:
        yield fail(f"{error}.", f"chmod go-w {path.parent}, and its parents; chown them to root")
