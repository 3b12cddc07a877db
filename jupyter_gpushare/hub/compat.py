"""Replacements for what JupyterHub 5.5 lacks and 6 has.

6.0 added `SpawnException`: a refusal by policy, which does not count towards the
Hub's `consecutive_failure_limit`.  In 5.5 every failed start counts, and at the limit
the Hub exits (`jupyterhub/handlers/base.py`, `_track_failure_count`).

6.0 also added `extra_user_scopes`; for 5.5 the role ``user`` is redefined.  The broker needs no
replacement: a POST with an empty body starts a server in both versions.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any

from jupyterhub import version_info
from tornado import web

try:
    from jupyterhub.spawner import SpawnException
except ImportError:

    class SpawnException(web.HTTPError):  # type: ignore[no-redef]
        """A refused start; takes the arguments of JupyterHub 6's exception."""

        def __init__(
            self,
            message: str,
            *,
            reason: str,
            message_html: str = "",
            status_code: int = 400,
        ) -> None:
            self.message = message
            self.message_html = message_html
            super().__init__(status_code, message, reason=reason)

    REFUSALS_COUNT = True
else:
    REFUSALS_COUNT = False

if TYPE_CHECKING:
    from jupyterhub.spawner import Spawner

__all__ = [
    "BROKER_SCOPES",
    "REFUSALS_COUNT",
    "SERVICE_SCOPES",
    "SpawnException",
    "grant_to_users",
    "keep_failure_count",
]

# Scopes of the broker's service in the Hub.  With the service scopes it finds idle cullers.
SERVICE_SCOPES = ("list:services", "read:services")
BROKER_SCOPES = (
    "list:users",
    "read:users",
    "read:groups",
    "read:servers",
    "servers",
    "delete:servers",
    *SERVICE_SCOPES,
)


def keep_failure_count(spawner: Spawner) -> None:
    """Exclude a refusal that is about to be raised from the Hub's count of failed starts."""
    if REFUSALS_COUNT and spawner.handler is not None:
        # The Hub adds one to this number when `start` has raised.
        settings: dict[str, Any] = spawner.handler.settings
        settings["failure_count"] = settings.get("failure_count", 0) - 1


def grant_to_users(c: Any, scopes: Set[str]) -> None:
    """Give all users scopes in addition to the Hub's own list; ``c`` is the configuration."""
    if version_info[0] >= 6:
        c.JupyterHub.extra_user_scopes = set(c.JupyterHub.get("extra_user_scopes", ())) | scopes
        return
    roles = c.JupyterHub.setdefault("load_roles", [])
    user = next((role for role in roles if role["name"] == "user"), None)
    if user is None:
        roles.append(user := {"name": "user", "scopes": ["self"]})
    user["scopes"] = sorted({*user["scopes"], *scopes})
