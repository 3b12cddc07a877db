"""Who asks: turns tokens into an identity, by asking the Hub.

Three kinds of callers, three kinds of tokens:

* people and their servers: a Hub token (or the service's own login cookie, for
  reading only) with access to this service;
* a server as itself: its token has ``access:servers!server=USER/NAME``, and no
  other token of the user names exactly one server;
* the Hub's spawner: the fixed token of `GPUShareBroker.spawner_token_file`.

Group membership and the right to administer are the Hub's: groups are read
with the broker's own token and kept for `_GROUPS_S` seconds.
"""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass
from typing import Any

from jupyterhub.services.auth import HubOAuth

from jupyter_gpushare.backends.base import Backend, HubError, ServerKey
from jupyter_gpushare.errors import BrokerUnavailable, Conflict, NotAllowed

JOBS_SCOPE = "custom:gpushare:jobs"
ADMIN_SCOPE = "custom:gpushare:admin"

_GROUPS_S = 30.0
_MAX_CACHED = 10_000
_SERVER_SCOPE = "access:servers!server="


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller of a request, as the Hub knows it."""

    user: str
    scopes: frozenset[str]
    is_service: bool = False

    @property
    def admin(self) -> bool:
        return ADMIN_SCOPE in self.scopes

    @property
    def server(self) -> str | None:
        """The one server of the user that this token belongs to; None: it is no server's token."""
        names = {s.removeprefix(_SERVER_SCOPE) for s in self.scopes if s.startswith(_SERVER_SCOPE)}
        user, slash, server = next(iter(names)).partition("/") if len(names) == 1 else ("", "", "")
        return server if slash and user == self.user else None

    def require(self, scope: str) -> None:
        """Raise `NotAllowed` unless the token has ``scope``."""
        if scope not in self.scopes:
            raise NotAllowed(f"your token lacks the scope {scope}: ask the admin of this Hub")


class Access:
    """Identifies callers; keeps what the Hub said for a short while."""

    def __init__(self, hub_auth: HubOAuth, spawner_token: str, backend: Backend) -> None:
        self.hub_auth = hub_auth
        self._spawner_token = spawner_token
        self._backend = backend
        self._groups: dict[str, tuple[float, tuple[str, ...]]] = {}

    def identity(self, model: dict[str, Any] | None) -> Identity:
        """Return the identity for the Hub's model of a token.

        Raises:
            NotAllowed: no valid token, or one without access to this service.
        """
        if model is None:
            raise NotAllowed("this needs a token of the Hub (or a login)", reason="login")
        scopes = frozenset(model.get("scopes", ()))
        if not self.hub_auth.check_scopes(self.hub_auth.access_scopes, model):
            raise NotAllowed("your token has no access to the GPU service (access:services!service=...)")
        return Identity(user=model["name"], scopes=scopes, is_service=model.get("kind") == "service")

    def is_spawner(self, authorization: str) -> bool:
        """Return whether a request comes from the Hub's spawner."""
        given = authorization.partition(" ")[2]
        return bool(self._spawner_token) and hmac.compare_digest(given.encode(), self._spawner_token.encode())

    async def groups(self, user: str) -> tuple[str, ...]:
        """Return the Hub groups of a user.

        Raises:
            BrokerUnavailable: the Hub does not answer.
        """
        known = self._groups.get(user)
        if known is not None and time.monotonic() - known[0] < _GROUPS_S:
            return known[1]
        try:
            groups = await self._backend.groups(user)
        except HubError as error:
            raise BrokerUnavailable(str(error)) from None
        if len(self._groups) >= _MAX_CACHED:
            self._groups.clear()
        self._groups[user] = (time.monotonic(), groups)
        return groups

    async def server_url(self, key: ServerKey) -> str:
        """Return where people reach a server, with a slash at its end.

        Raises:
            Conflict: it does not run.
            BrokerUnavailable: the Hub does not answer.
        """
        try:
            url = await self._backend.server_url(key)
        except HubError as error:
            raise BrokerUnavailable(str(error)) from None
        if not url:
            raise Conflict("this server does not run any more", reason="not_running")
        return url
