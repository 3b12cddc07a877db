"""Plugin for The Littlest JupyterHub (entry point ``tljh``): its spawner class with GPUs.

TLJH runs servers in systemd units, as system users that it creates at the first start.  Its
plugins set their configuration after its own (`tljh/hooks.py`, `tljh/jupyterhub_config.py`).
The broker and the device helper are separate services, as on any machine (docs/admin.md).
"""

from __future__ import annotations

from typing import Any

from tljh.hooks import hookimpl

from jupyter_gpushare.hub import compat


@hookimpl
def tljh_custom_jupyterhub_config(c: Any) -> None:
    """Set the spawner, named servers for training jobs, and the scopes of users and broker."""
    # TLJH's spawner modules read its configuration on import.
    from tljh.normalize import generate_system_username
    from tljh.user import ensure_user
    from tljh.user_creating_spawner import UserCreatingSpawner

    from jupyter_gpushare.hub.local import uid_of
    from jupyter_gpushare.hub.systemd import SystemdUnits

    class GPUShareTLJHSpawner(SystemdUnits, UserCreatingSpawner):
        """TLJH's spawner with the GPU of a lease, and with a unit for every server of a user."""

        def server_uid(self) -> int:
            name = generate_system_username(f"jupyter-{self.user.name}")
            ensure_user(name)  # TLJH does so too, but only after the broker's answer
            return uid_of(name)

    c.JupyterHub.spawner_class = GPUShareTLJHSpawner
    # TLJH names units after the user alone.
    c.SystemdSpawner.unit_name_template = "jupyter-{USERNAME}_{SERVERNAME}"
    c.JupyterHub.allow_named_servers = True
    c.GPUShareMixin.broker_token_file = "/etc/gpushare/spawner-token"  # noqa: S105
    c.JupyterHub.custom_scopes = {
        **dict(c.JupyterHub.get("custom_scopes", {})),
        "custom:gpushare:jobs": {"description": "Submit and manage training jobs"},
        "custom:gpushare:admin": {
            "description": "See all leases and jobs, change quotas, and act on them for their users"
        },
    }
    compat.grant_to_users(c, {"custom:gpushare:jobs", "access:services!service=gpushare"})
    roles = c.JupyterHub.setdefault("load_roles", [])
    roles.append({"name": "gpushare-broker", "services": ["gpushare"], "scopes": list(compat.BROKER_SCOPES)})
