"""Servers of one user run side by side: what they run in needs a name of its own.

A training job is a named server.  With a unit, container or pod that is named by the
user alone, its start replaces the user's session: SystemdSpawner 1.0 stops a unit of
the same name before it starts another.  The names are compared twice: on two made-up
servers when the Hub starts (`check_at_start`), and on the user's real servers at every
start (`GPUShareMixin.start`), which also covers names that a class computes later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import sys
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

_log = logging.getLogger(__name__)

# Attribute of a spawner with the name of what its server runs in, and what makes it distinct.
# SystemdSpawner 1.0.2, DockerSpawner 14.0, KubeSpawner 7.1.
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
    """Return the name of the unit, container or pod of a server; None: the class has none."""
    for attribute in _REMEDIES:
        name = getattr(spawner, attribute, None)
        if isinstance(name, str) and name:
            return name
    return None


def remedy(spawner: Any) -> str:
    """Return what to set so that the names of a class's servers differ."""
    known = (
        text for attribute, text in _REMEDIES.items() if isinstance(getattr(spawner, attribute, None), str)
    )
    return next(
        known, f"make the names that {type(spawner).__name__}.server_resource returns differ by `self.name`"
    )


def complaint(first: Any, second: Any) -> str:
    """Return why two servers of one user cannot run side by side, and what to set; empty: they can."""
    name = first.server_resource()
    if name is None or name != second.server_resource():
        return ""
    return f'{type(first).__name__} runs all servers of a user in "{name}": {remedy(first)}.'


def check_class(spawner_class: type, config: Any) -> str:
    """Return the complaint about two made-up servers of one user with this configuration.

    A class with objects that cannot be made outside a start is not judged: the log says so.
    """
    try:
        first, second = (sample(spawner_class, config, name) for name in _SAMPLE_SERVERS)
        return complaint(first, second)
    except Exception as error:  # of a class that is not ours
        _log.warning("%s not checked at the Hub's start: %s", spawner_class.__name__, error)
        return ""


def sample(spawner_class: type, config: Any, server: str) -> Any:
    """Return a spawner of this class for a user that exists, as the Hub would make it."""
    # Spawners of system users look the name up.
    known = pwd.getpwuid(os.getuid()).pw_name
    user = SimpleNamespace(
        name=known, id=1, url=f"/user/{known}/", escaped_name=known, groups=[], settings={}
    )
    orm_spawner = SimpleNamespace(name=server, display_name=server, user_options={}, state={}, server=None)
    from jupyterhub.objects import Hub

    return spawner_class(config=config, user=user, orm_spawner=orm_spawner, hub=Hub())


def check_at_start(spawner_class: type) -> None:
    """Check a class once its Hub has read the configuration; without a Hub in this process, do nothing.

    Called when a class is defined: JupyterHub makes no object of it before the first
    server.  Classes of installed entry points are defined before the Hub's event loop
    runs, and are not checked here: `GPUShareMixin.start` refuses their clashes.
    """
    app = sys.modules.get("jupyterhub.app")
    if app is None or not app.JupyterHub.initialized():
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    # The rest of the configuration is read before the Hub waits for the first time.
    loop.call_soon(_check_of_hub, spawner_class, app.JupyterHub.instance())


def _check_of_hub(spawner_class: type, hub: Any) -> None:
    if hub.spawner_class is spawner_class and (said := check_class(spawner_class, hub.config)):
        hub.log.critical("%s A training job would replace its owner's session.", said)
        sys.exit(1)
