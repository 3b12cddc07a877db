"""Check that each server of a user has a unit, container or pod of its own.

A training job is a named server.  If units, containers or pods are named after the user
alone, the start of a job replaces the user's session: SystemdSpawner 1.0 stops a unit of
the same name before it starts another.  The names are compared twice: on two made-up
servers when the Hub starts (`check_at_start`), and on the user's real servers at every
start (`GPUShareMixin.start`), which also covers names that a class computes later.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pwd
import sys
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from jupyter_gpushare.hub.broker_access import check_address, unverified
from jupyter_gpushare.hub.refusals import SettingRefused

_log = logging.getLogger(__name__)

# The attribute of a spawner that names its unit, container or pod, and the remedy if servers share it
# (SystemdSpawner 1.0.2, DockerSpawner 14.0, KubeSpawner 7.0).
_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "unit_name": (
            "use gpushare-systemd and put {SERVERNAME} into c.SystemdSpawner.unit_name_template, "
            'such as "jupyter-{USERNAME}_{SERVERNAME}"'
        ),
        "object_name": (
            'put {servername} into c.DockerSpawner.name_template, such as "{prefix}-{username}--{servername}"'
        ),
        "pod_name": (
            'put {user_server} into c.KubeSpawner.pod_name_template, such as "jupyter-{user_server}"'
        ),
    }
)
_SAMPLE_SERVERS = ("", "j0123456789-1")


def resource_name(spawner: Any) -> str | None:
    """Return the name of the unit, container or pod of a server; None if its class has none."""
    for attribute in _REMEDIES:
        name = getattr(spawner, attribute, None)
        if isinstance(name, str) and name:
            return name
    return None


def remedy(spawner: Any) -> str:
    """Return the setting that gives the servers of a class different names."""
    known = (
        text for attribute, text in _REMEDIES.items() if isinstance(getattr(spawner, attribute, None), str)
    )
    return next(
        known, f"make the names that {type(spawner).__name__}.server_resource returns differ by `self.name`"
    )


def complaint(first: Any, second: Any) -> str:
    """Return why two servers of one user cannot run side by side, and the remedy; empty if they can."""
    name = first.server_resource()
    if name is None or name != second.server_resource():
        return ""
    return f'{type(first).__name__} runs all servers of a user in "{name}": {remedy(first)}.'


def check_class(spawner_class: type, config: Any) -> str:
    """Return the complaint about two made-up servers of one user with this configuration, or "".

    A class whose objects cannot be created outside a start is not checked; the log says so.
    """
    try:
        first, second = (sample(spawner_class, config, name) for name in _SAMPLE_SERVERS)
        return complaint(first, second)
    except Exception as error:  # from a class that is not ours
        _log.warning("%s not checked at the Hub's start: %s", spawner_class.__name__, error)
        return ""


def sample(spawner_class: type, config: Any, server: str) -> Any:
    """Return a spawner of this class, created as the Hub would, for a user that exists."""
    # Spawners for system users look the name up.
    name = pwd.getpwuid(os.getuid()).pw_name
    user = SimpleNamespace(name=name, id=1, url=f"/user/{name}/", escaped_name=name, groups=[], settings={})
    orm_spawner = SimpleNamespace(name=server, display_name=server, user_options={}, state={}, server=None)
    from jupyterhub.objects import Hub

    return spawner_class(config=config, user=user, orm_spawner=orm_spawner, hub=Hub())


def check_at_start() -> None:
    """Make the Hub of this process check its spawner class before it serves; without a Hub, do nothing.

    The Hub has no hook for this: it imports installed classes before it reads its configuration,
    and creates no spawner before the first server starts.
    """
    app = sys.modules.get("jupyterhub.app")
    inner = getattr(app and app.JupyterHub, "init_tornado_settings", None)
    if app is None or inner is None:
        return

    @functools.wraps(inner)
    def init_tornado_settings(hub: Any) -> None:
        _check_of_hub(hub)
        inner(hub)

    app.JupyterHub.init_tornado_settings = init_tornado_settings


def _check_of_hub(hub: Any) -> None:
    if not hasattr(hub.spawner_class, "server_resource"):
        return
    try:
        spawner = sample(hub.spawner_class, hub.config, "")
        broken = unverified(spawner)
    except SettingRefused as error:  # each start would fail with it
        hub.log.critical("%s", error)
        sys.exit(1)
    except Exception:  # from a class that is not ours
        check_class(hub.spawner_class, hub.config)  # logs why nothing is checked
        return
    if shared := check_class(hub.spawner_class, hub.config):
        hub.log.critical("%s A training job would replace its owner's session.", shared)
        sys.exit(1)
    if broken:
        hub.log.critical("The broker cannot be verified: %s.", broken)
        sys.exit(1)
    # Each start reports a certificate that cannot be used.
    with contextlib.suppress(Exception):
        check_address(spawner.broker_url, spawner.certificate(), hub.log)
